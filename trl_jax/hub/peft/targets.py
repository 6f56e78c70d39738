"""The modules that a LoraConfig means: PEFT's rules for names, patterns and layers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from trl_jax.hub.peft.heads import peft_head
from trl_jax.hub.peft.lora_config import LoraConfig
from trl_jax.hub.peft.modules import Module, in_order

ADAPTABLE = ("linear", "conv1d", "embedding")
_ALL = "all-linear"
_MANY = 20  # from so many names on, PEFT looks for ends of names that mean the same

# The modules that PEFT adapts where none are named.
_USUAL = {
    "bert": ("query", "value"), "deberta": ("in_proj",), "deberta-v2": ("query_proj", "value_proj"),
    "electra": ("query", "value"), "gemma4": r".*language_model\..*\.(q_proj|v_proj)", "gpt2": ("c_attn",),
    "gpt_neox": ("query_key_value",), "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"), "roberta": ("query", "value"), "xlm-roberta": ("query", "value"),
} | dict.fromkeys(
    "gemma gemma2 gemma3_text gptj llama llama4 mistral mixtral opt qwen2 qwen3 stablelm".split(), ("q_proj", "v_proj")
)  # fmt: skip

# Families whose kernels of Mamba take the weights of these modules themselves, past an adapter: PEFT refuses them.
_PAST_ADAPTERS = {"falcon_h1": {"out_proj", "conv1d"}, "nemotron_h": {"out_proj", "conv1d"}}

Targets = list[tuple[str, Module, int]]


def with_drawn(
    config: LoraConfig, modules: list[Module], drawn: tuple[str, ...]
) -> tuple[LoraConfig, str | None]:
    """The config with the modules that the base checkpoint lacks in `modules_to_save`, too: nobody could load the
    adapter otherwise, for they would be drawn anew."""
    saved = {module.name for _, module, _ in fully_trained(config, modules)}
    owners = dict.fromkeys(tensor.rpartition(".")[0] for tensor in drawn)
    lost = [name for name in owners if name not in saved]
    if not lost:
        return config, None
    line = f"the base checkpoint has no {', '.join(lost)}: added to modules_to_save, or nobody could load the adapter."
    return replace(config, modules_to_save=[*lost, *(config.modules_to_save or [])]), line


def settled(config: LoraConfig, modules: list[Module], model_type: str) -> LoraConfig:
    """The config with the names of modules in `target_modules`: the usual ones where it names none, all for all-linear.

    Raises:
        ValueError: it names none, and there are no usual ones of this model_type.
    """
    wanted, places = config.target_modules, in_order(modules)
    if wanted is None and not (config.target_parameters and model_type not in _USUAL):
        if model_type not in _USUAL:
            raise ValueError(
                f"LoraConfig: target_modules is None, and PEFT has no usual choice for model_type {model_type!r}. "
                f"Name some of {', '.join(candidates(modules))}, or pass 'all-linear'."
            )
        usual = _USUAL[model_type]
        wanted = usual if isinstance(usual, str) else set(usual)
    if is_all(wanted):
        wanted = linear_maps(config, modules)
    if isinstance(wanted, set) and len(wanted) >= _MANY:
        wanted = _shortest(wanted, _every_name(places))
    conv = any(module.kind == "conv1d" for _, module, _ in places)
    return replace(config, target_modules=wanted, fan_in_fan_out=config.fan_in_fan_out or conv)


def is_all(wanted: Any) -> bool:
    return isinstance(wanted, str) and wanted.lower() == _ALL


def linear_maps(config: LoraConfig, modules: list[Module]) -> set[str]:
    """Every linear map by name, except the head."""
    head = peft_head(config, modules)
    return {name for name, module, _ in in_order(modules) if module.kind in ("linear", "conv1d") and name != head}


def candidates(modules: list[Module]) -> list[str]:
    """Last names of the modules that can be adapted."""
    return sorted({module.name.rpartition(".")[2] for module in modules if module.kind in ADAPTABLE})


def _every_name(places: Targets) -> set[str]:
    """Names of modules with parameters, and of those they are in."""
    return {".".join(name.split(".")[:count]) for name, _, _ in places for count in range(1, name.count(".") + 2)}


def _shortest(wanted: set[str], names: set[str]) -> set[str]:
    """Ends of names that mean these modules and no others; PEFT shortens long lists so."""
    others = {name for name in names if name not in wanted and not name.endswith(tuple(f".{w}" for w in wanted))}
    ends = {end for name in others for end in _ends(name)}
    kept: set[str] = set()
    for name in sorted(wanted, key=_ends):
        for end in _ends(name):
            if end not in kept and end not in ends and not any(name.endswith(f".{one}") for one in kept):
                kept.add(end)
                break
    return kept if kept and len(kept) < len(wanted) else wanted


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))][::-1]


def targeted(config: LoraConfig, modules: list[Module], model_type: str) -> Targets:
    """Each module that gets an adapter, in order; `config` is settled.

    Raises:
        ValueError: none is meant, and no parameter either; or one that cannot have an adapter.
    """
    places, wanted = in_order(modules), config.target_modules
    known = {name: (name, module, layer) for name, module, layer in places}
    meant = [name for name in walked(places) if is_meant(config, name)]
    past = _PAST_ADAPTERS.get(model_type, set())
    incompatible = next((name for name in meant if name.rpartition(".")[2] in past), None)
    if incompatible is not None:
        raise ValueError(
            f"LoraConfig: target_modules={shown(wanted)} means {incompatible}. PEFT: Module "
            f"{incompatible.rpartition('.')[2]!r} is incompatible with Mamba-based models (model_type="
            f"{model_type!r}). Name others of {', '.join(candidates(modules))}, or exclude_modules=['out_proj']."
        )
    wrong = [name for name in meant if name not in known or known[name][1].kind not in ADAPTABLE]
    if wrong:
        raise ValueError(
            f"LoraConfig: target_modules={shown(wanted)} means {wrong[0]} (and {len(meant) - 1} more), which is no "
            f"linear map or embedding. Those that are: {', '.join(candidates(modules))}."
        )
    if not meant and not config.target_parameters:
        raise ValueError(
            f"LoraConfig: target_modules={shown(wanted)} means no module of this model, or only what exclude_modules, "
            f"modules_to_save or layers_to_transform leave out. It has {', '.join(candidates(modules))}."
        )
    return [known[name] for name in meant]


def shown(value: Any) -> str:
    return repr(sorted(value) if isinstance(value, set) else value)


def walked(places: Targets) -> list[str]:
    """Every name in order, that of an outer module before those inside."""
    return list(
        dict.fromkeys(
            ".".join(name.split(".")[:count]) for name, _, _ in places for count in range(1, name.count(".") + 2)
        )
    )


def is_meant(config: LoraConfig, name: str) -> bool:
    if config.exclude_modules and _matches(config.exclude_modules, name):
        return False
    if any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in config.modules_to_save or []):
        return False
    wanted = config.target_modules
    if wanted is None or isinstance(wanted, str):
        return wanted is not None and re.fullmatch(wanted, name) is not None
    if name in wanted:  # a whole name means that module, whichever layers are named
        return True
    return _matches(wanted, name) and _in_layers(config, name)


def _matches(wanted: Any, name: str) -> bool:
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return name in wanted or any(name.endswith(f".{end}") for end in wanted)


def _in_layers(config: LoraConfig, name: str) -> bool:
    layers, patterns = config.layers_to_transform, config.layers_pattern
    if layers is None or layers == []:
        return True
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(?P<number>\d+)\.", name)
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        tried = (re.match(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.", name) for pattern in patterns)
        found = next((match for match in tried if match), None)
    if found is None or found["number"] is None:  # an alternative in the pattern may have no number
        return False
    return int(found["number"]) in ([layers] if isinstance(layers, int) else layers)


def fully_trained(config: LoraConfig, modules: list[Module]) -> Targets:
    """The modules that `modules_to_save` means by the ends of their names, and those inside of them."""
    wanted = tuple(config.modules_to_save or ())
    places = in_order(modules)
    meant = [name for name in walked(places) if wanted and name.endswith(wanted)]
    return [place for place in places if any(place[0] == name or place[0].startswith(f"{name}.") for name in meant)]


def rank_and_alpha(config: LoraConfig, name: str) -> tuple[int, float]:
    """The rank and alpha of the module of this name: those of the first pattern that fits, or the usual ones."""

    def lookup(patterns: dict, usual: Any) -> Any:
        return next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", name)), usual)

    return lookup(config.rank_pattern, config.r), lookup(config.alpha_pattern, config.lora_alpha)
