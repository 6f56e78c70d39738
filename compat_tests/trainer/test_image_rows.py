"""Rows with images train as in TRL in every layout; saving, resuming and errors work as for text."""

from __future__ import annotations

import io
import json
import logging
import shutil
import types

import numpy as np
import pytest
import transformers
from datasets import Dataset, IterableDataset

import trl_jax
from compat_tests.effort import only_thorough, thorough, usual, usually
from compat_tests.hub.vision.models import CASES
from compat_tests.hub.vision.processors import MADE_BY
from compat_tests.models import towers
from compat_tests.trainer import vision_models
from compat_tests.trainer.vision_models import (
    assistant,
    completions,
    counted_towers,
    logged,
    messages,
    pairs,
    pictures,
    tiny_llava,
    tiny_qwen,
    tiny_tiled,
    trainer,
    user,
)
from trl_jax.data.loader import raw_row
from trl_jax.hub.config import read_native_config
from trl_jax.hub.native_backend import load_native
from trl_jax.hub.vision import vision_families
from trl_jax.training.step import default_optimizer

KINDS = {
    "messages": ("SFT", messages, {}, None),
    "completions": ("SFT", completions, {}, None),
    "whole": ("SFT", completions, {"completion_only_loss": False}, None),
    "lora": ("SFT", completions, {}, {"r": 4, "target_modules": "all-linear"}),
    "pairs": ("DPO", pairs, {}, None),
    "pairs-lora": ("DPO", pairs, {}, {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
}


ONE_SHAPE = {"per_device_train_batch_size": 8}  # all rows in each step, so that one program is compiled


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return str(tiny_llava(tmp_path_factory.mktemp("llava")))


@pytest.mark.parametrize("model", ["folder", "object"])
def test_the_processor_that_was_passed_is_saved_as_in_trl(model, llava, tmp_path):
    """Its settings may differ from the folder's, and a model object has no folder with such files."""
    trl = pytest.importorskip("trl")
    saved = []
    for package in (trl, trl_jax):
        processor = transformers.AutoProcessor.from_pretrained(llava)
        processor.image_processor.image_mean = [0.1, 0.2, 0.3]
        processor.tokenizer._processor_class = None  # as if a script had built the processor
        processor.tokenizer.init_kwargs.pop("processor_class", None)
        given = transformers.AutoModelForImageTextToText.from_pretrained(llava) if model == "object" else llava
        out = tmp_path / package.__name__
        trainer(package, "SFT", given, out, messages(2), processing_class=processor).save_model(out)
        saved.append([(out / name).read_text() for name in ("processor_config.json", "tokenizer_config.json")])
        parts = json.loads((out / "config.json").read_text())
        saved[-1] += [parts["dtype"], *(parts[name].get("dtype") for name in ("text_config", "vision_config"))]
    assert json.loads(saved[0][0])["image_processor"]["image_mean"] == [0.1, 0.2, 0.3] and saved[1] == saved[0]
    assert not (out / "preprocessor_config.json").exists()


@pytest.mark.parametrize("processor", [True, False])
def test_a_model_object_keeps_its_folders_processor(processor, llava, tmp_path):
    given = transformers.AutoModelForImageTextToText.from_pretrained(llava)
    options = {"processing_class": transformers.AutoProcessor.from_pretrained(llava)} if processor else {}
    trainer(trl_jax, "SFT", given, tmp_path, messages(2), **options).save_model(tmp_path / "saved")
    found, wanted = (transformers.AutoProcessor.from_pretrained(folder) for folder in (tmp_path / "saved", llava))
    assert found.image_processor.to_dict() == wanted.image_processor.to_dict()


OTHER_TEMPLATE = vision_models.TEMPLATE.replace("{{ eos_token }}", "bread")


@usual("images-processor", "texts-chat_template.json", "images-processor_config.json")
@pytest.mark.parametrize("place", ["processor", "chat_template.json", "processor_config.json"])
@pytest.mark.parametrize("rows", ["images", "texts"])
def test_the_processors_chat_template_is_used(place, rows, llava, tmp_path):
    """Also where the tokenizer has another."""
    trl = pytest.importorskip("trl")
    folder, given = str(shutil.copytree(llava, tmp_path / "model")), {}
    if place == "processor":
        given["processing_class"] = transformers.AutoProcessor.from_pretrained(folder)
        given["processing_class"].chat_template = OTHER_TEMPLATE
    else:
        file = tmp_path / "model" / place
        found = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(found | {"chat_template": OTHER_TEMPLATE}))
    table = messages(2) if rows == "images" else messages(2).remove_columns("images")
    theirs = logged(trainer(trl, "SFT", folder, tmp_path / "trl", table, max_steps=1, **given))
    made = trainer(trl_jax, "SFT", folder, tmp_path / "ours", table, max_steps=1, **given)
    ours = logged(made)
    assert ours[0]["num_tokens"] == theirs[0]["num_tokens"] > {"images": 62, "texts": 46}[rows]
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=1e-5)
    made.save_model(tmp_path / "saved")
    assert transformers.AutoProcessor.from_pretrained(tmp_path / "saved").chat_template == OTHER_TEMPLATE
    if given:
        assert given["processing_class"].tokenizer.chat_template == vision_models.TEMPLATE


