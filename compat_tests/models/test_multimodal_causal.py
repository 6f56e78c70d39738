"""Multimodal language models without a classifier in transformers: logits and gradients of the text part match, and the
whole checkpoint is saved as it was."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from datasets import Dataset
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

import trl_jax
from compat_tests.effort import only_thorough, usual
from compat_tests.models import causal, towers, variants
from trl_jax.hub.auto import AutoModelForCausalLM, with_adapter
from trl_jax.hub.families import vlm_text
from trl_jax.models.model import merge
from trl_jax.trainer.sft_config import SFTConfig
from trl_jax.trainer.sft_trainer import SFTTrainer
from trl_jax.training.data import averages_micro_batches

torch = pytest.importorskip("torch")

QUICKLY = {"xla_backend_optimization_level": 0}
USUAL = ("gemma4", "glm4v", "mistral3", "qwen2_5_vl", "qwen3_5_moe", "qwen3_vl_moe")  # the others are similar to these


@pytest.fixture(scope="module", params=towers.CASES)
def case(request, tmp_path_factory):
    """(folder, transformers' model, prefixes of the towers' tensor names)."""
    folder = tmp_path_factory.mktemp(request.param)
    return folder, towers.build(folder, request.param), towers.CASES[request.param][2]


def test_steps_are_averaged_over_micro_batches_where_transformers_averages_them():
    import transformers
    from transformers.models.auto import modeling_auto

    whole, alone = (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )
    for family in vlm_text.FAMILIES:
        theirs = getattr(transformers, whole[family.model_type])
        averaged = not getattr(theirs, "accepts_loss_kwargs", True)
        assert family.mean_of_micro_batches == averaged, family.model_type
        text_class = alone.get(family.model_type, "").endswith("ForCausalLM") and averaged
        assert family.has_text_class == text_class, family.model_type


def test_the_class_and_the_script_say_how_steps_are_averaged(tmp_path):
    towers.build(tmp_path, "qwen3_5_moe")
    texts = trl_jax.AutoModelForCausalLM.from_pretrained(tmp_path)
    adapted = with_adapter(texts, trl_jax.LoraConfig(r=2, target_modules=["q_proj"]), 0)
    whole = trl_jax.Qwen3_5MoeForConditionalGeneration.from_pretrained(tmp_path)
    assert [averages_micro_batches(model) for model in (texts, adapted, whole)] == [False, False, True]
    whole.accepts_loss_kwargs = True
    assert not averages_micro_batches(whole)


@usual("gemma4", "glm4v", "mistral3", "qwen2_5_vl", "qwen3_vl_moe")
def test_logits(case):
    folder, theirs, _ = case
    ids, mask = (rows[:3] for rows in causal.rows())
    model, seen = AutoModelForCausalLM.from_pretrained(folder), mask.astype(bool)
    wanted = causal.forward(_of_text(theirs), ids, mask).detach().numpy()[seen]
    assert wanted.std() > 0.03
    variants.assert_close(np.asarray(model(ids, mask).logits)[seen], wanted, 1e-5, "logits")


def _of_text(model):
    """For llama4 the language model alone: transformers 5.24's full model fails on texts."""
    return model.language_model if model.config.model_type == "llama4" else model


@only_thorough
def test_gradients(case, tmp_path):
    """Of a weighted sum of log-probabilities; the tower has none."""
    folder, theirs, tower = case
    ids, mask = (rows[:3] for rows in causal.rows())
    reads, targets = causal.reads_and_targets(ids, mask)
    pull = np.linspace(-1.0, 1.5, len(reads), dtype=np.float32)
    model, seen = AutoModelForCausalLM.from_pretrained(folder), mask.astype(bool)
    logits = causal.forward(_of_text(theirs), ids, mask)

    def pulled(params):
        places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        found = merge(model.graph, params)(jnp.asarray(ids), places, reads, targets=targets, valid=jnp.asarray(seen))
        return jnp.sum(found.logps * pull)

    gradients = jax.jit(jax.grad(pulled), compiler_options=QUICKLY)(model.params)
    found = dict(model.backend.on_disk(gradients))
    logps = torch.log_softmax(logits, -1).reshape(-1, model.vocab_size)[reads[:-2]]
    (logps[torch.arange(len(logps)), torch.tensor(targets[:-2])] * torch.tensor(pull[:-2])).sum().backward()
    wanted = _gradients(theirs, tmp_path)
    assert set(found) == {name for name in wanted if not name.startswith(tower)} != set(wanted)
    for name, values in found.items():
        mark = 3e-4 if name.endswith("A_log") else 1e-4  # a sum over everything a head reads
        variants.assert_close(values, wanted[name], mark, name)


