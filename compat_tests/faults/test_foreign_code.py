"""Third-party code in files we read: none runs unless the user allows it, and then only a tokenizer's."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import trl_jax
from compat_tests.effort import only_thorough, usual
from compat_tests.light import IMPORTS
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.cli.main import main
from trl_jax.hub import auto
from trl_jax.hub.config import transformers_config
from trl_jax.hub.config_reader import read_config
from trl_jax.hub.torch_state import write_adamw_moments
from trl_jax.trainer import base_trainer
from trl_jax.training import devices, model
from trl_jax.training.devices import private_folder

ROOT = Path(__file__).resolve().parents[2]

# ---- code in a repository ----------------------------------------------------------------------------------------


@pytest.fixture
def hostile(checkpoint, tmp_path):
    """A folder whose config and tokenizer refer to custom code; `folder/ran` lists which code ran."""
    folder = shutil.copytree(checkpoint(**FACTS), tmp_path / "hostile")

    def named(file, auto_map, **others):
        facts = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(facts | {"auto_map": auto_map} | others))

    named("config.json", {"AutoConfig": "own_config.Own", "AutoModelForSequenceClassification": "own_model.Own"})
    named("tokenizer_config.json", {"AutoTokenizer": ["own_tokenizer.Own", None]}, tokenizer_class="Own")
    bases = {
        "config": "LlamaConfig", "model": "LlamaForSequenceClassification", "tokenizer": "PreTrainedTokenizerFast",
    }  # fmt: skip
    for what, base in bases.items():
        marks = f"open({str(folder / 'ran')!r}, 'a').write('{what} ')"
        (folder / f"own_{what}.py").write_text(f"from transformers import {base}\n{marks}\nclass Own({base}): ...\n")
    return folder


@pytest.fixture(autouse=True)
def yes(monkeypatch, tmp_path):
    """Answers "y" to every prompt on the terminal. Custom code is copied to a folder of the test."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 1000))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", sys.path[:])


def ran(folder):
    return set((folder / "ran").read_text().split()) if (folder / "ran").exists() else set()


def score(folder, tmp_path, *flags):
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    return main(["score", str(folder), str(tmp_path / "in.jsonl"), "--quiet", *flags])


def test_scoring_asks_nobody_and_runs_nothing(hostile, tmp_path, capsys):
    assert score(hostile, tmp_path) == 2 and ran(hostile) == set()
    told = capsys.readouterr()
    assert "[y/N]" not in told.out and "pass the argument `trust_remote_code=True`" in told.err
    assert score(hostile, tmp_path, "--trust_remote_code") == 0 and ran(hostile) == {"tokenizer"}


def test_training_runs_a_tokenizers_code_where_it_is_trusted_and_says_so(hostile, tmp_path, caplog):
    with pytest.raises(ValueError, match="pass the argument `trust_remote_code=True`"):
        make(trl_jax, hostile, tmp_path / "out")
    assert ran(hostile) == set()
    with caplog.at_level(logging.WARNING, "trl_jax"):
        make(trl_jax, hostile, tmp_path / "out", config={"trust_remote_code": True})
    assert ran(hostile) == {"tokenizer"}
    assert "no effect on models, whose code is never run. It only allows a tokenizer to run the code" in caplog.text


def test_a_plan_runs_nothing(hostile, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    table(4).to_json(rows)
    flags = ["--model_name_or_path", str(hostile), "--topology", "cpu:1", "--dataset_name", str(rows)]
    code = "import sys; from trl_jax.cli.main import main; sys.exit(main(['plan', *sys.argv[1:]]))"
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + code, *flags], input="y\n" * 9, capture_output=True, text=True
    )
    assert done.returncode == 2 and "pass the argument `trust_remote_code=True`" in done.stderr, done.stderr
    assert "[y/N]" not in done.stdout and ran(hostile) == set()


def test_a_model_alone_runs_nothing(hostile):
    for trust in (False, True):
        trl_jax.AutoModelForSequenceClassification.from_pretrained(hostile, trust_remote_code=trust)
    assert ran(hostile) == set()


def test_a_chat_template_of_another_repository_runs_nothing(hostile, checkpoint, tmp_path):
    with pytest.raises(ValueError, match="that loads without remote code") as error:
        make(trl_jax, checkpoint(**FACTS), tmp_path / "out", config={"chat_template_path": str(hostile)})
    assert ran(hostile) == set() and "trust_remote_code" in str(error.value.__cause__)


def test_torchs_models_run_nothing(hostile, tmp_path):
    torch = pytest.importorskip("torch")
    from trl_jax.exported.program import load_model

    load_model(hostile, "float32", 0)
    torch.save({"param_groups": [], "state": {}}, hostile / "optimizer.pt")
    raw, path = read_config(hostile), hostile / "config.json"
    with pytest.raises(ValueError, match="is not an AdamW state for this model"):
        write_adamw_moments(hostile, tmp_path, transformers_config(raw, path, "score"), "score", lambda name: True)
    assert ran(hostile) == set()


