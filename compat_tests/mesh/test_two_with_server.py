"""Two processes with completions from a server: the rows, losses and weights of one process."""

from __future__ import annotations

import json

import pytest

from compat_tests.effort import THOROUGH, only_thorough
from compat_tests.mesh.launching import launch
from compat_tests.mesh.served import replies
from compat_tests.parity import grpo_cases
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_weights
from compat_tests.parity.reference import read_weights
from compat_tests.rollout.stub_server import StubServer
from compat_tests.trainer.test_tool_images import TEMPLATE
from compat_tests.trainer.vision_models import PATCH, SIZE, tiny_llava
from trl_jax.hub.peft_config import LoraConfig

TOOLS = {"num_generations": 2, "max_completion_length": 120, "shuffle_dataset": False}
CONFIG = grpo_cases.STEPS | {
    "max_steps": 2, "trainer": "GRPO", "num_generations": 4, "use_vllm": True, "vllm_mode": "server",
    "writes": True, "pairs": 16, "pad_to_multiple_of": None,
}  # fmt: skip
RUNS = {
    "whole": {}, "ahead": {"generate_ahead": True, "max_steps": 3},
    "tools": TOOLS | {"kind": "tools", "peft_config": LoraConfig(r=4, target_modules="all-linear")},
    "function": TOOLS | {"kind": "function"},
}  # fmt: skip
CASES = RUNS if THOROUGH else ("tools",)


def run(folder, out, runs: dict, **served) -> dict[int, list]:
    """Train with one process and with two; returns the requests of each. `served` configures the server."""
    stub, asked, replay = StubServer(folder, max_lora_rank=8), {}, served.pop("replay")
    stub.replay = replay
    vars(stub).update(served)
    try:
        for count in (1, 2):
            config = CONFIG | {
                "per_device_train_batch_size": 8 // count, "mesh_shape": f"data:{count}", "runs": runs,
                "vllm_server_base_url": stub.url, "vllm_weights_dir": str(out / "handed"),
            }  # fmt: skip
            stub.seen = []
            ended = launch("ours", folder, out / str(count), config=[config] * count)
            assert all(code == 0 for code, _ in ended), "\n".join(text[-3000:] for _, text in ended)
            asked[count] = stub.seen
    finally:
        stub.stop()
    return asked


@pytest.fixture(scope="module")
def out(checkpoint, tmp_path_factory):
    """The folder of the runs, and the requests to the server."""
    out = tmp_path_factory.mktemp("served")
    folder = checkpoint("qwen3", **{key: value for key, value in SMALL.items() if key != "model_type"})
    return out, run(folder, out, {name: RUNS[name] for name in CASES}, replay=replies)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name, out):
    assert_alike(out[0], name)


@only_thorough
@pytest.mark.parametrize("kind", ["images", "drawn"])
def test_images(kind, tmp_path):
    """In prompts, and also in the answers of a tool."""
    folder = tiny_llava(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    number = (SIZE // PATCH) ** 2

    def replay(ids, n):
        return [[40 + (sum(ids) + own + place) % 50 for place in range(own + 3)] for own in range(n)]

    config = {
        "kind": kind,
        "num_generations": 2,
        "vllm_importance_sampling_correction": False,
    }  # the stub returns no sampling log-probabilities
    config |= {"max_completion_length": 120, "shuffle_dataset": False} if kind == "drawn" else {}
    asked = run(folder, tmp_path, {"images": config}, replay=replay, image_tokens=number)
    assert_alike(tmp_path, "images")
    seen = [[body["token_ids"] for path, body in seen if path == "/inference/v1/generate"] for seen in asked.values()]
    if kind == "images":
        assert sorted(seen[0]) == sorted(seen[1]) and len(seen[0]) == 7  # one of eight prompts has no image
        return
    one, *both = (
        json.loads((tmp_path / part / f"oursimages.{rank}.json").read_text()) for part, rank in ("10", "20", "21")
    )
    assert one == [ids for start in (0, 4) for own in both for ids in own[start : start + 4]] and len(one) == 16
    assert sorted(seen[0]) == sorted(seen[1]) and max(map(len, seen[0])) > 60


def assert_alike(out, name):
    assert_same_logs(out, name)
    assert_same_weights(*(read_weights(out / count / f"ours{name}" / "final") for count in "12"), 2e-4)


def assert_same_logs(out, name):
    logs, others = (json.loads((out / count / f"ours{name}.json").read_text()) for count in "12")
    for mine, other in zip(logs, others, strict=True):
        assert mine.keys() == other.keys()
        for key in ("loss", "reward", "sampling/sampling_logp_difference/mean", "entropy", "train_loss",
                    "sample/staleness_mean", "tools/call_frequency", "tools/failure_frequency"):  # fmt: skip
            assert mine.get(key) == pytest.approx(other.get(key), abs=1e-5), key


@pytest.mark.parametrize("name", [name for name in CASES if "kind" in RUNS[name]])
def test_each_process_has_its_own_rows(name, out):
    out, _ = out
    one, first, second = (
        json.loads((out / part).read_text())
        for part in (f"1/ours{name}.0.json", f"2/ours{name}.0.json", f"2/ours{name}.1.json")
    )
    assert len(one) == 16
    assert one == [row for start in (0, 4) for own in (first, second) for row in own[start : start + 4]]


def test_the_first_of_two_processes_alone_asks(out):
    _, asked = out
    sent = [
        [(path, body) for path, body in seen if path.startswith(("/v1/", "/collective"))] for seen in asked.values()
    ]
    prompts = [sorted((body["prompt"], body["seed"]) for _, body in seen if body and "seed" in body) for seen in sent]
    loads = [[path for path, _ in seen if "load" in path or path == "/collective_rpc"] for seen in sent]
    assert prompts[0] == prompts[1] and len(prompts[0]) > 8
    assert loads[0] == loads[1] and loads[0].count("/v1/load_lora_adapter") > 1
