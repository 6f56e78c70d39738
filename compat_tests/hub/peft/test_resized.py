"""Adapters on a model whose vocabulary was resized: embedding and head are saved with the adapter, as PEFT does for
save_embedding_layers="auto", and with checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from safetensors.numpy import load_file

import trl_jax
from compat_tests.effort import thorough, usual
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.parity.reference import BASE
from compat_tests.tiny import text_rows
from trl_jax.hub.auto import with_adapter
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.training.model import from_torch

peft, torch, transformers = (pytest.importorskip(name) for name in ("peft", "torch", "transformers"))
NEW, WEIGHTS = 3, "adapter_model.safetensors"
Q = {"target_modules": ["q_proj"]}


def resized(base, seed=0):
    """A torch model whose new rows are drawn with this seed."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    model.resize_token_embeddings(model.config.vocab_size + NEW, mean_resizing=False)
    return model.eval()


def ids_of(model):
    rows = model.config.vocab_size
    return np.array([[5, 6, rows - 1, 7, rows - 2, rows - 3, 8]])


def logits(model, ids):
    found = model(torch.tensor(ids) if isinstance(model, torch.nn.Module) else ids).logits
    return found.detach().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)


def configs(how, new_ids):
    lora = Q | how | {"r": 2, "task_type": "CAUSAL_LM"}
    return lora | ({"trainable_token_indices": new_ids} if how.get("trainable_token_indices") else {})


