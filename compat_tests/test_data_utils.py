"""Dataset conversions, reward functions, collators and mixtures, each against TRL's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

import trl_jax
from compat_tests.tiny import tiny_tokenizer
from trl_jax import data_utils
from trl_jax.chat_template_utils import clone_chat_template
from trl_jax.exported.program import ExportedBackend
from trl_jax.hub.backend import Traits
from trl_jax.scripts.data import DatasetConfig, DatasetMixtureConfig, get_dataset
from trl_jax.trainer.collators import RewardDataCollator
from trl_jax.trainer.utils import compute_accuracy, get_peft_config, get_quantization_config


def say(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


ASK, ANSWER, OTHER = say(("user", "Hi?")), say(("assistant", "Yes.")), say(("assistant", "No."))
ROWS = [
    {"messages": ASK + ANSWER},
    {"prompt": ASK},
    {"prompt": ASK + say(("assistant", "Ye"))},
    {"prompt": ASK, "completion": ANSWER},
    {"prompt": ASK, "chosen": ANSWER, "rejected": OTHER},
    {"chosen": ASK + ANSWER, "rejected": ASK + OTHER},
    {"prompt": ASK, "completion": ANSWER, "label": True},
]
TEXTS = [
    {"prompt": "Hi?", "chosen": " Yes.", "rejected": " No."},
    {"chosen": "Hi? Yes.", "rejected": "Hi? No."},
    {"chosen": "Hi? Yes", "rejected": "Hi? Yes, sir"},
    {"prompt": "Hi", "chosen": ASK + ANSWER, "rejected": ASK + OTHER},
    {"text": "plain"},
]
TALKS = [
    {"conversations": [{"from": "user", "value": "Hi?"}, {"from": "assistant", "value": "Yes."}]},
    {"chosen": [{"from": "user", "value": "Hi?"}], "rejected": [{"from": "user", "value": "Ho?"}], "score": 1},
]


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("trl.data_utils")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(None, chat_template=True)


def both(ours, theirs, *given, **how):
    """(our result, TRL's); ours must not modify its arguments."""
    mine = copy.deepcopy(given)
    found = ours(*mine, **how)
    assert list(mine[:1]) == list(given[:1])
    return found, theirs(*copy.deepcopy(given), **how)


@pytest.mark.parametrize("row", ROWS + TEXTS + TALKS)
@pytest.mark.parametrize(
    "name", ["is_conversational", "is_conversational_from_value", "maybe_convert_to_chatml", "maybe_extract_prompt"]
)
def test_rows_are_read_as_trl_reads_them(theirs, name, row):
    if name == "is_conversational" and row is TEXTS[3]:
        pytest.skip("TRL looks at whichever column a set gives first")
    found, wanted = both(getattr(data_utils, name), getattr(theirs, name), row)
    assert found == wanted


@pytest.mark.parametrize("row", ROWS + TEXTS[-1:])
def test_a_template_is_applied_as_trl_applies_it(theirs, tokenizer, row):
    found = data_utils.maybe_apply_chat_template(row, tokenizer)
    assert found == theirs.maybe_apply_chat_template(copy.deepcopy(row), tokenizer)
    assert list(found) == list(theirs.maybe_apply_chat_template(copy.deepcopy(row), tokenizer))


def test_rows_without_a_form(tokenizer):
    with pytest.raises(KeyError, match="Invalid keys in the example"):
        data_utils.apply_chat_template({"completion": ANSWER}, tokenizer)
    with pytest.raises(
        ValueError, match="Invalid role in the last message: system. It must be user, tool or assistant."
    ):
        data_utils.apply_chat_template({"prompt": say(("system", "x"))}, tokenizer)


@pytest.mark.parametrize("kind", ["table", "dict", "stream", "other"])
def test_pairs_are_unpaired_as_trl_does(theirs, kind):
    rows = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}", "source": i} for i in range(3)]
    table = Dataset.from_list(rows)
    if kind == "other":
        assert data_utils.maybe_unpair_preference_dataset(table.remove_columns("chosen")).column_names[0] == "prompt"
        return
    given = {"table": table, "dict": DatasetDict(train=table), "stream": table.to_iterable_dataset()}[kind]
    function = "unpair_preference_dataset" if kind == "stream" else "maybe_unpair_preference_dataset"
    found, wanted = (getattr(module, function)(given) for module in (data_utils, theirs))
    if kind == "dict":
        found, wanted = found["train"], wanted["train"]
    assert list(found) == list(wanted) and len(list(found)) == 6


