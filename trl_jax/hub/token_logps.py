"""Log-probabilities and entropies of texts' tokens: what losses of policies are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from trl_jax.models.functional import merge

if TYPE_CHECKING:
    from trl_jax.hub.pretrained import PreTrainedModel


def token_logps_and_entropies(
    model: PreTrainedModel,
    input_ids: Any,
    attention_mask: Any = None,
    temperature: float = 1.0,
    *,
    params: dict[str, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """log p(token | tokens before) and the entropy, in nats, of the distribution that it is drawn from.

    No array of `[rows, T, vocabulary]` exists. Both have gradients by `params`, so a loss of one's own may be written
    with `trl_jax.losses.policy_gradient` and `jax.grad`.

    Args:
        model: a causal language model.
        input_ids: int `[rows, T]`, padded on the right.
        attention_mask: `[rows, T]`, 0 of a pad; None: there are none.
        temperature: divides the logits.
        params: in the place of `model.params`, of the same names and shapes.

    Returns:
        Float32 `[rows, T - 1]` each, of the second token to the last; zeros of pads.

    Raises:
        ValueError: the model has another head, or rows have fewer than two tokens.
    """
    if model.backend.head != "lm":
        raise ValueError(f"{model.name_or_path} has a {model.backend.head!r} head: wanted a language model's.")
    ids = jnp.asarray(input_ids, jnp.int32)
    if ids.ndim != 2 or ids.shape[1] < 2:
        raise ValueError(f"input_ids is {list(ids.shape)}: wanted [rows, T] with two tokens at least.")
    rows, length = ids.shape
    mask = jnp.ones(ids.shape, bool) if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
    virtual = model.backend.virtual
    before = virtual.count
    whole = jnp.hstack([jnp.broadcast_to(virtual.ids, (rows, before)), ids])
    places = jnp.broadcast_to(jnp.arange(before + length, dtype=jnp.int32), whole.shape)
    real = (mask[:, :-1] & mask[:, 1:]).reshape(-1)
    order = jnp.argsort(~real, stable=True)  # reads without a target come last
    at = jnp.arange(rows)[:, None] * (before + length) + before + jnp.arange(length - 1)
    reads = at.reshape(-1)[order].astype(jnp.int32)
    targets = jnp.where(real, ids[:, 1:].reshape(-1), -1)[order]
    arrays = model.frozen | (model.params if params is None else params)
    lengths = before + mask.sum(axis=1, dtype=jnp.int32)
    options = {"targets": targets, "lengths": lengths, "temperature": temperature}
    outputs = merge(model.graph, arrays)(whole, places, reads, **options)
    back = jnp.argsort(order)
    return tuple(values[back].reshape(rows, length - 1) for values in (outputs.logps, outputs.entropy))
