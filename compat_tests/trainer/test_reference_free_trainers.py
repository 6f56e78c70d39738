"""ORPOTrainer and CPOTrainer: rows, arguments, old names and adapters, against TRL where TRL has them."""

from __future__ import annotations

import copy
import math
import subprocess
import sys

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import trl_jax
from compat_tests.effort import only_thorough
from compat_tests.tiny import preference_rows, tiny_tokenizer
from trl_jax.data import preference
from trl_jax.trainer.cpo_trainer import CPOTrainer
from trl_jax.trainer.orpo_config import ORPOConfig
from trl_jax.trainer.orpo_trainer import ORPOTrainer

SMALL = {"head": "causal", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
RUN = {"max_steps": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "bf16": False,
       "save_strategy": "no", "per_device_train_batch_size": 4, "max_length": 64}  # fmt: skip
MOST = 40  # max_length: truncates answers of some rows, but no prompt
COLUMNS = [*preference.TEXTS, *preference.LABELS, "prompt_input_ids"]
EDGES = [
    {"prompt": "Say", "chosen": " yes", "rejected": " no"},
    # The last character of the prompt merges with the answer into one token.
    {"prompt": "un", "chosen": "do it", "rejected": "it"},
    {"prompt": "", "chosen": "a b", "rejected": "c"},
    {"chosen": "Tell me: yes, of course", "rejected": "Tell me: never"},
    {"prompt": "ends", "chosen": " here</s>", "rejected": ""},
    {"prompt": "<s>begins", "chosen": " there", "rejected": " nowhere"},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**SMALL)


def steps(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("bos", [None, "<s>"])
@pytest.mark.parametrize("kind", ["prompt", "text", "chat", "chat_prompt", "edges"])
def test_rows_are_trls(kind, bos):
    trl = pytest.importorskip("trl.experimental.orpo", reason="rows are those of real TRL")
    from accelerate import PartialState
    from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt

    PartialState()  # required by TRL's logger
    tokenizer = tiny_tokenizer(bos=bos, chat_template=True)
    rows = EDGES if kind == "edges" else preference_rows(8, kind)
    theirs = trl.ORPOTrainer.__new__(trl.ORPOTrainer)
    theirs.processing_class, theirs.is_encoder_decoder, theirs.max_length = tokenizer, False, MOST
    for index, row in enumerate(rows):
        text = maybe_apply_chat_template(maybe_extract_prompt(copy.deepcopy(row)), tokenizer)
        wanted = theirs.tokenize_row(text)
        found = preference.tokenize_reference_free_row(row, index, tokenizer, "train_dataset", MOST, None)
        assert {name: found[name] for name in COLUMNS[:4]} == {name: wanted[name] for name in COLUMNS[:4]}, row


def test_tools_of_a_row_are_rendered():
    tokenizer = tiny_tokenizer(chat_template=True)
    tokenizer.chat_template = "{{ tools | length if tools else 0 }}" + tokenizer.chat_template
    row = preference_rows(1, "chat_prompt")[0]
    tool = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}
    bare, told = (
        preference.tokenize_reference_free_row(given, 0, tokenizer, "train_dataset", None, None)
        for given in (row, row | {"tools": [tool]})
    )
    assert bare["chosen_input_ids"] != told["chosen_input_ids"]
    assert tokenizer.decode(told["prompt_input_ids"]).startswith("1")


def test_a_prompt_that_becomes_another_is_refused():
    class Odd:
        bos_token_id = eos_token_id = None

        def __call__(self, texts, add_special_tokens):
            return {"input_ids": [[1, 2, 3], [1, 2, 3, 4], [7, 8, 3, 5]]}

    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    with pytest.raises(ValueError, match="Row 3 of train_dataset: the prompt is tokenized differently before 'chosen'"):
        preference.tokenize_reference_free_row(row, 3, Odd(), "train_dataset", None, None)


def test_full_prompts_are_left_out_and_long_ones_shortened(folder, caplog):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    long = {"prompt": "w" + " w" * 89, "chosen": " a", "rejected": " b"}
    rows = Dataset.from_list([*preference_rows(4, "prompt"), long])
    options = {"max_length": 32, "num_proc": None, "name": "train"}
    kept = preference.prepare_reference_free(rows, tokenizer, max_prompt_length=None, **options)
    assert len(kept) == 4 and "Dropped 1 of 5 rows of train_dataset: their prompts alone fill max" in caplog.text
    kept = preference.prepare_reference_free(rows, tokenizer, max_prompt_length=5, **options)
    whole = tokenizer(rows[4]["prompt"])["input_ids"]
    assert kept[4]["prompt_input_ids"] == whole[-5:] and kept[4]["chosen_input_ids"][:5] == whole[-5:]
    with pytest.raises(ValueError, match="train_dataset must have the columns 'chosen' and 'rejected'.*rename_column"):
        preference.prepare_reference_free(rows.remove_columns("rejected"), tokenizer, max_prompt_length=None, **options)


@only_thorough
@pytest.mark.parametrize("trainer", [ORPOTrainer, CPOTrainer])
def test_an_adapter_trains_in_every_layout_alike(trainer, folder, tmp_path):
    curves = []
    for layout in ("padded", "packed", "shared"):
        args = trainer.config_class(str(tmp_path / layout), batch_layout=layout, learning_rate=1e-2, **RUN)
        own = trainer(
            str(folder), args, train_dataset=Dataset.from_list(preference_rows(8, "prompt")),
            peft_config=trl_jax.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian"),
        )  # fmt: skip
        own.train()
        own.save_model()
        assert (tmp_path / layout / "adapter_model.safetensors").exists()
        numbers = ("loss", "grad_norm", "nll_loss", "logits/chosen")
        curves.append([[entry[name] for name in numbers] for entry in steps(own)])
    np.testing.assert_allclose(curves[1:], [curves[0]] * 2, rtol=2e-5, atol=1e-6)


def test_what_a_script_may_set_counts(folder, tmp_path):
    rows = Dataset.from_list(preference_rows(8, "prompt"))
    seldom = RUN | {"logging_steps": 5, "logging_first_step": True}
    trainer = ORPOTrainer(str(folder), ORPOConfig(str(tmp_path), **seldom), train_dataset=rows)
    trainer.beta = 0.0001
    trainer.train()
    assert steps(trainer)[0]["loss"] == pytest.approx(steps(trainer)[0]["nll_loss"], abs=1e-3)
    assert "nll_loss" in trainer.state.log_history[-1]  # from the second step; TRL never logs it
    assert trainer.evaluate(rows)["eval_loss"] > 0
    for refused in ({"compute_metrics": len}, {"model_init": len}, {"data_collator": len}):
        with pytest.raises(ValueError, match=f"{next(iter(refused))}=.* is not in this release"):
            ORPOTrainer(str(folder), ORPOConfig(str(tmp_path), **RUN), train_dataset=rows, **refused)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"loss_type": "kto_pair"}, "Support for kto_pair has been removed"),
        ({"loss_type": "odd"}, "Unknown loss type: odd"),
        ({"beta": 0}, "beta"),
        ({"cpo_alpha": -1.0}, "cpo_alpha"),
    ],
)
def test_values_are_checked(given, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        trl_jax.CPOConfig(str(tmp_path), **given)


def test_alphapo_is_simpo_without_likelihood(tmp_path):
    args = trl_jax.CPOConfig(str(tmp_path), loss_type="alphapo", alpha=0.25)
    assert (args.loss_type, args.cpo_alpha, args.alpha) == ("simpo", 0.0, 0.25)
    assert math.isclose(args.learning_rate, 1e-6)


SCRIPT = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import ORPOConfig, ORPOTrainer
from trl.experimental import cpo, orpo
from trl.experimental.orpo.orpo_config import ORPOConfig as deep
from trl.trainer.cpo_trainer import CPOTrainer
from trl.trainer.orpo_trainer import ORPOTrainer as former

assert former is orpo.ORPOTrainer is ORPOTrainer
assert orpo.ORPOConfig is deep is ORPOConfig and cpo.CPOTrainer is CPOTrainer
model, tokenizer = AutoModelForCausalLM.from_pretrained({folder!r}), AutoTokenizer.from_pretrained({folder!r})
args = ORPOConfig(
    output_dir={out!r}, max_steps=1, logging_steps=1, report_to="none", bf16=False, beta=0.1, max_length=64,
    max_prompt_length=32, per_device_train_batch_size=4, save_strategy="no",
)
trainer = ORPOTrainer(model=model, args=args, train_dataset=Dataset.from_list({rows!r}), tokenizer=tokenizer)
trainer.train()
assert type(trainer).__module__ == "trl_jax.trainer.orpo_trainer"
assert "log_odds_ratio" in trainer.state.log_history[0]
"""


@only_thorough
def test_a_script_of_any_year_runs(folder, tmp_path):
    """With the imports that TRL has had: from the top level, trl.trainer and trl.experimental."""
    pytest.importorskip("torch")
    rows = preference_rows(8, "prompt")
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(folder), out=str(tmp_path / "out"), rows=rows))
    command = [sys.executable, "-m", "trl_jax", str(tmp_path / "script.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
