"""Which modules and parameters an adapter config selects, against PEFT on transformers' module trees (meta device)."""

from __future__ import annotations

import copy
import json
import warnings
from functools import cache
from pathlib import Path

import pytest

from compat_tests.effort import THOROUGH
from compat_tests.models.families import ABSENT, BODY_ONLY, SHAPES
from compat_tests.tiny import SHAPE
from trl_jax.hub.config import native_config
from trl_jax.hub.families import families
from trl_jax.hub.modules import modules_of
from trl_jax.hub.peft_adapters import resolved
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.peft_targets import candidates, rank_and_alpha

# Without vision-language models, whose text parts are families of their own.
FAMILIES = sorted(name for name, family in families().items() if family.carried is None)
HEADS = ["classifier", "score"]
# By default, all selections are tested on these families, whose module names differ most: Conv1D (gpt2), fused layers,
# experts, mixers and convolutions. The other families get only FEW of them.
UNLIKE_NAMES = {
    "bert", "deberta-v2", "deepseek_v3", "distilbert", "gemma4_text", "gpt2", "gpt_oss", "lfm2", "llama", "modernbert",
    "nemotron_h", "phi3", "phimoe",
}  # fmt: skip
# These are enough for a family whose layers are other families' layers under other names: they cover all modules in
# order.
FEW = {"several ends", "all", "layers", "a table", "the head, too", "patterns of rank", "the usual", "once and today"}
# Families whose routers are linear layers for PEFT, which cannot run them, because they return tuples.
ROUTED_APART = {
    "phimoe": (r"mlp.router \(and 2 more\)", {"q_proj", "k_proj", "v_proj", "o_proj"}),
    "llama4_text": (
        r"feed_forward.router \(and 2 more\)",
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    ),
}
PATTERNS = {"rank_pattern": {r"\.1\..*": 3}, "alpha_pattern": {r".*\.0\..*": 32}}


@cache
def config_of(model_type):
    transformers = pytest.importorskip("transformers")
    facts = SHAPE | SHAPES.get(model_type, {}) | {"vocab_size": 300, "num_labels": 1}
    facts |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    facts = {key: value for key, value in facts.items() if key not in ABSENT.get(model_type, ())}
    return transformers.AutoConfig.for_model(model_type, **facts)


