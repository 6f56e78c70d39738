"""The stub server replies as a real vLLM server did (recorded_vllm.json): the same statuses, keys and types."""

from __future__ import annotations

import json

import pytest

from compat_tests.parity.dpo_cases import SMALL
from compat_tests.rollout import recorded
from compat_tests.rollout.stub_server import StubServer

REAL = json.loads(recorded.FILE.read_text())


@pytest.fixture
def stub(checkpoint):
    made = StubServer(checkpoint(**SMALL), max_model_len=256, max_lora_rank=8)
    made.replay = lambda ids, n: [[5, 6, 7]] * n
    yield made
    made.stop()


def test_the_stub_replies_as_vllm(stub, checkpoint, tmp_path):
    folder = checkpoint(**SMALL)
    mine = recorded.replies(stub.url, folder, recorded.adapter(str(folder), tmp_path / "adapter"))
    assert recorded.differences(mine, REAL["text"]) == []
    assert {one["path"] for one in REAL["text"]} == {path for path, _ in recorded.REQUESTS}


def test_the_stub_replies_as_vllm_to_images(stub, checkpoint):
    (place,) = REAL["image"][0]["reply"]["features"]["mm_placeholders"]["image"]
    stub.image_tokens = place["length"]
    mine = recorded.replies_about_an_image(stub.url, checkpoint(**SMALL), "data:image/png;base64,", 9)
    assert recorded.differences(mine, REAL["image"]) == []


def test_differences_are_found():
    assert recorded.differences({"a": [1, {"b": "x"}]}, {"a": [2, {"b": "y", "c": 0}], "d": None}) == []
    assert recorded.differences({"a": [1]}, {"b": [1]}) == [".a: only in the stub"]
    for mine, real in ((["a"], ["a", "b"]), ([1], [1.0]), (1, 1.0), (None, "x"), ({}, None), ([], {}), (True, 1)):
        assert len(recorded.differences([mine], [real])) == 1, (mine, real)
