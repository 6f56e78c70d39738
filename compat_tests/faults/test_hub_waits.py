"""A Hub that hangs, defers, or sends wrong content: timeouts, and their error messages.

The real client runs against the loopback server with timeouts of one or two seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import HfHubHTTPError

import trl_jax
from compat_tests.effort import thorough, usual
from compat_tests.hub.loopback import TOKEN, Repository, serving
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.hub import fetch as limits
from trl_jax.hub import push
from trl_jax.hub.push import Publisher, Upload

NAME, WEIGHTS = "somebody/judge", "model.safetensors"
CONFIG = {"push_to_hub": True, "hub_model_id": "judge", "hub_token": TOKEN, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setenv(limits.VARIABLE, "2")
    monkeypatch.setattr(limits, "_WARN_AFTER", 0.5)
    monkeypatch.setattr(push, "_WAITS", (0.05,) * 4)
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", str(tmp_path / "assets"))
    with serving(monkeypatch, tmp_path / "cache") as server:
        yield server


@pytest.fixture
def fetch(hub, checkpoint, tmp_path):
    """fetch() -> the model served by the Hub."""
    files = {path.name: path.read_bytes() for path in checkpoint(**FACTS).iterdir()}
    hub.repositories[NAME] = Repository(False, {"main": [("initial commit", files)]})

    def fetched():
        return trl_jax.AutoModelForSequenceClassification.from_pretrained(NAME, token=TOKEN)

    return fetched


@pytest.fixture
def trainer(hub, checkpoint, tmp_path):
    def build(**config):
        return make(trl_jax, checkpoint(**FACTS), tmp_path / "run", train=table(4), config=CONFIG | config)

    return build


class Clock:
    def __enter__(self):
        self.began = time.monotonic()
        return self

    def __exit__(self, *error):
        self.seconds = time.monotonic() - self.began


def test_a_hub_that_hangs_ends_construction(trainer, hub, caplog):
    hub.fault = lambda method, path: "hang"
    with Clock() as clock, pytest.raises(ConnectionError) as error:
        trainer()
    assert clock.seconds < 20
    assert "'judge' on the Hub cannot be opened: ReadTimeout: " in str(error.value)
    assert f"POST {hub.url}/api/repos/create" in str(error.value)
    waiting = "while opening the repository 'judge' on the Hub: POST "
    assert sum("The Hub has not" in text and waiting in text for text in caplog.messages) == 1
    assert "The request will be aborted after 2 seconds (TRL_JAX_HUB_TIMEOUT)." in caplog.text


@pytest.mark.parametrize("file", [thorough("config.json"), WEIGHTS])
def test_a_hub_that_hangs_ends_a_fetch(file, fetch, hub, caplog):
    hub.fault = lambda method, path: "hang" if path.endswith(file) else None
    with Clock() as clock, pytest.raises(ConnectionError) as error:
        fetch()
    assert clock.seconds < 20
    assert str(error.value).startswith(
        f"model='{NAME}': {file} could not be downloaded from the Hub; its client reported: "
    )
    assert f"/{NAME}/resolve/" in str(error.value)
    assert "did not succeed within 2 seconds (TRL_JAX_HUB_TIMEOUT)" in str(error.value)
    assert f"while fetching {file} of model='{NAME}'" in caplog.text


def test_a_hub_that_hangs_is_not_needed_for_what_is_in_the_cache(fetch, hub):
    fetch()
    hub.fault = lambda method, path: "hang"
    with Clock() as clock:
        assert fetch().params
    assert clock.seconds < 20


def test_a_hub_that_hangs_costs_the_upload_and_nothing_else(trainer, hub, tmp_path, monkeypatch, caplog):
    made = trainer(max_steps=1)
    monkeypatch.setenv(limits.VARIABLE, "0.5")
    hub.fault = lambda method, path: "hang" if path.startswith("/objects/") else None
    with Clock() as clock:
        made.train()
    assert clock.seconds < 40 and made.state.global_step == 1
    assert "2 pushes to somebody/judge failed. The last one did not arrive either" in caplog.text
    assert (tmp_path / f"run/checkpoint-1/{WEIGHTS}").is_file() and hub.messages(NAME) == ["initial commit"]


def test_an_hour_is_not_waited_for(fetch, hub):
    hub.fault = lambda method, path: 429 if path.endswith(WEIGHTS) else None
    hub.headers = {"Retry-After": "3600"}
    with Clock() as clock, pytest.raises(ConnectionError) as error:
        fetch()
    assert clock.seconds < 20
    assert f"model='{NAME}': {WEIGHTS} could not be downloaded" in str(error.value) and hub.url in str(error.value)
    assert "the server answered with status 429 and asks to wait 3600 seconds, which is more than 2 (TRL_J" in str(
        error.value
    )


def test_a_second_is_waited_for(fetch, hub, monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, "30")
    refused = []

    def once(method, path):
        if path.endswith(WEIGHTS) and method == "GET" and not refused:
            refused.append(time.monotonic())
            return 429
        return None

    hub.fault, hub.headers = once, {"Retry-After": "1"}
    assert fetch().params and time.monotonic() - refused[0] >= 1


@pytest.mark.parametrize(("headers", "seconds"), [
    ({"Retry-After": "7"}, 7), ({"ratelimit": '"api";r=0;t=9', "Retry-After": "7"}, 9),
    ({"Retry-After": "soon"}, None), ({"Retry-After": "90000"}, push._LONGEST_WAIT),
])  # fmt: skip
def test_an_upload_waits_as_long_as_the_hub_asks(headers, seconds):
    """As huggingface_hub does: the header of rate limits goes first."""
    response = httpx2.Response(429, headers=headers, request=httpx2.Request("POST", "http://localhost"))
    assert push._retry_after(HfHubHTTPError("Too many", response=response)) == seconds


def test_a_limit_that_is_no_number(fetch, monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, "soon")
    with pytest.raises(ValueError, match="TRL_JAX_HUB_TIMEOUT must be a number of seconds, such as 60, got 'soon'"):
        fetch()


def test_zeros_in_the_place_of_weights_are_noticed_and_not_kept(fetch, hub):
    whole = hub.files(NAME)[WEIGHTS]
    hub.fault = lambda method, path: "zeros" if path.endswith(WEIGHTS) and method == "GET" else None
    with pytest.raises(ValueError) as error:
        fetch()
    assert str(error.value).startswith(f"model='{NAME}': {WEIGHTS} is corrupted: its sha256 is ")
    sent, meant = (hashlib.sha256(data).hexdigest() for data in (bytes(len(whole)), whole))
    assert f"its sha256 is {sent}, but {meant} on the Hub." in str(error.value)
    assert "Start again to download it again" in str(error.value)
    hub.fault = lambda method, path: None
    assert fetch().params


def test_weights_that_lie_damaged_in_the_cache_are_noticed(fetch, hub, tmp_path, monkeypatch):
    fetch()
    with monkeypatch.context() as patch:
        patch.setattr(limits.hashlib, "file_digest", lambda *given: pytest.fail("compared again"))
        fetch()
    (blob,) = {path.resolve() for path in (tmp_path / "cache").rglob(WEIGHTS)}
    blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(ValueError, match=f"{WEIGHTS} is corrupted"):
        fetch()
    assert not blob.exists() and fetch().params


def test_a_transfer_that_breaks_off_names_the_model(fetch, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.fault = lambda method, path: "half" if path.endswith(WEIGHTS) and method == "GET" else None
    with pytest.raises(ConnectionError) as error:
        fetch()
    assert f"model='{NAME}': {WEIGHTS} could not be downloaded from the Hub; its client reported: " in str(error.value)


def test_a_signal_at_the_end_of_training_cuts_the_upload_off(trainer, hub, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(limits.VARIABLE, "60")
    made, hanging = trainer(max_steps=1), itertools.count()

    def hang(method, path):
        if not path.startswith("/objects/"):
            return None
        # Only once: two files are uploaded in parallel, and a second signal would end the process.
        if next(hanging) == 0:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return "hang"

    hub.fault = hang
    before = set(threading.enumerate())
    with Clock() as clock, pytest.raises(SystemExit) as left:
        made.train()
    assert left.value.code == 143 and clock.seconds < 30
    assert 'Exiting while the upload "Training in progress, step 1" to somebody/judge is running' in caplog.text
    assert (tmp_path / f"run/checkpoint-1/{WEIGHTS}").is_file()
    threads = [thread for thread in threading.enumerate() if thread not in before]
    threads = [thread for thread in threads if "process_request" not in thread.name]  # the server's threads
    for thread in threads:  # the interpreter waits for the client's threads at exit
        thread.join(10)
    assert not [thread for thread in threads if thread.is_alive()]


PUSH = """
import sys, time
from pathlib import Path
from trl_jax.hub.push import Publisher, Upload
publisher = Publisher("judge", token=sys.argv[2], private=None, revision=None)
uploads = [Upload(Path(sys.argv[1]), "mine", ["a.safetensors", "b.safetensors"])]
if sys.argv[3] == "later":
    publisher.push_in_background(uploads, done=print, daemon=False)
    time.sleep(60)
