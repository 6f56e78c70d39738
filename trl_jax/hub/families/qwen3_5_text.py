"""qwen3_5_text: qwen3_next without experts, with each projection in its own tensor."""

from __future__ import annotations

from trl_jax.hub.config_reader import ConfigReader
from trl_jax.hub.families import Family, llama, qwen3_next
from trl_jax.hub.families.qwen3_next import OURS
from trl_jax.hub.tensor_map import Names, concatenated, in_runs
from trl_jax.models.arch import Arch

_OF_IMAGES = frozenset(
    {"mrope_section", "mrope_interleaved"}
)  # unused by texts, which have the same position on all three axes


def arch(config: ConfigReader) -> Arch:
    return qwen3_next.hybrid_arch(config, extra_keys=_OF_IMAGES)


def names(arch: Arch) -> Names:
    mlp = {name: place for name, place in llama.names(arch).items() if name.startswith("decoder.layers.mlp.")}
    return in_runs(arch.runs, lambda kind: qwen3_next.layer_names(arch, kind, mlp, projections))


def projections(arch: Arch) -> Names:
    """The names of a delta net's parameters."""
    theirs = "model.layers.{}.linear_attn."
    return {
        **qwen3_next.of_delta_net(arch),
        OURS + "out_norm": theirs + "norm",
        OURS + "o": theirs + "out_proj",
        **concatenated(theirs + "in_proj_qkv", qwen3_next.delta_channels(arch)),
        OURS + "gate": theirs + "in_proj_z",
        OURS + "beta": theirs + "in_proj_b",
        OURS + "decay": theirs + "in_proj_a",
    }


FAMILY = Family("qwen3_5_text", "Qwen3_5Text", arch, names, ignored=qwen3_next.IGNORED, **qwen3_next.HEADS)
