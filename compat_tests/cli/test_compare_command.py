"""`trl-jax compare`: runs a script under TRL and under trl_jax, and reports differences."""

from __future__ import annotations

import json
import math

import pytest

from compat_tests.effort import only_thorough
from compat_tests.tiny import tiny_model
from trl_jax.cli import compare
from trl_jax.cli.compare import SIDES, Record, differences, first_difference, make_parser, picture, report, run
from trl_jax.cli.main import main

SCRIPT = """
import argparse
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--out")
flags = parser.parse_args()
rows = Dataset.from_dict({"text": [f"{n} and {n} are {2 * n}" for n in range(40)]})
args = SFTConfig(
    flags.out, learning_rate=1e-2, bf16=False, use_cpu=True, per_device_train_batch_size=4, eval_strategy="epoch",
    push_to_hub=True, save_steps=1,
)
SFTTrainer(flags.model, args=args, train_dataset=rows, eval_dataset=rows).train()
raise SystemError("a script goes on after train(), a comparison does not")
"""


@only_thorough  # test_notebooks.py also compares a script
def test_a_script_under_both(tmp_path, capsys):
    pytest.importorskip("trl")
    tiny_model(tmp_path / "model", head="causal", num_hidden_layers=1)
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out")]
    ways = ["--steps", "3", "--json", str(tmp_path / "both.json"), "--picture", str(tmp_path / "both.svg")]
    assert main(["compare", *ways, str(tmp_path / "script.py"), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SFTTrainer, step by step" and lines[-1].startswith("The runs agree: ")
    both = json.loads((tmp_path / "both.json").read_text())
    theirs, ours = (Record(**both[side]) for side in ("trl", "trl_jax"))
    assert [log["step"] for log in theirs.logs] == [1, 2, 3] and len(theirs.seconds) == len(ours.seconds) == 3
    assert max(differences(theirs, ours).values()) < 1e-5 and theirs.rows == ours.rows and len(ours.rows) == 4
    assert theirs.logs[0].keys() == ours.logs[0].keys() >= {"loss", "grad_norm", "entropy", "num_tokens"}
    assert (tmp_path / "both.svg").read_text().count("<polyline") == 4
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "steps", "flags"),
    [
        ("--steps 3 s.py --lr 1", 3, "--lr 1"),
        ("s.py --steps 3 --lr 1", 3, "--lr 1"),
        ("--json b.json s.py --steps=4 --picture p.svg", 4, ""),
        ("s.py --lr 1 --steps 3", 10, "--lr 1 --steps 3"),
        ("s.py --steps 3 -- --steps 5", 3, "--steps 5"),
        ("s.py -- --steps 5", 10, "--steps 5"),
        ("-- s.py --steps 5", 10, "--steps 5"),
        ("--steps 3 -- s.py --lr 1", 3, "--lr 1"),
        ("s.py --lr 1 -- b", 10, "--lr 1 -- b"),
        ("--step 3 s.py --lr 1", 3, "--lr 1"),
    ],
)
def test_its_own_flags_stand_before_the_script_or_right_behind_it(line, steps, flags):
    (args,) = make_parser().parse_args_and_config(line.split())
    assert (args.script, args.steps, args.flags) == ("s.py", steps, flags.split())
    assert args.json == ("b.json" if "b.json" in line else None)


def test_a_flag_without_its_value(capsys):
    with pytest.raises(SystemExit):
        make_parser().parse_args_and_config(["s.py", "--steps"])
    assert "--steps: expected one argument" in capsys.readouterr().err


WRITTEN = """
import sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

model, out = sys.argv[1:]
rows = Dataset.from_dict({"prompt": [f"{n} and {n + 1} are" for n in range(20)], "answer": [str(n) for n in range(20)]})

def write(prompts, trainer):
    words = trainer.processing_class
    made = [[(len(text) * 7 + 3 * place + row) % 200 + 5 for place in range(3 + row % 4)] + [words.eos_token_id]
            for row, text in enumerate(prompts)]
    return {
        "prompt_ids": [words(text)["input_ids"] for text in prompts],
        "completion_ids": made,
        "logprobs": [[-1.0] * len(ids) for ids in made],
        "env_mask": [[int((place + row) % 3 > 0) for place in range(len(ids))] for row, ids in enumerate(made)],
        "judged": [float(len(ids)) for ids in made],
    }

def reward(completions, judged, answer, **columns):
    return [a + len(b) / 10 + len(text) % 5 for text, a, b in zip(completions, judged, answer)]

args = GRPOConfig(
    out, learning_rate=1e-3, bf16=False, use_cpu=True, per_device_train_batch_size=8, max_completion_length=16,
    beta=0.1, num_iterations=2,
)
GRPOTrainer(model, reward, args=args, train_dataset=rows, rollout_func=write).train()
"""