@pytest.fixture(scope="module", params=FAMILIES)
def both(request):
    """(model_type, transformers' module tree, our modules)."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    config = config_of(request.param)
    with torch.device("meta"):
        if request.param in BODY_ONLY:  # no classifier in transformers: replace the causal head
            model = AutoModelForCausalLM.from_config(config)
            del model.lm_head
            model.score = torch.nn.Linear(64, 1, bias=False)
        else:
            model = AutoModelForSequenceClassification.from_config(config)
    if request.param in ROUTED_APART:
        without_linear_routers(model)
    facts = native_config(json.loads(config.to_json_string(use_diff=False)), Path("config.json"))
    return request.param, model, modules_of(facts)


def without_linear_routers(model):
    """Hides routers that PEFT takes for linear layers; a test below shows what would happen."""
    from torch import nn

    for owner in [module for module in model.modules() if "router" in dict(module.named_children())]:
        router = nn.Module()
        router.weight = owner.router.weight
        owner.router = router


@pytest.fixture
def untouched(monkeypatch):
    """Let PEFT create its layers without inserting them; -> [(rank, scale)] of the created layers."""
    peft = pytest.importorskip("peft")
    made = []

    def note(self, parent, name, new, old):
        made.append((new.r["default"], new.scaling["default"]))

    monkeypatch.setattr(peft.tuners.lora.LoraModel, "_replace_module", note)
    monkeypatch.setattr(peft.tuners.tuners_utils, "set_additional_trainable_modules", lambda **how: None)
    return made


def ways(model):
    """Selections made from the model's own names: (description, LoraConfig's arguments)."""
    import torch
    from transformers.pytorch_utils import Conv1D

    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)]
    inner = [n for n in linear if ".1." in n]
    ends = list(dict.fromkeys(n.rpartition(".")[2] for n in inner))
    first, last, above = ends[0], ends[-1], inner[0].split(".")[-2]
    stack = inner[0].split(".1.")[0].rpartition(".")[2]
    table = next(n for n, m in model.named_modules() if isinstance(m, torch.nn.Embedding)).rpartition(".")[2]
    norm = next(n for n, m in model.named_modules() if "orm" in type(m).__name__).rpartition(".")[2]
    yield from ((f"the end {end}", {"target_modules": [end]}) for end in ends)
    yield "several ends", {"target_modules": [first, last]}
    yield "a tuple's set", {"target_modules": set(ends[:2])}
    yield "two parts", {"target_modules": [f"{above}.{first}"]}
    yield "a whole name", {"target_modules": [inner[-1]]}
    yield "whole names and an end", {"target_modules": [inner[0], inner[-1], first]}
    yield "every whole name", {"target_modules": [n for n in linear if "." in n]}
    yield "an end as a pattern", {"target_modules": first}
    yield "a pattern", {"target_modules": rf".*\.{first}"}
    yield "a pattern of layers", {"target_modules": rf".*\.[02]\..*({first}|{last})"}
    yield "all", {"target_modules": "all-linear"}
    yield "ALL without some", {"target_modules": "ALL-linear", "exclude_modules": [last, "pre_classifier"]}
    yield "all without a layer", {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*|.*classifier"}
    yield "layers", {"target_modules": ends, "layers_to_transform": [0, 2]}
    yield "a layer and its pattern", {"target_modules": ends, "layers_to_transform": 1, "layers_pattern": stack}
    yield "patterns", {"target_modules": [first], "layers_to_transform": [1], "layers_pattern": ["blocks", stack]}
    yield "another's pattern", {"target_modules": [first], "layers_to_transform": [1], "layers_pattern": "blocks"}
    yield "no such layer", {"target_modules": [first], "layers_to_transform": [9]}
    yield "what is saved", {"target_modules": ends, "modules_to_save": [last]}
    yield "the head, too", {"target_modules": [*HEADS, first]}
    yield "a table", {"target_modules": [table]}
    yield "patterns of rank", {"target_modules": ends, "use_rslora": True, **PATTERNS}
    yield "the usual", {}
    yield "a wrong name", {"target_modules": ["frobnicate"]}
    yield "a part of a name", {"target_modules": [first[1:]]}
    yield "what modules are in", {"target_modules": [above]}
    yield "a norm", {"target_modules": [norm]}
    yield "nothing", {"target_modules": []}
    yield "what is left out", {"target_modules": [first], "exclude_modules": [first]}
    if not isinstance(model.get_submodule(inner[0]), Conv1D):
        yield "a matrix", {"target_modules": [], "target_parameters": [f"{first}.weight"]}
        yield "a matrix beside modules", {"target_modules": [last], "target_parameters": [f"{first}.weight"]}


def pefts(model, config):
    """(modules, parameters) that PEFT adapts, or None if it refuses; updates `config` to what it saves."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tuner = peft.tuners.lora.LoraModel(model, config, "default")
        except ValueError:
            return None
    return tuner.targeted_module_names, tuner.targeted_parameter_names


def ours(modules, model_type, how):
    """The same for us, with ranks and scales, and the config as we save it."""
    config, places, parameters = resolved(LoraConfig(task_type="SEQ_CLS", **how), modules, model_type)
    names = [name for name, _, _ in places], [name for name, _, _ in parameters]
    root = 0.5 if config.use_rslora else 1
    told = [rank_and_alpha(config, name) for group in names for name in group]
    return names, [(rank, pytest.approx(alpha / rank**root)) for rank, alpha in told], config