@pytest.mark.parametrize("keeps", [False, True])
def test_options_of_the_chat_template_reach_it_as_in_trl(keeps, llava, tmp_path):
    """TRL drops their column, unless remove_unused_columns=False."""
    trl = pytest.importorskip("trl")
    rows = completions(2).add_column("chat_template_kwargs", [{"eos_token": "?"}] * 2)
    options = {"max_steps": 1, "remove_unused_columns": not keeps}
    theirs = logged(trainer(trl, "SFT", llava, tmp_path / "trl", rows, **options))
    ours = logged(trainer(trl_jax, "SFT", llava, tmp_path / "ours", rows, **options))
    assert ours[0]["loss"] == pytest.approx(theirs[0]["loss"], abs=1e-5)


# Others are compared with recordings, for other models: parity/test_image_curve.py.
@pytest.mark.parametrize("case", usually("pairs".__eq__, KINDS))
def test_losses_and_metrics_are_trls(case, llava, tmp_path):
    trl = pytest.importorskip("trl")
    kind, rows, options, adapter = KINDS[case]
    theirs = logged(trainer(trl, kind, llava, tmp_path / "trl", rows(), adapter, **options))
    made = trainer(trl_jax, kind, llava, tmp_path / "ours", rows(), adapter, **options)
    ours = logged(made)
    assert len(ours) == 3
    for own, their in zip(ours, theirs, strict=True):
        names = their.keys() & own.keys() - {"epoch"}
        assert {"loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy"} <= names
        for name in names:
            assert own[name] == pytest.approx(their[name], rel=2e-4, abs=1e-5 if name == "loss" else 2e-4), name
    if case != "messages":
        return
    import torch
    from transformers import AutoModelForImageTextToText

    made.save_model(tmp_path / "saved")
    files = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "processor_config.json" in files
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        moved = [
            (name, float((before - after).abs().max()))
            for (name, before), after in zip(
                AutoModelForImageTextToText.from_pretrained(llava).named_parameters(), loaded.parameters(), strict=True
            )
        ]
    still = {name for name, change in moved if change == 0}
    unread = ("post_layernorm", "encoder.layers.2.")  # vision_feature_layer=-2 skips the last layer
    assert still and all(any(part in name for part in unread) for name in still)


OTHERS = [*((name, "SFT") for name in MADE_BY), ("gemma3", "DPO"), ("llava_next", "DPO")]


