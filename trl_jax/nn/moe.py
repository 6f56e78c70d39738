"""Mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from trl_jax.core.outputs import RouterSums
from trl_jax.mesh.mesh import TENSOR, as_summed, psum
from trl_jax.nn.layers import ACTIVATIONS, MLP, Norm
from trl_jax.nn.linear import ExpertsLora, Linear, adapted_dot

# Mixture of experts


class MoE(nnx.Module):
    """Routes each token to the `top_k` experts with the highest scores (Shazeer et al. 2017, arXiv:1701.06538).

    `experts` is a models.arch.Experts. Weights are stacked: gate (optional) and up `[E, F, D]`, down `[E, D, F]`, each
    with an optional adapter and bias `[E, F]` or `[E, D]`.
    """

    gate_lora: ExpertsLora | None
    up_lora: ExpertsLora | None
    down_lora: ExpertsLora | None

    def __init__(self, features: int, experts, *, activation: str, eps: float = 0.0):
        self.router = Linear(features, experts.count, bias=experts.bias, axes=("", "embed"))
        width = features if experts.latent_size is None else experts.latent_size
        inner, outer = (experts.count, experts.size, width), (experts.count, width, experts.size)
        gate = nnx.Param(jnp.zeros(inner, jnp.float32), axes=("experts", "mlp", "embed"))
        self.gate = gate if experts.gated else None
        self.up = nnx.Param(jnp.zeros(inner, jnp.float32), axes=("experts", "mlp", "embed"))
        self.down = nnx.Param(jnp.zeros(outer, jnp.float32), axes=("experts", "embed", "mlp"))
        self.gate_lora, self.up_lora, self.down_lora = nnx.data(None), nnx.data(None), nnx.data(None)
        self.gate_bias, self.up_bias = _biases(experts, experts.size, "mlp"), _biases(experts, experts.size, "mlp")
        self.down_bias = _biases(experts, features, "embed")
        corrected, shared = experts.correction_bias, experts.shared_size
        self.correction_bias = nnx.Param(jnp.zeros(experts.count, jnp.float32), axes=("",)) if corrected else None
        maps = {"activation": activation, "gated": experts.gated, "bias": experts.latent_bias}
        self.shared = None if shared is None else MLP(features, shared, **maps)
        scales = experts.beside_mlp
        self.router_norm = Norm(features, kind="rms_plain", eps=eps) if scales else None
        self.router_scale = nnx.Param(jnp.ones(features, jnp.float32), axes=("norm",)) if scales else None
        self.expert_scale = nnx.Param(jnp.ones(experts.count, jnp.float32), axes=("",)) if scales else None
        gated = shared is not None and experts.shared_gated
        self.shared_gate = Linear(features, 1, axes=("", "embed")) if gated else None
        into, back = (width, features), (features, width)
        self.into_latent, self.from_latent = (
            None if experts.latent_size is None else Linear(*size[::-1], bias=experts.latent_bias, axes=axes)
            for size, axes in ((into, ("", "embed")), (back, ("embed", "")))
        )
        self.experts, self.activation = experts, ACTIVATIONS[activation]

    def __call__(self, x: jax.Array, routed_by: jax.Array | None = None, key: jax.Array | None = None) -> jax.Array:
        """`[..., D]` to `[..., D]`. The router reads `routed_by` `[..., D]`, or x if that is None. With `key`, a sparse
        mixer samples experts."""
        flat = x.reshape(-1, x.shape[-1])
        mixed = self._routed(flat, flat if routed_by is None else routed_by.reshape(flat.shape), key)
        if self.shared is not None:
            shared = self.shared(flat)
            mixed = mixed + (shared if self.shared_gate is None else jax.nn.sigmoid(self.shared_gate(flat)) * shared)
        return mixed.reshape(x.shape)

    def _routed(self, x: jax.Array, seen: jax.Array, key: jax.Array | None) -> jax.Array:
        routes = self._route(seen, key)
        if self.into_latent is None:
            return self._sharded(x, *routes)
        return self.from_latent(self._sharded(self.into_latent(x), *routes))

    def _sharded(self, x: jax.Array, weights: jax.Array, selected: jax.Array) -> jax.Array:
        """The weighted sum of the experts' outputs. If experts are sharded over the tensor axis, each device computes
        its own."""
        count, devices = self.experts.count, jax.sharding.get_abstract_mesh().shape.get(TENSOR, 1)
        experts = self._matrices()
        if devices == 1 or count % devices:
            return self._mix(x, weights, selected, None, *experts)

        def of_device(tokens, *arguments):
            return psum(self._mix(tokens.astype(x.dtype), *arguments), TENSOR)

        divided, first = PartitionSpec(TENSOR), jnp.arange(0, count, count // devices)
        specs = (*[PartitionSpec()] * 3, *[divided] * 4)
        run = jax.shard_map(of_device, in_specs=specs, out_specs=PartitionSpec(), axis_names={TENSOR}, check_vma=False)
        return run(as_summed(x), weights, selected, first, *experts)  # the gradient of x is a sum over devices

    def router_sums(self, x: jax.Array, token_weights: jax.Array) -> RouterSums:
        """Router sums over the tokens of `x` `[..., D]`, weighted by `token_weights` `[...]`."""
        flat, weight = x.reshape(-1, x.shape[-1]), token_weights.reshape(-1).astype(jnp.float32)
        probabilities = jax.nn.softmax(self._logits(flat), axis=-1)
        _, selected = jax.lax.top_k(probabilities, self.experts.top_k)
        sent = jnp.zeros(self.experts.count).at[selected].add(weight[:, None])
        return RouterSums(sent, weight @ probabilities, jnp.sum(weight))

    def _matrices(self) -> list[tuple[jax.Array | None, ...] | None]:
        """(bias or None, weight, and A and B of an adapter) for gate, up and down; None for a missing gate."""
        parts = (
            (self.gate_bias, self.gate, self.gate_lora),
            (self.up_bias, self.up, self.up_lora),
            (self.down_bias, self.down, self.down_lora),
        )
        return [
            None
            if weight is None
            else (
                None if bias is None else bias[...],
                weight[...],
                *(() if lora is None else (lora.a[...], lora.b[...])),
            )
            for bias, weight, lora in parts
        ]

    def _mix(self, x, weights, selected, first, gate, up, down) -> jax.Array:
        """The weighted sum over a token's experts; with `first`, only over this device's experts from `first[0]` on."""
        expert, count = selected.reshape(-1), self.experts.count
        if first is not None:
            expert = (expert - first[0]) % count  # sorts this device's experts first
        order = jnp.argsort(expert, stable=True)  # (token, slot) pairs sorted by expert
        token = order // self.experts.top_k
        sizes = jnp.bincount(expert, length=count)[: len(up[1])]
        sorted_x, sorted_weights = x[token], weights.reshape(-1)[order][:, None].astype(x.dtype)
        if self.experts.weights_inputs:
            sorted_x = sorted_x * sorted_weights

        def mapped(x: jax.Array, bias: jax.Array | None, *matrices: jax.Array) -> jax.Array:
            y = adapted_dot(x, sizes, *matrices)
            return y if bias is None else y + bias.astype(y.dtype).at[expert[order]].get(mode="clip")

        hidden = mapped(sorted_x, *up)
        hidden = self.activation(hidden) if gate is None else self._activate(mapped(sorted_x, *gate), hidden)
        out = mapped(hidden, *down)
        out = out if self.experts.weights_inputs else out * sorted_weights
        if first is not None:
            out = jnp.where(jnp.arange(len(out))[:, None] < jnp.sum(sizes), out, 0)
        return jnp.zeros_like(x).at[token].add(out)

    def _activate(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        swiglu = self.experts.swiglu
        return self.activation(gate) * up if swiglu is None else swiglu(gate, up)

    def _route(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Weights (float32) and indices of each token's experts, `[tokens, top_k]`."""
        experts, logits = self.experts, self._logits(x)
        if experts.sparse_mixer is not None:
            return experts.sparse_mixer(logits, key)
        weights = jax.nn.softmax(logits, axis=-1) if experts.scores == "softmax" else jax.nn.sigmoid(logits)
        _, selected = jax.lax.top_k(self._within_best_groups(self._selection_weights(weights)), experts.top_k)
        weights = jnp.take_along_axis(weights, selected, axis=-1)
        if experts.renormalized:
            total, floor = jnp.sum(weights, axis=-1, keepdims=True), experts.weight_floor
            weights = weights / (jnp.maximum(total, floor) if experts.scores == "softmax" else total + floor)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[...][selected]
        return weights if experts.scale == 1.0 else weights * experts.scale, selected

    def _logits(self, x: jax.Array) -> jax.Array:
        """Router logits, float32."""
        if self.router_norm is not None:
            x = self.router_norm(x) * self.router_scale[...].astype(x.dtype) * x.shape[-1] ** -0.5
        return self.router(x.astype(jnp.float32) if self.experts.float32_router else x).astype(jnp.float32)

    def _selection_weights(self, weights: jax.Array) -> jax.Array:
        """Weights used for the selection."""
        return weights if self.correction_bias is None else weights + self.correction_bias[...]

    def _within_best_groups(self, weights: jax.Array) -> jax.Array:
        """Weights `[tokens, E]`, with -inf outside the best groups."""
        experts = self.experts
        if experts.groups == 1:
            return weights
        grouped = weights.reshape(len(weights), experts.groups, -1)
        worth = jnp.sum(jax.lax.top_k(grouped, experts.group_best)[0], axis=-1)
        _, best = jax.lax.top_k(worth, experts.top_groups)
        inside = jnp.zeros(worth.shape, bool).at[jnp.arange(len(worth))[:, None], best].set(True)
        return jnp.where(inside[..., None], grouped, -jnp.inf).reshape(weights.shape)


