"""Runs with an adapter: logging, saving and resuming; dropout, layouts and quantized weights."""

from __future__ import annotations

import json
import logging

import jax
import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import only_thorough
from compat_tests.hub.peft.runs import train
from compat_tests.parity.marks import steps_of
from compat_tests.parity.reference import read_weights
from compat_tests.tiny import preference_rows, tiny_model
from compat_tests.trainer.trainers import FACTS, make, table
from trl_jax.hub.auto import find_checkpoint
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.pretrained import compiled_scores
from trl_jax.hub.quantization import BitsAndBytesConfig, formats, quantized
from trl_jax.models.model import merge
from trl_jax.nn.linear import DYNAMIC, TABLES, Format, dequantized
from trl_jax.training.failures import check_weights

IDS = np.array([[5, 6, 7, 8, 9, 10]])
SMALL = {"num_hidden_layers": 2, "head": "causal"}


def losses(trainer):
    return [entry["loss"] for entry in steps_of(trainer.state.log_history)]


def adapter(**how):
    return LoraConfig(**({"r": 2, "target_modules": ["q_proj"], "task_type": "SEQ_CLS"} | how))


def test_the_head_is_added_and_told_and_the_share_is_logged(checkpoint, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="trl_jax"):
        lora = adapter(task_type=None)
        trainer = make(trl_jax, checkpoint("llama", **FACTS), tmp_path, peft_config=lora, config={"log_level": "info"})
    assert "the head 'score' was added to modules_to_save, so that it is trained and saved." in caplog.text
    train_, count = trainer.get_num_trainable_parameters(), trainer.model.num_parameters()
    assert f"Training with adapter: {train_:,} of {count:,} parameters ({100 * train_ / count:.4f}%)." in caplog.text
    assert "score.weight" in trainer.model.params and lora.modules_to_save is None


def test_a_run_goes_on_bit_for_bit_and_its_folder_is_an_adapters(checkpoint, tmp_path):
    folder = checkpoint("llama", **FACTS)
    config = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "disable_dropout": False}
    lora = adapter(lora_dropout=0.3, use_dora=True)
    whole = make(trl_jax, folder, tmp_path / "a", peft_config=lora, config=config)
    whole.train()
    again = make(trl_jax, folder, tmp_path / "b", peft_config=lora, config=config)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert losses(again)[-2:] == losses(whole)[-2:]
    saved = tmp_path / "a" / "checkpoint-4"
    assert {path.name for path in saved.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert not (saved / "config.json").exists() and (saved / "tokenizer.json").is_file()
    mine, other = (read_weights(tmp_path / run / "checkpoint-4") for run in "ab")
    assert all((mine[name] == other[name]).all() for name in mine)
    whole.create_model_card()
    card = (tmp_path / "a" / "README.md").read_text()
    assert "library_name: peft" in card and "- lora" in card and "AutoPeftModelForSequenceClassification" in card


@only_thorough
def test_dropout_in_front_of_the_adapter(checkpoint, tmp_path):
    """Active in training only, and only if disable_dropout is False, unlike RewardConfig's default."""
    runs = {}
    for name, rate, disabled in (("none", 0.0, True), ("disabled", 0.5, True), ("on", 0.5, False)):
        lora = adapter(lora_dropout=rate, init_lora_weights=False)
        config = {"disable_dropout": disabled, "batch_layout": "padded", "max_steps": 2}
        runs[name] = make(trl_jax, checkpoint("llama", **FACTS), tmp_path, peft_config=lora, config=config)
        runs[name].train()
    assert losses(runs["none"]) == losses(runs["disabled"]) != losses(runs["on"])


def test_no_two_uses_of_dropout_draw_the_same_numbers(tmp_path, monkeypatch):
    rates = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2, "num_hidden_layers": 3}
    folder = tiny_model(tmp_path / "gpt2", "gpt2", head="causal", **rates)
    lora = LoraConfig(r=2, target_modules=["c_attn", "c_proj"], lora_dropout=0.2, task_type="CAUSAL_LM")
    args = trl_jax.SFTConfig(str(tmp_path), report_to="none", disable_tqdm=True)
    rows = Dataset.from_list([{"text": "one two three"}])
    model = trl_jax.SFTTrainer(str(folder), args, train_dataset=rows, peft_config=lora).model
    drawn, bernoulli = [], jax.random.bernoulli

    def recorded(key, *given):
        jax.debug.callback(lambda data: drawn.append(tuple(data.tolist())), jax.random.key_data(key))
        return bernoulli(key, *given)

    monkeypatch.setattr("jax.random.bernoulli", recorded)
    key, positions = jax.random.key(0), np.arange(IDS.shape[1])[None]
    merge(model.backend.graph, model.arrays, key)(IDS, positions, np.arange(IDS.size), dropout_key=key)
    jax.effects_barrier()
    uses = 1 + 3 * (3 + 3)  # the embedding; in each layer three of the model's and three adapters
    assert len(set(drawn)) == uses
    assert len(drawn) == uses + 3 * 2  # queries, keys and values share c_attn's adapter, and thus its input


