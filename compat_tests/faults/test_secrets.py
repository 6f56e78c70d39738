"""Secrets, wherever a user may put them, appear in no file, upload, tracker, screen output or error.

Each place has its own marker, so that none is masked only because it is already known from another place.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import sys
import traceback
import warnings
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path

import pytest
from datasets import Dataset
from transformers.trainer_callback import ExportableState, TrainerCallback

import trl_jax
from compat_tests.effort import only_thorough, usually
from compat_tests.hub.loopback import serving
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from compat_tests.trainer.trainers import FACTS, table
from trl_jax.cli.main import main
from trl_jax.core import secrets
from trl_jax.hub import push
from trl_jax.training.resume import log_changes

MARK = "Mark7of3a9Secret"
TOLD = re.compile(re.escape(MARK[1:]), re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """A trainer and its config, their arguments beyond BASE, and the command that trains with them."""

    trainer: type
    config: type
    command: str
    rows: object = table
    model: dict = field(default_factory=dict)


LM = {"head": "causal"}
# To cover a new trainer, add a line.
KINDS = {
    "reward": Kind(trl_jax.RewardTrainer, trl_jax.RewardConfig, "reward"),
    "sft": Kind(trl_jax.SFTTrainer, trl_jax.SFTConfig, "sft", lambda n: Dataset.from_list(text_rows(n)), LM),
    "dpo": Kind(trl_jax.DPOTrainer, trl_jax.DPOConfig, "dpo", table, LM),
    "kto": Kind(trl_jax.KTOTrainer, trl_jax.KTOConfig, "kto", table, LM),
}
every_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)


def marker(place: str) -> str:
    """Neither a name nor its shape gives it away as a secret: only its place does."""
    return f"{place}-{MARK}-{place}"


@pytest.fixture(autouse=True)
def forgets(monkeypatch):
    """Secrets learned in one test are unknown to the next."""
    monkeypatch.setattr(secrets, "_known", {})


@pytest.fixture
def kind(request):
    """Reward training, unless `every_kind` parametrizes it."""
    return KINDS[vars(request).get("param", "reward")]


@pytest.fixture
def folder(checkpoint, kind):
    return str(checkpoint(**FACTS, **kind.model))


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(push, "_WAITS", (0.01,))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "run" / "runs"))
    with serving(monkeypatch, tmp_path / "cache") as server:
        server.token = marker("hub")
        yield server


@pytest.fixture
def told(caplog, capfd, recwarn, tmp_path):
    """Everything written or printed so far, by source."""
    caplog.set_level(logging.INFO)
    logging.getLogger("trl_jax").setLevel(logging.DEBUG)

    def collect(*more) -> dict[str, bytes]:
        run = tmp_path / "run"
        found = {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}
        found |= {"logs": caplog.text, "screen": "".join(capfd.readouterr())}
        found |= {f"warning {i}": str(w.message) for i, w in enumerate(recwarn)}
        found |= {f"told {i}": text for i, text in enumerate(more)}
        return {name: data if isinstance(data, bytes) else data.encode() for name, data in found.items()}

    return collect


def assert_untold(found: dict[str, bytes]) -> None:
    for name, data in found.items():
        at = TOLD.search(data.decode("latin-1"))
        assert at is None, f"{name}: ...{data[max(at.start() - 80, 0) : at.end() + 20]!r}"


def full_text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def everything(hub) -> dict[str, bytes]:
    return {f"request {i}": data for i, data in enumerate(hub.received)}


def settings(out, **more):
    given = {
        "hub_token": f" {marker('hub')}\n", "push_to_hub": True, "hub_model_id": "judge", "save_steps": 2,
        "save_strategy": "steps", "hub_strategy": "all_checkpoints", "hub_always_push": True,
        "report_to": "tensorboard", "run_name": f"with {marker('hub')}",
        "model_init_kwargs": {"token": f"{marker('init')}\n"},
    }  # fmt: skip
    return {"output_dir": str(out)} | BASE | given | more


DEEP = {
    "headers": [{"Authorization": f"Bearer {marker('header')}", "eos_token": "</s>"}],
    "as_json": json.dumps({"inner": json.dumps({"apiKey": marker("json")})}),
    "endpoint": f"https://me:{marker('url')}@example.com/data?access_token={marker('query')}",
    "more": ({"password": {"of": [marker("password")]}},),
}


def with_own_fields(config: type) -> type:
    """A user's dataclass derived from the config, which must not get a generated __repr__ that shows secrets."""
    own = [("extras", dict, field(default_factory=dict)), ("tracker_api_key", str | None, field(default=None))]
    return make_dataclass("OwnConfig", own, bases=(config,), kw_only=True)


