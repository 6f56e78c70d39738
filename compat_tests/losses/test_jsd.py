"""The generalized Jensen-Shannon divergence of whole logits, as TRL's GKDTrainer computes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.losses.jsd import generalized_jsd_loss
from trl_jax.nn.head import HeadInputs, divergences

DRAWN = np.random.default_rng(0)
STUDENT, TEACHER = (DRAWN.standard_normal((2, 5, 7), np.float32) * 2 for _ in range(2))
LABELS = np.array([[-100, 3, 1, -100, 2], [0, -100, -100, 5, 6]])
OPTIONS = [
    {"labels": LABELS},
    {},
    {"labels": LABELS, "beta": 0, "temperature": 0.7},
    {"labels": LABELS, "beta": 1.0, "reduction": "sum"},
    {"beta": 0.1, "reduction": "mean"},
    {"labels": LABELS, "beta": 0.9, "reduction": "mean"},
    {"labels": LABELS, "reduction": "none"},
    {"labels": LABELS, "num_items_in_batch": 9},
    {"labels": np.full_like(LABELS, -100)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(map(str, options)) or "no labels")
def test_it_is_trls(options):
    torch = pytest.importorskip("torch")
    gkd = pytest.importorskip("trl.experimental.gkd")
    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    theirs = gkd.GKDTrainer.generalized_jsd_loss(torch.from_numpy(STUDENT), torch.from_numpy(TEACHER), **given)
    ours = generalized_jsd_loss(STUDENT, TEACHER, **options)
    assert ours.shape == tuple(theirs.shape)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_training_computes_the_same_in_chunks(beta):
    """Logits that are hidden states, under a head that is the identity."""

    def in_chunks(hidden):
        heads = (HeadInputs(logits.reshape(-1, 7), jnp.eye(7)) for logits in (hidden, TEACHER))
        return divergences(*heads, jnp.zeros(10, jnp.int32), beta=beta).divergence.sum()

    def whole(logits):
        return generalized_jsd_loss(logits, TEACHER, beta=beta, reduction="sum")

    found, wanted = (jax.value_and_grad(of)(jnp.asarray(STUDENT)) for of in (in_chunks, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, wanted)
