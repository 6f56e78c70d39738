"""One optimizer step in each layout: the same loss and the same gradients."""

from __future__ import annotations

from functools import cache, lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compat_tests.effort import only_thorough, usual, usually
from compat_tests.models import encoders
from compat_tests.models.families import VARIANTS
from trl_jax.data.batch import Example, Extras
from trl_jax.data.packed import (
    PackingSpec,
    RowViewShape,
    greedy_bins,
    longest_in_batch,
    pack_examples,
    pad_examples,
    place,
    step_slots,
)
from trl_jax.hub.auto import AutoModelForSequenceClassification
from trl_jax.losses.supervised import pairwise_loss
from trl_jax.models.model import merge
from trl_jax.training.forward import Forward

QUICKLY = {"xla_backend_optimization_level": 0}
PAIRS, COUNT, PAD = 3, 3, 0
PACKED = ("packed", "shared", "shared rows")  # rows: attention per text, as on GPUs
# For each family the variant that differs most, and those in which layouts could fail in their own way.
CASES = [("llama", "yarn"), ("qwen2", "layer_types"), ("qwen3", "attention_bias")]
CASES += [(family, list(own)[-1]) for family, own in VARIANTS.items()]
CASES += [("llama4_text", "growing"), ("gemma4_text", "experts")]
CASES += [("gemma2", "plain"), ("phi3", "long"), ("smollm3", "plain"), ("gpt2", "plain")]
ENCODERS = [("bert", "plain"), ("roberta", "plain"), ("modernbert", "biases"), ("electra", "plain")]
GRADIENTS = [("llama", "yarn"), ("gemma2", "plain"), ("phi3", "long"), ("qwen3_moe", "window"), ("gpt2", "plain")]
GRADIENTS += [("lfm2", "biases"), ("deepseek_v3", "plain"), ("qwen3_5_text", "others"), ("gemma4_text", "plain")]
GRADIENTS += [("gpt_oss", "clamped"), ("llama4_text", "growing")]
# By default, those with RoPE per layer or per length, a window, a state, sinks and learned positions;
# `benchmarks.layouts` runs all of CASES with gradients.
USUAL = {
    ("llama", "yarn"), ("gemma3_text", "old"), ("gpt_oss", "clamped"), ("nemotron_h", "latent"), ("phi3", "long"),
    ("gpt2", "plain"),
}  # fmt: skip


@cache
def step():
    """Seven pairs in micro-batches of three, the last with one.

    Their prefixes: long, none, one text contained in the other, both texts equal. Some texts end in padding, where the
    read moves back to the last real token, possibly into the shared prefix.
    """
    dice = np.random.default_rng(5)

    def draw(count):
        return dice.integers(1, 500, count).tolist()

    prompts = draw(21), draw(0), draw(5), draw(9), draw(12), draw(30), draw(3)
    chosen = draw(4), draw(11), [], draw(1), [], draw(3) + [PAD], [PAD, PAD]
    rejected = draw(13), draw(17), draw(6), draw(2) + [PAD], [], [PAD], draw(25)
    rows = [
        Example((prompt + one, prompt + other), Extras({"margin": float(dice.normal())}))
        for prompt, one, other in zip(prompts, chosen, rejected, strict=True)
    ]
    return rows[:3], rows[3:6], rows[6:]


@cache
def batches(layout):
    if layout == "padded":
        return pad_examples(step(), examples=PAIRS, count=COUNT, pad_token_id=PAD, pad_to_multiple_of=48)
    share, view = layout.startswith("shared"), RowViewShape(7, 64)
    placed = place(step(), examples=PAIRS, share_prefix=share)
    into = greedy_bins([pair.tokens for pair in placed], COUNT)
    spec = PackingSpec(PAD, share, 128, view if layout.endswith("rows") else None)
    slots = step_slots(COUNT, COUNT, PAIRS)
    return pack_examples(placed, into, spec, micro_batch=slots, longest_texts=longest_in_batch(placed, PAIRS))


@lru_cache(maxsize=1)
def pass_of(model, gradients, dtype, max_length):
    """(params, batch) -> the loss of a micro-batch, or (loss, gradients); compiled once per shape."""
    task = SimpleNamespace(head="score")
    state = {"model": model, "max_tokens": max_length, "task": task, "reference": None, "router_aux_loss_coef": 0.0,
             "computes_logits": False}  # fmt: skip
    forward = Forward(SimpleNamespace(**state))

    def loss(params, batch):
        chosen, rejected = jnp.split(forward.outputs(params, batch, dtype=dtype), 2)
        facts = {"weight": batch.weight, "margin": batch.extras.example["margin"], "center_rewards_coefficient": 0.1}
        return pairwise_loss(chosen, rejected, **facts)[0]

    return jax.jit(jax.value_and_grad(loss) if gradients else loss, compiler_options=QUICKLY)


