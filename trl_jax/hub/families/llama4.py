"""llama4_text: llama with chunked attention, layers without positions, and experts whose inputs are weighted."""

from __future__ import annotations

from dataclasses import replace

from trl_jax.hub.config_reader import FULL, ConfigReader
from trl_jax.hub.families import Family, llama
from trl_jax.hub.tensor_map import ExpertRows, Names, in_runs
from trl_jax.models.arch import Arch, Experts, LayerKind, QueryGrowth

_CHUNKED = "chunked_attention"


def arch(config: ConfigReader) -> Arch:
    base, mlp_size = llama.arch(config), config.size("intermediate_size_mlp")
    config.skip("output_router_logits", "router_aux_loss_coef")  # only for the language model's loss
    config.skip("router_jitter_noise")  # transformers never applies it
    config.refuse("for_llm_compressor", False)
    placed, normed = _placed(config, base.num_layers), config.flag("use_qk_norm", True)
    with_experts = _with_experts(config, base.num_layers)
    experts = Experts(
        count=config.size("num_local_experts"),
        top_k=config.size("num_experts_per_tok"),
        size=base.mlp_size,
        renormalized=False,
        shared_size=base.mlp_size,
        shared_gated=False,
        scores="sigmoid",
        weights_inputs=True,
    )
    return replace(
        base,
        mlp_size=mlp_size,
        mlp_bias=False,
        rope_interleaved=True,
        ropes=tuple(rope if rotated else None for rope, rotated in zip(base.ropes, placed, strict=True)),
        chunks=_chunks(config, placed),
        qk_norm="head" if normed else None,
        qk_norm_kind="rms_plain",
        qk_norm_after_rope=True,
        query_growth=_growth(config),
        experts=experts if any(with_experts) else None,
        kinds=tuple(
            LayerKind(experts=mixed, no_rope=not rotated) for mixed, rotated in zip(with_experts, placed, strict=True)
        ),
    )


def _placed(config: ConfigReader, num_layers: int) -> list[bool]:
    """Whether each layer has positions."""
    every = config.size("no_rope_layer_interval", 4)
    told = config.value("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(told, list) or len(told) < num_layers or set(told) - {0, 1}:
        raise config.wrong("no_rope_layers", told, f"a list of {num_layers} of 0 and 1")
    return [bool(flag) for flag in told[:num_layers]]


def _with_experts(config: ConfigReader, num_layers: int) -> list[bool]:
    step = config.size("interleave_moe_layer_step", 1)
    told = config.value("moe_layers", list(range(step - 1, num_layers, step)))
    if not isinstance(told, list) or not all(type(layer) is int for layer in told):
        raise config.wrong("moe_layers", told, "a list of the numbers of layers")
    return [layer in told for layer in range(num_layers)]


def _chunks(config: ConfigReader, placed: list[bool]) -> tuple[int | None, ...]:
    size = None if config.is_null("attention_chunk_size") else config.size("attention_chunk_size", 8192)
    types = config.names("layer_types") or [_CHUNKED if rotated and size else FULL for rotated in placed]
    if len(types) != len(placed) or set(types) - ({_CHUNKED, FULL} if size else {FULL}):
        raise config.wrong("layer_types", types, f"{len(placed)} of {FULL!r} or, with chunks, {_CHUNKED!r}")
    return tuple(size if kind == _CHUNKED else None for kind in types)


def _growth(config: ConfigReader) -> QueryGrowth | None:
    beta, length = config.number("attn_scale", 0.1), config.size("floor_scale", 8192)
    enabled = config.value("attn_temperature_tuning", True)  # some checkpoints have a number here
    return QueryGrowth(beta, length, first=1, no_rope=True) if enabled else None


def names(arch: Arch) -> Names:
    ours, theirs = "decoder.layers.mlp.", "model.layers.{}.feed_forward."
    rest = {name: place for name, place in llama.names(arch).items() if not name.startswith(ours)}
    dense = {f"{ours}{part}": f"{theirs}{part}_proj" for part in ("gate", "up", "down")}
    experts = _of_experts(ours, theirs, arch)
    return in_runs(arch.runs, lambda kind: llama.norms_last(rest | (experts if kind.experts else dense)))


def _of_experts(ours: str, theirs: str, arch: Arch) -> Names:
    gate_up, size, width = theirs + "experts.gate_up_proj", arch.experts.size, arch.hidden_size
    return {
        ours + "gate": (gate_up, ExpertRows(0, size, 2 * size, transposed=True)),
        ours + "up": (gate_up, ExpertRows(size, size, 2 * size, transposed=True)),
        ours + "down": (theirs + "experts.down_proj", ExpertRows(0, width, width, transposed=True)),
        ours + "router": theirs + "router",
        **{f"{ours}shared.{part}": f"{theirs}shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    }


FAMILY = Family("llama4_text", "Llama4Text", arch, names, in_transformers=False)