@only_thorough
@pytest.mark.parametrize(("name", "kind"), OTHERS)
def test_losses_of_other_models_are_trls(name, kind, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    folder = tmp_path / "model"
    processor = tiny_tiled(folder, name, monkeypatch)
    rows = {"SFT": messages, "DPO": pairs}[kind](6)
    theirs = logged(trainer(trl, kind, str(folder), tmp_path / "trl", rows, processing_class=processor))
    ours = logged(trainer(trl_jax, kind, str(folder), tmp_path / "ours", rows))
    assert len(ours) == 3
    for own, their in zip(ours, theirs, strict=True):
        for entry in ("loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy"):
            limit = 1e-5 if entry == "loss" else 2e-4
            assert own[entry] == pytest.approx(their[entry], rel=2e-4, abs=limit), entry


@only_thorough
def test_layouts_have_the_same_numbers(llava, tmp_path):
    losses = {}
    for layout in ("padded", "packed", "shared"):
        made = trainer(trl_jax, "DPO", llava, tmp_path / layout, pairs(), batch_layout=layout, **ONE_SHAPE)
        losses[layout] = [entry["loss"] for entry in logged(made)]
    for layout in ("packed", "shared"):
        np.testing.assert_allclose(losses[layout], losses["padded"], atol=1e-5)


@only_thorough
def test_a_run_that_is_resumed_ends_with_the_same_weights(llava, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(trl_jax, "SFT", llava, tmp_path / "whole", messages(), **options)
    whole.train()
    half = trainer(trl_jax, "SFT", llava, tmp_path / "half", messages(), **options)
    half.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for path, array in whole.model.params.items():
        assert np.array_equal(array, half.model.params[path]), path


def test_evaluation_and_streams(llava, tmp_path):
    rows = messages()
    args = trainer(trl_jax, "SFT", llava, tmp_path / "table", rows, **ONE_SHAPE).args
    made = trl_jax.SFTTrainer(llava, args=args, train_dataset=rows, eval_dataset=rows.select(range(3)))
    value = made.evaluate()["eval_loss"]
    stream = IterableDataset.from_generator(lambda: iter(list(rows)))
    other = trl_jax.SFTTrainer(llava, args=args, train_dataset=stream, eval_dataset=rows.select(range(3)))
    assert other.evaluate()["eval_loss"] == pytest.approx(value, abs=1e-6)
    assert len(logged(other)) == 3


def test_images_in_messages_and_encoded_ones(llava, tmp_path):
    def encoded(picture):
        file = io.BytesIO()
        picture.save(file, "PNG")
        return file.getvalue()

    [picture] = pictures(1)
    picture.save(tmp_path / "picture.png")
    part = [{"type": "image", "image": encoded(picture)}, {"type": "text", "text": "bake?"}]
    inside = [{"messages": [{"role": "user", "content": part}, *assistant("gladly")]}] * 2

    def column(image):
        return [{"messages": user("bake?") + assistant("gladly"), "image": image}] * 2

    rows = {
        "inside": inside, "column": column(picture), "path": column(str(tmp_path / "picture.png")),
        "dict": column({"path": None, "bytes": encoded(picture)}), "array": column(np.asarray(picture)),
    }  # fmt: skip
    losses = {
        name: logged(trainer(trl_jax, "SFT", llava, tmp_path / name, stream_of(own), max_steps=1))[0]["loss"]
        for name, own in rows.items()
    }
    assert set(losses.values()) == {losses["column"]}, losses


@pytest.mark.parametrize("layout", usually("shared".__eq__, ("padded", "packed", "shared")))
def test_a_trained_tower_is_computed_for_the_policy_and_for_the_reference(layout, llava, tmp_path):
    rows = pairs().select(range(2))
    with counted_towers() as ran:
        trainer(trl_jax, "DPO", llava, tmp_path, rows, max_steps=1, batch_layout=layout).train()
    assert ran == [2, 2]


@only_thorough
def test_recomputing_the_layers_of_the_tower_changes_nothing(llava, tmp_path):
    found = []
    for options in ({}, {"gradient_checkpointing": True, "remat_policy": "nothing_saveable"}):
        made = trainer(trl_jax, "SFT", llava, tmp_path, completions(2), max_steps=1, **options)
        found.append(made.args.remats)
        [entry] = logged(made)
        found.append([entry["loss"], entry["grad_norm"]])
    without, first, remat, second = found
    assert without[0] is False and remat == [True]
    assert second == pytest.approx(first, rel=1e-6)


@only_thorough
@pytest.mark.parametrize("name", ["gemma4", "idefics3", "internvl"])
def test_shared_rows_of_other_models_have_the_numbers_of_padded_ones(name, tmp_path, monkeypatch):
    tiny_tiled(tmp_path / "model", name, monkeypatch)
    found = []
    for layout in ("padded", "shared"):
        options = {"max_steps": 1, "batch_layout": layout}
        made = trainer(trl_jax, "DPO", str(tmp_path / "model"), tmp_path / layout, pairs(4), **options)
        [entry] = logged(made)
        found.append([entry[key] for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected")])
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)


def test_images_that_a_transform_opens(llava, tmp_path):
    rows = pairs()
    opened = rows.remove_columns("images").add_column("number", range(len(rows)))
    opened.set_transform(lambda batch: dict(rows[batch["number"]]))
    args = trainer(trl_jax, "DPO", llava, tmp_path / "table", rows, max_steps=1).args
    losses = [
        logged(trl_jax.DPOTrainer(llava, args=args, train_dataset=table, eval_dataset={"own": table}))[0]["loss"]
        for table in (rows, opened)
    ]
    assert losses[0] == losses[1]


def stream_of(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


REFUSED = {
    "packing": ("SFT", messages, {"packing": True, "max_length": 64}, "Packing is not supported for vision datasets"),
    "padding_free": ("SFT", messages, {"padding_free": True}, "Padding-free training is yet not supported"),
    "keep_end": ("SFT", messages, {"truncation_mode": "keep_end", "max_length": 64}, "truncation_mode='keep_end' is"),
    "assistants": ("SFT", completions, {"assistant_only_loss": True}, "argument is only supported for conversational"),
    "keep_end-dpo": ("DPO", pairs, {"truncation_mode": "keep_end", "max_length": 64}, "truncation_mode='keep_end' is"),
    "precomputed": ("DPO", pairs, {"precompute_ref_log_probs": True}, "`precompute_ref_log_probs=True` is not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_images_do_not_go_with(case, llava, tmp_path):
    kind, rows, options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        trainer(trl_jax, kind, llava, tmp_path, rows(), **options)


def test_a_text_model_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="does not seem to be a vision-language model"):
        trainer(trl_jax, "SFT", str(checkpoint()), tmp_path, messages())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"images": [b"no picture"]}, r"Row \d of train_dataset: .*cannot be read as a picture"),
        ({"images": []}, r"Row \d of train_dataset: .*\(0\) does not match number of image placeholders \(1\)"),
    ],
)
def test_a_wrong_row_is_named(row, words, llava, tmp_path):
    content = [{"type": "image"}, {"type": "text", "text": "bake?"}]
    rows = [{"messages": [{"role": "user", "content": content}, *assistant("gladly")], **row}] * 2
    with pytest.raises(ValueError, match=words):
        trainer(trl_jax, "SFT", llava, tmp_path, stream_of(rows)).train()


def test_a_cut_image_is_named(llava, tmp_path):
    with pytest.raises(ValueError, match="Row . of train_dataset: max_length=10 cuts an image"):
        trainer(trl_jax, "SFT", llava, tmp_path, completions(), max_length=10).train()


def test_rows_without_images_leave_the_tower_on_disk(llava, tmp_path):
    rows = Dataset.from_list([{"messages": user("bake?") + assistant("gladly")}] * 4)
    made = trainer(trl_jax, "SFT", llava, tmp_path, rows)
    assert not any(path.startswith("vision.") for path in made.model.params)


def test_the_tower_is_computed_once_for_policy_and_reference(llava, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "trl_jax")
    from trl_jax.models.vision import VisionTower

    calls, called = [], VisionTower.__call__

    def counted(self, *given, **options):
        calls.append(1)
        return called(self, *given, **options)

    monkeypatch.setattr(VisionTower, "__call__", counted)
    adapters = {"text": {"target_modules": r".*language_model.*q_proj"}, "both": {"target_modules": ["q_proj"]}}
    found, lines = {}, {}
    for name, adapter in adapters.items():
        calls.clear()
        caplog.clear()
        trainer(
            trl_jax, "DPO", llava, tmp_path / name, pairs().select(range(2)), {"r": 2, **adapter}, max_steps=1
        ).train()
        found[name] = len(calls)
        [lines[name]] = [record.message for record in caplog.records if record.message.startswith("Images: ")]
    assert found["both"] == 2 * found["text"]
    line = "Images: 2 in a step, each computed once for all texts that show it (4 without sharing)"
    assert lines == {"text": f"{line}; policy and reference share their features.", "both": f"{line}."}


@only_thorough
@pytest.mark.parametrize("layout", [thorough("padded"), "packed"])
def test_qwens_first_loss_is_transformers(layout, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    folder = str(tiny_qwen(tmp_path / "qwen"))
    rows = completions(2)
    made = trainer(trl_jax, "SFT", folder, tmp_path, rows, max_steps=1, batch_layout=layout)
    [entry] = logged(made)
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    model, losses, targets = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval(), 0.0, 0
    image = model.config.image_token_id
    for row in rows:
        seen = processor(images=[row["image"]], return_tensors="pt")
        count = int(seen["image_grid_thw"].prod()) // 4
        words = [part[0]["content"] for part in (row["prompt"], row["completion"])]
        begun = f"user: <|vision_start|>{'<|image_pad|>' * count}<|vision_end|>{words[0]}{tokenizer.eos_token}\n"
        before = tokenizer(f"{begun}assistant: ", add_special_tokens=False)["input_ids"]
        after = tokenizer(f"{words[1]}{tokenizer.eos_token}\n", add_special_tokens=False)["input_ids"]
        ids = torch.tensor([before + after])
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=(ids == image).long(), **seen).logits[
                0, len(before) - 1 : -1
            ]
        losses += float(torch.nn.functional.cross_entropy(logits, ids[0, len(before) :], reduction="sum"))
        targets += len(after)
    assert entry["loss"] == pytest.approx(losses / targets, abs=1e-5)


@only_thorough
def test_gradients_are_accumulated_over_steps_with_and_without_images(llava, tmp_path):
    trl = pytest.importorskip("trl")
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "weight_decay": 0.1}
    theirs = logged(trainer(trl, "SFT", llava, tmp_path / "trl", messages(), **options))
    ours = logged(trainer(trl_jax, "SFT", llava, tmp_path / "ours", messages(), **options))
    for own, their in zip(ours, theirs, strict=True):
        assert own["loss"] == pytest.approx(their["loss"], abs=1e-5)
        assert own["grad_norm"] == pytest.approx(their["grad_norm"], rel=2e-4)