def test_streams_give_what_padded_rows_do(checkpoint, tmp_path):
    rows = table(8, kind="prompt")
    found = []
    for one in ("padded", "shared"):
        lora, config = adapter(use_dora=True), {"batch_layout": one, "learning_rate": 1e-2}
        trainer = make(trl_jax, checkpoint("llama", **FACTS), tmp_path, train=rows, peft_config=lora, config=config)
        trainer.train()
        found.append(losses(trainer))
    assert np.allclose(*found, rtol=0, atol=1e-5)


def test_an_adapters_folder_is_trained_further_as_a_model(checkpoint, tmp_path):
    run = train(trl_jax, (LoraConfig, {"target_modules": ["q_proj"]}), checkpoint("llama", **FACTS), tmp_path / "a",
                rows=8, max_steps=2)  # fmt: skip
    trainer = make(trl_jax, run.folder, tmp_path / "b", config={"max_steps": 1, "learning_rate": 1e-2})
    before = np.asarray(trainer.model(IDS).logits)
    assert np.allclose(before, run.trainer.model(IDS).logits, atol=1e-6)
    trainer.train()
    assert not np.allclose(before, trainer.model(IDS).logits, atol=1e-4)
    assert json.loads((run.folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    with pytest.raises(ValueError, match="the model has an adapter already. Leave peft_config out"):
        make(trl_jax, run.folder, tmp_path / "c", peft_config=adapter())


@only_thorough
def test_a_model_of_ours_keeps_its_own_numbers(checkpoint, tmp_path):
    model = trl_jax.AutoModelForSequenceClassification.from_pretrained(checkpoint("llama", **FACTS))
    before = {path: np.array(array) for path, array in model.params.items()}
    trainer = make(trl_jax, model, tmp_path, peft_config=adapter(), config={"learning_rate": 1e-2})
    trainer.train()
    assert all((np.asarray(model.params[path]) == value).all() for path, value in before.items())
    merged = trainer.model.merge_and_unload()
    assert np.allclose(merged(IDS).logits, trainer.model(IDS).logits, atol=1e-5) and not merged.frozen
    assert list(trainer.model.peft_config) == ["default"] and trainer.model.peft_config["default"].r == adapter().r
    assert not hasattr(merged, "peft_config")


@only_thorough
def test_experts_of_sixteen_bits_beside_an_adapter(tmp_path):
    """Their fused tensors are kept as raw 16-bit codes and saved byte for byte."""
    folder = tiny_model(tmp_path / "in", "gpt_oss", head="causal", dtype="bfloat16", sliding_window=7)
    lora = adapter(target_parameters=["mlp.experts.down_proj"])
    model = find_checkpoint(str(folder), head="lm", dtype="bfloat16").load_adapted(lora, 0)
    held = [model.frozen[f"decoder.layers.mlp.{name}.codes"].dtype.name for name in ("gate", "up", "down")]
    assert held == ["uint16"] * 3
    plain = trl_jax.AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_array_equal(model(IDS).logits, plain(IDS).logits)
    model.merge_and_unload().save_pretrained(tmp_path / "out")
    before, after = ((path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "out"))
    assert before == after


def test_from_the_command_line(checkpoint, tmp_path, monkeypatch):
    from trl_jax.cli.main import main

    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in preference_rows(8)))
    flags = "--use_peft --lora_r 3 --lora_target_modules all-linear --lora_task_type SEQ_CLS --load_in_4bit"
    flags += " --max_steps 1 --use_cpu --bf16 False --report_to none --save_strategy no --disable_tqdm True"
    model = str(checkpoint("llama", **FACTS))
    where = ["--model_name_or_path", model, "--dataset_name", str(data), "--output_dir", str(tmp_path / "out")]
    assert main(["reward", *where, *flags.split(), "--bnb_4bit_quant_type", "nf4"]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 32, model)