def _biases(experts, outputs: int, axis: str) -> nnx.Param | None:
    """Biases `[E, outputs]`, or None."""
    if not experts.bias:
        return None
    return nnx.Param(jnp.zeros((experts.count, outputs), jnp.float32), axes=("experts", axis))


# SparseMixer

_FIRST, _SECOND, _INPUT, _INPUT_AGAIN = range(4)  # random draws, each with its own key
_FULL_WEIGHT_ABOVE = 0.75  # an expert that was not the most likely keeps its full weight if a uniform draw exceeds this
_SCALED_DOWN = 0.3333


@dataclass(frozen=True)
class SparseMixer:
    """SparseMixer routing (Liu et al. 2024, arXiv:2409.12136): sampled experts, with a gradient for the choice.

    Selects two experts per token, one after the other, each among candidates with scores close to the best.

    jitter: a candidate's score is below the best by at most 2 * jitter * max(best, |its own score|). An expert's weight
        is its probability among the candidates, so it is 1 if there is only one.
    input_jitter: training multiplies the experts' input by factors within 1 +- this.
    """

    jitter: float
    input_jitter: float

    def __call__(self, scores: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Weights and indices of the experts, `[tokens, 2]`, for scores `[tokens, E]`: the best candidates or, with
        `key`, candidates sampled by their probabilities, as in training."""
        first_weight, first = self._select_one(scores, scores, _fold(key, _FIRST))
        left = jnp.where(jnp.arange(scores.shape[-1]) == first, -jnp.inf, scores)
        second_weight, second = self._select_one(scores, left, _fold(key, _SECOND))
        return jnp.concatenate([first_weight, second_weight], -1), jnp.concatenate([first, second], -1)

    def jittered(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """The input of experts and router in training: each number times two random factors, uniform around 1."""
        if self.input_jitter == 0.0:
            return x
        low, high = 1.0 - self.input_jitter, 1.0 + self.input_jitter
        first, second = (
            jax.random.uniform(_fold(key, place), x.shape, jnp.float32, low, high) for place in (_INPUT, _INPUT_AGAIN)
        )
        return (x * first * second).astype(x.dtype)

    def _select_one(self, scores: jax.Array, left: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Weight and index of one expert, `[tokens, 1]`; `left` is -inf for experts that were already selected."""
        best = jnp.max(left, axis=-1, keepdims=True)
        far = (best - scores) / jnp.maximum(jnp.abs(scores), best) > 2 * self.jitter
        candidates = jnp.where(far, -jnp.inf, left)
        likeliest = jnp.argmax(candidates, axis=-1, keepdims=True)
        drawn = likeliest if key is None else _sample(candidates, key)
        weight = jnp.take_along_axis(jax.nn.softmax(candidates, axis=-1), drawn, axis=-1)
        return weight if key is None else _scale_sampled(weight, drawn == likeliest, key), drawn


def _sample(candidates: jax.Array, key: jax.Array) -> jax.Array:
    """Sample one candidate per token with the Gumbel-max trick."""
    noise = jax.random.gumbel(jax.random.fold_in(key, 0), candidates.shape, jnp.float32)
    return jnp.argmax(candidates + noise, axis=-1, keepdims=True)


def _scale_sampled(weight: jax.Array, likeliest: jax.Array, key: jax.Array) -> jax.Array:
    """The weight of a sampled expert, with the gradient of the unscaled weight. Scaling some down yields Heun's
    third-order estimate of the gradient for the choice (Liu et al. 2023, arXiv:2310.00811)."""
    whole = likeliest | (jax.random.uniform(jax.random.fold_in(key, 1), weight.shape) > _FULL_WEIGHT_ABOVE)
    value = weight * jnp.where(whole, 1.0, _SCALED_DOWN)
    return jax.lax.stop_gradient(value) + (weight - jax.lax.stop_gradient(weight))


def _fold(key: jax.Array | None, place: int) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, place)