@pytest.mark.parametrize("name", vision_families())
def test_the_parameters_that_decay_are_transformers(name, tmp_path):
    from safetensors.torch import load_file

    case = CASES[name]
    config = getattr(transformers, case.config_class)(**case.values)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    args = transformers.TrainingArguments(str(tmp_path / "out"), use_cpu=True, report_to="none")
    wanted = {*transformers.Trainer(model, args).get_decay_parameter_names(model)}
    for parameter_name, parameter in model.named_parameters():
        parameter.data.fill_(float(parameter_name in wanted))
    model.save_pretrained(tmp_path / "marked")
    marks = load_file(tmp_path / "marked" / "model.safetensors")
    native = read_native_config(tmp_path / "marked", "lm").with_images()
    params, backend = load_native(native, dtype="float32", seed=0)
    seen = []

    class Choice:
        def make(self, decayed, *_):
            seen.append(decayed)

    options = types.SimpleNamespace(get_warmup_steps=lambda steps: 0, max_grad_norm=1.0)
    default_optimizer(Choice(), backend, options, 1)
    [decayed] = seen
    assert any(decayed.values())
    assert not any(decayed[path] for path in backend.buffers)
    for path, entries in decayed.items():
        if path in backend.buffers:
            continue
        assert bool(np.asarray(params[path]).all()) == entries and len(np.unique(np.asarray(params[path]))) == 1, path
    found = {float(value) for tensor in marks.values() for value in tensor.unique()}
    # Gemma4's clipped projections have infinite limits by default.
    assert found - {float("inf"), -float("inf")} == {0.0, 1.0}