def test_a_base_of_sixteen_bits_is_never_made_32(checkpoint, tmp_path):
    """On a CPU, XLA would convert a whole stack of layers. Scores are those of the rounded weights."""
    base, lora = checkpoint("llama", **SMALL), adapter(target_modules=["up_proj"], modules_to_save=["down_proj"])
    model = make(trl_jax, base, tmp_path, peft_config=lora, config={"model_init_kwargs": {"dtype": "bfloat16"}}).model
    plain = trl_jax.AutoModelForSequenceClassification.from_pretrained(base, dtype="bfloat16")
    assert np.abs(np.asarray(model(IDS).logits) - np.asarray(plain(IDS).logits)).max() < 1e-6
    held = [model.frozen[f"decoder.{name}.weight.codes"] for name in ("embed", "layers.mlp.up", "layers.attention.q")]
    assert {codes.dtype.name for codes in held} == {"uint16"}
    assert model.params["decoder.layers.mlp.down.weight"].dtype == np.float32
    assert model.num_parameters() == plain.num_parameters() + model.num_parameters(only_trainable=True)
    tokens, at = IDS.astype(np.int32), np.asarray([5], np.int32)
    mask = np.ones_like(tokens, bool)
    step = compiled_scores.lower(model.graph, 0, model.arrays, tokens, mask, at).compile().as_text()
    assert "u16[2,96,64]" in step and "f32[2,96,64]" not in step
    table = plain.get_input_embeddings().weight
    assert model.num_parameters(exclude_embeddings=True) == model.num_parameters() - table.size
    assert (model.get_input_embeddings().weight == table).all()
    model.frozen["decoder.embed.weight.codes"] = held[0].at[3, 4].set(0x7FC0)  # a NaN
    with pytest.raises(ValueError, match="decoder.embed.weight.codes hold NaN or infinite values"):
        check_weights(model)
    model.frozen["decoder.embed.weight.codes"] = held[0]
    merged = model.merge_and_unload()
    assert (np.asarray(merged.params["decoder.embed.weight"]) == np.asarray(plain.params["decoder.embed.weight"])).all()


# ---- quantized weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("nf4", False), ("fp4", False)])
@pytest.mark.parametrize("shape", [(96, 64), (7, 46)])
def test_four_bits_are_bitsandbytes(kind, nested, shape):
    torch, bnb = pytest.importorskip("torch"), pytest.importorskip("bitsandbytes.functional")
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * 0.05
    with torch.compiler.set_stance("force_eager"):  # compiling would take longer than computing
        wanted, state = bnb.quantize_4bit(
            torch.tensor(values), blocksize=64, compress_statistics=nested, quant_type=kind
        )
        back = bnb.dequantize_4bit(wanted, state).numpy()
    form = Format(kind, shape, nested)
    found = quantized(values, form)
    assert (found["codes"] == wanted.numpy().reshape(-1)).all()
    assert (found["scales"] == state.absmax.numpy()).all()
    assert np.abs(np.asarray(dequantized(form, found)) - back).max() < 1e-7


