"""The facts of a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

from trl_jax.nn.experts.sparse_mixer import SparseMixer
from trl_jax.nn.mlp import ClampedSwiGLU


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP: `top_k` of `count` experts, each `size` wide, see every token.

    `scores` turns the router's logits into weights: "softmax" over all experts, or "sigmoid" of each.
    `renormalised`: the weights of the selected ones are made to add up to 1, but for what `weight_floor` adds to their
    sum ("sigmoid") or holds it up to ("softmax"); `scale` then multiplies them. `shared_size`: the width of an expert
    that sees every token, behind a sigmoid gate where `shared_gated`; None without it. `float32_router`: it computes in
    float32, whatever other layers do. `bias`: the router and every map of an expert have one. `gated`: experts are as
    gated MLPs are. `swiglu`: joins gate and up in the place of the arch's activation; None leaves it to that. With
    `latent_size`, experts that do not see every token compute in so many channels, which a linear map makes of the
    token's and another brings back; `latent_bias`: these and the expert that sees every token have biases.

    `correction_bias`: a number of each expert that is added to its weight for the selection alone, and never trained.
    Of `groups` of experts, the best `top_groups` are selected from; a group is as good as its best `group_best` experts
    together (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). With `weights_inputs`, an expert's weight multiplies what
    it sees, not what it gives. `sparse_mixer` selects two experts and weighs them in the place of all this.

    `beside_mlp`: a layer has both, and either's result is normed before they are added; the experts see the residual
    stream through a norm of their own, and the router through one without weights, with a learned scale for each of
    its channels. The weight of each expert then has a learned scale, too.
    """

    count: int
    top_k: int
    size: int
    renormalised: bool
    shared_size: int | None = None
    bias: bool = False
    swiglu: ClampedSwiGLU | None = None
    shared_gated: bool = True
    scores: str = "softmax"
    float32_router: bool = False
    weight_floor: float = 0.0
    scale: float = 1.0
    correction_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    gated: bool = True
    latent_size: int | None = None
    latent_bias: bool = False
    weights_inputs: bool = False
    beside_mlp: bool = False
    sparse_mixer: SparseMixer | None = None
