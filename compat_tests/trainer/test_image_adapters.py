"""Adapters on rows with images: over a 4-bit base, and adapter folders that are trained further."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import only_thorough, usually
from compat_tests.hub.vision.models import CASES
from compat_tests.trainer.vision_models import (
    assistant,
    completions,
    logged,
    pairs,
    tiny_llava,
    tiny_tiled,
    trainer,
    user,
)
from trl_jax.hub.config import read_native_config
from trl_jax.hub.modules import modules_of
from trl_jax.hub.quantization import BitsAndBytesConfig, formats
from trl_jax.hub.vision import vision_families

torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
transformers, trl = pytest.importorskip("transformers"), pytest.importorskip("trl")
load_file = pytest.importorskip("safetensors.torch").load_file

LORA = {"r": 4, "target_modules": ["q_proj", "fc1"]}
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return str(tiny_llava(tmp_path_factory.mktemp("llava"), hidden_size=64, intermediate_size=64))


def same(one, other):
    assert one.params.keys() == other.params.keys()
    for path, array in one.params.items():
        assert np.array_equal(array, other.params[path]), path


def test_a_base_in_four_bits_trains_as_in_trl(llava, tmp_path):
    pytest.importorskip("bitsandbytes")
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2}
    given = {"quantization_config": trl_jax.BitsAndBytesConfig(**FOUR)}
    whole = trainer(trl_jax, "SFT", llava, tmp_path / "whole", completions(4), LORA, **given, **options)
    ours = logged(whole)
    half = trainer(trl_jax, "SFT", llava, tmp_path / "half", completions(4), LORA, **given, **options)
    half.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    same(whole.model, half.model)
    assert {"decoder", "vision"} == {path.partition(".")[0] for path in whole.model.frozen if path.endswith(".codes")}
    saved = peft.load_peft_weights(str(tmp_path / "whole" / "checkpoint-2"))
    trained = {name.split(".")[3] for name, value in saved.items() if "lora_B" in name and value.abs().max() > 0}
    assert trained == {"vision_tower", "language_model"}
    with torch.compiler.set_stance("force_eager"):
        bits = transformers.BitsAndBytesConfig(**FOUR)
        model = transformers.AutoModelForImageTextToText.from_pretrained(llava, quantization_config=bits)
        processor = transformers.AutoProcessor.from_pretrained(llava)
        options["save_strategy"] = "no"
        theirs = logged(
            trainer(trl, "SFT", model, tmp_path / "trl", completions(4), LORA, processing_class=processor, **options)
        )
    for own, their in zip(ours, theirs, strict=True):  # TRL casts the adapter to bfloat16
        assert own["loss"] == pytest.approx(their["loss"], abs=1e-3)
        assert own["grad_norm"] == pytest.approx(their["grad_norm"], rel=2e-2)


@pytest.mark.parametrize("name", vision_families())
def test_what_is_in_four_bits_is_bitsandbytes_choice(name, tmp_path):
    """All linear layers except the head, including those of the tower and the connector."""
    case = CASES[name]
    config = getattr(transformers, case.config_class)(**case.values)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    native = read_native_config(tmp_path, "lm").with_images()
    few = formats(BitsAndBytesConfig(**FOUR), None, native)
    modules = [one for one in modules_of(native) if any(f"{path}.weight" in few for path, _ in one.parts)]
    ours = {one.name.replace("{}", str(one.first + layer)) for one in modules for layer in range(one.layers)}
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert ours <= linear
    unread = "model.vision_tower.encoder.layers.2." if name in ("llava", "llava_next") else "lm_head"
    assert all(name == "lm_head" or name.startswith(unread) for name in linear - ours)


def adapter(llava, folder, **options):
    """An adapter saved by PEFT without zero matrices."""
    base = transformers.AutoModelForImageTextToText.from_pretrained(llava)
    model, generator = peft.get_peft_model(base, peft.LoraConfig(**LORA | options)), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05, generator=generator)
    model.save_pretrained(folder)
    return str(folder)


def test_an_adapter_in_a_folder_trains_on(llava, tmp_path, caplog):
    """PEFT also adapts the tower's last layer, whose output is not used."""
    folder = adapter(llava, tmp_path / "adapter")
    options = {"save_strategy": "steps", "save_steps": 2}
    made = trainer(trl_jax, "SFT", folder, tmp_path / "ours", completions(), **options)
    assert "vision_tower.encoder.layers.2" in caplog.text and "adapt layers whose outputs are not read" in caplog.text
    ours = logged(made)
    base = transformers.AutoModelForImageTextToText.from_pretrained(llava)
    theirs = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    processor = transformers.AutoProcessor.from_pretrained(llava)
    theirs = logged(trainer(trl, "SFT", theirs, tmp_path / "trl", completions(), processing_class=processor))
    for own, their in zip(ours, theirs, strict=True):
        assert own["loss"] == pytest.approx(their["loss"], abs=1e-5)
        assert own["grad_norm"] == pytest.approx(their["grad_norm"], rel=2e-4)
    half = trainer(trl_jax, "SFT", folder, tmp_path / "half", completions(), **options)
    half.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    same(made.model, half.model)
    made.save_model(tmp_path / "saved")
    again = trainer(trl_jax, "SFT", str(tmp_path / "saved"), tmp_path / "again", completions())
    same(made.model, again.model)
    old, new = (load_file(f"{path}/adapter_model.safetensors") for path in (folder, tmp_path / "saved"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old if "vision_tower.encoder.layers.2" in name)


LEFT_OUT = {
    "all-linear": {"target_modules": "all-linear", "exclude_modules": r"model\.vision_tower\..*"},
    "pattern": {"target_modules": r"model\.(vision_tower|language_model)\..*(q_proj|v_proj)"},
}


@pytest.mark.parametrize("case", LEFT_OUT)
@pytest.mark.parametrize("sees", usually(lambda sees: not sees, [False, True]))
def test_initial_values_are_pefts_where_the_tower_is_chosen_by_its_full_name(case, sees, llava, tmp_path):
    rows = completions(2) if sees else completions(2).remove_columns("image")
    made = trainer(trl_jax, "SFT", llava, tmp_path / "ours", rows, LEFT_OUT[case])
    theirs = trainer(trl, "SFT", llava, tmp_path / "trl", rows, LEFT_OUT[case])
    wanted = {name: value for name, value in theirs.model.named_parameters() if "language_model" in name}
    made.save_model(tmp_path / "saved")
    found = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    drawn = [name for name in wanted if ".lora_A." in name]
    assert drawn
    for name in drawn:
        assert torch.equal(found[name.replace(".default", "")], wanted[name].detach()), name


@pytest.mark.parametrize(("name", "tower"), [("gemma4", "vision_tower"), ("qwen2_5_vl", "visual")])
def test_a_whole_tower_decays_and_is_saved_as_by_peft(name, tower, tmp_path, monkeypatch):
    """transformers knows RMS norms by their names only, and `norm1` is none of them. Gemma 4's tower has buffers."""
    processor, folder = tiny_tiled(tmp_path / "model", name, monkeypatch), str(tmp_path / "model")
    made, decayed, shapes = {}, {}, {}
    for package in (trl, trl_jax):
        options = {"r": 4, "target_modules": r".*language_model.*q_proj", "modules_to_save": [tower]}
        own = made[package] = trainer(
            package, "SFT", folder, tmp_path / package.__name__, completions(2), options, processing_class=processor
        )
        trained = {path for path, parameter in own.model.named_parameters() if parameter.requires_grad}
        decayed[package] = trained & {*own.get_decay_parameter_names(own.model)}
        own.model.save_pretrained(str(tmp_path / package.__name__))
        tensors = load_file(tmp_path / package.__name__ / "adapter_model.safetensors")
        shapes[package] = {path: tensor.shape for path, tensor in tensors.items()}
    assert decayed[trl_jax] == decayed[trl] and (name == "gemma4" or any("norm1" in path for path in decayed[trl]))
    assert shapes[trl_jax] == shapes[trl]
    backend = made[trl_jax].model.backend
    assert len(backend.buffers & backend.tensors.keys()) > 1 or name != "gemma4"
    trained, _ = made[trl].model.get_nb_trainable_parameters()
    assert made[trl_jax].model.num_parameters(only_trainable=True) == trained


def test_trained_tokens_are_rows_of_the_text_models_embedding(llava, tmp_path):
    """Not of the tower's position table, which comes first."""
    lora = {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [3, 4]}
    theirs = logged(trainer(trl, "SFT", llava, tmp_path / "trl", completions(2), lora, max_steps=1))
    made = trainer(trl_jax, "SFT", llava, tmp_path / "ours", completions(2), lora, max_steps=1)
    [entry] = logged(made)
    assert entry["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=2e-4)
    made.save_model(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    [name] = [name for name in saved if "token_adapter" in name or "trainable_tokens" in name]
    assert "language_model.embed_tokens" in name


TOWERS = {
    "names": {"r": 4, "target_modules": ["q_proj", "fc1", "linear_1"]},
    "all-linear": {"r": 4, "target_modules": "all-linear", "use_dora": True},
    "a whole connector": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["multi_modal_projector"]},
}


@pytest.mark.parametrize("case", usually(lambda case: case == "names", TOWERS))
def test_an_adapter_of_the_tower_is_carried_through_training_on_text(case, llava, tmp_path, caplog):
    folder = adapter(llava, tmp_path / "adapter", **TOWERS[case])
    texts = Dataset.from_list([{"messages": user("bake?") + assistant("gladly")}] * 4)
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "learning_rate": 1e-2}
    made = trainer(trl_jax, "SFT", folder, tmp_path / "ours", texts, **options)
    made.train()
    assert "multi_modal_projector" in caplog.text and "saved unchanged" in caplog.text
    made.save_model(tmp_path / "saved")
    half = trainer(trl_jax, "SFT", folder, tmp_path / "half", texts, **options)
    half.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-1"))
    same(made.model, half.model)
    old, new = (load_file(f"{path}/adapter_model.safetensors") for path in (folder, tmp_path / "saved"))
    assert old.keys() == new.keys()
    of_text = {name for name in old if "language_model" in name}
    assert of_text and all(torch.equal(old[name], new[name]) for name in old.keys() - of_text)
    assert not all(torch.equal(old[name], new[name]) for name in of_text)
    base = transformers.AutoModelForImageTextToText.from_pretrained(llava)
    loaded = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, tmp_path / "saved"))
    assert loaded.keys() == new.keys() and all(torch.equal(loaded[name], new[name]) for name in new)
    with pytest.raises(ValueError, match="tensors of the vision tower or its connector, such as .*ImageTextToText"):
        made.model.merge_and_unload()
    if case != "a whole connector":
        trl_jax.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").merge_and_unload()


