"""Every parameter names its axes; mesh.sharding's rules divide them by those names only."""

from __future__ import annotations

import pytest

from compat_tests.models import encoders
from compat_tests.tiny import tiny_model
from trl_jax.hub.auto import AutoModelForSequenceClassification, find_checkpoint
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.mesh.mesh import RULES

LAYER = {
    "attention.q.weight": "heads embed", "attention.k.weight": "kv embed", "attention.v.weight": "kv embed",
    "attention.o.weight": "embed heads", "attention.q.bias": "heads", "attention.k.bias": "kv",
    "attention.v.bias": "kv", "attention.o.bias": "embed", "attention.distance_q.weight": "heads embed",
    "attention.distance_k.weight": "kv embed", "attention.distance_q.bias": "heads", "attention.distance_k.bias": "kv",
    "mlp.gate.weight": "mlp embed", "mlp.up.weight": "mlp embed", "mlp.down.weight": "embed mlp", "mlp.up.bias": "mlp",
    "mlp.gate.bias": "mlp", "mlp.down.bias": "embed", "mlp.gate": "experts mlp embed", "mlp.up": "experts mlp embed",
    "mlp.gate_bias": "experts mlp", "mlp.up_bias": "experts mlp", "mlp.down_bias": "experts embed",
    "mlp.router.bias": "-", "attention.sinks": "heads",
    "mlp.down": "experts embed mlp", "mlp.router.weight": "- embed", "mlp.shared_gate.weight": "- embed",
    "mlp.shared.gate.weight": "mlp embed", "mlp.shared.up.weight": "mlp embed", "mlp.shared.down.weight": "embed mlp",
    "mlp.activation.alpha_p": "-", "mlp.activation.alpha_n": "-", "mlp.activation.beta": "", "mlp.activation.eps": "",
}  # fmt: skip
MODEL = {
    "embed.weight": "vocab embed", "position_embed.weight": "- embed", "type_embed.weight": "- embed",
    "distance_embed.weight": "- embed", "score.weight": "- embed", "head.out.weight": "- embed", "head.out.bias": "-",
    "head.dense.weight": "- -", "head.dense.bias": "-", "projection.weight": "- -", "projection.bias": "-",
    "convolution.weight": "- - -", "convolution.bias": "-",
}  # fmt: skip
CASES = [("llama", "yarn"), ("qwen2_moe", "plain"), ("gpt2", "plain"), ("olmo2", "plain"), ("cohere", "plain")]
CASES += [("gpt_oss", "plain"), ("apertus", "plain")]
ENCODERS = ["bert", "modernbert", "deberta", "deberta-v2", "electra"]


def wanted(path, ndim):
    _, stacked, layer = path.partition(".layers.")
    if "norm." in path:
        lead = ("layers",) if ndim > 1 else ()
        return (*lead, *("norm",) * (ndim - len(lead)))
    said = LAYER[layer] if stacked else MODEL[path.removeprefix("decoder.").removeprefix("encoder.")]
    axes = tuple("" if axis == "-" else axis for axis in said.split())
    return ("layers", *axes) if stacked else axes


def axes_of(model):
    """(the axes that the parameters name, the expected ones)"""
    said = {path: model.backend.axes[path] for path in model.params}
    return said, {path: wanted(path, array.ndim) for path, array in model.params.items()}


@pytest.mark.parametrize(("family", "name"), CASES)
def test_decoders(family, name, built):
    said, right = axes_of(AutoModelForSequenceClassification.from_pretrained(built(family, name)))
    assert said == right and set().union(*said.values()) <= set(RULES)


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family, tmp_path):
    said, right = axes_of(AutoModelForSequenceClassification.from_pretrained(encoders.build(tmp_path, family, "plain")))
    assert said == right and set().union(*said.values()) <= set(RULES)


@pytest.mark.parametrize(("bits", "codes"), [("load_in_4bit", "flat"), ("load_in_8bit", "heads embed")])
def test_few_bits_have_the_axes_of_their_matrix_or_lie_flat(bits, codes, tmp_path):
    checkpoint = find_checkpoint(str(tiny_model(tmp_path, "llama")), dtype="float32")
    lora, quantization = LoraConfig(r=4, target_modules="all-linear"), BitsAndBytesConfig(**{bits: True})
    model = checkpoint.load_adapted(lora, 0, quantization=quantization)
    axes = model.backend.axes
    for path, array in model.frozen.items():
        assert len(axes[path]) == array.ndim, path
    name = "decoder.layers.attention.q.weight"
    assert axes[f"{name}.codes"] == ("layers", *codes.split()) and axes[f"{name}.scales"] == ("layers", "flat")
    trained = {path for path in model.params if "lora_" in path}
    assert trained and not trained & set(axes)  # adapters are stored as in their file
