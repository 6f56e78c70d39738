"""The Hub and its absence: the real client against a loopback server with fault injection.

The number in a test's name is that of the case in the project's table of faults.
"""

from __future__ import annotations

import logging
import time

import huggingface_hub
import pytest
from transformers import TrainerCallback

import trl_jax
from compat_tests.effort import usual
from compat_tests.hub.loopback import TOKEN, serving
from compat_tests.trainer.trainers import FACTS, checkpoints, make, table
from trl_jax.hub import push

NAME = "somebody/judge"
CONFIG = {"push_to_hub": True, "hub_model_id": "judge", "hub_token": TOKEN, "save_strategy": "steps", "save_steps": 2}
MODEL = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training_args.json"}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(push, "_WAITS", (0.05,) * 4)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def trainer(checkpoint, tmp_path, hub):
    def build(callbacks=(), **config):
        folder = checkpoint(**FACTS)
        return make(trl_jax, folder, tmp_path / "run", train=table(16), config=CONFIG | config, callbacks=[*callbacks])

    return build


class Wait(TrainerCallback):
    """Waits for an upload before training continues; otherwise these short runs would skip most uploads."""

    def on_save(self, args, state, control, **kwargs):
        self.trainer.parts.publisher.wait()


@pytest.fixture
def train(trainer):
    def run(wait=True, more=(), **config):
        made = trainer([*([Wait()] if wait else []), *more], **config)
        Wait.trainer = made
        made.train()
        return made

    return run


