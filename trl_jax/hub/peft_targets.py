"""Which modules and parameters an adapter trains, following PEFT's rules."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

from trl_jax.hub.heads import LM_HEAD, HeadName
from trl_jax.hub.modules import Module, in_order, of_vision
from trl_jax.hub.peft_config import PISSA, LoraConfig

# target_parameters: adapters on parameters of linear layers and experts (all experts of a layer share one parameter)


logger = logging.getLogger(__name__)

_WITH_MATRICES = ("linear", "router", "experts")  # kinds of modules whose matrices can be adapted

# Families in which target_modules may use older names for experts and routers. PEFT then adapts the parameters that
# replaced them; if two old modules share one parameter, both must be selected.
_OF_QWEN = {"gate": "gate.weight", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_OF_MIXTRAL = {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_REPLACED_BY = {
    **dict.fromkeys(("minimax_m2", "mixtral"), _OF_MIXTRAL),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "glm4_moe"), _OF_QWEN),
    **dict.fromkeys(("hunyuan_v1_moe", "olmoe", "qwen3_moe", "qwen3_next"), _OF_QWEN),
}


def with_parameters(config: LoraConfig, modules: list[Module], model_type: str) -> LoraConfig:
    """Replace module names from older transformers releases by the parameters that these modules became, as PEFT does.

    Raises:
        ValueError: only one of two modules that share a parameter is selected.
    """
    targets, replaced_by = config.target_modules, _REPLACED_BY.get(model_type)
    if replaced_by is None:
        return config
    if isinstance(targets, str):
        targets = _last_names(config, modules, replaced_by)
        if not targets:
            return config
    named = {name: next((old for old in replaced_by if f".{name}".endswith(f".{old}")), None) for name in targets or ()}
    rank_pattern, alpha_pattern = dict(config.rank_pattern), dict(config.alpha_pattern)
    for parameter in dict.fromkeys(replaced_by.values()):
        inside = [old for old, new in replaced_by.items() if new == parameter]
        selected = [old for old in inside if old in named.values()]
        if 0 < len(selected) < len(inside):
            raise ValueError(
                f"LoraConfig: target_modules={shown(config.target_modules)} selects {selected[0]} of the experts, "
                f"which shares the parameter {parameter} with the rest of {', '.join(inside)}. Select all of them, or "
                f"use target_parameters=['experts.{parameter}']."
            )
        if selected and len(inside) > 1:
            rank_pattern[rf".*\.{parameter}"] = config.r * len(inside)
            alpha_pattern[rf".*\.{parameter}"] = config.lora_alpha * len(inside)
    parameters = {*(config.target_parameters or ()), *(replaced_by[old] for old in named.values() if old is not None)}
    return replace(
        config,
        target_modules={name for name, old in named.items() if old is None},
        target_parameters=sorted(parameters),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
    )


def _last_names(config: LoraConfig, modules: list[Module], replaced_by: dict[str, str]) -> set[str]:
    """The last name components of everything that one pattern selects, in any layer."""
    if is_all(config.target_modules):
        return {name.rpartition(".")[2] for name in linear_maps(config, modules)} | set(replaced_by)
    places = in_order(modules)
    parameters = [f"{name}.{last}" for name, module, _ in places for last, _ in module.parameters()]
    once = [
        f"{name.rpartition('.')[0]}.{old}"
        for name in parameters
        for old, new in replaced_by.items()
        if name.rpartition(".")[2] == new
    ]
    selected = [name for name in (*module_names(places), *parameters, *once) if is_selected(config, name)]
    return {name.rpartition(".")[2] for name in selected}


def targeted_parameters(config: LoraConfig, modules: list[Module], *, alone: bool) -> Targets:
    """Each parameter that gets an adapter, in order: its full name, the module that owns it, and the layer.

    As in PEFT, layer and exclusion options do not apply to parameters.

    Args:
        alone: True if no module gets an adapter. It is then an error if no parameter matches, otherwise a warning.

    Raises:
        ValueError: no parameter matches although `alone`, one is not a matrix, or the config has an option that only
            works for modules.
    """
    params = tuple(config.target_parameters or ())
    every = [
        (f"{name}.{last}", last, owner, layer)
        for name, module, layer in in_order(modules)
        for last, owner in module.parameters()
    ]
    selected = [place for place in every if f".{place[0]}".endswith(tuple(f".{end}" for end in params))]
    for name, last, owner, _ in selected:
        if owner.kind not in _WITH_MATRICES or last not in ("weight", owner.name.rpartition(".")[2]):
            raise ValueError(
                f"LoraConfig: target_parameters={shown(set(params))} selects {name}, which is not a matrix of a linear "
                f"layer or of experts. Available: {', '.join(_matrices(every))}."
            )
    if params and not selected:
        text = f"target_parameters={shown(set(params))} selects no parameter of this model. It has "
        text += f"{', '.join(_matrices(every))}."
        if alone:
            raise ValueError(f"LoraConfig: {text}")
        logger.warning("LoraConfig: %s", text)
    for field in ("lora_dropout", "use_dora", "lora_bias", "fan_in_fan_out"):
        if selected and vars(config)[field]:
            raise ValueError(
                f"LoraConfig: {field}={vars(config)[field]!r} cannot be used with adapters on parameters, and this "
                f"config selects {selected[0][0]}. Leave it out, or choose target_modules without experts: ['q_proj', "
                "'v_proj']."
            )
    if selected and config.init_lora_weights == PISSA:
        raise ValueError(
            f"LoraConfig: init_lora_weights='pissa' only works for matrices of modules, and this config selects "
            f"{selected[0][0]}. Use True, or choose target_modules without experts: ['q_proj', 'v_proj']."
        )
    return [(name, owner, layer) for name, _, owner, layer in selected]


def _matrices(every: list[tuple[str, str, Module, int]]) -> list[str]:
    """Parameters that can be adapted, by their last two name components."""
    names = [name for name, last, owner, _ in every if owner.kind in _WITH_MATRICES and not last.endswith("bias")]
    return sorted({".".join(name.split(".")[-2:]) for name in names})


# trainable_token_indices: rows of the token embedding that are trained


EMBEDDING, HEAD = "embed_tokens", "lm_head"  # PEFT's names for the modules with one row per token
TENSOR = "token_adapter.trainable_tokens_delta"  # suffix of the trained rows' tensor after the module's name


def with_new_tokens(lora: LoraConfig, ids: list[int], head: HeadName) -> LoraConfig:
    """The config of an adapter that also trains the rows of new tokens and the full language model head, as in TRL.

    Raises:
        ValueError: this type of adapter cannot train embedding rows.
    """
    if not isinstance(lora, LoraConfig):
        raise ValueError(
            f"The chat template adds {len(ids)} new tokens, whose embeddings must be trained, but a "
            f"{type(lora).__name__} only trains virtual tokens. Use a LoraConfig, or a template without new tokens."
        )
    token_ids, saved = lora.trainable_token_indices, list(lora.modules_to_save or [])
    named = isinstance(token_ids, dict)
    token_ids = token_ids | {EMBEDDING: [*token_ids.get(EMBEDDING, ()), *ids]} if named else [*(token_ids or ()), *ids]
    if head == "lm" and HEAD not in saved:
        saved.append(HEAD)
        logger.warning(
            "Cloning chat template added new tokens to the tokenizer, but 'lm_head' is not in `modules_to_save` of the "
            "adapter. It was added, because otherwise the model may not learn to generate these tokens. "
            "To do this explicitly, pass LoraConfig(modules_to_save=['lm_head'])."
        )
    return replace(lora, trainable_token_indices=token_ids, modules_to_save=saved or None)


def token_tables(lora: LoraConfig, modules: list[Module]) -> list[tuple[Module, tuple[int, ...]]]:
    """Each embedding with some trained rows, and the ids of these rows.

    Raises:
        ValueError: a name is not a token embedding, an id is out of range, or the embedding is also trained fully.
    """
    indices = lora.trainable_token_indices
    if not indices:
        return []
    tables = [module for module in modules if module.kind == "embedding" or is_lm_head(module)]
    if not isinstance(indices, dict):
        texts = (table for table in tables if not of_vision(table.tensor_map[0]))
        indices = {next(texts).name: indices}
    selected = []
    for name, ids in indices.items():
        table = next((table for table in tables if table.name.endswith(name)), None)
        if table is None:
            names = ", ".join(table.name.rpartition(".")[2] for table in tables)
            raise ValueError(f"LoraConfig: trainable_token_indices names {name!r}, not a token embedding: {names}.")
        _check(lora, name, table, ids)
        selected.append((table, tuple(ids)))
    return selected


def _check(lora: LoraConfig, name: str, table: Module, ids: list[int]) -> None:
    last = name.rpartition(".")[2]
    if last in (lora.modules_to_save or []):
        raise ValueError(
            f"The embedding layer is already marked to be trained fully, either specify `modules_to_save=[..., "
            f"\"{last}\", ...]` or `trainable_tokens={{'{last}': x}}` but not both."
        )
    rows = table.outputs if is_lm_head(table) else table.inputs
    wrong = [token for token in ids if not 0 <= token < rows]
    if wrong or len(set(ids)) < len(ids):
        raise ValueError(
            f"LoraConfig: trainable_token_indices of {name!r} must be distinct ids from 0 to {rows - 1}, got "
            f"{list(ids)!r:.80}."
        )


# PEFT's names for heads


_TASKS = {"score": "SEQ_CLS", "lm": "CAUSAL_LM"}  # PEFT's names for models with these heads
_PEFT_HEADS = ("score", "classifier")  # attributes that PEFT considers the head of a classifier
_PEFT_SAVED = ["classifier", "score"]  # what PEFT adds to modules_to_save for a classifier


def with_peft_head(lora: LoraConfig, modules: list[Module], kind: HeadName) -> tuple[LoraConfig, str | None]:
    """The adapter's config as PEFT changes it for a model with this head, and a message about the change, if any.

    PEFT would build a different model for another task_type. The head of a classifier is also trained and added to
    `modules_to_save`.
    """
    if kind == "lm":
        return _of_causal_lm(lora)
    saved, task, expected = list(lora.modules_to_save or []), lora.task_type, _TASKS[kind]
    if task is not None:
        changed = f"task_type={task!r} was changed to {expected!r}, so that the head is trained too."
        saved = saved if saved[-2:] == _PEFT_SAVED else [*saved, *_PEFT_SAVED]
        return replace(lora, task_type=expected, modules_to_save=saved), None if task == expected else changed
    head = next((name for name in _PEFT_HEADS if _has(modules, name)), None)
    if head is None or any(head.endswith(name) for name in saved):
        return lora, None
    added = f"the head {head!r} was added to modules_to_save, so that it is trained and saved."
    return replace(lora, modules_to_save=[*saved, head]), added


def _of_causal_lm(lora: LoraConfig) -> tuple[LoraConfig, str | None]:
    task, expected = lora.task_type, _TASKS["lm"]
    if task in (None, expected):
        return lora, None
    return replace(lora, task_type=expected), f"task_type={task!r} was changed to {expected!r}, the task of this model."


def is_lm_head(module: Module) -> bool:
    """Whether the module is the head of a language model."""
    return any(f"{path}.weight" == LM_HEAD for path, _ in module.parts)


def peft_head(lora: LoraConfig, modules: list[Module]) -> str | None:
    """The head that PEFT excludes from "all-linear": the language model's, or any module of a classifier whose name
    matches."""
    head = next((module.name for module in modules if is_lm_head(module)), None)
    if head is not None:
        return head
    if lora.task_type != _TASKS["score"]:
        return None
    return next((name for name in _PEFT_HEADS if _has(modules, name)), None)


def _has(modules: list[Module], name: str) -> bool:
    return any(module.name.split(".")[0] == name for module in modules)


# Which modules a LoraConfig selects: PEFT's rules for names, patterns and layers


ADAPTABLE = ("linear", "conv1d", "embedding")
_ALL = "all-linear"
_MANY = 20  # for this many names or more, PEFT looks for equivalent suffixes

# The modules that PEFT adapts by default.
_USUAL = {
    "bert": ("query", "value"), "deberta": ("in_proj",), "deberta-v2": ("query_proj", "value_proj"),
    "electra": ("query", "value"), "gemma4": r".*language_model\..*\.(q_proj|v_proj)", "gpt2": ("c_attn",),
    "gpt_neox": ("query_key_value",), "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"), "roberta": ("query", "value"), "xlm-roberta": ("query", "value"),
} | dict.fromkeys(
    "gemma gemma2 gemma3_text gptj llama llama4 mistral mixtral opt qwen2 qwen3 stablelm".split(), ("q_proj", "v_proj")
)  # fmt: skip

# Families whose Mamba kernels use the weights of these modules directly and bypass an adapter; PEFT refuses them.
_PAST_ADAPTERS = {"falcon_h1": {"out_proj", "conv1d"}, "nemotron_h": {"out_proj", "conv1d"}}

Targets = list[tuple[str, Module, int]]


def with_drawn(config: LoraConfig, modules: list[Module], drawn: tuple[str, ...]) -> tuple[LoraConfig, str | None]:
    """Add modules that the base checkpoint lacks to `modules_to_save`. Otherwise they would be initialized randomly
    each time the adapter is loaded."""
    saved = {module.name for _, module, _ in fully_trained(config, modules)}
    owners = dict.fromkeys(tensor.rpartition(".")[0] for tensor in drawn)
    lost = [name for name in owners if name not in saved]
    if not lost:
        return config, None
    line = f"the base checkpoint has no {', '.join(lost)}: added to modules_to_save, so that the adapter can be loaded."
    return replace(config, modules_to_save=[*lost, *(config.modules_to_save or [])]), line


def resolve_targets(config: LoraConfig, modules: list[Module], model_type: str) -> LoraConfig:
    """Fill in `target_modules` with names: the usual modules if it is None, all linear layers for "all-linear".

    Raises:
        ValueError: `target_modules` is None, and PEFT has no default for this model_type.
    """
    targets, places = config.target_modules, in_order(modules)
    if targets is None and not (config.target_parameters and model_type not in _USUAL):
        if model_type not in _USUAL:
            raise ValueError(
                f"LoraConfig: target_modules is None, and PEFT has no default for model_type {model_type!r}. "
                f"Choose from {', '.join(candidates(modules))}, or pass 'all-linear'."
            )
        usual = _USUAL[model_type]
        targets = usual if isinstance(usual, str) else set(usual)
    if is_all(targets):
        targets = linear_maps(config, modules)
    if isinstance(targets, set) and len(targets) >= _MANY:
        targets = _shortest(targets, _every_name(places))
    conv = any(module.kind == "conv1d" for _, module, _ in places)
    transposed = conv or (config.fan_in_fan_out and not targets)  # PEFT corrects it for the modules that it finds
    return replace(config, target_modules=targets, fan_in_fan_out=transposed)


def is_all(target_modules: Any) -> bool:
    return isinstance(target_modules, str) and target_modules.lower() == _ALL


def linear_maps(config: LoraConfig, modules: list[Module]) -> set[str]:
    """Names of all linear layers except the head."""
    head = peft_head(config, modules)
    return {name for name, module, _ in in_order(modules) if module.kind in ("linear", "conv1d") and name != head}


def candidates(modules: list[Module]) -> list[str]:
    """Last name components of the modules that can be adapted."""
    return sorted({module.name.rpartition(".")[2] for module in modules if module.kind in ADAPTABLE})


def _every_name(places: Targets) -> set[str]:
    """Names of the modules with parameters and of their parents."""
    return {".".join(name.split(".")[:count]) for name, _, _ in places for count in range(1, name.count(".") + 2)}


def _shortest(targets: set[str], names: set[str]) -> set[str]:
    """Suffixes that match exactly these modules; PEFT shortens long lists this way."""
    others = {name for name in names if name not in targets and not name.endswith(tuple(f".{w}" for w in targets))}
    ends = {end for name in others for end in _ends(name)}
    suffixes: set[str] = set()
    for name in sorted(targets, key=_ends):
        if not any(name.endswith(f".{suffix}") for suffix in suffixes):
            suffixes.update([end for end in _ends(name) if end not in suffixes and end not in ends][:1])
    return suffixes if suffixes and len(suffixes) < len(targets) else targets


def _ends(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))][::-1]


def targeted(config: LoraConfig, modules: list[Module], model_type: str) -> Targets:
    """Each module that gets an adapter, in order; `config` comes from `resolve_targets`.

    Raises:
        ValueError: no module or parameter is selected, or one that cannot have an adapter.
    """
    places, targets = in_order(modules), config.target_modules
    by_name = {name: (name, module, layer) for name, module, layer in places}
    selected = [name for name in module_names(places) if is_selected(config, name)]
    past = _PAST_ADAPTERS.get(model_type, set())
    incompatible = next((name for name in selected if name.rpartition(".")[2] in past), None)
    if incompatible is not None:
        raise ValueError(
            f"LoraConfig: target_modules={shown(targets)} selects {incompatible}. PEFT: Module "
            f"{incompatible.rpartition('.')[2]!r} is incompatible with Mamba-based models (model_type="
            f"{model_type!r}). Choose from {', '.join(candidates(modules))}, or pass exclude_modules=['out_proj']."
        )
    wrong = [name for name in selected if name not in by_name or by_name[name][1].kind not in ADAPTABLE]
    if wrong:
        raise ValueError(
            f"LoraConfig: target_modules={shown(targets)} selects {wrong[0]} (and {len(selected) - 1} more), which is "
            f"not a linear layer or embedding. Available: {', '.join(candidates(modules))}."
        )
    if not selected and not config.target_parameters:
        raise ValueError(
            f"LoraConfig: target_modules={shown(targets)} selects no module of this model, or only modules that "
            f"exclude_modules, modules_to_save or layers_to_transform exclude. It has {', '.join(candidates(modules))}."
        )
    return [by_name[name] for name in selected]


def shown(value: Any) -> str:
    return repr(sorted(value) if isinstance(value, set) else value)


def module_names(places: Targets) -> list[str]:
    """All names in order, with outer modules before inner ones."""
    return list(
        dict.fromkeys(
            ".".join(name.split(".")[:count]) for name, _, _ in places for count in range(1, name.count(".") + 2)
        )
    )


def is_left_out(config: LoraConfig, name: str) -> bool:
    """Whether `exclude_modules` or `modules_to_save` keeps a module from being adapted."""
    if config.exclude_modules and _matches(config.exclude_modules, name):
        return True
    return any(re.match(rf"(^|.*\.){saved}($|\..*)", name) for saved in config.modules_to_save or [])


def is_selected(config: LoraConfig, name: str) -> bool:
    if is_left_out(config, name):
        return False
    targets = config.target_modules
    if targets is None or isinstance(targets, str):
        return targets is not None and re.fullmatch(targets, name) is not None
    if name in targets:  # a full name selects that module regardless of the layer options
        return True
    return _matches(targets, name) and _in_layers(config, name)


def _matches(targets: Any, name: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return name in targets or any(name.endswith(f".{end}") for end in targets)


def _in_layers(config: LoraConfig, name: str) -> bool:
    layers, patterns = config.layers_to_transform, config.layers_pattern
    if layers is None or layers == []:
        return True
    if not patterns:
        match = re.match(r".*?\.[^.]*\.(?P<number>\d+)\.", name)
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        tried = (re.match(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\.", name) for pattern in patterns)
        match = next((match for match in tried if match), None)
    if match is None or match["number"] is None:  # an alternative of the pattern may have no number
        return False
    return int(match["number"]) in ([layers] if isinstance(layers, int) else layers)


def fully_trained(config: LoraConfig, modules: list[Module]) -> Targets:
    """The modules whose names end with an entry of `modules_to_save`, and their submodules."""
    suffixes = tuple(config.modules_to_save or ())
    places = in_order(modules)
    selected = [name for name in module_names(places) if suffixes and name.endswith(suffixes)]
    return [place for place in places if any(place[0] == name or place[0].startswith(f"{name}.") for name in selected)]


def rank_and_alpha(config: LoraConfig, name: str) -> tuple[int, float]:
    """Rank and alpha of a module: from the first matching pattern, or the defaults."""

    def lookup(patterns: dict, usual: Any) -> Any:
        return next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", name)), usual)

    return lookup(config.rank_pattern, config.r), lookup(config.alpha_pattern, config.lora_alpha)