def test_the_table_of_nf4_is_the_published_one():
    """Quantiles of a normal distribution scaled to 1, as in Dettmers et al. (2023)."""
    from statistics import NormalDist

    edge, quantile = 0.9677083, NormalDist().inv_cdf
    upper = [quantile(p) for p in np.linspace(edge, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(edge, 0.5, 8)[:-1]]
    made = np.sort([*upper, 0.0, *lower]) / max(upper)
    assert np.abs(made - TABLES["nf4"]).max() < 2e-6 and len(DYNAMIC) == 256


def test_eight_bits_are_within_half_a_step():
    values = np.random.default_rng(1).standard_normal((5, 40)).astype(np.float32)
    form = Format("int8", (5, 40))
    back = np.asarray(dequantized(form, quantized(values, form)))
    assert (np.abs(back - values) <= np.abs(values).max(axis=1, keepdims=True) / 127 * 0.5001).all()


@only_thorough  # trainer/test_sft_trainer.py tests it with SFT
def test_training_on_quantized_weights(checkpoint, tmp_path):
    """The loss falls as with float weights; matrices stay quantized; merging gives floats that compute the same."""
    held = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    rows, config = table(80, seed=3), {"max_steps": 20, "learning_rate": 1e-2}
    how = {"train": rows, "config": config, "peft_config": adapter(r=4, target_modules=["v_proj"])}
    base = checkpoint("llama", **SMALL)
    plain = make(trl_jax, base, tmp_path, **how)
    small = make(trl_jax, base, tmp_path, **how, quantization_config=BitsAndBytesConfig(**held))
    assert small.model.num_parameters() == plain.model.num_parameters()
    size = [sum(array.nbytes for path, array in t.model.frozen.items() if ".layers." in path) for t in (plain, small)]
    assert size[1] < size[0] * 0.17
    for trainer in (plain, small):
        trainer.train()
    early, late = np.mean(losses(small)[:5]), np.mean(losses(small)[-5:])
    assert late < 0.85 * early and abs(late - np.mean(losses(plain)[-5:])) < 0.15
    assert np.allclose(small.model.merge_and_unload()(IDS).logits, small.model(IDS).logits, atol=1e-5)


def test_eight_bit_weights_score_nearly_the_same(checkpoint, tmp_path):
    base, held = checkpoint("llama", **FACTS), BitsAndBytesConfig(load_in_8bit=True)
    plain, small = (
        make(trl_jax, base, tmp_path, peft_config=adapter(), quantization_config=q).model for q in (None, held)
    )
    assert small.frozen["decoder.layers.mlp.down.weight.codes"].dtype == np.int8
    assert 0 < np.abs(np.asarray(plain(IDS).logits) - np.asarray(small(IDS).logits)).max() < 0.02


def test_what_is_not_quantized(checkpoint):
    from trl_jax.hub.config import read_native_config

    folder = checkpoint("llama", **FACTS)
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=["o_proj"])
    found = formats(config, adapter(modules_to_save=["down_proj"]), read_native_config(folder))
    assert {path.split(".")[-2] for path in found} == {"q", "k", "v", "gate", "up"}


def test_quantized_weights_do_not_train(checkpoint, tmp_path):
    folder = checkpoint("llama", **FACTS)
    four, lora = BitsAndBytesConfig(load_in_4bit=True), adapter(init_lora_weights="pissa")
    with pytest.raises(ValueError, match="'pissa' modifies .*q.weight, which is quantized to fp4."):
        make(trl_jax, folder, tmp_path, quantization_config=four, peft_config=lora)
    with pytest.raises(ValueError, match="quantized weights cannot be trained. Also pass peft_config="):
        make(trl_jax, folder, tmp_path, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    with pytest.raises(ValueError, match="bnb_4bit_quant_type must be nf4 or fp4, got 'nf5'"):
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf5")
    with pytest.raises(ValueError, match="load_in_4bit and load_in_8bit are both False"):
        BitsAndBytesConfig()


def test_exported_programs_take_no_adapter(tmp_path):
    from compat_tests.tiny import tiny_model

    folder = tiny_model(tmp_path / "model", "gpt_neo", num_hidden_layers=1, attention_types=[[["global"], 1]])
    with pytest.raises(
        ValueError, match="models of type 'gpt_neo' run as exported programs, which do not support adapters"
    ):
        make(trl_jax, folder, tmp_path / "out", peft_config=adapter())