@only_thorough
def test_a_saved_adapter_is_pefts(llava, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    made = trainer(trl_jax, "SFT", llava, tmp_path / "run", completions(), KINDS["lora"][3], max_steps=2)
    made.train()
    made.save_model(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(llava), tmp_path / "adapter")
    row = completions()[0]
    processor = AutoProcessor.from_pretrained(llava)
    inputs = processor(
        images=[row["image"]],
        text=f"user: <image>{row['prompt'][0]['content']}</s>\nassistant: ",
        return_tensors="pt",
        add_special_tokens=False,
    )
    answer = processor.tokenizer(f"{row['completion'][0]['content']}</s>\n", add_special_tokens=False)["input_ids"]
    begun = inputs["input_ids"].shape[1]
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        logits = loaded.eval()(**inputs).logits[0, begun - 1 : -1]
    wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(answer))
    assert made.evaluate(completions().select([0]))["eval_loss"] == pytest.approx(float(wanted), abs=1e-5)


def test_frozen_towers_stay(llava, tmp_path):
    made = trainer(trl_jax, "SFT", llava, tmp_path, completions(), max_steps=2)
    for name, parameter in made.model.named_parameters():
        if "vision_tower" in name:
            parameter.requires_grad = False
    before = {path: np.asarray(array) for path, array in made.model.params.items()}
    made.train()
    moved = {path for path, array in made.model.params.items() if not np.array_equal(array, before[path])}
    assert moved and not any(path.startswith("vision.tower.") for path in moved)
    assert any(path.startswith("vision.connector.") for path in moved)