def texts_of(args) -> dict[str, str]:
    shown = {
        "str": str(args), "repr": repr(args), "format": f"{args}", "to_json_string": args.to_json_string(),
        "to_dict": repr(args.to_dict()), "to_sanitized_dict": repr(args.to_sanitized_dict()),
    }  # fmt: skip
    return {name: text.encode() for name, text in shown.items()}


@every_kind
@pytest.mark.parametrize("init", [{"token": marker("init")}, json.dumps({"token": f"{marker('init')}\n"})])
def test_a_configuration_shows_none_and_has_them_all(kind, init, tmp_path):
    own = with_own_fields(kind.config)
    given = settings(tmp_path, report_to="none", model_init_kwargs=init, extras=DEEP, tracker_api_key=marker("own"))
    args = own(**given | {"run_name": f"with {marker('own')}"})
    assert_untold(texts_of(args))
    assert args.hub_token == marker("hub") and args.model_init_kwargs == {"token": marker("init")}
    assert args.extras == DEEP and args.tracker_api_key == marker("own")
    shown = args.to_dict()
    assert (shown["hub_token"], shown["model_init_kwargs"]) == ("<HUB_TOKEN>", {"token": "<TOKEN>"})
    assert shown["extras"]["headers"] == [{"Authorization": "<AUTHORIZATION>", "eos_token": "</s>"}]
    for twin in (copy.copy(args), copy.deepcopy(args), own(**args.to_dict())):
        assert twin.model_init_kwargs == {"token": marker("init")} and twin.to_dict() == shown


def test_what_was_given_is_left_as_it_was(kind, tmp_path):
    held = trl_jax.BitsAndBytesConfig(load_in_8bit=True)
    given = {"token": f"{marker('init')}\n", "quantization_config": held}
    args = kind.config(str(tmp_path), use_cpu=True, report_to="none", model_init_kwargs=given)
    args.to_dict()
    assert given == {"token": f"{marker('init')}\n", "quantization_config": held}
    assert args.model_init_kwargs["quantization_config"] is held


def test_a_placeholder_is_never_taken_for_another_runs_token(kind, tmp_path):
    def config(token):
        how = {"use_cpu": True, "report_to": "none", "hub_token": token, "model_init_kwargs": {"token": token}}
        return kind.config(str(tmp_path), **how)

    first = config(marker("one"))
    config(marker("two"))
    with pytest.raises(ValueError, match="token='<TOKEN>' is a placeholder for 2 tokens: pass the token itself"):
        kind.config(**first.to_dict())
    assert kind.config(str(tmp_path), use_cpu=True, report_to="none", hub_token="<HUB_TOKEN>").hub_token is None


