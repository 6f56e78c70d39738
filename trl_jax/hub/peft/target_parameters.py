"""The parameters that a LoraConfig means: of linear maps, and of experts, which share one."""

from __future__ import annotations

import logging
from dataclasses import replace

from trl_jax.hub.peft.lora_config import PISSA, LoraConfig
from trl_jax.hub.peft.modules import Module, in_order
from trl_jax.hub.peft.targets import Targets, is_all, is_meant, linear_maps, shown, walked

logger = logging.getLogger(__name__)

_WITH_MATRICES = ("linear", "router", "experts")  # kinds of modules whose matrices can be meant

# Families whose experts and router target_modules may name by older names; PEFT then adapts the parameters that they
# have become, and of two that lie in one, both or neither.
_OF_QWEN = {"gate": "gate.weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_OF_MIXTRAL = {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_BECAME = {
    **dict.fromkeys(("minimax_m2", "mixtral"), _OF_MIXTRAL),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe"), _OF_QWEN),
    **dict.fromkeys(("hunyuan_v1_moe", "olmoe", "qwen3_moe", "qwen3_next"), _OF_QWEN),
}


def with_parameters(config: LoraConfig, modules: list[Module], model_type: str) -> LoraConfig:
    """The config with parameters in the place of older modules that lie in them now, as PEFT writes it.

    Raises:
        ValueError: it names one of two that lie in one parameter.
    """
    wanted, became = config.target_modules, _BECAME.get(model_type)
    if became is None:
        return config
    if isinstance(wanted, str):
        wanted = _last_names(config, modules, became)
        if not wanted:
            return config
    named = {name: next((old for old in became if f".{name}".endswith(f".{old}")), None) for name in wanted or ()}
    rank_pattern, alpha_pattern = dict(config.rank_pattern), dict(config.alpha_pattern)
    for parameter in dict.fromkeys(became.values()):
        inside = [old for old, new in became.items() if new == parameter]
        meant = [old for old in inside if old in named.values()]
        if 0 < len(meant) < len(inside):
            raise ValueError(
                f"LoraConfig: target_modules={shown(config.target_modules)} means {meant[0]} of the experts, which "
                f"lies in one parameter, {parameter}, with the rest of {', '.join(inside)}. Name all of them, or "
                f"target_parameters=['experts.{parameter}']."
            )
        if meant and len(inside) > 1:
            rank_pattern[rf".*\.{parameter}"] = config.r * len(inside)
            alpha_pattern[rf".*\.{parameter}"] = config.lora_alpha * len(inside)
    parameters = {*(config.target_parameters or ()), *(became[old] for old in named.values() if old is not None)}
    return replace(
        config,
        target_modules={name for name, old in named.items() if old is None},
        target_parameters=sorted(parameters),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
    )


def _last_names(config: LoraConfig, modules: list[Module], became: dict[str, str]) -> set[str]:
    """The last names of all that one pattern means, whichever layers it means them in."""
    if is_all(config.target_modules):
        return {name.rpartition(".")[2] for name in linear_maps(config, modules)} | set(became)
    places = in_order(modules)
    parameters = [f"{name}.{last}" for name, module, _ in places for last, _ in module.parameters()]
    once = [
        f"{name.rpartition('.')[0]}.{old}"
        for name in parameters
        for old, new in became.items()
        if name.rpartition(".")[2] == new
    ]
    meant = [name for name in (*walked(places), *parameters, *once) if is_meant(config, name)]
    return {name.rpartition(".")[2] for name in meant}


def targeted_parameters(config: LoraConfig, modules: list[Module], *, alone: bool) -> Targets:
    """Each parameter that gets an adapter, in order, by its whole name, with the module that has it; PEFT does not look
    at the layers that are named or modules that are left out. `alone`: no module gets an adapter.

    Raises:
        ValueError: nothing at all is meant, or no matrix; or an option is set that only modules have.
    """
    wanted = tuple(config.target_parameters or ())
    every = [
        (f"{name}.{last}", last, owner, layer)
        for name, module, layer in in_order(modules)
        for last, owner in module.parameters()
    ]
    meant = [place for place in every if f".{place[0]}".endswith(tuple(f".{end}" for end in wanted))]
    for name, last, owner, _ in meant:
        if owner.kind not in _WITH_MATRICES or last not in ("weight", owner.name.rpartition(".")[2]):
            raise ValueError(
                f"LoraConfig: target_parameters={shown(set(wanted))} means {name}, which is no matrix of a linear map "
                f"or of experts. Those that are: {', '.join(_matrices(every))}."
            )
    if wanted and not meant:
        text = f"target_parameters={shown(set(wanted))} means no parameter of this model. It has "
        text += f"{', '.join(_matrices(every))}."
        if alone:
            raise ValueError(f"LoraConfig: {text}")
        logger.warning("LoraConfig: %s", text)
    for field in ("lora_dropout", "use_dora", "lora_bias", "fan_in_fan_out"):
        if meant and vars(config)[field]:
            raise ValueError(
                f"LoraConfig: {field}={vars(config)[field]!r} does not go with adapters of parameters, and this config "
                f"means {meant[0][0]}. Leave it out, or name target_modules without experts: ['q_proj', 'v_proj']."
            )
    if meant and config.init_lora_weights == PISSA:
        raise ValueError(
            f"LoraConfig: init_lora_weights='pissa' divides the matrices of modules, and this config means "
            f"{meant[0][0]}. Take True, or name target_modules without experts: ['q_proj', 'v_proj']."
        )
    return [(name, owner, layer) for name, _, owner, layer in meant]


def _matrices(every: list[tuple[str, str, Module, int]]) -> list[str]:
    """Parameters that can be adapted, by their last two names."""
    names = [name for name, last, owner, _ in every if owner.kind in _WITH_MATRICES and not last.endswith("bias")]
    return sorted({".".join(name.split(".")[-2:]) for name in names})