CASES = [
    ("qwen2", False, {}),
    ("qwen2", True, {}),
    thorough("gpt2", True, {"target_modules": ["c_attn"]}),
    thorough("gpt2", True, {"target_modules": ["c_attn", "wte"]}),
    ("qwen2", False, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    thorough("qwen2", True, {"modules_to_save": ["embed_tokens", "lm_head"]}),
    thorough("qwen2", False, {"modules_to_save": ["lm_head"]}),
    ("qwen2", True, {"trainable_token_indices": True}),
    ("qwen2", False, {"trainable_token_indices": True, "modules_to_save": ["lm_head"]}),
    ("qwen2", True, {"target_modules": ["q_proj", "embed_tokens"]}),
    thorough("qwen2", False, {"target_modules": "all-linear"}),
]


@usual("qwen2-False-how0", "qwen2-True-how1", "qwen2-False-how4", "qwen2-True-how7", "qwen2-False-how8")
@pytest.mark.parametrize(("kind", "tied", "how"), CASES)
def test_the_tables_are_saved_and_read_as_pefts(kind, tied, how, checkpoint, tmp_path):
    base = checkpoint(kind, head="causal", num_hidden_layers=2, tie_word_embeddings=tied)
    ids = ids_of(resized(base))
    lora = configs(how, ids[0, [2, 4]].tolist())
    theirs = peft.get_peft_model(resized(base), peft.LoraConfig(init_lora_weights=False, **lora)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = logits(theirs, ids)
    ours = trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    np.testing.assert_allclose(logits(ours, ids), wanted, atol=2e-5)
    ours.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("theirs", "again"))
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
    args = trl_jax.SFTConfig(str(tmp_path), report_to=[])
    np.testing.assert_allclose(logits(from_torch(theirs, args, "lm"), ids), wanted, atol=2e-5)
    made = with_adapter(from_torch(resized(base), args, "lm"), LoraConfig(**lora), 0)
    made.save_pretrained(tmp_path / "made")
    assert load_file(tmp_path / "made" / WEIGHTS).keys() == before.keys()
    loaded = peft.PeftModel.from_pretrained(resized(base, seed=1), tmp_path / "made").eval()
    np.testing.assert_allclose(logits(loaded, ids), logits(made, ids), atol=2e-5)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_the_table_that_peft_leaves_out_beside_a_targeted_one_is_saved(target, checkpoint, tmp_path):
    base = checkpoint("qwen2", head="causal", num_hidden_layers=2, tie_word_embeddings=False)
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj", target])
    args = trl_jax.SFTConfig(str(tmp_path), report_to=[])
    made = with_adapter(from_torch(resized(base), args, "lm"), lora, 0)
    made.save_pretrained(tmp_path / "made")
    ids = ids_of(resized(base))
    loaded = peft.PeftModel.from_pretrained(resized(base, seed=1), tmp_path / "made").eval()
    np.testing.assert_allclose(logits(loaded, ids), logits(made, ids), atol=2e-5)


def test_a_model_of_its_own_size_saves_no_tables(checkpoint, tmp_path):
    model = trl_jax.AutoModelForCausalLM.from_pretrained(checkpoint("qwen2", head="causal", num_hidden_layers=2))
    with_adapter(model, LoraConfig(r=2, task_type="CAUSAL_LM", **Q), 0).save_pretrained(tmp_path)
    assert not [name for name in load_file(tmp_path / WEIGHTS) if "embed" in name or "lm_head" in name]


def trainer_of(kind, model, tokenizer, out, **config):
    rows = [{"text": f"<note>{row['text']}"} for row in text_rows(8)]
    if kind == "DPO":
        rows = [{"prompt": "<note>", "chosen": row["text"], "rejected": row["text"][::-1]} for row in rows]
    facts = BASE | {"max_length": 64, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    args = getattr(trl_jax, f"{kind}Config")(str(out), **facts | config)
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", **Q, modules_to_save=["lm_head"] if kind == "DPO" else None)
    return getattr(trl_jax, f"{kind}Trainer")(
        model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora
    )


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@usual("SFT")
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_resume_goes_on_with_the_same_rows(kind, checkpoint, tmp_path):
    """Even though the user's script has drawn other rows. DPO's reference also gets the first ones, under a trained
    head."""
    base = checkpoint(**SMALL)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<note>", "</note>", "<end>"])
    whole = trainer_of(kind, resized(base), tokenizer, tmp_path / "whole")
    whole.train()
    again = trainer_of(kind, resized(base, seed=1), tokenizer, tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:] != losses(again)[:2]
    whole, again = (load_file(tmp_path / run / "checkpoint-4" / WEIGHTS) for run in ("whole", "again"))
    assert all((whole[name] == again[name]).all() for name in whole) and whole.keys() == again.keys()


def test_a_chat_format_on_a_model_of_ours(checkpoint, tmp_path):
    base = checkpoint(**SMALL)
    model = trl_jax.AutoModelForCausalLM.from_pretrained(base)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    model, tokenizer = trl_jax.setup_chat_format(model, tokenizer)
    trainer = trainer_of("SFT", model, tokenizer, tmp_path / "run", save_strategy="no")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    ids = np.array([[5, 6, tokenizer.bos_token_id, 7, tokenizer.eos_token_id]])
    loaded = trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    np.testing.assert_array_equal(logits(loaded, ids), logits(trainer.model, ids))
    names = [name for name in load_file(tmp_path / "saved" / WEIGHTS) if "lora" not in name]
    assert names and all(name.startswith("base_model.model.") for name in names)


def test_virtual_tokens_on_a_resized_model_are_refused(checkpoint, tmp_path):
    base, args = checkpoint(**SMALL), trl_jax.SFTConfig(str(tmp_path), report_to=[])
    config = trl_jax.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="was resized to .* Save the resized model with save_pretrained"):
        with_adapter(from_torch(resized(base), args, "lm"), config, 0)
    resized(base).save_pretrained(tmp_path / "resized")
    model = trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path / "resized")
    assert with_adapter(model, config, 0).backend.virtual.count == 2


@usual("float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resume_on_other_frozen_weights_is_refused(dtype, checkpoint, tmp_path):
    base = checkpoint(**SMALL, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    trainer_of("SFT", str(base), tokenizer, tmp_path, max_steps=2, model_init_kwargs={"dtype": dtype}).train()
    same, other = (
        transformers.AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype)) for _ in range(2)
    )
    trainer_of("SFT", same, tokenizer, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    with torch.no_grad():
        other.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    other = trainer_of("SFT", other, tokenizer, tmp_path)
    with pytest.raises(
        ValueError, match="with other frozen weights than this model has: decoder.layers.mlp.down.weight"
    ):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