EXPERTS = {
    "one parameter": {"target_modules": [], "target_parameters": ["experts.gate_up_proj"]},
    "of one layer": {"target_modules": ["q_proj"], "target_parameters": ["layers.1.mlp.experts.down_proj"]},
    "as once called": {"target_modules": ["gate_proj", "mlp.up_proj", "q_proj"], "rank_pattern": {"q_proj": 2}},
    "once and today": {"target_modules": ["down_proj"], "target_parameters": ["gate_up_proj"], "r": 3},
    "whatever is left out": {"target_modules": ["down_proj", "gate"], "layers_to_transform": [1]},
    "a pattern of once": {"target_modules": r".*experts\.(gate_proj|up_proj)|.*\.1\..*q_proj"},
    "a pattern of today": {"target_modules": r".*\.(down_proj|v_proj)", "exclude_modules": ["v_proj"]},
    "half of one": {"target_modules": ["up_proj"]},
    "dropout": {"target_modules": [], "target_parameters": ["down_proj"], "lora_dropout": 0.1},
    "DoRA": {"target_modules": [], "target_parameters": ["gate.weight"], "use_dora": True},
    "a vector": {"target_modules": [], "target_parameters": ["norm.weight"]},
    "a wrong name": {"target_modules": [], "target_parameters": ["frobnicate"]},
    "a wrong name beside a right one": {"target_modules": ["q_proj"], "target_parameters": ["frobnicate"]},
}


def test_ways_of_naming_modules(both, untouched):
    import peft

    model_type, model, modules = both
    experts = EXPERTS.items() if any(module.inside for module in modules) else ()
    every = THOROUGH or model_type in UNLIKE_NAMES
    for told, how in (*ways(model), *experts):
        if not every and told not in FEW:
            continue
        how = {**how, "modules_to_save": [*how.get("modules_to_save", ()), *HEADS]}
        theirs = peft.LoraConfig(task_type="SEQ_CLS", **copy.deepcopy(how))
        untouched.clear()
        wanted = pefts(model, theirs)
        if wanted is None:
            with pytest.raises(ValueError, match="LoraConfig: ") as error:
                print(model_type, told, ours(modules, model_type, how)[0])
            named = ", ".join(candidates(modules)) in str(error.value) or "experts" in str(error.value)
            assert named, (told, str(error.value))
            continue
        names, ranks, config = ours(modules, model_type, how)
        assert (told, *names) == (told, *wanted)
        assert (told, ranks) == (told, untouched)
        for field in ("target_modules", "rank_pattern", "alpha_pattern"):
            assert (told, vars(config)[field]) == (told, vars(theirs)[field])
        assert (told, set(config.target_parameters or ())) == (told, set(theirs.target_parameters or ()))


@pytest.mark.parametrize("model_type", ROUTED_APART)
def test_a_router_that_gives_more_than_a_linear_map_does(model_type):
    """PEFT adapts the router as a module, and then the model cannot run. As a parameter phimoe's works: see
    hub/peft/runs.py."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config, (shown, linear) = config_of(model_type), ROUTED_APART[model_type]
    modules = modules_of(native_config(json.loads(config.to_json_string(use_diff=False)), Path("config.json")))
    wanted = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_config(config), wanted)
    with pytest.raises(AttributeError, match="'tuple' object has no attribute"):
        theirs(input_ids=torch.tensor([[5, 6, 7]]))
    names, _, _ = ours(modules, model_type, {"target_modules": "all-linear"})
    assert {name.rpartition(".")[2] for name in names[0]} == linear
    with pytest.raises(ValueError, match=rf"selects model.layers.0.{shown}, which is not a linear"):
        ours(modules, model_type, {"target_modules": ["router"]})


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_axes_of_linear_maps_are_corrected_as_in_peft(model_type):
    """`fan_in_fan_out` is True for Conv1D and False for Linear, in the saved config, too."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    from transformers import AutoModelForSequenceClassification

    config = config_of(model_type)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    targets = ["c_attn"] if model_type == "gpt2" else ["q_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flag in (True, False):
            theirs = peft.LoraConfig(target_modules=targets, fan_in_fan_out=flag, task_type="SEQ_CLS")
            peft.get_peft_model(copy.deepcopy(model), theirs)
            facts = native_config(json.loads(config.to_json_string(use_diff=False)), Path("config.json"))
            ours = LoraConfig(target_modules=targets, fan_in_fan_out=flag, task_type="SEQ_CLS")
            saved, _, _ = resolved(ours, modules_of(facts), model_type)
            assert saved.fan_in_fan_out == theirs.fan_in_fan_out == (model_type == "gpt2")