def _gradients(model, folder) -> dict[str, np.ndarray]:
    """The gradients of a backward pass, by their names on disk; the model is left unchanged."""
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = variants.reference_gradients(model, folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
    return found


@usual(
    "gemma4-bfloat16-False",
    "glm4v-bfloat16-False",
    "mistral3-bfloat16-False",
    "qwen2_5_vl-bfloat16-False",
    "qwen3_5_moe-bfloat16-False",
    "qwen3_vl_moe-bfloat16-False",
)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_byte_for_byte(dtype, fused, case, tmp_path):
    """Also with experts fused into one tensor, as in transformers' modules; compared with transformers' own export."""
    folder, theirs, _ = case
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
    """A copy of the checkpoint, with experts in separate tensors or fused into one."""
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


def _renamed(folder, *pairs: tuple[str, str]) -> None:
    """Rename tensors as in older files; of `pairs` (old prefix, new prefix), the first that matches applies."""
    path, tensors = folder / "model.safetensors", {}
    for name, values in load_file(path).items():
        old, new = next((pair for pair in pairs if name.startswith(pair[0])), ("", ""))
        tensors[new + name.removeprefix(old)] = values
    save_file(tensors, path, metadata={"format": "pt"})


def _flat(folder) -> None:
    """Rewrite config.json as in Qwen2.5-VL's repositories, with the text's keys on the top level."""
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    text = whole.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"]}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text.pop("layer_types")
    path.write_text(json.dumps(text | {"tie_word_embeddings": False} | whole, indent=2))


def _turned(folder) -> None:
    """Transpose experts, as in Qwen3-VL's repositories."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    turned = {name: values.swapaxes(1, 2).copy() for name, values in tensors.items() if ".experts." in name}
    save_file(tensors | turned, path, metadata={"format": "pt"})


def _silent(folder) -> None:
    """Remove tie_word_embeddings, as in Mistral Small 3.1, whose class defaults to a tied head."""
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "tie_word_embeddings"}))


OTHERS = {
    "renamed": ("mistral3", lambda folder: _renamed(
        folder, ("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."), ("multi_modal_projector.", "model.multi_modal_projector."),
    )),
    "renamed visual": ("qwen2_5_vl", lambda folder: _renamed(
        folder, ("model.", "model.language_model."), ("visual.", "model.visual."),
    )),
    "flat": ("qwen2_5_vl", _flat),
    "turned": ("qwen3_vl_moe", _turned),
    "silent": ("mistral3", _silent),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_repositories_of_another_time(other, tmp_path):
    """They are read as transformers reads them, and saved with their original names and keys."""
    folder, (name, change) = tmp_path / "there", OTHERS[other]
    theirs = towers.build(folder, name, tie_word_embeddings=False)
    change(folder)
    ids, mask = (rows[:2] for rows in causal.rows())
    model, seen = AutoModelForCausalLM.from_pretrained(folder), mask.astype(bool)
    wanted = causal.forward(theirs, ids, mask).detach().numpy()[seen]
    again = causal.forward(type(theirs).from_pretrained(folder).eval(), ids, mask).detach().numpy()[seen]
    np.testing.assert_allclose(again, wanted, atol=1e-5)
    variants.assert_close(np.asarray(model(ids, mask).logits)[seen], wanted, 1e-5, "logits")
    model.config.text_config.pad_token_id = 7
    model.save_pretrained(tmp_path / "back")
    back, there = (tmp_path / "back", folder)
    assert (back / "model.safetensors").read_bytes() == (there / "model.safetensors").read_bytes()
    saved, before = (json.loads((place / "config.json").read_text()) for place in (back, there))
    (saved if other == "flat" else saved["text_config"])["pad_token_id"] = 0
    assert saved.pop("tie_word_embeddings") is False and before.pop("tie_word_embeddings", False) is False
    assert saved == before


def test_every_part_of_the_config_has_the_dtype_that_is_saved(tmp_path, monkeypatch):
    """As in transformers, also a part that is not computed, and one with the dtype under its old name."""
    from transformers import AutoModelForImageTextToText

    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    text, parts, prefixes = towers.CASES["gemma4"]
    monkeypatch.setitem(towers.CASES, "gemma4", (text, parts | {"audio_config": audio}, prefixes))
    towers.build(tmp_path / "there", "gemma4")
    path = tmp_path / "there" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["torch_dtype"] = config["text_config"].pop("dtype")
    path.write_text(json.dumps(config))
    AutoModelForCausalLM.from_pretrained(tmp_path / "there", dtype="bfloat16").save_pretrained(tmp_path / "ours")
    theirs = AutoModelForImageTextToText.from_pretrained(tmp_path / "there", dtype="bfloat16")
    theirs.save_pretrained(tmp_path / "theirs")
    ours, wanted = (json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs"))
    assert ours == wanted and ours["audio_config"]["dtype"] == "bfloat16"


def test_what_prepares_images_is_saved_beside_a_trained_model(tmp_path, caplog):
    """A chat template in a file of the processor becomes the tokenizer's."""
    folder, template = tmp_path / "there", "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    towers.build(folder, "smolvlm", tie_word_embeddings=False)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": f"a {n}"}]} for n in range(8)])
    args = SFTConfig(output_dir=str(tmp_path / "out"), max_steps=1, report_to="none", save_strategy="no")
    trainer = SFTTrainer(model=str(folder), args=args, train_dataset=rows)
    assert trainer.processing_class.chat_template == template
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "preprocessor_config.json").read_text() == '{"size": 28}'
    assert (tmp_path / "saved" / "chat_template.jinja").read_text() == template
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["SmolVLMForConditionalGeneration"]