def test_other_media_are_refused(llava, tmp_path):
    video = [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "bake?"}]
    rows = [{"messages": [{"role": "user", "content": video}, *assistant("gladly")], "images": pictures(1)}] * 2
    with pytest.raises(ValueError, match="Row . of train_dataset: .*rows with videos are not supported"):
        trainer(trl_jax, "SFT", llava, tmp_path, stream_of(rows)).train()


def test_models_whose_images_are_not_computed_are_named(tmp_path):
    towers.build(tmp_path / "model", "aya_vision").save_pretrained(tmp_path / "model")
    words = "not supported yet for model_type 'aya_vision', only text. They are .* llava, .*qwen"
    with pytest.raises(ValueError, match=words):
        trainer(trl_jax, "SFT", str(tmp_path / "model"), tmp_path / "run", messages())


def test_rows_of_a_table_are_told_apart():
    first, second = pictures(2)
    array = np.asarray(first)
    assert raw_row({"images": [first]}) == raw_row({"images": [first.copy()]}) == raw_row({"images": [array]})
    assert raw_row({"images": [first]}) != raw_row({"images": [second]})
    assert raw_row({"images": [array]}) != raw_row({"images": [array.reshape(-1)]})
    assert raw_row({"image": {"bytes": b"a", "path": None}}) != raw_row({"image": {"bytes": b"b", "path": None}})


@only_thorough
def test_loaded_models_train_with_their_towers(llava, tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForImageTextToText

    [wanted] = logged(trainer(trl_jax, "SFT", llava, tmp_path / "name", completions(), max_steps=1))
    ours = trl_jax.AutoModelForImageTextToText.from_pretrained(llava, dtype="float32")
    [own] = logged(trainer(trl_jax, "SFT", ours, tmp_path / "ours", completions(), max_steps=1))
    theirs = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32)
    theirs.model.vision_tower.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
    made = trainer(trl_jax, "SFT", theirs, tmp_path / "torch", completions(), max_steps=1)
    [other] = logged(made)
    assert own["loss"] == other["loss"] == wanted["loss"] and own["grad_norm"] == wanted["grad_norm"]
    moved = {name for name, parameter in theirs.named_parameters() if not torch.equal(parameter, before[name])}
    assert any("projector" in name for name in moved) and not any("vision_tower" in name for name in moved)
    text = trl_jax.AutoModelForCausalLM.from_pretrained(llava)
    with pytest.raises(TypeError, match="loaded without its vision tower"):
        trainer(trl_jax, "SFT", text, tmp_path / "text", completions())


