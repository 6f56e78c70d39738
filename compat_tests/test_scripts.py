"""Scripts written for TRL over three years, run with TRL and with `python -m trl_jax`: results are compared.

For scripts that TRL itself no longer runs, TRL gets an updated version; ours run unchanged.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from compat_tests.effort import THOROUGH, usual, usually
from compat_tests.parity.reference import read_weights
from compat_tests.tiny import preference_rows
from compat_tests.trainer.trainers import FACTS

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("__init__", "run_all"))
# By default, these are covered by other comparisons with TRL: parity/test_curve.py, trainer/test_trainer_evaluate.py,
# trainer/test_overriding.py, trainer/test_trainer_train.py, data/test_preference.py and cli/test_main_module.py.
SELDOM = {"by_name", "margins", "own_metrics", "subclassed", "callbacks", "old_helpers", "old_tokenized"}
# Replacements that TRL 1.16 needs in old scripts.
SINCE = {
    "old_keywords": {
        "TrainingArguments\n": "set_seed\nfrom trl import RewardConfig\n",
        "TrainingArguments(": "RewardConfig(\n    gradient_checkpointing=False, bf16=False, max_length=64,",
        "warmup_ratio": "warmup_steps",
        "evaluation_strategy": "eval_strategy",
        "no_cuda": "use_cpu",
        "\n    overwrite_output_dir=True, tf32=True,": "",
        "tokenizer=tokenizer": "processing_class=tokenizer",
        ", max_length=64": "",
    },
    "old_tokenized": {
        ', padding="max_length", max_length=96': "",  # TRL 1.16 does not read masks
        ", save_safetensors=True": "",
        "tokenizer=tokenizer": "processing_class=tokenizer",
        "rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)": (
            "rows = rows.map(tokenize, batched=True, remove_columns=rows.column_names)\n"
            "rows = rows.rename_columns({f'input_ids_{side}': f'{side}_ids' for side in ('chosen', 'rejected')})\n"
            "rows = rows.select_columns(['chosen_ids', 'rejected_ids'])"
        ),
    },
    "old_loss": {
        "import jax": "import torch",
        "return_outputs=False)": "return_outputs=False, num_items_in_batch=None)",
        'model(input_ids=inputs["input_ids_chosen"], attention_mask=inputs["attention_mask_chosen"])[0]': (
            "model(input_ids=inputs['input_ids'], attention_mask=inputs['attention_mask'], use_cache=False).logits"
        ),
        "rejected = model(input_ids=": "chosen, rejected = torch.chunk(chosen, 2)  # ",
        "jax.nn.log_sigmoid": "torch.nn.functional.logsigmoid",
    },
    "old_launcher": {
        "paged_adamw_32bit": "adamw_torch",
        "include_tokens_per_second=False,": "",
        "overwrite_output_dir=True,": "",
    },
    "gpu_code": {
        'assert torch.cuda.is_available(), "this script needs a GPU"': "",
        "torch.cuda.set_device(0)": "",
        "torch.cuda.get_device_properties(0)": "type('Some', (), {'name': 'some', 'total_memory': 1024**3})",
        "torch.cuda.device_count()": "1",
        "torch.cuda.get_device_capability()[0] >= 8 and torch.cuda.is_bf16_supported()": "True",
        '"": torch.cuda.current_device()': '"": "cpu"',
        "flash_attention_2": "eager",
        ".cuda(0, non_blocking=True)": "",
        ".pin_memory()": "",
        "cuda:0": "cpu",
        '"cuda"': '"cpu"',
        "torch.cuda.synchronize()": "",
    },
    "torch_object": {"torch_dtype": "dtype", ', "device_map": "cpu"': ""},
}
UNTIMED = ("runtime", "per_second", "flos")


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory):
    """{"theirs" or "ours": (folder, the output of each script)}"""
    pytest.importorskip("trl")
    root = tmp_path_factory.mktemp("scripts")
    data = root / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in preference_rows(16)))
    model = checkpoint(**FACTS, tokenizer={"chat_template": True})
    found = {}
    for side, command in (("theirs", []), ("ours", ["-m", "trl_jax"])):
        out = root / side
        out.mkdir()
        scripts = [str(_written(name, side, root)) for name in NAMES if THOROUGH or name not in SELDOM]
        run = [sys.executable, *command, str(SCRIPTS / "run_all.py"), str(model), str(data), str(out), *scripts]
        env = {**os.environ, "PYTHONPATH": str(SCRIPTS.parents[1]), "HF_DATASETS_CACHE": str(root / "cache")}
        done = subprocess.run(run, capture_output=True, text=True, env=env, cwd=root)
        assert done.returncode == 0, done.stderr[-3000:]
        found[side] = out, json.loads((out / "told.json").read_text())
    return found


def _written(name, side, root):
    """The script's path: ours is unchanged, theirs has the replacements."""
    path = SCRIPTS / f"{name}.py"
    if side == "ours" or name not in SINCE:
        return path
    text = path.read_text()
    for old, new in SINCE[name].items():
        text = text.replace(old, new)
    (root / path.name).write_text(text)
    return root / path.name


def lines(printed):
    """The lines that a script itself prints, without the trainer's bars and logs."""
    own = "trained", "eval", "event", "best", "score", "spread", "saving", "logged", "columns", "*****", "  train_loss"
    return [line for line in printed.splitlines() if line.startswith(own)]


@usual("gpu_code", "official", "old_keywords", "old_launcher", "old_loss", "refused", "torch_object")
@pytest.mark.parametrize("name", usually(lambda name: name not in SELDOM, NAMES))
def test_a_script_gives_what_it_gives_under_trl(runs, name):
    (theirs, wanted), (ours, told) = runs["theirs"], runs["ours"]
    assert told[name]["code"] == wanted[name]["code"], told[name]["error"] or wanted[name]["error"]
    assert lines(told[name]["printed"]) == lines(wanted[name]["printed"])
    if wanted[name]["code"]:
        assert name == "refused" and "DatasetDict" in told[name]["error"]
        return
    same_logs(ours / name, theirs / name)
    same_files(ours / name, theirs / name)


def same_logs(ours, theirs):
    mine, wanted = (json.loads((folder / "trainer_state.json").read_text()) for folder in (ours, theirs))
    assert mine["global_step"] == wanted["global_step"] and len(mine["log_history"]) == len(wanted["log_history"])
    for found, log in zip(mine["log_history"], wanted["log_history"], strict=True):
        names = [key for key in log if not key.endswith(UNTIMED) and key != "eval_model_preparation_time"]
        assert set(names) <= set(found)
        assert {key: found[key] for key in names} == pytest.approx({key: log[key] for key in names}, rel=2e-4, abs=2e-4)


def same_files(ours, theirs):
    files = ({path.name for path in folder.iterdir()} for folder in (ours, theirs))
    mine, wanted = files
    own = {"training_args.json", "training_loss.svg"}  # the plot in our card
    assert wanted - mine <= {"training_args.bin"} and mine - wanted <= own
    weights, reference = read_weights(ours), read_weights(theirs)
    assert weights.keys() == reference.keys()
    for tensor, values in reference.items():
        # A gradient that is rounding noise (below Adam's eps) may move an element by up to the learning rate, 1e-3.
        apart = np.abs(weights[tensor] - values)
        assert np.mean(apart > 3e-4) <= 1e-3 and apart.max() <= 1e-3, (tensor, apart.max())


def test_half_of_the_scripts_are_of_earlier_years():
    assert len(NAMES) >= 12 and sum(name.startswith("old_") or name == "torch_object" for name in NAMES) >= 6
    assert set(SINCE) | SELDOM <= set(NAMES)