@usual("qwen2_5_vl")
@pytest.mark.parametrize("case", ["qwen2_5_vl", "mistral3"])
def test_a_torch_model_is_trained_and_gets_its_weights(case, tmp_path):
    """Except for the layers and the tower that the user froze in torch."""
    folder = tmp_path / "there"
    theirs = towers.build(folder, case, tie_word_embeddings=False).train()
    for name, parameter in theirs.named_parameters():
        parameter.requires_grad = not any(part in name for part in ("visual", "vision_tower", "layers.0.", "lm_head"))
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    rows = Dataset.from_list([{"text": f"a {n}"} for n in range(8)])
    args = SFTConfig(output_dir=str(tmp_path / "out"), max_steps=1, report_to="none", save_strategy="no")
    words = AutoTokenizer.from_pretrained(folder)
    SFTTrainer(model=theirs, args=args, train_dataset=rows, processing_class=words).train()
    moved = {name for name, value in theirs.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name, one in theirs.named_parameters() if one.requires_grad and "language_model" in name}


def test_a_class_is_found_by_its_name_and_a_text_that_is_not_computed_is_named(tmp_path):
    towers.build(tmp_path / "there", "qwen3_vl", tie_word_embeddings=False)
    model = trl_jax.Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "there")
    assert model.config.model_type == "qwen3_vl" and model.backend.head == "lm"
    path = tmp_path / "there" / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": {"model_type": "gpt_bigcode"}}))
    with pytest.raises(ValueError, match="model_type of text_config must be 'llama' or 'mistral'.*, got 'gpt_bigcode'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "there")