def test_an_adapter_of_the_text_leaves_the_tower(llava, tmp_path, caplog):
    texts = Dataset.from_list([{"messages": user("bake?") + assistant("gladly")}] * 4)
    made = trainer(trl_jax, "SFT", llava, tmp_path, texts, LORA)
    made.save_model(tmp_path / "adapter")
    further = trainer(trl_jax, "SFT", str(tmp_path / "adapter"), tmp_path, completions())
    same(made.model, further.model)
    assert "was trained on text only: the vision tower stays as it is" in caplog.text
    assert any(path.startswith("vision.") for path in further.model.frozen)


@pytest.mark.parametrize("targets", usually({"all-linear"}.__contains__, ["all-linear", "names"]))
def test_peft_loads_an_adapter_of_the_text_of_gemma_4(targets, tmp_path, monkeypatch):
    """The linear layers of its tower are inner modules, which PEFT does not find by the names of the text's layers."""
    processor = tiny_tiled(tmp_path, "gemma4", monkeypatch)
    texts = Dataset.from_list([{"messages": user("bake?") + assistant("gladly")}] * 4)
    lora = {"r": 4, "target_modules": targets if targets == "all-linear" else ["q_proj", "v_proj"]}
    given = {"processing_class": processor.tokenizer, "max_steps": 1}
    made = trainer(trl_jax, "SFT", str(tmp_path), tmp_path / "out", texts, lora, **given)
    made.train()
    made.model.save_pretrained(tmp_path / "saved")
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "saved").eval()
    ids = processor.tokenizer("bake the bread", return_tensors="pt").input_ids
    assert np.allclose(loaded(input_ids=ids).logits.detach(), made.model(input_ids=ids).logits, atol=1e-5)
    again = trainer(trl_jax, "SFT", str(tmp_path / "saved"), tmp_path / "again", texts, **given)
    same(made.model, again.model)
    again.model.save_pretrained(tmp_path / "saved_again")
    configs = [peft.LoraConfig.from_pretrained(tmp_path / name).target_modules for name in ("saved", "saved_again")]
    assert configs[0] == configs[1]


@only_thorough
def test_the_reference_is_the_adapter_as_it_was(llava, tmp_path):
    folder = adapter(llava, tmp_path / "adapter")
    first, *_, last = logged(trainer(trl_jax, "DPO", folder, tmp_path / "ours", pairs(), learning_rate=1e-2))
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and abs(last["rewards/margins"]) > 1e-4
