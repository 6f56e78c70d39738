"""`trl-jax score`: the scores of the library and bad lines; `trl-jax env`; and the help texts."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from compat_tests.trainer.trainers import FACTS
from trl_jax.cli.main import main
from trl_jax.scripts import env


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint(**FACTS, tokenizer={"chat_template": True})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def true_scores(folder, texts):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    words = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [model(**words(text, return_tensors="pt")).logits.item() for text in texts]


def test_rows_of_every_form_get_their_scores(folder, tmp_path, capsys):
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    drawn = words.apply_chat_template(talk, tokenize=False)
    rows = [
        {"text": "a good answer", "id": 1},
        {"prompt": "Hi? ", "response": "Yes."},
        {"messages": talk},
        {"prompt": talk[:1], "response": "Yes."},
        {"prompt": talk[:1], "completion": talk[1:]},
        {"prompt": "Hi? ", "chosen": "Yes.", "rejected": "No."},
    ]
    out = tmp_path / "out.jsonl"
    assert main(["score", str(folder), write(tmp_path / "in.jsonl", rows), "-o", str(out), "--batch_size", "4"]) == 0
    scored = read(out)
    end = words.eos_token
    wanted = true_scores(folder, [f"a good answer{end}", f"Hi? Yes.{end}", drawn, drawn, drawn, f"Hi? Yes.{end}",
                                  f"Hi? No.{end}"])  # fmt: skip
    found = [row["reward"] for row in scored[:5]] + [scored[5]["chosen_reward"], scored[5]["rejected_reward"]]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert scored[0]["id"] == 1 and [row.keys() - {"reward", "chosen_reward", "rejected_reward"} for row in scored] == [
        row.keys() for row in rows
    ]
    right = float(wanted[5] > wanted[6])
    assert f"accuracy {right:.4f} over 1 pairs" in capsys.readouterr().err


def test_without_an_output_rows_go_to_stdout(folder, tmp_path, capsys):
    assert main(["score", str(folder), write(tmp_path / "in.jsonl", [{"text": "x"}])]) == 0
    printed = capsys.readouterr()
    assert set(json.loads(printed.out)) == {"text", "reward"} and "1/1" in printed.err


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            '{"txt": "a"}',
            "in.jsonl, line 1 must have the columns text, messages, chosen and rejected, or prompt and one",
        ),
        ("{", "line 1 is not JSON: Expecting property name enclosed in double quotes in column 2. Expected one row"),
        ("[1]", 'line 1 must be a row, such as {"text": "..."}, got a list.'),
    ],
)
def test_lines_that_are_no_rows(folder, tmp_path, capsys, line, text):
    (tmp_path / "in.jsonl").write_text(line)
    assert main(["score", str(folder), str(tmp_path / "in.jsonl"), "--quiet"]) == 2
    assert text in capsys.readouterr().err


def test_env_names_versions_devices_and_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(env, "OPTIONAL", {"nowhere_to_be_found": "do wonders"})
    assert main(["env"]) == 0
    told = capsys.readouterr().out
    assert "- nowhere_to_be_found: not installed; needed to do wonders" in told
    assert "- devices: 1 x cpu (cpu)" in told and "- jax: 0." in told


def test_env_names_every_extra_of_users():
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    wanted = [one for name in ("torch", "gguf", "peft", "math-verify", "vision") for one in extras[name]]
    assert {re.split("[^a-z-]", one)[0] for one in wanted} <= set(env.OPTIONAL)


@pytest.mark.parametrize("command", ["reward", "score", "env"])
def test_help_fits_80_columns(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
