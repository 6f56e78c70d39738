"""Which modules a config means, beside PEFT on transformers' own module trees (meta device: no weights)."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path

import pytest

from compat_tests.models.families import ABSENT, BODY_ONLY, SHAPES
from compat_tests.tiny import SHAPE
from trl_jax.hub.families import families, read_arch
from trl_jax.hub.lora_config import LoraConfig
from trl_jax.hub.modules import modules_of
from trl_jax.hub.targets import rank_and_alpha, saved_whole, settled, targeted, with_head

# Beside gemma3, whose config is another's: its text part is gemma3_text.
FAMILIES = sorted(set(families()) - BODY_ONLY - {"gemma3"})
WAYS = [
    {"target_modules": ["q_proj"]},
    {"target_modules": ["o_proj", "gate_up_proj"]},
    {"target_modules": ["self_attn.qkv_proj", "layers.1.mlp.down_proj"]},
    {"target_modules": ["model.layers.2.mlp.down_proj"]},
    {"target_modules": "qkv_proj"},
    {"target_modules": r".*qkv_proj"},
    {"target_modules": r"model\.layers\.[02]\.(mlp|self_attn)\..*_proj"},
    {"target_modules": ["embed_tokens"]},
    {"target_modules": "ALL-linear"},
    {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"},
    {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": [0, 2]},
    {"target_modules": ["o_proj", "down_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    {"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    {"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
    {"target_modules": ["o_proj", "down_proj"], "modules_to_save": ["down_proj"]},
    {"target_modules": ["score", "o_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": ["self_attn"]},
    {"target_modules": ["input_layernorm"]},
    {"target_modules": None},
    {"target_modules": ["o_proj"], "exclude_modules": ["o_proj"]},
]


@cache
def config_of(model_type):
    transformers = pytest.importorskip("transformers")
    facts = SHAPE | SHAPES.get(model_type, {}) | {"vocab_size": 300, "num_labels": 1}
    facts |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    facts = {key: value for key, value in facts.items() if key not in ABSENT.get(model_type, ())}
    return transformers.AutoConfig.for_model(model_type, **facts)


def pefts(model_type, **how):
    """(the modules it adapts, target_modules as it writes them, parameters that train), or None where it refuses."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    config = peft.LoraConfig(task_type="SEQ_CLS", **how)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForSequenceClassification.from_config(config_of(model_type))
        try:
            found = peft.get_peft_model(model, config)
        except ValueError:
            return None
    return found.base_model.targeted_module_names, config.target_modules


def ours(model_type, **how):
    raw = json.loads(config_of(model_type).to_json_string(use_diff=False))
    family, arch = read_arch(raw, Path("config.json"))
    modules = modules_of(family, arch)
    config = settled(with_head(LoraConfig(task_type="SEQ_CLS", **how), modules)[0], modules, model_type)
    places = targeted(config, modules)
    both = {name for name, _, _ in places} & {name for name, _, _ in saved_whole(config, modules)}
    assert not both
    return [name for name, _, _ in places], config.target_modules


@pytest.mark.parametrize("model_type", FAMILIES)
def test_all_linear_on_every_family(model_type):
    wanted = pefts(model_type, target_modules="all-linear", exclude_modules=["pre_classifier"])
    if model_type in ("mixtral", "qwen3_moe"):
        with pytest.raises(ValueError, match="means experts, too"):
            ours(model_type, target_modules="all-linear")
        wanted = pefts(model_type, target_modules=["q_proj", "o_proj"])
        assert ours(model_type, target_modules=["q_proj", "o_proj"]) == wanted
    else:
        assert ours(model_type, target_modules="all-linear", exclude_modules=["pre_classifier"]) == wanted


@pytest.mark.parametrize("how", WAYS, ids=lambda how: " ".join(map(str, how.values())))
def test_ways_of_naming_modules(how):
    wanted = pefts("phi3", **how)
    if wanted is not None:
        assert ours("phi3", **how) == wanted
        return
    with pytest.raises(ValueError, match="LoraConfig: target_modules") as told:
        ours("phi3", **how)
    assert "down_proj, embed_tokens, gate_up_proj, o_proj, qkv_proj, score" in str(told.value)


def test_patterns_of_rank_and_alpha():
    config = LoraConfig(r=4, lora_alpha=8, rank_pattern={"o_proj": 2, ".*": 3}, alpha_pattern={r"layers\.1\..*": 32})
    assert rank_and_alpha(config, "model.layers.1.self_attn.o_proj") == (2, 32)
    assert rank_and_alpha(config, "model.layers.2.self_attn.q_proj") == (3, 8)