TALKS = [(user(f"bake the {word}?"), assistant(f"gladly {word}")) for word in ("bread", "soup", "river")]
TEXTS = {
    "messages": ("SFT", {}, [{"messages": asked + said} for asked, said in TALKS]),
    "assistant": ("SFT", {"assistant_only_loss": True}, [{"messages": asked + said} for asked, said in TALKS]),
    "completions": ("SFT", {}, [{"prompt": asked, "completion": said} for asked, said in TALKS]),
    "pairs": ("DPO", {}, [{"prompt": asked, "chosen": said, "rejected": asked} for asked, said in TALKS]),
    "unpaired": ("KTO", {}, [{"prompt": asked, "completion": said, "label": True} for asked, said in TALKS]),
}


@pytest.fixture(scope="module")
def by_parts(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_models, "TEMPLATE", vision_models.BY_PARTS)
        return str(tiny_llava(tmp_path_factory.mktemp("by_parts")))


@pytest.mark.parametrize("case", TEXTS)
def test_conversations_without_images_are_tokenized_as_by_the_processor(case, by_parts, tmp_path):
    trl = pytest.importorskip("trl")
    kind, options, rows = TEXTS[case]
    theirs, ours = (
        trainer(package, kind, by_parts, tmp_path / package.__name__, Dataset.from_list(rows), **options).train_dataset
        for package in (trl, trl_jax)
    )
    names = [name for name in theirs.column_names if name.endswith("_ids") or name == "labels"]
    assert len(names) > 1 and ours.select_columns(names).to_dict() == theirs.select_columns(names).to_dict()


def test_conversations_for_a_tokenizer_that_was_passed_are_strings(by_parts, tmp_path):
    """TRL then uses the tokenizer, too, with which this template skips all contents."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    made = []
    for package in (trl, trl_jax):
        tokenizer = transformers.AutoTokenizer.from_pretrained(by_parts)
        rows = Dataset.from_list(TEXTS["messages"][2])
        made.append(trainer(package, "SFT", by_parts, tmp_path, rows, processing_class=tokenizer).train_dataset)
    theirs, ours = (rows["input_ids"][:] for rows in made)
    assert ours == theirs and ours[0] == ours[1]


@pytest.mark.parametrize("kind", ["GRPO", thorough("RLOO")])
def test_prompts_without_images_are_tokenized_as_by_the_processor(kind, by_parts, tmp_path):
    """TRL's RLOOTrainer passes strings to the processor; this template skips them."""
    trl, counted = pytest.importorskip("trl"), []
    options = {
        "beta": 0.0, "num_generations": 2, "max_completion_length": 2, "per_device_train_batch_size": 6, "max_steps": 1,
    }  # fmt: skip
    for package in (trl, trl_jax):
        args = getattr(package, f"{kind}Config")(
            str(tmp_path / package.__name__), report_to="none", use_cpu=True, bf16=False, save_strategy="no",
            logging_steps=1, **options,
        )  # fmt: skip
        rows = Dataset.from_list([{"prompt": asked} for asked, _ in TALKS])
        made = getattr(package, f"{kind}Trainer")(
            by_parts, reward_funcs=lambda completions, **_: [1.0] * len(completions), args=args, train_dataset=rows
        )
        [entry] = logged(made)
        counted.append(entry["num_tokens"] - 6 * entry["completions/mean_length"])
    theirs, ours = counted
    assert ours == theirs == {"GRPO": 112, "RLOO": 84}[kind]