@only_thorough
@pytest.mark.parametrize("kind", usually({"reward", "sft"}.__contains__, KINDS), indirect=True)
def test_a_run_tells_none(kind, folder, hub, told, tmp_path):
    pytest.importorskip("tensorboard")
    args = with_own_fields(kind.config)(**settings(tmp_path / "run", extras=DEEP, tracker_api_key=marker("own")))
    trainer = kind.trainer(model=folder, args=args, train_dataset=kind.rows(16))
    trainer.train()
    trainer.push_to_hub(license="mit", dataset_name=f"https://me:{marker('dataset')}@example.com/rows")
    hub.headers = {"X-Error-Message": f"not with Bearer {marker('hub')}, {marker('init')}"}
    hub.fault = lambda method, path: 500 if "/preupload/" in path else None
    with pytest.raises(ConnectionError) as failed:
        trainer.push_to_hub()
    assert "not with " in str(failed.value)
    args.extras = {"headers": {"Authorization": marker("later")}, "as_json": json.dumps({"token": marker("later")})}
    again = kind.trainer(model=folder, args=args, train_dataset=kind.rows(16))
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    old = tmp_path / "old" / "training_args.json"  # from a release that saved nested secrets
    old.parent.mkdir()
    old.write_text(json.dumps({"extras": {"headers": {"token": marker("old")}}}))
    log_changes(old.parent, again.parts.checkpointer.arguments)
    trainer.end()
    found = told(full_text(failed.value))
    assert_untold(found | everything(hub))
    # The places were really used.
    card = hub.files("somebody/judge")["README.md"].decode()
    assert "| model_init_kwargs | {'token': '<TOKEN>'} |" in card and "tracker_api_key | <TRACKER_API_KEY>" in card
    for name in ("checkpoint-2", "checkpoint-4"):
        assert b'"token": "<TOKEN>"' in found[f"{name}/training_args.json"]
    assert any(b"<TOKEN>" in data for name, data in found.items() if "events.out" in name)
    assert b"Resuming with other arguments" in found["logs"] and b"pushes to somebody/judge failed" in found["logs"]
    assert args.model_init_kwargs["token"] == marker("init")


