"""Language models that see images as well, whose classifiers transformers does not have: the text part is computed and
differentiated, and all of the checkpoint is saved as it came."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from compat_tests.effort import usual, usually
from compat_tests.models import causal, families, variants
from compat_tests.tiny import SHAPE, tiny_tokenizer
from trl_jax import AutoModelForCausalLM
from trl_jax.hub.checkpoint.saving import entries_of, read_tensor
from trl_jax.models.functional import merge

torch = pytest.importorskip("torch")

QUICKLY = {"xla_backend_optimization_level": 0}
QWEN_TOWER = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip
GEMMA_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16, "pooling_kernel_size": 2,
}  # fmt: skip
MROPE = families.QUARTER | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
# The text part, the towers, and how their tensors' names begin.
CASES = {
    "qwen3_5_moe": ({"rope_parameters": MROPE}, {"vision_config": QWEN_TOWER}, "model.visual."),
    "gemma4": (
        {"sliding_window": 7, "final_logit_softcapping": 4.0}, {"vision_config": GEMMA_TOWER, "audio_config": None},
        ("model.vision_tower.", "model.embed_vision."),
    ),
    "gemma4 with experts": (
        families.VARIANTS["gemma4_text"]["experts"], {"vision_config": GEMMA_TOWER, "audio_config": None},
        ("model.vision_tower.", "model.embed_vision."),
    ),
}


@pytest.fixture(scope="module", params=usually(lambda name: "experts" not in name, CASES))
def case(request, tmp_path_factory):
    """(model_type, folder, transformers' model, how the names of the towers' tensors begin)."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text, parts, tower = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model_type = request.param.partition(" ")[0]
    words, own = tiny_tokenizer(folder), f"{model_type}_text"
    text = SHAPE | families.SHAPES[own] | text | {"vocab_size": len(words) + 8, "pad_token_id": words.pad_token_id}
    text = {key: value for key, value in text.items() if key not in families.ABSENT.get(own, ())}
    config = AutoConfig.for_model(model_type, text_config=text, **parts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model_type, folder, model.eval(), tower


def test_logits(case):
    _, folder, theirs, _ = case
    ids, mask = (rows[:3] for rows in causal.rows())
    model, seen = AutoModelForCausalLM.from_pretrained(folder), mask.astype(bool)
    wanted = causal.forward(theirs, ids, mask).detach().numpy()[seen]
    assert wanted.std() > 0.03
    variants.assert_close(np.asarray(model(ids, mask).logits)[seen], wanted, 1e-5, "logits")


@usual("gemma4")
def test_gradients(case, tmp_path):
    """Of a weighted sum of log-probabilities; the tower has none."""
    _, folder, theirs, tower = case
    ids, mask = (rows[:3] for rows in causal.rows())
    reads, targets = causal.reads_and_targets(ids, mask)
    pull = np.linspace(-1.0, 1.5, len(reads), dtype=np.float32)
    model, seen = AutoModelForCausalLM.from_pretrained(folder), mask.astype(bool)
    logits = causal.forward(theirs, ids, mask)

    def pulled(params):
        places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        found = merge(model.graph, params)(jnp.asarray(ids), places, reads, targets=targets, valid=jnp.asarray(seen))
        return jnp.sum(found.logps * pull)

    gradients = jax.jit(jax.grad(pulled), compiler_options=QUICKLY)(model.params)
    found = {tensor: read_tensor(gradients, places) for tensor, places in entries_of(gradients, model.source).items()}
    logps = torch.log_softmax(logits, -1).reshape(-1, model.vocab_size)[reads[:-2]]
    (logps[torch.arange(len(logps)), torch.tensor(targets[:-2])] * torch.tensor(pull[:-2])).sum().backward()
    wanted = _gradients(theirs, tmp_path)
    assert set(found) == {name for name in wanted if not name.startswith(tower)} != set(wanted)
    for name, values in found.items():
        variants.assert_close(values, wanted[name], 1e-4, name)


def _gradients(model, folder) -> dict[str, np.ndarray]:
    """Those that a backward pass left, by their names on disk; the model stays as it is."""
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = variants.reference_gradients(model, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_byte_for_byte(dtype, fused, case, tmp_path):
    """Also of experts that lie in one tensor, as transformers' modules have them; its own export says what is right."""
    _, folder, theirs, _ = case
    there, known = _copy(folder, tmp_path / "there", fused), type(theirs)
    known.from_pretrained(there, dtype=dtype).save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype="auto")
    model.save_pretrained(tmp_path / "back")
    weights = sorted(path.name for path in (tmp_path / "theirs").glob("*.safetensors"))
    assert len(weights) > 1
    for name in weights:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    ids, mask = (rows[:2] for rows in causal.rows())
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    np.testing.assert_array_equal(model(ids, mask).logits, before(ids, mask).logits)


def _copy(folder, there, fused: bool):
    """The checkpoint, its experts each in tensors of its own or all in one."""
    if not fused:
        return folder
    tensors = load_file(folder / "model.safetensors")
    layers = {name.partition(".0.gate_proj")[0] for name in tensors if name.endswith(".experts.0.gate_proj.weight")}
    if not layers:
        pytest.skip("its experts, if any, are in one tensor anyway")
    for layer in layers:
        count = sum(name.startswith(layer) and name.endswith(".gate_proj.weight") for name in tensors)
        gate, up, down = (
            np.stack([tensors.pop(f"{layer}.{expert}.{part}_proj.weight") for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{layer}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{layer}.down_proj": down}
    there.mkdir()
    (there / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, there / "model.safetensors", metadata={"format": "pt"})
    return there
