"""Image features of a frozen tower are computed once, and losses equal those of a run that does not cache them."""

from __future__ import annotations

import logging

import numpy as np
import pytest

import trl_jax
from compat_tests.effort import usually
from compat_tests.trainer import test_image_rollouts as online
from compat_tests.trainer.vision_models import (
    TEXT_ONLY,
    completions,
    counted_towers,
    logged,
    pairs,
    tiny_llava,
    trainer,
    unpaired,
)
from trl_jax.core.outputs import PrecomputedFeatures
from trl_jax.data.images import Features, ImagePatches, digest_of, join_images, spans_of
from trl_jax.training import features, setup
from trl_jax.training.features import FeatureStore

ROWS = {"SFT": completions, "DPO": pairs, "KTO": unpaired}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    online.TEACHER[:] = [str(tiny_llava(tmp_path_factory.mktemp("teacher"), seed=1))]
    return str(tiny_llava(tmp_path_factory.mktemp("llava")))


def frozen(made):
    """Freeze the tower and its projector, as user scripts do."""
    for name, parameter in made.model.named_parameters():
        if "vision_tower" in name or "multi_modal_projector" in name:
            parameter.requires_grad_(False)
    return made


def run(kind, freeze, llava, out):
    adapter = TEXT_ONLY if freeze == "adapter" else None
    if kind in ROWS:
        made = trainer(trl_jax, kind, llava, out, ROWS[kind](4), adapter, max_steps=4)
    else:
        options = online.POLICY | {"num_iterations": 2, "steps_per_generation": 2} if kind != "Distillation" else {}
        made = online.trainer(trl_jax, kind, llava, out, online.prompts(4), adapter, max_steps=8, **options)
    return logged(made if adapter else frozen(made))


# With an adapter, the reference shares the policy's tower; without one, it has a copy. A teacher has its own.
CASES = {
    ("SFT", "adapter"): 4,
    ("SFT", "flags"): 4,
    ("DPO", "adapter"): 4,
    ("DPO", "flags"): 8,
    ("KTO", "adapter"): 4,
    ("GRPO", "adapter"): 4,
    ("RLOO", "adapter"): 4,
    ("Distillation", "adapter"): 8,
}


@pytest.mark.parametrize(("kind", "freeze"), usually(lambda *case: case == ("SFT", "flags"), CASES))
def test_images_are_computed_once_for_all_epochs(kind, freeze, llava, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "trl_jax"), counted_towers() as ran:
        kept = run(kind, freeze, llava, tmp_path / "kept")
    assert sum(ran) == CASES[kind, freeze]
    [line] = [record.message for record in caplog.records if record.message.startswith("Images: ")]
    assert line.endswith("; their features are kept, because the vision tower is not trained.")
    with pytest.MonkeyPatch.context() as patch, counted_towers() as often:
        patch.setattr(setup, "FeatureStore", lambda args: None)
        computed = run(kind, freeze, llava, tmp_path / "computed")
    assert sum(often) >= 2 * sum(ran)
    for one, other in zip(kept, computed, strict=True):
        for name in {"loss", "grad_norm", "rewards/margins", "kl", "entropy"} & one.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name


def image(number, count, separators=1, deep=2):
    values = np.full((count + separators, 3), number, np.float32)
    values[count:] = 100
    return ImagePatches(
        np.full((count, 4), number, np.float32), np.zeros((count, 2), np.int32), spans_of([count]),
        np.arange(count, dtype=np.int32)[:, None], np.append(np.arange(count), -2).astype(np.int32),
        features=(Features(values, np.full((deep, count, 3), -number, np.float32)),),
    )  # fmt: skip


def test_features_are_joined_with_separators():
    at = np.array([[-1, 0, 5, -2, 6, 8]], np.int32)
    joined = join_images([[image(1, 6), image(2, 3)]], at)
    assert isinstance(joined, PrecomputedFeatures) and joined.of_reference is None
    values, places = joined.values[0], joined.at[0]
    assert places[0] == -1 and values[places[1:], 0].tolist() == [1, 1, 100, 2, 2]
    assert joined.deep.shape == (1, 2, 16, 3) and joined.deep[0, :, places[[1, 5]], 0].T.tolist() == [[-1, -2]] * 2


class Tower:
    """A stand-in for a tower that counts its images."""

    def __init__(self, value):
        self.graph = self.dtype = None
        self.arrays, self.seen = {"weight": np.float32(value)}, 0

    def _replace(self, arrays):
        return self

    def features(self, given):
        self.seen += 1
        return Features(np.zeros((len(given.groups), 2), np.float32), None)


@pytest.mark.parametrize("room", [0, 2**20])
def test_features_are_kept_within_the_memory_and_forgotten_with_their_tower(room, monkeypatch):
    policy = type("Policy", (), {"params": {}})()
    monkeypatch.setattr(features, "available_host_memory", lambda: 4 * room)
    store, tower = FeatureStore(trl_jax.SFTConfig("out", use_cpu=True, bf16=False)), Tower(1)
    monkeypatch.setattr(features, "_towers", lambda *_: [tower])
    images = [image(number, 6)._replace(features=()) for number in (1, 2)]
    for _ in range(3):
        store.follow(policy, None)
        found = store.filled(images)
    assert tower.seen == (2 if room else 6) and all(one.features for one in found)
    assert digest_of(found) == digest_of(images)
    tower = Tower(2)
    store.follow(policy, None)
    store.filled(images)
    assert tower.seen == 2
    monkeypatch.setattr(features, "_towers", lambda *_: [])
    store.follow(policy, None)
    assert not any(one.features for one in store.filled(found))