SOURCES = {
    "hub_token": ({"hub_token": f"{marker('hub')}\n"}, {}, {}),
    "init_hf_repo": ({"hub_token": None}, {"token": f"{marker('hub')}\n"}, {}),
    "HF_TOKEN": ({"hub_token": None}, {}, {"HF_TOKEN": f"{marker('hub')}\n"}),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_hub_that_cites_the_token_is_not_cited(source, status, kind, folder, hub, told, tmp_path, monkeypatch):
    config, asked, environment = SOURCES[source]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    given = settings(tmp_path / "run", push_to_hub=False, report_to="none", **config)
    trainer = kind.trainer(model=folder, args=kind.config(**given), train_dataset=kind.rows(4))
    trainer.init_hf_repo(**asked)
    assert list(hub.repositories) == ["somebody/judge"]  # so the Hub got the real token
    hub.fault = lambda method, path: status
    hub.headers = {"X-Error-Message": f"no good: {marker('hub')}"}
    with pytest.raises(OSError) as failed:
        trainer.push_to_hub(**asked)
    assert "no good: <" in str(failed.value)
    assert_untold(told(full_text(failed.value)))


@pytest.mark.parametrize("fault", [404, 401, 500])
def test_loading_from_a_hub_that_cites_the_token(fault, kind, hub, told, tmp_path):
    hub.fault = lambda method, path: fault
    hub.headers = {"X-Error-Message": f"no good: {marker('init')}", "X-Error-Code": "RepoNotFound"}
    given = settings(tmp_path / "run", push_to_hub=False, report_to="none")
    with pytest.raises(OSError) as failed:
        kind.trainer(model="somebody/none", args=kind.config(**given), train_dataset=kind.rows(4))
    with pytest.raises(OSError) as straight:
        trl_jax.AutoModelForSequenceClassification.from_pretrained("somebody/none", token=f"{marker('init')}\n")
    assert_untold(told(full_text(failed.value), full_text(straight.value)))


BAD = {"inside": f"{marker('a')} {marker('b')}", "lines": f"{marker('a')}\n{marker('b')}", "letters": f"{marker('é')}é",
       "bytes": marker("a").encode(), "a list": [marker("a")]}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_what_can_be_no_token_is_refused_unseen(bad, kind, folder, told, tmp_path):
    bad = BAD[bad]
    trainer = kind.trainer(
        model=folder, args=kind.config(**settings(tmp_path / "run", push_to_hub=False, report_to="none")),
        train_dataset=kind.rows(4),
    )  # fmt: skip
    load = trl_jax.AutoModelForSequenceClassification.from_pretrained
    ways = (
        ("hub_token", lambda: kind.config(str(tmp_path), use_cpu=True, hub_token=bad)),
        ("token", lambda: kind.config(str(tmp_path), use_cpu=True, model_init_kwargs={"token": bad})),
        ("token", lambda: load(folder, token=bad)),
        ("hub_token", lambda: trainer.init_hf_repo(token=bad)),
        ("hub_token", lambda: trainer.push_to_hub(token=bad)),
    )
    for name, way in ways:
        with pytest.raises((TypeError, ValueError), match=f"^{name} (contains whitespace|is a )") as refused:
            way()
        assert_untold(told(full_text(refused.value)))


# ---- the command line ------------------------------------------------------------------------------------------------

WRONG = {
    "an unknown flag": ["--hub_token", marker("hub"), "--hub_tokens", marker("x"), "--nothing", "1"],
    "a wrong value": ["--hub_token", marker("hub"), "--max_steps", marker("hub")],
    "a stray word": ["--hub_token", marker("hub"), marker("hub")],
    "no JSON": ["--model_init_kwargs", f"{{'token': '{marker('init')}'}}"],
    "half of JSON": ["--model_init_kwargs", f'{{"token": "{marker("init")}'],
    "a list": ["--model_init_kwargs", json.dumps([{"token": marker("init")}])],
    "no token": ["--hub_token", f"{marker('a')} {marker('b')}"],
    "both names": ["--push_to_hub_token", marker("old"), "--hub_token", marker("hub")],
    "help": ["--hub_token", marker("hub"), "--help"],
    "no such data": ["--hub_token", marker("hub"), "--dataset_name", f"https://me:{marker('url')}@example.com/a/b"],
}
WRONG_YAML = {
    "an open quote": f'hub_token: "{marker("hub")}\nseed: 1\n',
    "a tab": f"hub_token: {marker('hub')}\n\tseed: 1\n",
    "two on a line": f"hub_token: {marker('hub')}: 1\n",
    "env is a list": f"env: [{{HF_TOKEN: {marker('env')}}}]\n",
    "an unknown key": f"hub_token: {marker('hub')}\nhub_tokens: {marker('x')}\n",
    "a wrong value": f"hub_token: {marker('hub')}\noptim: {marker('hub')}\n",
    "no token": f"hub_token: {marker('a')} {marker('b')}\n",
    "the same as help": f"hub_token: {marker('hub')}\nmodel_init_kwargs: {{token: {marker('init')}}}\n",
}


def run_command(kind, flags) -> int:
    try:
        return main([kind.command, "--model_name_or_path", "somewhere", "--output_dir", "run", "--use_cpu", *flags])
    except SystemExit as left:
        return left.code


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_flags_are_told_without_secrets(wrong, kind, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = WRONG[wrong] + ([] if "--dataset_name" in WRONG[wrong] else ["--dataset_name", "nowhere/at/all"])
    assert run_command(kind, flags) == (0 if wrong == "help" else 2)
    found = told()
    assert found["screen"] != b""
    assert_untold(found)


@pytest.mark.parametrize("wrong", WRONG_YAML)
def test_wrong_files_are_told_without_secrets(wrong, kind, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    Path("config.yaml").write_text(WRONG_YAML[wrong])
    help_asked = wrong == "the same as help"
    assert run_command(kind, ["--config", "config.yaml", *(["--help"] if help_asked else [])]) == 2 * (not help_asked)
    found = told()
    assert found["screen"] != b""
    assert_untold(found)


@pytest.mark.parametrize("kind", usually("sft".__eq__, KINDS), indirect=True)
def test_a_command_trains_and_pushes_and_tells_none(kind, folder, hub, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANOTHER_API_KEY", "unset")  # so that monkeypatch restores it: the file sets it
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kind.rows(8)))
    Path("config.yaml").write_text(
        f"hub_token: '{marker('hub')}\n\n'\nenv: {{ANOTHER_API_KEY: {marker('env')}}}\nreport_to: none\nmax_steps: 1\n"
    )
    init = json.dumps({"token": f"{marker('init')}\n"})
    flags = ["--model_name_or_path", folder, "--dataset_name", "rows.jsonl", "--output_dir", "run", "--use_cpu",
             "--config", "config.yaml", "--push_to_hub", "--hub_model_id", "judge", "--model_init_kwargs", init,
             "--save_strategy", "no", "--run_name", marker("env")]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["trl-jax", kind.command, *flags])
    assert main() == 0
    found = told(repr(sys.argv))
    assert_untold(found | everything(hub))
    assert b"Model pushed to somebody/judge" in found["screen"] and b'"token": "<TOKEN>"' in found["training_args.json"]


def test_env_tells_none(told, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", marker("env"))
    assert main(["env"]) == 0
    found = told()
    assert b"transformers" in found["screen"]
    assert_untold(found)


def test_old_names_and_other_arguments(kind, told, tmp_path):
    with (
        warnings.catch_warnings(record=True) as seen,
        pytest.raises(TypeError, match="are the same argument") as refused,
    ):
        kind.config(str(tmp_path), push_to_hub_token=marker("old"), hub_token=marker("hub"))
    assert_untold(told(full_text(refused.value), *(str(each.message) for each in seen)))


def test_saving_with_a_token_is_refused_unseen(folder, told, tmp_path):
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    with pytest.raises(TypeError, match="token='<TOKEN>' is not supported by this release") as refused:
        model.save_pretrained(tmp_path / "saved", token=marker("save"))
    assert_untold(told(full_text(refused.value)))


class Keyed(TrainerCallback, ExportableState):
    """A callback with secrets in its state, such as one that sends metrics to a service."""

    def __init__(self, key):
        self.api_key, self.seen, self.url = key, 0, f"https://me:{key}@example.com"

    def on_step_end(self, args, state, control, **kwargs):
        self.seen += 1

    def on_log(self, args, state, control, logs=None, **kwargs):
        state.log_history[-1] |= {"note": f"sent with api_key={self.api_key}", "eval_password": 0.5}

    def state(self):
        own = {"api_key": self.api_key, "seen": self.seen, "url": self.url}
        return {"args": {"key": self.api_key}, "attributes": own}


def test_the_state_of_a_callback_is_written_without_and_resumed_with_them(kind, folder, told, tmp_path):
    def trained(resume=None, key="callback"):
        given = {"output_dir": str(tmp_path / "run")} | BASE | {"save_strategy": "steps", "save_steps": 2}
        callback = Keyed(marker(key))
        trainer = kind.trainer(
            model=folder, args=kind.config(**given), train_dataset=kind.rows(16), callbacks=[callback]
        )
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_state()
        return trainer, callback

    trained()
    found = told()
    assert_untold({name: data for name, data in found.items() if name not in ("logs", "screen")})
    state = json.loads(found["checkpoint-2/trainer_state.json"])
    assert state["stateful_callbacks"]["Keyed"]["attributes"]["api_key"] == "<API_KEY>"
    assert {log["eval_password"] for log in state["log_history"]} == {0.5}  # a number is a metric, not a secret
    _, resumed = trained(str(tmp_path / "run" / "checkpoint-2"))
    assert (resumed.api_key, resumed.seen) == (marker("callback"), 4) and marker("callback") in resumed.url