def calls():
    """Every call in the package and the examples that may load transformers classes named by a repository."""
    for path in [*(ROOT / "trl_jax").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        theirs = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers"
            for alias in node.names
            if alias.name.startswith("Auto")
        } | {"_class_of(head)"}  # an auto class, chosen by the head
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("from_pretrained", "from_config") and ast.unparse(node.func.value) in theirs:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", {keyword.arg for keyword in node.keywords}


@only_thorough
def test_transformers_is_told_each_time_whether_code_may_run():
    found = dict(calls())
    assert len(found) >= 5
    assert [place for place, keywords in found.items() if "trust_remote_code" not in keywords] == []


# ---- compiled programs -------------------------------------------------------------------------------------------

SCRIPT = """
import logging, os, sys
os.umask(0)
logging.basicConfig()
import jax
from trl_jax.training.devices import enable_compilation_cache
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
enable_compilation_cache()
enable_compilation_cache()
jax.jit(lambda x: x * 3)(1.0)
"""


def compiled(tmp_path, **settings):
    """The output of a run with umask 0, and the folders of its compiled programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XDG_"))}
    env = kept | {"JAX_PLATFORMS": "cpu", "HOME": str(tmp_path / "home")} | settings
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, check=True, capture_output=True, text=True)
    return done.stderr, {path.parent for path in tmp_path.rglob("*-cache")}


def test_programs_are_kept_for_their_owner_alone_whatever_the_umask(tmp_path):
    told, places = compiled(tmp_path)
    folder = tmp_path / "home/.cache/trl_jax/compiled"
    assert places == {folder} and "not kept" not in told
    assert [part.stat().st_mode & 0o777 for part in (folder, *list(folder.parents)[:3])] == [0o700] * 4


@usual("True")
@pytest.mark.parametrize("named", [True, False])
def test_programs_in_a_folder_that_others_write_are_neither_kept_nor_run(named, tmp_path):
    folder = tmp_path / ("shared" if named else "home/.cache/trl_jax/compiled")
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    told, places = compiled(tmp_path, **({"JAX_COMPILATION_CACHE_DIR": str(folder)} if named else {}))
    assert places == set() and told.count("Compiled programs are not kept:") == 1
    assert f"{folder} has mode 0777, so others can write to it" in told and "chmod 700" in told
    folder.chmod(0o700)
    assert compiled(tmp_path, JAX_COMPILATION_CACHE_DIR=str(folder))[1] == {folder}


def test_a_trainer_and_scoring_look_before_they_compile(checkpoint, tmp_path, monkeypatch):
    seen, plain = [], auto.find_checkpoint

    def found(*given, **how):
        seen.append("found")
        return plain(*given, **how)

    for module in (base_trainer, devices):
        monkeypatch.setattr(module, "enable_compilation_cache", lambda: seen.append("looked"))
    for module in (model, auto):
        monkeypatch.setattr(module, "find_checkpoint", found)
    make(trl_jax, checkpoint(**FACTS), tmp_path / "out")
    assert seen == ["looked", "found"]
    assert score(checkpoint(**FACTS), tmp_path) == 0 and seen == ["looked", "found"] * 2


@pytest.mark.parametrize(("mode", "safe"), [(0o755, True), (0o1777, True), (0o777, False), (0o1775, True)])
def test_above_the_folder_the_sticky_bit_is_enough(mode, safe, tmp_path):
    (tmp_path / "above").mkdir()
    (tmp_path / "above").chmod(mode)
    if safe:
        assert private_folder(tmp_path / "above/mine") == tmp_path / "above/mine"
        return
    with pytest.raises(PermissionError, match=f"{tmp_path}/above has mode {mode:04o}, so others can write to it"):
        private_folder(tmp_path / "above/mine")


@pytest.mark.parametrize("mode", [0o1777, 0o702, 0o720])
def test_the_folder_itself_is_written_by_nobody_else(mode, tmp_path, monkeypatch):
    monkeypatch.setattr("trl_jax.training.devices._is_own_group", lambda group: False)
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match=f"has mode {mode:04o}"):
        private_folder(tmp_path)


def test_a_link_counts_as_what_it_leads_to(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "to_open").symlink_to("open")
    (tmp_path / "open" / "to_mine").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError, match="open has mode 0777"):
        private_folder(tmp_path / "to_open")
    # The resolved path, which nobody can redirect later.
    assert private_folder(tmp_path / "open" / "to_mine") == tmp_path / "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("whose", ["", "folder", "folder/planted-cache"])
def test_what_belongs_to_another_user_is_not_taken(whose, tmp_path):
    (tmp_path / "folder").mkdir(mode=0o700)
    (tmp_path / "folder" / "planted-cache").write_bytes(b"code")
    os.chown(tmp_path / whose, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to user 12345 and not to 0"):
        private_folder(tmp_path / "folder")


def test_a_folder_that_cannot_be_made_costs_the_cache_alone(tmp_path):
    (tmp_path / "file").write_text("")
    told, places = compiled(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert places == set() and f"Compiled programs are not kept: {tmp_path / 'file'} is not a directory." in told


def test_a_buckets_address_is_left_to_jax(monkeypatch):
    monkeypatch.setattr(devices, "private_folder", lambda path: pytest.fail("looked at"))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/compiled")
    try:
        devices.enable_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == "gs://bucket/compiled"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
