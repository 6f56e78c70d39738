"""Two processes whose completions a server writes: the rows, losses and weights of one process."""

from __future__ import annotations

import json

import pytest

from compat_tests.mesh.launching import launch
from compat_tests.parity import grpo_cases
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.marks import assert_same_weights
from compat_tests.parity.reference import read_weights
from compat_tests.rollout.stub_server import StubServer
from trl_jax.hub.peft_config import LoraConfig

CONFIG = grpo_cases.STEPS | {
    "max_steps": 2, "trainer": "GRPO", "num_generations": 4, "use_vllm": True, "vllm_mode": "server",
    "writes": True, "pairs": 16, "pad_to_multiple_of": None,
    "runs": {"whole": {}, "adapter": {"peft_config": LoraConfig(r=4, target_modules="all-linear")}},
}  # fmt: skip


@pytest.fixture(scope="module")
def out(checkpoint, tmp_path_factory):
    """The folder of both runs by one process, and by two; and what the server was asked for."""
    out, folder, asked = tmp_path_factory.mktemp("served"), checkpoint(**SMALL), {}
    stub = StubServer(folder, max_lora_rank=8)
    # Seeds of one rank are not those of two, which shuffle their rows apart.
    stub.replay = lambda ids, n: [[ids[(own + at) % len(ids)] for at in range(own + 3)] for own in range(n)]
    try:
        for count in (1, 2):
            config = CONFIG | {
                "per_device_train_batch_size": 8 // count, "mesh_shape": f"data:{count}",
                "vllm_server_base_url": stub.url, "vllm_weights_dir": str(out / "handed"),
            }  # fmt: skip
            stub.seen = []
            ended = launch("ours", folder, out / str(count), config=[config] * count)
            assert all(code == 0 for code, _ in ended), "\n".join(text[-3000:] for _, text in ended)
            asked[count] = stub.seen
    finally:
        stub.stop()
    return out, asked


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_two_processes_train_as_one(name, out):
    out, _ = out
    logs, others = (json.loads((out / count / f"ours{name}.json").read_text()) for count in "12")
    for mine, other in zip(logs, others, strict=True):
        assert mine.keys() == other.keys()
        for key in ("loss", "reward", "sampling/sampling_logp_difference/mean", "entropy", "train_loss"):
            assert mine.get(key) == pytest.approx(other.get(key), abs=1e-5), key
    assert_same_weights(*(read_weights(out / count / f"ours{name}" / "final") for count in "12"), 2e-4)


def test_the_first_of_two_processes_alone_asks(out):
    _, asked = out
    sent = [
        [(path, body) for path, body in seen if path.startswith(("/v1/", "/collective"))] for seen in asked.values()
    ]
    prompts = [sorted(body["prompt"] for _, body in seen if body and "seed" in body) for seen in sent]
    loads = [[path for path, _ in seen if "load" in path or path == "/collective_rpc"] for seen in sent]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 8
    assert loads[0] == loads[1] and loads[0].count("/collective_rpc") == 3
