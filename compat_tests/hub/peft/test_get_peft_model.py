"""get_peft_model on our models: PEFT's initial values and config, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

import trl_jax
from compat_tests.parity.dpo_cases import SMALL
from trl_jax.hub.auto import AutoModelForCausalLM, get_peft_model

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

CONFIGS = {
    "lora": lambda package: package.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    "dora": lambda package: package.LoraConfig(r=2, use_dora=True, target_modules="all-linear", revision="old"),
    "embedding": lambda package: package.LoraConfig(
        r=2, target_modules=["embed_tokens"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    ),
    "prompt": lambda package: package.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_new_adapter_is_pefts_after_the_same_seed(name, checkpoint, tmp_path):
    folder, saved = checkpoint(**SMALL), []
    for package, library in ((peft, transformers), (trl_jax, trl_jax)):
        base = library.AutoModelForCausalLM.from_pretrained(folder)
        library.set_seed(5)
        options = {"revision": "main"} if name == "dora" else {}
        model = package.get_peft_model(base, CONFIGS[name](package), **options)
        model.save_pretrained(tmp_path / package.__name__)
        saved.append((
            json.loads((tmp_path / package.__name__ / "adapter_config.json").read_text()),
            load_file(tmp_path / package.__name__ / "adapter_model.safetensors"),
        ))  # fmt: skip
    (their_config, theirs), (our_config, ours) = saved
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_allclose(ours[key], value, atol=1e-7, err_msg=key)
    for key in ("base_model_name_or_path", "task_type", "r", "revision", "peft_type", "modules_to_save"):
        assert our_config.get(key) == their_config.get(key), key
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "trl_jax"
    )
    assert loaded.active_adapter == "default"


def test_torchs_seed_counts_if_it_was_set_last(checkpoint):
    model, lora = AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL)), trl_jax.LoraConfig(r=2)
    found = []
    for set_seed in (trl_jax.set_seed, torch.manual_seed, trl_jax.set_seed):
        set_seed(9)
        found.append([np.asarray(array) for array in get_peft_model(model, lora).params.values()])
    assert all(np.array_equal(*arrays) for other in found[1:] for arrays in zip(found[0], other, strict=True))
    later = [np.asarray(array) for array in get_peft_model(model, lora).params.values()]
    assert not all(map(np.array_equal, found[0], later))


def test_what_cannot_be_done_is_refused(checkpoint):
    folder, lora = checkpoint(**SMALL), trl_jax.LoraConfig(r=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)
    assert "default" in adapted.peft_config and not model.frozen
    cases = [
        (ValueError, "has an adapter already. Train that one further, or pass model.merge", adapted, lora, {}),
        (TypeError, "for a torch model, use peft.get_peft_model", torch.nn.Linear(2, 2), lora, {}),
        (TypeError, "peft_config must be trl_jax.LoraConfig", model, {"r": 2}, {}),
        (ValueError, "adapter_name='other' is not supported", model, lora, {"adapter_name": "other"}),
        (ValueError, "mixed=True is not in this release", model, lora, {"mixed": True}),
        (ValueError, "low_cpu_mem_usage=True is not in this", model, lora, {"low_cpu_mem_usage": True}),
        (
            ValueError, "autocast_adapter_dtype=False is not in this",
            AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16"), lora, {"autocast_adapter_dtype": False},
        ),
    ]  # fmt: skip
    for kind, text, base, config, options in cases:
        with pytest.raises(kind, match=text):
            get_peft_model(base, config, **options)
    assert get_peft_model(adapted.merge_and_unload(), lora).frozen
