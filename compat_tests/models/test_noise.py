"""NEFTune: the noise has the right magnitude, and is added in the same place as in transformers."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from compat_tests.effort import usual
from compat_tests.models import encoders, variants
from compat_tests.models.families import BODY_ONLY
from trl_jax.core.outputs import reads_of_rows
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.models.model import merge
from trl_jax.nn.layers import Noise

# The two ways to scale embeddings; learned positions followed by a dense projection.
DECODERS, ENCODERS = ["gemma", "granite"], ["electra"]


def test_how_strong_it_is():
    zeros = np.zeros((4, 50, 32), np.float32)
    drawn = np.asarray(Noise(5.0, jax.random.key(0), 40)(zeros))
    bound = 5.0 / np.sqrt(40 * 32)
    assert 0.99 * bound < np.abs(drawn).max() <= bound
    assert abs(drawn.mean()) < 0.02 * bound and abs(drawn.std() - bound / np.sqrt(3)) < 0.02 * bound
    other = np.asarray(Noise(5.0, jax.random.key(1), 40)(zeros))
    assert not np.any(other == drawn)


@usual("gemma", "granite")
@pytest.mark.parametrize("family", DECODERS + ENCODERS)
def test_it_is_added_where_transformers_adds_it(family, built, tmp_path):
    torch = pytest.importorskip("torch")
    causal = family in DECODERS
    folder = built(family, "plain") if causal else encoders.build(tmp_path / "model", family, "plain")
    ids, mask = (rows[:2] for rows in (variants.rows() if causal else encoders.rows()))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    if family in BODY_ONLY:
        folder = tmp_path / "with our head"
        model.save_pretrained(folder)
    reference = variants.reference(folder)
    noise = Noise(20.0, jax.random.key(3), ids.shape[1])
    table = (reference.body if family in BODY_ONLY else reference).get_input_embeddings()
    added = torch.tensor(np.asarray(noise(np.zeros((*ids.shape, table.embedding_dim), np.float32))))
    table.register_forward_hook(lambda module, given, out: out + added)
    with torch.no_grad():
        wanted = reference(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits[:, 0].numpy()
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    reads = reads_of_rows(np.where(ids != 0, positions, 0).max(axis=1), ids.shape[1])
    scorer, valid = merge(model.graph, model.params), mask.astype(bool)
    run = jax.jit(lambda noise: scorer(ids, positions, reads, valid=valid, noise=noise))
    found, calm = run(noise), run(None)
    variants.assert_close(found, wanted, 1e-4)
    assert np.abs(found - calm).max() > 1e-2 * np.abs(wanted).max()
