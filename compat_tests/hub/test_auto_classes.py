"""What user scripts do with transformers' auto classes and models, done with ours."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import trl_jax
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.tiny import tiny_model
from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification, with_adapter
from trl_jax.hub.quantization import BitsAndBytesConfig

torch = pytest.importorskip("torch")
IDS = np.arange(8)[None]


def test_classes_by_the_names_of_families(checkpoint):
    folder = checkpoint(**SMALL)
    from trl_jax import LlamaForCausalLM, Qwen2ForSequenceClassification

    one, other = (kind.from_pretrained(folder) for kind in (LlamaForCausalLM, AutoModelForCausalLM))
    assert (np.asarray(one(IDS).logits) == np.asarray(other(IDS).logits)).all()
    config = transformers.Qwen2Config(**dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8),
                                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_labels=1,
                                      pad_token_id=0)  # fmt: skip
    assert np.asarray(Qwen2ForSequenceClassification(config)(IDS[:, :4]).logits).shape == (1, 1)
    assert AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16).source.dtype == "bfloat16"
    with pytest.raises(ImportError, match="ZamboniForCausalLM"):
        from trl_jax import ZamboniForCausalLM  # noqa: F401


def test_arguments_of_from_pretrained_and_from_config(checkpoint, tmp_path):
    folder = checkpoint(**SMALL)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.use_cache, config.my_own = False, "kept"
    model = AutoModelForCausalLM.from_pretrained(folder, config=config)
    assert model.config is config
    model.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).my_own == "kept"
    config.num_attention_heads = 2
    made = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), dtype="bfloat16")
    assert made.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="describes a different architecture than"):
        AutoModelForCausalLM.from_pretrained(folder, config=config)
    few = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True))
    whole = AutoModelForCausalLM.from_pretrained(folder)
    assert few.params["decoder.layers.attention.q.weight.codes"].dtype == jnp.int8
    assert np.allclose(few(IDS).logits, whole(IDS).logits, atol=0.5) and (few(IDS).logits != whole(IDS).logits).any()


def test_what_scripts_ask_a_model(checkpoint):
    for facts in (SMALL, SMALL | {"tie": True}):
        folder = checkpoint(**facts)
        kinds = AutoModelForCausalLM, transformers.AutoModelForCausalLM
        model, theirs = (kind.from_pretrained(folder) for kind in kinds)
        assert model.dtype == theirs.dtype
        head = model.get_output_embeddings()
        assert np.array_equal(head.weight, theirs.get_output_embeddings().weight.detach().numpy())
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        assert model.get_memory_footprint() == theirs.get_memory_footprint(return_buffers=False)
        assert model.can_generate() and theirs.can_generate() and model.cpu() is model.cuda() is model
        model.tie_weights()
    assert AutoModelForSequenceClassification.from_pretrained(checkpoint()).get_output_embeddings() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_dtype_of_a_model_beneath_an_adapter_and_of_an_exported_one(checkpoint, dtype, tmp_path):
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL), dtype=dtype)
    adapted = with_adapter(model, trl_jax.LoraConfig(r=2), 0)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(checkpoint(**SMALL), dtype=dtype)
    theirs = peft.get_peft_model(loaded, peft.LoraConfig(r=2))
    assert adapted.dtype == theirs.dtype == vars(torch)[dtype]
    exported = AutoModelForSequenceClassification.from_pretrained(tiny_model(tmp_path, "bloom"), dtype=dtype)
    assert exported.dtype == vars(torch)[dtype]


@pytest.mark.parametrize("kind", ["AutoModelForCausalLM", "AutoModelForSequenceClassification"])
def test_a_template_is_cloned_for_a_torch_model(checkpoint, kind):
    folder, source = checkpoint(**SMALL), checkpoint(**CHAT)
    model = getattr(transformers, kind).from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    model, words, added = trl_jax.clone_chat_template(model, words, str(source))
    assert words.chat_template and model.get_input_embeddings().num_embeddings == len(words.get_vocab())
    assert model.config.eos_token_id == words.eos_token_id and isinstance(added, list)