EXAMPLES = [
    {"chosen_ids": [1, 2, 3], "rejected_ids": [4, 5], "margin": 0.5},
    {"chosen_ids": [6, 7], "rejected_ids": [8], "margin": 0.0},
]


@pytest.mark.parametrize("multiple", [None, 4])
def test_the_collator_is_trls(multiple):
    torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl.trainer.reward_trainer")
    wanted = trl.DataCollatorForPreference(0, multiple)(EXAMPLES)
    found = RewardDataCollator(0, multiple, return_tensors="np")(EXAMPLES)
    assert list(found) == list(wanted)
    for name, values in wanted.items():
        assert found[name].dtype == values.numpy().dtype
        np.testing.assert_array_equal(found[name], values)
    tensors = RewardDataCollator(0, multiple)(EXAMPLES)
    assert all(torch.equal(tensors[name], values) for name, values in wanted.items())
    assert "margin" not in RewardDataCollator(0)([{"chosen_ids": [1], "rejected_ids": [2]}])
    with pytest.raises(ValueError, match="return_tensors must be 'np', or 'pt' if torch is installed, got 'tf'"):
        RewardDataCollator(0, return_tensors="tf")


def test_a_mixture_is_trls(tmp_path):
    trl = pytest.importorskip("trl.scripts.utils")
    for name, rows in (("a", 8), ("b", 3)):
        lines = (json.dumps({"chosen": f"{name}{i}", "rejected": "x", "extra": i}) for i in range(rows))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))

    def mixture(module, **how):
        parts = [
            {"path": "json", "data_files": str(tmp_path / f"{name}.jsonl"), "columns": ["chosen", "rejected"]} | extra
            for name, extra in (("a", how.pop("a", {})), ("b", how.pop("b", {})))
        ]
        return module.get_dataset(module.DatasetMixtureConfig(datasets=parts, **how))

    from trl_jax.scripts import utils as mine

    for how in ({}, {"a": {"fraction": 1}, "b": {"fraction": 3}}, {"streaming": True}):
        found, wanted = mixture(mine, **copy.deepcopy(how)), mixture(trl, **copy.deepcopy(how))
        assert list(found) == list(wanted) and list(found["train"]) == list(wanted["train"])
    split = mixture(mine, test_split_size=2)
    assert {name: len(rows) for name, rows in split.items()} == {"train": 9, "test": 2}
    with pytest.raises(ValueError, match="`fraction` must be set for either all datasets .*, got"):
        mixture(mine, a={"fraction": 1})
    with pytest.raises(ValueError, match="Using a dataset `fraction` is not supported with streaming datasets"):
        mixture(mine, a={"fraction": 1}, b={"fraction": 1}, streaming=True)
    with pytest.raises(ValueError, match="No datasets were loaded from the mixture configuration"):
        get_dataset(DatasetMixtureConfig())


def test_the_configs_of_mixtures_are_trls():
    trl = pytest.importorskip("trl.scripts.utils")
    for mine in (DatasetConfig, DatasetMixtureConfig):
        wanted = [(f.name, f.type, f.default) for f in dataclasses.fields(getattr(trl, mine.__name__))]
        found = [(f.name, f.type, f.default) for f in dataclasses.fields(mine)]
        assert [(n, d) for n, _, d in found] == [(n, d) for n, _, d in wanted]
    given = [{"path": "x"}]
    assert DatasetMixtureConfig(datasets=given).datasets == [DatasetConfig("x")] and given == [{"path": "x"}]