def of_step(model, layout, *, gradients=False, dtype="float32", max_length=None):
    """The step's loss, or (loss, gradients) with `gradients`."""
    run = pass_of(model, gradients, dtype, max_length)
    batch = batches(layout) if isinstance(layout, str) else layout
    passes = [run(model.params, jax.tree.map(lambda leaf, p=p: leaf[p], batch)) for p in range(COUNT)]
    return jax.tree.map(lambda *parts: sum(np.asarray(part, np.float64) for part in parts), *passes)


@usual("llama-yarn", "gemma3_text-old", "gpt_oss-clamped", "gpt2-plain")
@pytest.mark.parametrize(("family", "name"), usually(lambda *case: case in USUAL, CASES))
def test_the_loss_is_the_same_in_every_layout(family, name, built):
    model = AutoModelForSequenceClassification.from_pretrained(built(family, name))
    assert model.backend.traits.takes_packed
    wanted = of_step(model, "padded")
    for layout in ("packed", "shared"):
        assert abs(of_step(model, layout) - wanted) <= 1e-6 * max(1, wanted), layout


def apart(model, layouts=PACKED, dtype="float32"):
    """The largest difference between packed and padded rows: of the loss, and of gradients relative to their scale.

    If the exact gradient is zero, both are rounding noise: scales are at least a hundredth of the largest one.
    """
    wanted, gradients = of_step(model, "padded", gradients=True, dtype=dtype)
    least = 1e-2 * max(np.abs(values).max() for values in gradients.values())
    for layout in layouts:
        found, theirs = of_step(model, layout, gradients=True, dtype=dtype)
        gaps = [
            np.abs(theirs[path] - values).max() / max(least, np.abs(values).max()) for path, values in gradients.items()
        ]
        yield abs(found - wanted) / max(1, wanted), max(gaps)


# By default, nn/ covers gradients of attention and of states, and training/test_layouts.py those of a run.
@only_thorough
@pytest.mark.parametrize(("family", "name"), GRADIENTS)
def test_the_gradients_are_the_same_in_every_layout(family, name, built):
    for loss, gradient in apart(AutoModelForSequenceClassification.from_pretrained(built(family, name))):
        assert loss <= 1e-6 and gradient <= 1e-5


@only_thorough
def test_a_window_that_no_text_is_longer_than_is_left_out(built):
    """gemma2's window is 7 here. It is omitted if max_length says that texts are not longer; longer texts show this."""
    model = AutoModelForSequenceClassification.from_pretrained(built("gemma2", "plain"))
    assert model.backend.traits.window == 7
    wanted = of_step(model, "padded")
    assert of_step(model, "padded", max_length=8) == wanted
    assert abs(of_step(model, "padded", max_length=7) - wanted) > 1e-4
    scorer, ids = merge(model.graph, model.params), jnp.arange(14, dtype=jnp.int32).reshape(2, 7)
    short = {"positions": jnp.broadcast_to(jnp.arange(7), ids.shape), "reads": jnp.asarray([6, 13])}
    np.testing.assert_allclose(scorer(ids, max_tokens=7, **short), scorer(ids, **short), rtol=1e-5)


@usual("modernbert-biases")
@pytest.mark.parametrize(("family", "name"), ENCODERS)
def test_encoders_pack(family, name, tmp_path):
    """Covers reading the first token and the mean, two-sided windows, and positions that skip padding within a text."""
    model = AutoModelForSequenceClassification.from_pretrained(encoders.build(tmp_path, family, name))
    assert model.backend.traits.takes_packed and not model.backend.traits.causal
    for loss, gradient in apart(model, ["packed", "packed rows"]):
        assert loss <= 1e-6 and gradient <= 1e-5


def test_encoders_that_read_neighbors_do_not(tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(encoders.build(tmp_path, "deberta-v2", "convolved"))
    assert not model.backend.traits.takes_packed


def test_the_step_shares_what_it_should():
    """Otherwise two of the three layouts would be the same."""
    real = {layout: int((batches(layout).packed.first < 128).sum()) for layout in ("packed", "shared")}
    assert real["packed"] - real["shared"] >= 70
    beyond = {layout: batches(layout).packed.end > np.arange(1, 129) for layout in ("packed", "shared")}
    inside = {layout: batches(layout).packed.first < 128 for layout in ("packed", "shared")}
    assert (beyond["shared"] & inside["shared"]).any() and not (beyond["packed"] & inside["packed"]).any()


@pytest.mark.parametrize("field", ["first", "end", "longest"])
def test_a_wrong_layout_is_noticed(field, built):
    """phi3's longrope depends on the longest text, which the mutant halves."""
    model = AutoModelForSequenceClassification.from_pretrained(built("phi3", "long"))
    packed = batches("shared").packed
    wrong = packed._replace(**{field: getattr(packed, field) // 2})
    gap = abs(of_step(model, batches("shared")._replace(packed=wrong)) - of_step(model, "shared"))
    assert gap > 1e-4
