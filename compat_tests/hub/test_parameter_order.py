"""`parameters()` and `named_parameters()` list parameters in torch's order, because scripts freeze them by position."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import usual
from compat_tests.hub.vision import models as vision
from compat_tests.models import encoders, families, variants
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows, tiny_model
from trl_jax.hub.config import read_native_config
from trl_jax.hub.modules import parameter_names, torch_order

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

HEADS = {"lm": transformers.AutoModelForCausalLM, "score": transformers.AutoModelForSequenceClassification}
# Parts of these towers have no effect, such as layers after the one that is read. We list only what is computed.
PARTLY_READ = {
    "internvl", "internvl with an earlier layer", "llava", "llava with siglip", "llava_next", "mistral3 with biases",
}  # fmt: skip


def order(kind, config):
    """(parameters, buffers that are saved) of transformers' model."""
    with torch.device("meta"):
        model = kind.from_config(config)
    parameters = [name for name, _ in model.named_parameters()]
    return parameters, model.state_dict().keys() - set(parameters)


def assert_same_order(config, kind, native):
    wanted, buffers = order(kind, config)
    assert [name for name in parameter_names(native) if name not in buffers] == wanted


@usual("llama-plain", "gemma4_text-experts", "opt-normed_sums", "gpt_oss-plain", "granitemoehybrid-plain")
@pytest.mark.parametrize(("family", "name"), variants.CASES)
def test_decoders(family, name, tmp_path):
    variants.build(tmp_path, family, name)
    for head, kind in HEADS.items():
        if head == "score" and family in families.BODY_ONLY:
            continue
        for tied in (True, False) if head == "lm" else (None,):
            raw = json.loads((tmp_path / "config.json").read_text())
            (tmp_path / "config.json").write_text(
                json.dumps(raw | ({} if tied is None else {"tie_word_embeddings": tied}))
            )
            config = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=1)
            assert_same_order(config, kind, read_native_config(tmp_path, head))


@usual("roberta-plain", "deberta-v2-convolved")
@pytest.mark.parametrize(("family", "name"), encoders.CASES)
def test_encoders(family, name, tmp_path):
    encoders.build(tmp_path, family, name)
    config = transformers.AutoConfig.from_pretrained(tmp_path, num_labels=1)
    assert_same_order(config, HEADS["score"], read_native_config(tmp_path))


@usual("gemma3", "internvl with an earlier layer", "llava", "qwen3_vl")
@pytest.mark.parametrize("name", vision.CASES)
def test_vision_towers(name, tmp_path):
    case = vision.CASES[name]
    config = getattr(transformers, case.config_class)(**case.values)
    config.save_pretrained(tmp_path)
    wanted, buffers = order(transformers.AutoModelForImageTextToText, config)
    found = parameter_names(read_native_config(tmp_path, "lm").with_images())
    found = [name for name in found if name not in buffers]
    assert found == [name for name in wanted if name in set(found)]
    unread = [name for name in wanted if name not in set(found)]
    assert bool(unread) == (name in PARTLY_READ) and all(".vision_" in one for one in unread)


def test_a_modules_own_parameters_precede_its_childrens():
    names = ["a.layers.10.x", "a.layers.2.norm.weight", "a.layers.2.scale", "a.layers.2.q.weight", "head.bias", "b"]
    layer = ["a.layers.2.scale", "a.layers.2.norm.weight", "a.layers.2.q.weight"]
    assert torch_order(names) == ["b", *layer, "a.layers.10.x", "head.bias"]


ALL = {"target_modules": "all-linear"}
ADAPTERS = {
    "none": ("llama", None),
    "bias": ("qwen2", {"bias": "lora_only", "lora_bias": True, "modules_to_save": ["lm_head", "norm"]}),
    "dora": ("phi3", ALL | {"use_dora": True}),
    "table": ("gpt2", {"target_modules": ["c_attn", "c_proj", "wte"]}),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved_head": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": ("llama", {"target_modules": ["v_proj", "down_proj"], "trainable_token_indices": [3, 5]}),
    "experts": (
        "mixtral",
        {"target_modules": ["v_proj"], "target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
    ),
    "some": ("opt", {"target_modules": ["fc1", "k_proj"], "layers_to_transform": [1], "rank_pattern": {"fc1": 2}}),
}  # fmt: skip


@usual("none-tied", "bias-tied", "table-untied", "tokens-tied", "head-tied")
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_models_of_trainers(case, tie, tmp_path):
    family, lora = ADAPTERS[case]
    folder = tiny_model(tmp_path / "model", family, head="causal", num_hidden_layers=2, tie=tie)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = None if lora is None else peft.LoraConfig(r=3, task_type="CAUSAL_LM", **lora)
    theirs = theirs if lora is None else peft.get_peft_model(theirs, config)
    rows = Dataset.from_list(text_rows(4))
    model = trl_jax.SFTTrainer(
        str(folder), trl_jax.SFTConfig(str(tmp_path), **BASE), train_dataset=rows, peft_config=config
    ).model
    wanted = [(name, one.requires_grad) for name, one in theirs.named_parameters() if ".original_module." not in name]
    assert [(name, one.requires_grad) for name, one in model.named_parameters()] == wanted
    assert [one.shape for one in model.parameters()] == [
        tuple(one.shape) for name, one in theirs.named_parameters() if ".original_module." not in name
    ]
    names = {name for name in theirs.state_dict() if ".original_module." not in name}
    if case == "tokens" and tie:  # PEFT wraps the tied head, too
        names = {name for name in names if ".lm_head." not in name} | {"base_model.model.lm_head.weight"}
    assert model.state_dict().keys() == names
    assert model.num_parameters() == theirs.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == theirs.num_parameters(exclude_embeddings=True)
    assert model.num_parameters(only_trainable=True) == theirs.num_parameters(only_trainable=True)
    if lora is not None:
        assert model.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()