@only_thorough
def test_a_scripts_own_rollout_func_trains_as_in_trl(tmp_path):
    pytest.importorskip("trl")
    tiny_model(tmp_path / "model", head="causal")
    (tmp_path / "script.py").write_text(WRITTEN)
    flags = [str(tmp_path / "model"), str(tmp_path / "out")]
    theirs, ours = (run(side, str(tmp_path / "script.py"), flags, 4) for side in SIDES)
    assert not theirs.error + ours.error and len(theirs.logs) == 4
    assert max(differences(theirs, ours).values()) < 1e-5 and theirs.logs[0].keys() == ours.logs[0].keys()
    assert all(log["kl"] != 0 for log in ours.logs[2:])


def record(losses=(2.0, 1.0), rows=((1, 2), (3,)), **others):
    logs = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses, start=1)]
    return Record("SFTTrainer", logs, [4.0, *[2.0] * (len(losses) - 1)], 100.0, [list(row) for row in rows], **others)


OTHER = [
    (record(rows=((3,), (1, 2))), "the first batch has the same rows in a different order"),
    (record(rows=((1, 2), (3, 4))), "row 1 of the first batch has different tokens from position 1 on: [] under TRL (1 "
     "tokens), [4] under trl_jax (2)"),
    (record(losses=(2.0, 1.1)), "the loss of step 2 is 1 under TRL and 1.1 under trl_jax"),
    (record(losses=(2.0,)), "TRL took 2 steps, trl_jax 1"),
    (record(losses=(2.0, math.nan)), "the loss of step 2 is 1 under TRL and nan under trl_jax"),
    (record(losses=(math.inf, 1.0)), "the loss of step 1 is 2 under TRL and inf under trl_jax"),
]  # fmt: skip


@pytest.mark.parametrize("other, where", OTHER)
def test_where_runs_differ_first(other, where):
    assert report(record(), other)[-1].startswith(f"The runs differ: {where}. ")


def test_rounding_is_no_difference():
    near = record(losses=(2.0, 1.0000004))._replace(seconds=[9.0, 0.5], memory=50.0)
    assert first_difference(record(), near) == ""
    assert report(record(), near)[-1] == (
        "The runs agree: the loss to 4e-07, all logged numbers to 4e-07; 4.0x faster, 0.5x the memory."
    )
    assert report(near, record())[-1].endswith("; 4.0x slower, 2.0x the memory.")
    assert picture(record(), near).startswith("<svg")


def test_two_runs_without_a_finite_loss():
    nan = record(losses=(math.nan, math.nan))
    nan = nan._replace(logs=[log | {"grad_norm": math.nan} for log in nan.logs])
    assert report(nan, nan)[-1].startswith("The runs agree: the loss to 0e+00,") and picture(nan, nan) is None


def test_a_script_that_one_side_does_not_run():
    lines = report(Record(error="TypeError: no argument max_seq_length"), record())
    assert lines[1].startswith("step 1  loss 2") and lines[-1] == (
        "The script does not train under TRL: TypeError: no argument max_seq_length. The numbers are from trl_jax."
    )
    assert report(record(), Record(error="it ends"))[-1].endswith("it ends. The numbers are from TRL.")


def test_trl_is_not_installed(tmp_path, monkeypatch, capsys):
    (tmp_path / "it.py").write_text("")
    records = {"trl": Record(error="ModuleNotFoundError: No module named 'trl'"), "trl_jax": record()}
    order = []
    monkeypatch.setattr(compare, "run", lambda side, *_: order.append(capsys.readouterr().err) or records[side])
    compare.main(compare.make_parser().parse_args([str(tmp_path / "it.py")]))
    said = "ModuleNotFoundError: No module named 'trl'. `pip install trl` installs it, with torch."
    assert f"trl: {said}\n10 steps under trl_jax ..." in order[1]  # before the minutes that the other side takes
    assert f"under TRL: {said} The numbers are from trl_jax." in capsys.readouterr().out


@only_thorough
def test_what_a_script_says_is_printed_without_control_characters_and_tokens(tmp_path):
    token = "hf_" + "a1" * 17
    (tmp_path / "it.py").write_text(f"raise RuntimeError('\\x1b[31m {token}')")
    said = run("trl_jax", str(tmp_path / "it.py"), [], 1).error
    assert said == "RuntimeError: \\x1b[31m <SECRET>"


def test_bad_words(tmp_path, capsys):
    assert main(["compare", str(tmp_path / "none.py")]) == 2
    (tmp_path / "script.py").write_text("print(1)")
    assert main(["compare", "--steps", "0", str(tmp_path / "script.py")]) == 2
    assert "--steps must be at least 1, got 0." in capsys.readouterr().err