OURS = {"install", "pairwise_loss", "set_seed", "token_logps_and_entropies"}  # names that TRL does not have
# Nor these any more: names of earlier TRL releases that trl_jax keeps.
OURS |= {"compute_accuracy", "get_kbit_device_map", "is_npu_available", "is_peft_available", "is_xpu_available",
         "setup_chat_format"}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in trl_jax.__all__ if name.islower() and name not in OURS])
def test_the_functions_arguments_are_trls(name):
    """Or PEFT's."""
    theirs = pytest.importorskip("peft" if name == "get_peft_model" else "trl")
    mine, wanted = (
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
        for module in (trl_jax, theirs)
    )
    assert mine == wanted


def test_no_adapter_and_no_quantization():
    plain = trl_jax.ModelConfig()
    assert get_peft_config(plain) is None and get_quantization_config(plain) is None
    adapter = get_peft_config(trl_jax.ModelConfig(use_peft=True, lora_r=4, lora_task_type="SEQ_CLS", use_rslora=True))
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout, adapter.task_type) == (4, 32, 0.05, "SEQ_CLS")
    assert adapter.use_rslora and adapter.bias == "none"
    flags = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    held = get_quantization_config(trl_jax.ModelConfig(**flags))
    assert (held.load_in_4bit, held.bnb_4bit_quant_type, held.bnb_4bit_use_double_quant) == (True, "nf4", True)


def test_an_adapter_has_the_class_of_an_imported_peft():
    peft, flags = pytest.importorskip("peft"), {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj"]}
    trl = pytest.importorskip("trl")
    ours, theirs = get_peft_config(trl_jax.ModelConfig(**flags)), trl.get_peft_config(trl.ModelConfig(**flags))
    assert isinstance(ours, peft.LoraConfig) and ours == theirs


def test_accuracy():
    logits, labels = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]]), np.array([0, 0, -100])
    assert compute_accuracy((logits, labels)) == {"accuracy": 0.5}
    with pytest.raises(ValueError, match="RewardTrainer reports eval_accuracy itself"):
        compute_accuracy((logits, ()))


def test_a_chat_template_is_cloned(checkpoint, tmp_path, tokenizer):
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(checkpoint())
    source, target = tiny_tokenizer(None), tiny_tokenizer(None)
    source.add_tokens(["<new>"])
    source.chat_template = "{{ 'cloned' }}"
    source.save_pretrained(tmp_path)
    size = len(target.get_vocab())
    _, found, added = clone_chat_template(model, target, str(tmp_path))
    assert found is target and found.chat_template == "{{ 'cloned' }}"
    assert added[0] == size == found.convert_tokens_to_ids("<new>") and len(found.get_vocab()) == model.vocab_size
    assert model.config.eos_token_id == found.eos_token_id


def test_generation_ends_with_the_cloned_eos_token(checkpoint, tmp_path):
    """As in TRL, it replaces the model's EOS tokens in both configs."""
    folder, source = checkpoint(head="causal"), tiny_tokenizer(tmp_path / "source", eos="!", chat_template=True)
    model = trl_jax.AutoModelForCausalLM.from_pretrained(folder)
    _, words, _ = clone_chat_template(model, tiny_tokenizer(None), str(tmp_path / "source"))
    wanted = words.convert_tokens_to_ids(source.eos_token)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == wanted
    args = trl_jax.SFTConfig(
        str(tmp_path / "run"), chat_template_path=str(tmp_path / "source"), report_to="none", use_cpu=True
    )
    made = trl_jax.SFTTrainer(str(folder), args, train_dataset=Dataset.from_list([{"text": "take notes"}]))
    assert made.model.config.eos_token_id == made.model.generation_config.eos_token_id == wanted


