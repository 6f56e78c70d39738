"""Messages about a torch model that a user passes name the model, never the temporary folder it is converted
through."""

from __future__ import annotations

import json
import logging
import tempfile

import pytest
from datasets import Dataset

from compat_tests.tiny import text_rows, tiny_model
from trl_jax.trainer.sft_config import SFTConfig
from trl_jax.trainer.sft_trainer import SFTTrainer

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("base") / "somebody", "llama", head="causal", num_hidden_layers=2)


def loaded(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def new_model(**facts):
    """A torch OPT model that was not loaded from a checkpoint."""
    from transformers import AutoModelForCausalLM, OPTConfig

    sizes = {"vocab_size": 600, "hidden_size": 32, "num_hidden_layers": 1, "ffn_dim": 32, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(OPTConfig(**sizes, **facts))


def with_prompts(folder):
    masks = {"cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}
    config = peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1, 2], **masks)
    return peft.get_peft_model(loaded(folder), config)


def trainer(model, tokenizer, out, log_level="passive", **arguments):
    rows = Dataset.from_list(text_rows(4))
    args = SFTConfig(str(out), max_steps=1, report_to="none", save_strategy="no", bf16=False, log_level=log_level)
    return SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, **arguments)


def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def without_folder(error):
    assert tempfile.gettempdir() + "/trl-jax-" not in str(error.value)


def test_a_config_that_is_not_computed_is_refused_by_the_models_class_or_name(folder, tmp_path):
    model = new_model(layerdrop=0.1)
    with pytest.raises(
        ValueError,
        match=r"^OPTForCausalLM/config.json: layerdrop must be 0.0, .*, got 0.1",
    ):
        trainer(model, tokenizer_of(folder), tmp_path)
    model.config._name_or_path = "somebody/opt"
    with pytest.raises(
        ValueError,
        match=r"^somebody/opt/config.json: layerdrop must be 0.0, .*, got 0.1",
    ):
        trainer(model, tokenizer_of(folder), tmp_path)


def test_an_adapter_that_is_not_computed_is_refused_by_the_base_models_name(folder, tmp_path):
    with pytest.raises(ValueError, match="CPT") as error:
        trainer(with_prompts(folder), tokenizer_of(folder), tmp_path)
    assert str(error.value).startswith(f"{folder}/adapter/adapter_config.json: peft_type=")
    without_folder(error)


def test_what_is_logged_of_a_torch_model_names_it(folder, tmp_path, caplog):
    caplog.set_level(logging.INFO, "trl_jax")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    for model in (loaded(folder), peft.get_peft_model(loaded(folder), lora)):
        caplog.clear()
        trainer(model, tokenizer_of(folder), tmp_path, log_level="info")
        told = [record.getMessage() for record in caplog.records if record.name.startswith("trl_jax")]
        assert any(line.startswith(f"{folder} runs on the native") for line in told)
        assert not any("/trl-jax-" in line for line in told)


def test_an_adapter_that_was_given_by_hand_and_again_is_one(folder, tmp_path, caplog):
    """Scripts of 2023 do this; a different config is refused."""
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    model = peft.get_peft_model(loaded(folder), lora)
    found = trainer(model, tokenizer_of(folder), tmp_path, peft_config=lora).model
    assert "peft_config has no effect: the model already has this adapter" in caplog.text
    assert found.num_parameters(only_trainable=True) == model.num_parameters(only_trainable=True)
    with pytest.raises(ValueError, match="the model has an adapter already. Leave peft_config out"):
        trainer(model, tokenizer_of(folder), tmp_path, peft_config=peft.LoraConfig(r=8, target_modules="all-linear"))


def test_a_model_of_no_folder_wants_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"OPTForCausalLM that was loaded from no folder .* Pass processing_class="):
        trainer(new_model(), None, tmp_path)


def test_the_tokenizer_in_a_processor_is_used(folder, tmp_path):
    from transformers import ProcessorMixin

    class Processor(ProcessorMixin):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)

    class Silent(ProcessorMixin):
        def __init__(self):
            pass

    tokenizer = tokenizer_of(folder)
    made = trainer(str(folder), Processor(tokenizer), tmp_path)
    assert made.processing_class is tokenizer
    made.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/processor_config.json").read_text()) == {"processor_class": "Processor"}
    with pytest.raises(TypeError, match="without a tokenizer"):
        trainer(str(folder), Silent(), tmp_path)
