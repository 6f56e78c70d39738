"""granitemoe: granite with experts; the matrices of a layer's experts are in two tensors."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, granite, llama
from trl_jax.hub.tensor_map import ExpertRows, Names, ordered
from trl_jax.models.arch import Arch, Experts

MOVED = (
    (".block_sparse_moe.input_linear", ".block_sparse_moe.experts"),
    (".block_sparse_moe.output_linear", ".block_sparse_moe.experts"),
    (".block_sparse_moe.router.layer", ".block_sparse_moe.router"),
)


def arch(config: ConfigReader) -> Arch:
    base = granite.arch(config)
    return replace(base, mlp_bias=False, experts=read_experts(config, base))


def read_experts(config: ConfigReader, base: Arch) -> Experts:
    """Experts as wide as the MLP of `base`, which they replace."""
    config.value("output_router_logits"), config.value("router_aux_loss_coef")  # only for the language model's loss
    count, top_k = config.size("num_local_experts"), config.size("num_experts_per_tok")
    # A softmax over the logits of the selected is one over all of them, renormalized.
    return Experts(count, top_k, size=base.mlp_size, renormalized=True)


def names(arch: Arch) -> Names:
    found = llama.names(arch) | experts_names(arch.experts)
    return ordered(found, "decoder.layers.mlp.router", before="decoder.layers.mlp.gate")


def experts_names(experts: Experts) -> Names:
    ours, theirs, size = "decoder.layers.mlp.", "model.layers.{}.block_sparse_moe.", experts.size
    return {
        ours + "router": theirs + "router.layer",
        ours + "gate": (theirs + "input_linear.weight", ExpertRows(0, size, 2 * size)),
        ours + "up": (theirs + "input_linear.weight", ExpertRows(size, size, 2 * size)),
        ours + "down": theirs + "output_linear.weight",
    }


FAMILY = Family("granitemoe", "GraniteMoe", arch, names, moved=MOVED, in_transformers=False)