@pytest.mark.parametrize("multiple", [64, None])
def test_a_model_without_rows_to_spare_grows_as_in_trl(checkpoint, tmp_path, multiple):
    transformers, trl = pytest.importorskip("transformers"), pytest.importorskip("trl")
    pytest.importorskip("torch").manual_seed(0)
    folder, source = checkpoint(), tiny_tokenizer(None)
    source.chat_template = "{{ 'cloned' }}"
    source.add_tokens([f"<more{i}>" for i in range(50)])
    source.save_pretrained(tmp_path / "source")

    def cloned(package, kind):
        model, words = kind.from_pretrained(folder, num_labels=1), tiny_tokenizer(None)
        model, words, added = package.clone_chat_template(model, words, str(tmp_path / "source"), multiple)
        return model, words, added

    theirs, their_words, _ = cloned(trl, transformers.AutoModelForSequenceClassification)
    before = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    ours, words, added = cloned(trl_jax, trl_jax.AutoModelForSequenceClassification)
    assert ours.vocab_size == theirs.vocab_size > before.vocab_size
    assert words.get_vocab() == their_words.get_vocab() and added[:2] == words.convert_tokens_to_ids(
        ["<more0>", "<more1>"]
    )
    wanted, found = theirs.get_input_embeddings().weight.detach().numpy(), ours.get_input_embeddings().weight
    np.testing.assert_array_equal(found[: before.vocab_size], wanted[: before.vocab_size])
    np.testing.assert_allclose(found[before.vocab_size :], wanted[before.vocab_size :], atol=3e-4 * wanted.std())
    ids = [[5, 6, 7, 8, 9, ours.vocab_size - 1], [5, 6, 7, 8, 9, 10]]
    ours.save_pretrained(tmp_path / "grown")
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "grown")
    assert again.config.vocab_size == ours.config.vocab_size == ours.vocab_size
    scores = again(pytest.importorskip("torch").tensor(ids)).logits.detach().numpy()
    np.testing.assert_allclose(ours(ids).logits, scores, atol=1e-5 * np.abs(scores).max() + 1e-6)
    np.testing.assert_array_equal(ours(ids[1:]).logits, before(ids[1:]).logits)


def test_a_trainer_grows_the_model_it_loads(checkpoint, tmp_path):
    source = tiny_tokenizer(None, chat_template=True)
    source.add_tokens([f"<more{i}>" for i in range(50)])
    source.save_pretrained(tmp_path / "source")
    args = trl_jax.RewardConfig(str(tmp_path / "run"), chat_template_path=str(tmp_path / "source"), report_to="none")
    rows = Dataset.from_list([{"chosen": "yes <more49>", "rejected": "no <more3>"}])
    trainer = trl_jax.RewardTrainer(str(checkpoint()), args, train_dataset=rows)
    assert trainer.model.vocab_size == len(trainer.processing_class.get_vocab())
    assert trainer.model.vocab_size % 64 == 0
    assert max(trainer.train_dataset[0]["chosen_ids"]) == trainer.processing_class.convert_tokens_to_ids("<more49>")
    assert trainer.evaluate(rows)["eval_loss"] > 0


def test_a_program_cannot_grow():
    backend = ExportedBackend.__new__(ExportedBackend)
    backend.name, backend.traits = "exported", Traits(vocab_size=5, max_positions=None, embeddings=frozenset())
    with pytest.raises(
        ValueError,
        match="cannot resize its embedding from 5 to 6 tokens. Resize the checkpoint with transformers' resize",
    ):
        backend.resized(6)


def test_streams_tell_their_columns():
    stream = IterableDataset.from_generator(lambda: iter([{"chosen": "a", "rejected": "b"}]))
    assert data_utils.get_dataset_column_names(stream) == ["chosen", "rejected"]
