"""Secrets are recognized by name, by shape, and because they were read before."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from trl_jax.core import secrets
from trl_jax.core.secrets import as_token, is_secret, learn, masked, masked_flags, scrubbed, shown


@pytest.fixture(autouse=True)
def forgets(monkeypatch):
    monkeypatch.setattr(secrets, "_known", {})


SECRET_NAMES = (
    "token hub_token HF_TOKEN push_to_hub_token use_auth_token accessToken api_key apiKey API-KEY WANDB_API_KEY"
    " password db.password secret client_secret AWS_SECRET_ACCESS_KEY Authorization Proxy-Authorization credentials"
    " private_key cookie hf_tokens"
).split()
ORDINARY_NAMES = (
    "eos_token pad_token bos_token image_token decoder_start_token mask_token num_token tokens max_tokens tokenizer"
    " token_type_ids pad_token_id key keys author authors secretary hub_private_repo num_tokens run_name tokens_seen"
    " mean_token_accuracy password_policy use_cache public_key"
).split()


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name):
    assert is_secret(name) and masked({name: "what it is"})[name] == secrets.placeholder(name)


@pytest.mark.parametrize("name", ORDINARY_NAMES)
def test_names_of_ordinary_values(name):
    assert not is_secret(name) and masked({name: "what it is"}) == {name: "what it is"}


TEXTS = {
    "hf_" + "aB3" * 12: "<SECRET>",
    "sk-proj-" + "aB3_" * 10: "<SECRET>",
    "AKIA" + "ABCD1234" * 2: "<SECRET>",
    "ghp_" + "aB3" * 12: "<SECRET>",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN": "<SECRET>",
    "https://me:pa55@example.com/x": "https://<SECRET>@example.com/x",
    "https://example.com/x?access_token=abc&page=2": "https://example.com/x?access_token=<ACCESS_TOKEN>&page=2",
    "https://cdn.example.com/x?X-Amz-Signature=0a1b&page=2": "https://cdn.example.com/x?<SECRET>&page=2",
    "Authorization: Bearer abc": "Authorization: <AUTHORIZATION>",
    "Illegal header value b'Bearer abc_defgh'": "Illegal header value b'Bearer <SECRET>'",
    "token=abc of x": "token=<TOKEN> of x",
    "{'token': 'a b', 'eos_token': '</s>'}": "{'token': '<TOKEN>', 'eos_token': '</s>'}",
    '{"token": "ab': '{"token": <TOKEN>',
    "{token: ab, x: 1}": "{token: <TOKEN>, x: 1}",
    "seed: 1\nhub_token: ab\n": "seed: 1\nhub_token: <HUB_TOKEN>\n",
    '["{\\"password\\": \\"a\\"}"]': '["{\\"password\\": \\"<PASSWORD>\\"}"]',
}
ORDINARY = [
    "hf_reward_model", "sk-learn-random-forest-classifier", "risk-adjusted-reward-model-with-a-long-name-2B",
    "da39a3ee5e6b4b0d3255bfef95601890afd80709", "https://example.com:8080/a@b", "ssh://git@github.com/a/b",
    "git@github.com:a/b", "http://localhost:8000?mail=a@b", "the bearer certificates", "one token: a word",
    "rank=128,update_proj_gap=200", "eos_token='</s>'", "token=None", "{'token': None, 'use_auth_token': True}",
    "num_token=5", "token=7", "C:\\token\\x", '{"a": [1, 2.0, null], "b":  "c"}', "<|endoftext|>",
    "{% for m in messages %}{{ m['role'] }}: {{ m.content }}{% endfor %}",
    "model_init_kwargs={'dtype': 'float32', 'revision': 'main'}",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    assert scrubbed(text) == TEXTS[text] == masked([text])[0] == scrubbed(TEXTS[text])


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts(text):
    assert scrubbed(text) == text and masked(text) is text


def test_a_secret_that_was_read_is_found_anywhere(monkeypatch, tmp_path):
    learn({"hub_token": "plainly secret-1", "deeper": json.dumps([{"password": "another + secret"}])})
    assert scrubbed("say plainly secret-1") == "say <HUB_TOKEN>"
    assert scrubbed("x another%20%2B%20secret y") == "x <PASSWORD> y"
    assert masked({"run_name": "of plainly secret-1"}) == {"run_name": "of <HUB_TOKEN>"}
    monkeypatch.setenv("SOME_API_KEY", "in-the-environment\n")
    assert scrubbed("x in-the-environment y") == "x <SOME_API_KEY> y"
    monkeypatch.setenv("PWD", str(tmp_path / "now"))  # the shell's working directory, not a password
    monkeypatch.setenv("OLDPWD", str(tmp_path / "before"))
    told = f"The model is in {tmp_path / 'now' / 'out'}, no longer in {tmp_path / 'before'}."
    assert scrubbed(told) == told
    learn({"token": "a"})  # too short to be searched for
    assert scrubbed("an apple") == "an apple"


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Held:
    name: str
    api_key: str = field(default="Mark")


def nest(draw: random.Random, depth: int) -> Any:
    """A value with "Mark" below the names of secrets, at any depth and in every kind of container."""
    if depth == 0:
        return {draw.choice(SECRET_NAMES): draw.choice(["Mark", b"Mark", ["Mark"], {"x": ("Mark",)}])}
    inner = nest(draw, depth - 1)
    ways = [
        lambda: {draw.choice(ORDINARY_NAMES): inner, "b": 1},
        lambda: [1, inner],
        lambda: (inner, "x"),
        lambda: Point(0.5, inner),
        lambda: Held("x"),
        lambda: json.dumps(inner, default=repr),
        lambda: {draw.choice(SECRET_NAMES): inner},
        lambda: f"the error was {inner!r}" if depth == 1 and b"Mark" not in inner.values() else [inner],
    ]
    return draw.choice(ways)()


@pytest.mark.parametrize("seed", range(300))
def test_whatever_holds_them(seed):
    value = nest(random.Random(seed), 1 + seed % 5)
    before = copy.deepcopy(value)
    told = masked(value)
    assert "Mark" in repr(value) and "Mark" not in repr(told)
    assert value == before and masked(told) == told


def test_what_is_no_text_stays():
    kept = {"token": None, "use_auth_token": True, "per_device": [1, 2.5, None], "x": Point(1, 2), "num_token": 3}
    assert masked(kept) == kept and type(masked(kept)["x"]) is Point
    same = Held("x", "")
    assert masked([same])[0] is same


def test_tokens_as_they_are_read():
    assert as_token("hub_token", " \tabc-def_1\r\n") == "abc-def_1"
    assert [as_token("token", value) for value in (None, True, False, "", " \n")] == [None, True, False, None, None]


@pytest.mark.parametrize("bad", ["ab cd", "ab\ncd", "ab\0cd", "äbcd", b"abcd", 5, ["abcd"]])
def test_what_is_no_token(bad):
    with pytest.raises((TypeError, ValueError), match="^my_token ") as error:
        as_token("my_token", bad)
    assert "bcd" not in str(error.value) and "cd" not in str(error.value)


def test_a_command_line():
    flags = ["--hub_token", "abc", "--token=abc", "--init", '{"token": "abc"}', "--hub-token", "abc", "--rate", "0.1"]
    told = ["--hub_token", "<HUB_TOKEN>", "--token=<TOKEN>", "--init", '{"token": "<TOKEN>"}']
    assert masked_flags(flags) == [*told, "--hub-token", "<HUB_TOKEN>", "--rate", "0.1"]


def test_an_argument_in_an_error():
    assert shown("hub_token", "abc") == "hub_token='<HUB_TOKEN>'" and shown("seed", 3) == "seed=3"
