"""Functions that user scripts import from `trl.trainer.utils`: TRL's values, on JAX and NumPy arrays."""

from __future__ import annotations

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from trl_jax.trainer import utils

torch = pytest.importorskip("torch")
theirs = pytest.importorskip("trl.trainer.utils")
DICE = np.random.default_rng(0)
ON_TENSORS = ("selective_log_softmax", "entropy_from_logits", "nanstd", "nanmin", "nanmax", "flush_left")


def both(name, *arrays, **options):
    """The results of our function and TRL's on the same arrays, as lists of NumPy arrays."""

    def plain(found):
        return [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]

    ours = getattr(utils, name)(*map(jnp.asarray, arrays), **options)
    trls = getattr(theirs, name)(*map(torch.tensor, arrays), **options)
    if name in ON_TENSORS:
        found = getattr(utils, name)(*map(torch.tensor, arrays), **options)
        torch.testing.assert_close(found, trls, atol=1e-6, rtol=1e-5, equal_nan=True)
    return plain(ours), plain(trls)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("multiple", [None, 4])
def test_pad(side, multiple):
    arrays = [DICE.integers(1, 9, shape) for shape in ((3, 2), (5, 1), (1, 2))]
    options = {"padding_value": -1, "padding_side": side, "pad_to_multiple_of": multiple}
    wanted = theirs.pad([torch.tensor(one) for one in arrays], **options).numpy()
    found = utils.pad(arrays, **options)
    assert isinstance(found, np.ndarray) and found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(utils.pad(list(map(jnp.asarray, arrays)), **options), wanted)
    with pytest.raises(ValueError, match="padding_side must be 'left' or 'right', got 'top'"):
        utils.pad(arrays, padding_side="top")


def test_log_probabilities_and_entropies():
    logits = DICE.normal(size=(2, 3, 7)).astype(np.float32)
    for index in (DICE.integers(0, 7, (2, 3)), DICE.integers(0, 7, (2, 3, 2))):
        for options in ({}, {"temperature": 0.7}):
            ours, trls = both("selective_log_softmax", logits, index, **options)
            np.testing.assert_allclose(ours[0], trls[0], atol=1e-6)
    mask = np.asarray([[1, 0, 1], [0, 1, 1]])
    index = DICE.integers(0, 7, (2, 3))
    found = utils.selective_log_softmax(jnp.asarray(logits), jnp.asarray(index), row_mask=jnp.asarray(mask))
    wanted = theirs.selective_log_softmax(torch.tensor(logits), torch.tensor(index), row_mask=torch.tensor(mask))
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert (np.asarray(found) == 0).tolist() == (mask == 0).tolist()
    given = torch.tensor(logits, requires_grad=True)
    found = utils.selective_log_softmax(given, torch.tensor(index), row_mask=torch.tensor(mask))
    torch.testing.assert_close(found.detach(), wanted)
    found.sum().backward()
    assert given.grad.abs().sum() > 0
    rows = [torch.arange(2), torch.arange(4)]
    torch.testing.assert_close(utils.pad(rows, 9, "left"), theirs.pad(rows, 9, "left"))
    ours, trls = both("entropy_from_logits", logits, chunk_size=4)
    np.testing.assert_allclose(ours[0], trls[0], atol=1e-6)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        utils.selective_log_softmax(jnp.asarray(logits), jnp.asarray(index), temperature=0)


def test_values_without_nans():
    values = DICE.normal(size=(3, 4)).astype(np.float32)
    values[0, 1] = values[1, :3] = values[2] = np.nan
    for options in ({}, {"dim": 0}, {"dim": 1}, {"dim": 1, "keepdim": True}, {"dim": (0, 1)}):
        ours, trls = both("nanstd", values, **options)
        np.testing.assert_allclose(ours[0], trls[0], atol=1e-6)
    for name in ("nanmin", "nanmax"):
        for row in values:
            ours, trls = both(name, row)
            np.testing.assert_array_equal(ours[0], trls[0])


def test_rows_are_moved_to_the_left():
    mask = np.asarray([[0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 0, 0]])
    ours, trls = both("flush_left", mask, DICE.integers(0, 9, mask.shape))
    assert len(ours) == 2
    for own, their in zip(ours, trls, strict=True):
        np.testing.assert_array_equal(own, their)
    (own,), (their,) = both("flush_left", mask)
    np.testing.assert_array_equal(own, their)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_indices_are_repeated_in_torchs_order(seed, shuffle):
    options = {"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 4, "shuffle": shuffle, "seed": seed}
    ours, trls = (each.RepeatSampler(range(11), **options) for each in (utils, theirs))
    assert len(ours) == len(trls) == 72
    assert [list(ours), list(ours)] == [list(trls), list(trls)]


def test_values_that_are_none_are_left_out():
    rows = [{"a": {"aa": None, "ab": 1, "ac": [{"x": None, "y": 2}]}, "b": "text", "c": None}]
    assert utils.remove_none_values(rows) == theirs.remove_none_values(rows)
    with pytest.raises(TypeError, match="takes a list or a mapping, got str"):
        utils.remove_none_values("text")
    assert utils.identity(rows) is rows


def test_generate_model_card(tmp_path):
    given = {
        "base_model": "org/base", "model_name": "mine", "hub_model_id": "me/mine", "dataset_name": "org/rows",
        "tags": ["trl", "grpo"], "wandb_url": "https://wandb.ai/run", "trackio_url": None, "trainer_name": "GRPO",
        "trainer_citation": "@article{a}", "paper_title": "A paper", "paper_id": "2402.03300",
    }  # fmt: skip
    assert list(inspect.signature(utils.generate_model_card).parameters) == list(
        inspect.signature(theirs.generate_model_card).parameters
    )
    card, other = utils.generate_model_card(**given), theirs.generate_model_card(**given)
    assert card.data.to_dict() == other.data.to_dict()
    card.save(tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    links = ("https://huggingface.co/papers/2402.03300", "https://huggingface.co/datasets/org/rows", "wandb.ai/run")
    assert all(link in text and link in str(other) for link in (*links, "@article{a}", 'model="me/mine"'))
    reward = utils.generate_model_card(
        None, "mine", "me/mine", None, [], None, None, "Reward", template_file="rm_model_card.md"
    )
    assert "text-classification" in str(reward) and "fine-tuned" not in str(reward)
    with pytest.raises(ValueError, match="template_file='own.md' is not one of lm_model_card.md, rm_model_card.md"):
        utils.generate_model_card(**given, template_file="own.md")