def on_disk(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


STEPS = ["initial commit", "Training in progress, step 2", "Training in progress, step 4"]
STRATEGIES = {
    "end": STEPS[:1],
    "every_save": STEPS,
    "checkpoint": [STEPS[0], STEPS[1], STEPS[1] + ", checkpoint", STEPS[2], STEPS[2] + ", checkpoint"],
    "all_checkpoints": [STEPS[0], STEPS[1], STEPS[1] + ", checkpoint", STEPS[2], STEPS[2] + ", checkpoint"],
}


# By default, the commits of "every save" are covered by test_a_revision_is_a_branch_of_its_own.
@usual("end", "checkpoint", "all_checkpoints")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_commits_are_trls_and_what_arrived_is_what_is_on_disk(strategy, train, hub, tmp_path):
    trainer = train(hub_strategy=strategy)
    assert hub.messages(NAME) == STRATEGIES[strategy] and trainer.hub_model_id == NAME
    files, local = hub.files(NAME), on_disk(tmp_path / "run")
    assert not any(".push" in name for name in local)
    if strategy != "end":
        assert {name: files[name] for name in MODEL} == {name: local[f"checkpoint-4/{name}"] for name in MODEL}
        assert not {"manifest.json", "trainer_state.json"} & set(files)
    places = {"checkpoint": {"last-checkpoint": 4}, "all_checkpoints": {"checkpoint-2": 2, "checkpoint-4": 4}}
    for place, step in places.get(strategy, {}).items():
        prefix = f"checkpoint-{step}/"
        whole = {name.removeprefix(prefix): data for name, data in local.items() if name.startswith(prefix)}
        assert {n.removeprefix(f"{place}/"): d for n, d in files.items() if n.startswith(f"{place}/")} == whole
    trainer.save_model()
    trainer.push_to_hub()
    assert hub.messages(NAME)[len(STRATEGIES[strategy]) :] == ["Model save", "End of training"]


def test_push_to_hub_without_having_asked_for_it(trainer, hub, tmp_path):
    made = trainer(push_to_hub=False, hub_private_repo=True)
    assert hub.repositories == {}
    commit = made.push_to_hub("mine", model_name="Judge", dataset_name="a/b", tags=["law"], license="mit")
    assert commit.commit_message == "mine" and hub.repositories[NAME].private
    files = hub.files(NAME)
    assert {*MODEL, "README.md"} <= set(files)
    card = files["README.md"].decode()
    assert "model_name: Judge\n" in card and "license: mit\n" in card and "- a/b\n" in card and "- law\n" in card
    assert "None" not in card and "huggingface.co/" not in card  # the run started from a local folder
    (tmp_path / "run" / "README.md").write_text("my own card")
    made.push_to_hub()
    assert hub.files(NAME)["README.md"] == b"my own card"


def test_a_revision_is_a_branch_of_its_own(train, hub):
    train(hub_revision="trial")
    assert hub.messages(NAME) == STEPS[:1] and hub.messages(NAME, "trial") == STEPS


def test_without_blocking_there_is_a_future(trainer, hub):
    assert trainer().push_to_hub(blocking=False).result(30).commit_message == "End of training"


def test_what_was_pushed_is_a_model_to_go_on_from(train, hub, tmp_path):
    trainer = train()
    folder = huggingface_hub.snapshot_download(NAME, token=TOKEN, cache_dir=tmp_path / "cache")
    again = trl_jax.AutoModelForSequenceClassification.from_pretrained(folder)
    assert (again([[5, 6]]).logits == trainer.model([[5, 6]]).logits).all()


def test_a_push_is_skipped_while_one_runs_unless_always(train, hub):
    hub.fault = lambda method, path: "slow" if path.endswith("/commit/main") else None
    train(wait=False, save_steps=1)
    assert len(hub.messages(NAME)) < 5
    hub.repositories.clear()
    train(wait=False, save_steps=1, hub_always_push=True)
    assert hub.messages(NAME) == ["initial commit", *(f"Training in progress, step {n}" for n in (1, 2, 3, 4))]


def test_a_checkpoint_may_go_while_it_is_being_pushed(train, hub, tmp_path):
    hub.fault = lambda method, path: "slow" if "/preupload/" in path else None
    train(wait=False, save_steps=1, save_total_limit=1, hub_strategy="all_checkpoints", hub_always_push=True)
    assert checkpoints(tmp_path / "run") == ["checkpoint-4"]
    assert {f"checkpoint-{n}/manifest.json" for n in (1, 2, 3, 4)} <= set(hub.files(NAME))


@usual("409", "drop")
@pytest.mark.parametrize("fault", [500, 503, 429, 409, "drop", "slow"])
def test_row42_a_fault_that_passes_is_ridden_out(fault, train, hub, caplog):
    met = set()

    def faulty(method, path):
        first, _ = path not in met, met.add(path)
        return fault if first and not path.endswith(("create", "whoami-v2", "validate-yaml")) else None

    hub.fault, hub.headers = faulty, {"Retry-After": "0"}
    train()
    assert hub.messages(NAME) == STEPS and "failed" not in caplog.text


def test_row42_an_outage_loses_nothing_and_is_told(train, hub, tmp_path, caplog):
    hub.fault = lambda method, path: "drop" if hub.repositories and hub.messages(NAME)[-1] == STEPS[1] else None
    start = time.time()
    with caplog.at_level(logging.WARNING):
        trainer = train(num_train_epochs=3)
    assert trainer.state.global_step == 12 and time.time() - start < 120
    assert hub.messages(NAME) == STEPS[:2]
    assert caplog.text.count('on the Hub did not accept "Training in progress, step ') >= 5
    last = caplog.records[-1].message
    assert last.startswith("6 pushes to somebody/judge failed. The last one did not arrive either;")
    assert f"{tmp_path / 'run'} holds everything. The first said: The repository 'somebody/judge'" in last
    assert TOKEN not in caplog.text
    hub.fault = lambda method, path: None
    trainer.push_to_hub()
    assert hub.files(NAME)["model.safetensors"] == (tmp_path / "run/checkpoint-12/model.safetensors").read_bytes()


def test_row42_the_last_push_is_tried_again_at_the_end_and_row43_the_token_is_in_no_file(
    train, hub, tmp_path, caplog, capfd
):
    class Heals(TrainerCallback):
        def on_epoch_end(self, args, state, control, **kwargs):
            hub.fault = lambda method, path: None

    hub.fault = lambda method, path: 500 if "/preupload/" in path else None
    train(more=[Heals()])
    assert hub.messages(NAME) == [STEPS[0], STEPS[2]]
    assert "2 pushes to somebody/judge failed. The last one arrived;" in caplog.text
    for name, data in on_disk(tmp_path / "run").items():
        assert TOKEN.encode() not in data, name
    assert TOKEN not in caplog.text and TOKEN not in "".join(capfd.readouterr())


def test_row41_a_hub_that_is_down_is_noticed_before_a_model_is_loaded(trainer, hub, monkeypatch):
    hub.close()
    monkeypatch.setattr("trl_jax.training.model.find", lambda *given: pytest.fail("looked at the model"))
    start = time.time()
    with pytest.raises(ConnectionError, match="The repository 'judge' on the Hub cannot be opened: ConnectError: "):
        trainer()
    assert time.time() - start < 10


def test_row41_at_the_end_only_it_may_be_down_until_then(trainer, hub, caplog):
    hub.fault = lambda method, path: "drop"
    made = trainer(hub_strategy="end")
    assert "It is asked again when there is something to push." in caplog.text
    made.train()
    hub.fault = lambda method, path: None
    made.push_to_hub()
    assert hub.messages(NAME)[-1] == "End of training"


@pytest.mark.parametrize(("status", "token"), [(401, "hf_wrong_token"), (403, TOKEN)])
def test_row43_a_token_that_may_not_write(status, token, trainer, hub, tmp_path, caplog):
    hub.fault = lambda method, path: 403 if status == 403 else None
    with pytest.raises(PermissionError) as error:
        trainer(hub_token=token)
    assert "'judge' on the Hub cannot be opened: " in str(error.value) and str(status) in str(error.value)
    assert "Log in with `hf auth login`, or pass a hub_token with write access." in str(error.value)
    assert error.value.__suppress_context__
    assert token not in str(error.value) + caplog.text