else:
    publisher.push(uploads)
"""


@usual("now-15-143")
@pytest.mark.parametrize(
    ("when", "number", "code"),
    [("now", signal.SIGTERM, 143), ("later", signal.SIGTERM, 143), ("now", signal.SIGINT, -signal.SIGINT)],
)
def test_a_signal_during_a_scripts_own_push_says_what_it_cuts_off(when, number, code, hub, heard, tmp_path):
    uploading = threading.Event()
    hub.fault = lambda method, path: "hang" if path.startswith("/objects/") and not uploading.set() else None
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(name.encode() * 1000)
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", limits.VARIABLE: "60"}
    command = [sys.executable, "-c", PUSH, str(tmp_path), TOKEN, when]
    child = subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.PIPE, text=True)
    assert uploading.wait(60)
    time.sleep(0.3)
    child.send_signal(number)
    with Clock() as clock:
        said = child.communicate(timeout=50)[1]
    assert child.returncode == code and clock.seconds < 15, said
    assert f'trl_jax: {number.name}: exiting while uploading "mine" to somebody/judge, which is interrupted.' in said


def test_an_error_of_our_own_is_not_tried_again(hub, tmp_path, monkeypatch):
    tries = []

    def broken(api, **how):
        tries.append(how)
        raise TypeError("ours")

    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", broken)
    publisher = Publisher("judge", token=TOKEN, private=None, revision=None)
    with pytest.raises(TypeError, match="ours"):
        publisher.push([Upload(tmp_path, "mine", [])])
    assert len(tries) == 1


def test_rows_that_a_script_streams_meanwhile_are_not_limited(hub):
    hub.fault, hub.headers = lambda method, path: 429, {"Retry-After": "3600"}
    session = huggingface_hub.get_session()
    with limits.limited("uploading"):
        assert session.get(f"{hub.url}/api/datasets/somebody/rows").status_code == 429
        with pytest.raises(limits.HubSilentError, match="asks to wait 3600 seconds"):
            session.get(f"{hub.url}/api/models/{NAME}")
    assert session.get(f"{hub.url}/api/models/{NAME}").status_code == 429
