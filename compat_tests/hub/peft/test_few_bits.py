"""Models loaded by the user with bitsandbytes in 4 or 8 bits: as policies, references and classifiers."""

from __future__ import annotations

import numpy as np
import pytest

import trl_jax
from compat_tests.effort import only_thorough, thorough
from compat_tests.parity.dpo_cases import SMALL
from compat_tests.trainer.test_dpo_trainer import make, steps, trained
from trl_jax.hub.quantization import quantized
from trl_jax.nn.linear import QUANTIZED_BLOCK, TABLES, Format, dequantized

torch, trl = pytest.importorskip("torch"), pytest.importorskip("trl")
peft, _ = pytest.importorskip("peft"), pytest.importorskip("bitsandbytes")

WIDE = SMALL | {"hidden_size": 64, "intermediate_size": 64}  # row lengths divisible by the block size, see below
LORA = {"r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}


def loaded(folder, **bits):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    with torch.compiler.set_stance("force_eager"):
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**bits))


@only_thorough
@pytest.mark.parametrize(
    "bits",
    [
        thorough({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        thorough({"load_in_8bit": True}),
    ],
)
def test_a_torch_model_in_few_bits_is_a_reference(checkpoint, tmp_path, bits):
    """It stays quantized and computes in float32, while bitsandbytes rounds products to 16 bits on a CPU."""
    model, other = checkpoint(**WIDE), checkpoint(**WIDE, seed=5)
    theirs = trained(trl, model, tmp_path / "b", ref_model=loaded(other, **bits))
    trainer = make(trl_jax, model, tmp_path / "a", ref_model=loaded(other, **bits))
    arrays = trainer.parts.setup.reference.arrays
    codes = [array for path, array in arrays.items() if path.endswith("q.weight.codes")]
    assert [array.dtype.name for array in codes] == ["uint8" if "load_in_4bit" in bits else "int8"]
    trainer.train()
    for mine, wanted in zip(steps(trainer), steps(theirs), strict=True):
        assert abs(wanted["rewards/chosen"]) > 0.01
        assert mine["loss"] == pytest.approx(wanted["loss"], abs=5e-3)
    ids = np.arange(8)[None]
    with torch.no_grad():
        unpacked = loaded(other, **bits).dequantize().float()(torch.tensor(ids)).logits.numpy()
    assert np.allclose(trainer.ref_model(ids).logits, unpacked, atol=1e-5)


def test_a_torch_model_in_few_bits_trains_an_adapter_as_trls(checkpoint, tmp_path):
    model, bits = checkpoint(**WIDE), {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    policy = loaded(model, **bits)
    ours = trained(trl_jax, policy, tmp_path / "a", peft_config=trl_jax.LoraConfig(**LORA))
    theirs = trained(trl, loaded(model, **bits), tmp_path / "b", peft_config=peft.LoraConfig(**LORA))
    for mine, wanted in zip(steps(ours), steps(theirs), strict=True):  # TRL casts the adapter to bfloat16
        assert mine["loss"] == pytest.approx(wanted["loss"], abs=1e-3)
        assert mine["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-2)
    merged = ours.model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = np.arange(8)[None]
    assert np.allclose(again(ids).logits, ours.model(ids).logits, atol=1e-4)
    with pytest.raises(ValueError, match="You cannot perform fine-tuning on purely quantized models"):
        make(trl_jax, loaded(model, **bits), tmp_path / "c")


@pytest.mark.parametrize("shape", [(6, 32), (4, 96)])
def test_rows_that_end_within_a_block_take_the_scales_of_their_blocks(shape):
    """If a block spans several rows, bitsandbytes' kernel for CPUs with AVX512 uses the scales of other blocks, and may
    be off by the whole scale."""
    import bitsandbytes.functional as bnb

    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    with torch.compiler.set_stance("force_eager"):
        wanted, state = bnb.quantize_4bit(torch.tensor(values), blocksize=QUANTIZED_BLOCK, quant_type="nf4")
    found, packed = quantized(values, Format("nf4", shape)), wanted.numpy().reshape(-1)
    assert (found["codes"] == packed).all() and (found["scales"] == state.absmax.numpy()).all()
    codes = np.stack([packed >> 4, packed & 15], axis=-1).reshape(-1)
    plain = TABLES["nf4"][codes] * np.repeat(state.absmax.numpy(), QUANTIZED_BLOCK)
    back = np.asarray(dequantized(Format("nf4", shape), found))
    assert np.allclose(back, plain.reshape(shape), atol=1e-7)
    widest = np.diff(TABLES["nf4"]).max() / 2
    assert (np.abs(back - values) <= widest * found["scales"].max() * 1.0001).all()
