"""Prompts with images: completions, losses and metrics match TRL's, and a run resumes in the middle of a generation.

Run as a program, it is a GRPO run that kills itself: python -m compat_tests.trainer.test_image_rollouts CHECKPOINT OUT
WHERE.
"""

from __future__ import annotations

import base64
import io
import logging
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from PIL import Image
from transformers import TrainerCallback

import trl_jax
from compat_tests import tiny
from compat_tests.effort import THOROUGH, only_thorough, usually
from compat_tests.rollout.stub_server import StubServer
from compat_tests.trainer.test_own_policy_loss import trls_loss
from compat_tests.trainer.vision_models import (
    PATCH,
    SIZE,
    TEXT_ONLY,
    counted_towers,
    pictures,
    tiny_llava,
    tiny_qwen,
    tiny_tiled,
    user,
)
from trl_jax.rollout.server import data_url
from trl_jax.training import policy_generator

SAME = {
    "max_steps": 3, "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no", "learning_rate": 1e-3,
    "per_device_train_batch_size": 4, "max_completion_length": 6, "logging_steps": 1,
}  # fmt: skip
POLICY = {"num_generations": 2, "beta": 0.1}
KINDS = {
    "GRPO": ("GRPO", POLICY | {"num_iterations": 2}, None),
    "GRPO-lora": ("GRPO", POLICY, {"r": 4, "target_modules": "all-linear"}),
    "RLOO": ("RLOO", POLICY, None),
    "Distillation": ("Distillation", {}, None),
}


TEACHER = []  # the folder of the teacher


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    TEACHER[:] = [str(tiny_llava(tmp_path_factory.mktemp("teacher"), seed=1))]
    return str(tiny_llava(tmp_path_factory.mktemp("llava")))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return str(tiny_qwen(tmp_path_factory.mktemp("qwen")))


def prompts(count: int = 8) -> Dataset:
    """Prompts with one image each, and one prompt without."""
    rows = zip(tiny.THINGS, pictures(count), strict=False)
    return Dataset.from_list([
        {"prompt": user(f"bake the {word}?"), "images": [] if number == 5 else [picture], "number": number}
        for number, (word, picture) in enumerate(rows)
    ])  # fmt: skip


SAMPLED = []  # completion ids that `reward` got


def reward(completions, images, completion_ids, **_):
    """Depends on the completion and on the width of the image in the dataset."""
    SAMPLED.extend(list(map(int, ids)) for ids in completion_ids)
    widths = [image[0].size[0] if image else 0 for image in images]
    return [len(own[0]["content"]) % 7 + width / 10 for own, width in zip(completions, widths, strict=True)]


def trainer(package, kind, model, out, rows=None, adapter=None, processing_class=None, **options):
    config = SAME | options
    if package is not trl_jax:
        config["gradient_checkpointing"] = False
    args = getattr(package, f"{kind}Config")(str(out), **config)
    extra = {"teacher_model": TEACHER[0]} if kind == "Distillation" else {"reward_funcs": reward}
    if adapter is not None:
        peft = pytest.importorskip("peft") if package is not trl_jax else trl_jax
        extra["peft_config"] = peft.LoraConfig(**adapter)
    rows = prompts() if rows is None else rows
    if processing_class is not None:
        extra["processing_class"] = processing_class
    return getattr(package, f"{kind}Trainer")(model=model, args=args, train_dataset=rows, **extra)


def logged(made):
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("case", usually(lambda case: case in ("GRPO", "RLOO"), KINDS))
def test_completions_losses_and_metrics_are_trls(case, llava, tmp_path):
    trl = pytest.importorskip("trl")
    kind, options, adapter = KINDS[case]
    rows = prompts()
    if kind == "Distillation":  # TRL fails if a row has no image
        rows = rows.filter(lambda row: row["images"])
    SAMPLED.clear()
    theirs = logged(trainer(trl, kind, llava, tmp_path / "trl", rows, adapter, **options))
    sampled = SAMPLED.copy()
    SAMPLED.clear()
    ours = logged(trainer(trl_jax, kind, llava, tmp_path / "ours", rows, adapter, **options))
    assert len(ours) == 3
    assert sampled == SAMPLED and (kind == "Distillation" or len(sampled) >= 8)
    for own, their in zip(ours, theirs, strict=True):
        names = their.keys() - {"epoch", "step_time"}
        assert {"loss", "grad_norm", "learning_rate"} <= names <= own.keys()
        for name in names:
            assert own[name] == pytest.approx(their[name], rel=2e-4, abs=1e-5 if name == "loss" else 2e-4), name


@only_thorough
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_the_loss_of_trl_in_torch_is_trls(kind, llava, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    _, options, adapter = KINDS[kind]
    theirs = logged(trainer(trl, kind, llava, tmp_path / "trl", prompts(), adapter, **options))
    own = {"_compute_loss": trls_loss(getattr(trl, f"{kind}Trainer"), tmp_path)}
    monkeypatch.setattr(trl_jax, f"{kind}Trainer", type("Own", (getattr(trl_jax, f"{kind}Trainer"),), own))
    ours = logged(trainer(trl_jax, kind, llava, tmp_path / "ours", prompts(), adapter, **options))
    for found, other in zip(ours, theirs, strict=True):
        for name in other.keys() - {"epoch", "step_time"}:
            assert found[name] == pytest.approx(other[name], rel=2e-4, abs=2e-4), name


@pytest.mark.parametrize("name", usually(lambda name: False, ("gemma3", "llava_next", "mistral3", "smolvlm")))
def test_other_towers_are_trls(name, tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    processor = tiny_tiled(tmp_path, name, monkeypatch)
    rows, options = (
        prompts().filter(lambda row: row["images"]),
        POLICY | {"max_steps": 2, "per_device_train_batch_size": 2},
    )
    found = [
        logged(trainer(package, "GRPO", str(tmp_path), tmp_path / package.__name__, rows, None, processor, **options))
        for package in (trl, trl_jax)
    ]
    for their, own in zip(*found, strict=True):
        for key in their.keys() - {"epoch", "step_time"}:
            assert own[key] == pytest.approx(their[key], rel=2e-4, abs=1e-5 if key == "loss" else 2e-4), key


@only_thorough
@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_the_side_that_a_processor_pads_on_changes_nothing(name, tmp_path, monkeypatch):
    """TRL's gradients are the same only if it pads on the left."""
    processor = tiny_tiled(tmp_path, name, monkeypatch)
    rows = prompts().filter(lambda row: row["images"])
    rows = rows.map(lambda row, at: {"prompt": user("bake" + " the" * (at % 4) + " cake?")}, with_indices=True)
    found = []
    for side in ("left", "right"):
        processor.tokenizer.padding_side = side
        given = rows, None, processor
        found += logged(trainer(trl_jax, "RLOO", str(tmp_path), tmp_path / side, *given, **POLICY, max_steps=1))
    left, right = found
    assert [right[name] for name in ("loss", "grad_norm", "entropy")] == pytest.approx(
        [left[name] for name in ("loss", "grad_norm", "entropy")], rel=1e-5, abs=1e-6
    )
    trl, processor.tokenizer.padding_side = pytest.importorskip("trl"), "left"
    [theirs] = logged(trainer(trl, "RLOO", str(tmp_path), tmp_path / "trl", *given, **POLICY, max_steps=1))
    assert theirs["grad_norm"] == pytest.approx(left["grad_norm"], rel=2e-4)


@only_thorough
def test_completions_by_a_server_train_as_those_of_this_process(llava, tmp_path):
    """One prompt has an image and one does not: the server gets pixels and our token ids."""
    seen, options, rows = [], POLICY | {"max_steps": 1, "shuffle_dataset": False}, prompts().select(range(4, 8))

    def recorded(completion_ids, **columns):
        seen.append([list(map(int, ids)) for ids in completion_ids])
        return reward(**columns)

    def made(out, **more):
        args = trl_jax.GRPOConfig(str(out), **SAME | options | more)
        return trl_jax.GRPOTrainer(llava, recorded, args, rows)

    own = made(tmp_path / "own")
    [wanted] = logged(own)
    stub, image = StubServer(llava), own.processing_class.convert_tokens_to_ids("<image>")
    stub.replay = lambda ids, n: seen[0][0 if image in ids else 2 :][:n]
    stub.image_tokens = (SIZE // PATCH) ** 2
    more = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url,
            "vllm_importance_sampling_correction": False}  # fmt: skip
    try:
        [found] = logged(made(tmp_path / "server", **more))
    finally:
        stub.stop()
    assert seen[1] == seen[0]
    for name in ("loss", "grad_norm", "reward"):
        assert found[name] == pytest.approx(wanted[name], abs=1e-5), name
    asked = {path: body for path, body in stub.seen if path.endswith(("render", "generate"))}
    [[part]] = [message["content"] for message in asked["/v1/chat/completions/render"]["messages"]]
    sent = Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
    np.testing.assert_array_equal(np.asarray(sent), np.asarray(rows[0]["images"][0]))
    body = asked["/inference/v1/generate"]
    [place] = body["features"]["mm_placeholders"]["image"]
    assert [body["token_ids"].index(image), body["token_ids"].count(image)] == [place["offset"], place["length"]]
    assert body["sampling_params"]["logit_bias"] == {str(image): -100.0} and body["sampling_params"]["n"] == 2


def test_a_picture_is_sent_to_a_server_once_for_its_completions(llava, tmp_path, monkeypatch):
    """Also if a transform opens it for each of them."""
    stub, encoded = StubServer(llava), []
    stub.replay, stub.image_tokens = (lambda ids, n: [[9, 11]] * n), (SIZE // PATCH) ** 2
    monkeypatch.setattr(policy_generator, "data_url", lambda picture: (encoded.append(1), data_url(picture))[1])
    rows = prompts().with_transform(lambda batch: batch)
    more = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url, "max_steps": 1,
            "vllm_importance_sampling_correction": False, "shuffle_dataset": False}  # fmt: skip
    try:
        trainer(trl_jax, "GRPO", llava, tmp_path, rows, **POLICY | more).train()
    finally:
        stub.stop()
    assert len(encoded) == 2 == len([path for path, _ in stub.seen if path.endswith("render")])


@only_thorough
def test_servers_generate_ahead_of_a_frozen_tower_and_a_run_resumes(llava, tmp_path):
    """The server replays the same completions at any time, so generating ahead changes no number."""
    stub = StubServer(llava)
    stub.replay, stub.image_tokens = (
        lambda ids, n: [[5 + len(ids) % 7 + k, 9, 11 + k] for k in range(n)],
        (SIZE // PATCH) ** 2,
    )
    options = POLICY | {"adapter": TEXT_ONLY, "use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": stub.url,
                        "max_steps": 3, "save_strategy": "steps", "save_steps": 1}  # fmt: skip

    def run(name, resumed=None, **more):
        made = trainer(trl_jax, "GRPO", llava, tmp_path / name, **options | more)
        made.train(resume_from_checkpoint=resumed)
        return made, [log for log in made.state.log_history if "loss" in log]

    try:
        _, wanted = run("in_turn")
        whole, found = run("ahead", generate_ahead=True)
        rest, _ = run("rest", str(tmp_path / "ahead" / "checkpoint-1"), generate_ahead=True)
    finally:
        stub.stop()
    assert 1 in [log["sample/staleness_mean"] for log in found]
    for name in ("loss", "grad_norm", "reward", "sampling/importance_sampling_ratio/mean"):
        assert [log[name] for log in found] == pytest.approx([log[name] for log in wanted], rel=1e-6), name
    for path, array in whole.model.params.items():
        assert np.array_equal(array, rest.model.params[path]), path


def test_a_run_resumes_within_a_generation(llava, tmp_path):
    """With a frozen tower, whose features are computed once for all steps of a generation and are not checkpointed."""
    options = POLICY | {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "adapter": TEXT_ONLY}
    with counted_towers() as ran:
        whole = trainer(trl_jax, "GRPO", llava, tmp_path / "whole", **options)
        whole.train()
    assert sum(ran) == 4  # two generations with two prompts each
    for step in (1, 2) if THOROUGH else (1,):  # text does both: training/test_rollout_resume.py
        rest = trainer(trl_jax, "GRPO", llava, tmp_path / f"rest{step}", **options)
        rest.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        for path, array in whole.model.params.items():
            assert np.array_equal(array, rest.model.params[path]), path


@only_thorough
def test_a_loss_of_the_script_gets_completions_to_images(llava, tmp_path, monkeypatch):
    class Half(trl_jax.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) / 2

    built_in = logged(trainer(trl_jax, "GRPO", llava, tmp_path / "built_in", max_steps=1, **POLICY))
    monkeypatch.setattr(trl_jax, "GRPOTrainer", Half)
    own = logged(trainer(trl_jax, "GRPO", llava, tmp_path / "own", max_steps=1, **POLICY))
    for name in ("loss", "grad_norm"):
        assert own[0][name] == pytest.approx(built_in[0][name] / 2, rel=1e-4, abs=1e-6)


KILLED = POLICY | {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}


def die(out: str, step: int) -> None:
    """Kill this process as soon as the checkpoint of a step exists; it is written in the background."""
    for _ in range(600):
        if (Path(out) / f"checkpoint-{step}").is_dir():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    raise TimeoutError(f"{out} has no checkpoint-{step} after a minute.")


class Killing(TrainerCallback):
    """Kills the process after the second step, before its checkpoint: the generation has been trained on once."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            die(args.output_dir, 1)


def killing_prefill(generator, out):
    """Patch the function that starts generations: the process is killed before the second generation's first token."""
    calls, prefill = [], generator.prefill

    def killed(*given, **options):
        calls.append(1)
        if len(calls) == 2:
            die(out, 2)
        return prefill(*given, **options)

    generator.prefill = killed


@only_thorough
@pytest.mark.parametrize(("where", "last"), [("training", 1), ("generating", 2)])
def test_a_run_that_was_killed_ends_as_if_it_had_not_been(where, last, llava, tmp_path):
    whole = trainer(trl_jax, "GRPO", llava, tmp_path / "whole", **KILLED)
    entries = logged(whole)
    program = [
        sys.executable,
        "-m",
        "compat_tests.light",
        "compat_tests.trainer.test_image_rollouts",
        llava,
        str(tmp_path / "killed"),
        where,
    ]
    run = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert run.returncode == -signal.SIGKILL, run.stderr[-3000:]
    saved = sorted(path.name for path in (tmp_path / "killed").glob("checkpoint-*"))
    assert saved == [f"checkpoint-{step}" for step in range(1, last + 1)]
    rest = trainer(trl_jax, "GRPO", llava, tmp_path / "killed", **KILLED)
    rest.train(resume_from_checkpoint=True)
    for path, array in whole.model.params.items():
        assert np.array_equal(array, rest.model.params[path]), path
    again = [entry for entry in rest.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in again] == [entry["loss"] for entry in entries]


@only_thorough
def test_images_in_messages_equal_a_column(llava, tmp_path):
    column = [row for row in prompts() if row["images"]]
    inside = [
        {"prompt": [{"role": "user", "content": [
            {"type": "image", "image": row["images"][0]}, {"type": "text", "text": row["prompt"][0]["content"]},
        ]}]}
        for row in column
    ]  # fmt: skip

    def longer(completions, **_):
        return [len(own[0]["content"]) % 7 for own in completions]

    found = []
    for name, rows in {
        "column": Dataset.from_list(column),
        "table": Dataset.from_list(inside),
        "stream": IterableDataset.from_generator(lambda: iter(inside)),
    }.items():
        options = SAME | POLICY | {"max_steps": 1, "shuffle_dataset": False, "max_completion_length": 4}
        args = trl_jax.GRPOConfig(str(tmp_path / name), **options)
        [entry] = logged(trl_jax.GRPOTrainer(llava, longer, args, rows))
        found.append([entry[key] for key in ("loss", "grad_norm", "reward", "entropy", "num_tokens")])
    assert found[0] == found[1] == found[2]


@only_thorough
def test_layouts_have_the_same_numbers(qwen, tmp_path):
    losses = {}
    others = ("packed", "shared") if THOROUGH else ("shared",)
    for layout in ("padded", *others):
        made = trainer(trl_jax, "GRPO", qwen, tmp_path / layout, **POLICY, batch_layout=layout, max_steps=2)
        losses[layout] = [entry[name] for entry in logged(made) for name in ("loss", "grad_norm", "kl")]
    for layout in others:
        np.testing.assert_allclose(losses[layout], losses["padded"], rtol=1e-4, atol=1e-5)


def test_a_prompts_image_is_computed_once_for_its_completions(llava, tmp_path, caplog):
    """By a trained tower, once to generate and once to train, for four completions."""
    from trl_jax.generation import generator

    options = POLICY | {"num_generations": 4, "beta": 0.0, "max_steps": 1, "max_completion_length": 2}
    made = trainer(trl_jax, "GRPO", llava, tmp_path, prompts(4), **options)
    seen, prefill = [], generator.prefill

    def watched(weights, tokens, lengths, longest, images, **options):
        seen.append((len(tokens), int(images.images.at.max() + 1)))
        return prefill(weights, tokens, lengths, longest, images, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "prefill", watched)
        with caplog.at_level(logging.INFO, "trl_jax"), counted_towers() as ran:
            made.train()
    assert ran == [1, 1]
    [line] = [record.message for record in caplog.records if record.message.startswith("Images: ")]
    assert line == "Images: 1 in a step, each computed once for all texts that show it (4 without sharing)."
    assert seen == [(1, 16)]  # one prompt with four completions, and the 4 x 4 features of its image


@only_thorough
def test_a_rollout_func_sees_images(llava, tmp_path):
    calls = []

    def rollout(given, trainer):
        calls.append([part["image"].size for part in given[0][0]["content"] if part["type"] == "image"])
        ids = trainer.processing_class("user: " + "<image>" * 16 + "bake?")["input_ids"]
        return {"prompt_ids": [ids] * len(given), "completion_ids": [[9, 8, 7]] * len(given),
                "logprobs": [[0.0] * 3] * len(given)}  # fmt: skip

    args = trl_jax.GRPOConfig(str(tmp_path), **SAME | POLICY | {"max_steps": 1})
    rows = prompts().select(range(4))
    made = trl_jax.GRPOTrainer(llava, reward, args, rows, rollout_func=rollout)
    made.train()
    assert calls and len(calls[0]) == 1

    def none(given, trainer):
        return rollout(given, trainer) | {"prompt_ids": [[5, 6]] * len(given)}

    with pytest.raises(ValueError, match="the text has 0 image tokens, but its 1 images have 16 features"):
        trl_jax.GRPOTrainer(llava, reward, args, rows, rollout_func=none).train()

    def sampled(given, trainer):
        image = trainer.processing_class.convert_tokens_to_ids("<image>")
        return rollout(given, trainer) | {"completion_ids": [[9, image, 7]] * len(given)}

    with pytest.raises(ValueError, match="A completion has the image token '<image>'"):
        trl_jax.GRPOTrainer(llava, reward, args, rows, rollout_func=sampled).train()


def test_image_tokens_are_never_sampled(llava, tmp_path):
    made = trainer(trl_jax, "GRPO", llava, tmp_path, **POLICY)
    assert made.parts.rollout_steps.rollout.generator._sampling.options["suppress_tokens"] == [
        made._setup.encoder.image_token_id
    ]


@pytest.mark.parametrize("passed", ["nothing", "processor", "tokenizer"])
def test_image_tokens_are_suppressed_without_images_as_in_trl(passed, llava, tmp_path):
    """With a processor, whatever the rows have."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    classes = {"nothing": None, "processor": transformers.AutoProcessor, "tokenizer": transformers.AutoTokenizer}
    given = None if classes[passed] is None else classes[passed].from_pretrained(llava)
    rows = prompts().remove_columns("images")

    def made(package):
        args = package.GRPOConfig(str(tmp_path / package.__name__), **SAME | POLICY)
        return package.GRPOTrainer(llava, lambda prompts, **_: [0.0] * len(prompts), args, rows, processing_class=given)

    wanted, own = made(trl).generation_kwargs.get("suppress_tokens"), made(trl_jax)
    assert own.parts.rollout_steps.rollout.generator._sampling.options.get("suppress_tokens") == wanted
    assert (wanted is None) == (passed == "tokenizer")


def test_images_are_kept_out_of_the_table(llava, tmp_path):
    options = POLICY | {"log_completions": True, "max_steps": 1, "log_multimodal": False}
    made = trainer(trl_jax, "GRPO", llava, tmp_path, **options)
    made.train()
    assert len(made._logs["images"]) == 0 < len(made._logs["prompt"])
    import pandas as pd

    [file] = (tmp_path / "completions").glob("*.parquet")
    prompt = pd.read_parquet(file)["prompt"][0]
    assert "PIL" not in str(prompt) and "image" in str(prompt)


def test_wandb_gets_its_own_images(monkeypatch):
    from trl_jax.rollout.completions_log import CompletionsLog, trackers

    logs, [picture] = [], pictures(1)
    wandb = types.ModuleType("wandb")
    wandb.run, wandb.log = object(), logs.append
    wandb.Table = lambda dataframe: dataframe
    wandb.Image = lambda image: ("wandb.Image", image.size)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log = CompletionsLog(None, 4, 0, trackers=trackers(["wandb"]), multimodal=True)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "bake?"}]
    log.add("train", [[{"role": "user", "content": content}], user("cake?")], ["yes", "no"])
    log.log("train", 1)
    [table] = [entry["completions"] for entry in logs]
    assert table["image"].tolist() == [[("wandb.Image", picture.size)], []]
    wandb.run = None
    log.log("train", 2)
    assert len(logs) == 1


@pytest.mark.parametrize("multimodal", [True, False])
def test_trackers_get_images(multimodal):
    from trl_jax.rollout.completions_log import CompletionsLog

    tables, [picture] = [], pictures(1)
    log = CompletionsLog(None, 4, 0, trackers=[tables.append], multimodal=multimodal)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "bake?"}]
    log.add("train", [[{"role": "user", "content": content}], user("cake?")], ["yes", "no"])
    again = CompletionsLog(None, 4, 0, trackers=[tables.append], multimodal=multimodal)
    again.restore(log.state())
    for own in (log, again):
        own.log("train", 1)
    assert all("PIL" not in str(table["prompt"][0]) for table in tables)
    assert ("image" in tables[0]) == multimodal and "image" not in tables[1]
    assert list(log.columns("train")["images"]) == ([[picture], []] if multimodal else [])
    if multimodal:
        assert list(tables[0]["image"]) == [[picture], []]


def test_evaluation_completes_prompts_with_images(llava, tmp_path):
    made = trainer(trl_jax, "GRPO", llava, tmp_path, **POLICY, per_device_eval_batch_size=2)
    metrics = made.evaluate(prompts(3))
    assert np.isfinite(metrics["eval_loss"]) and metrics["eval_reward"] > 0


def test_what_is_refused(llava, checkpoint, tmp_path):
    texts = Dataset.from_list([{"prompt": "bake?", "images": pictures(1)}] * 4)
    with pytest.raises(ValueError, match="Multimodal training requires conversational prompts"):
        trainer(trl_jax, "GRPO", llava, tmp_path, texts, **POLICY)
    with pytest.raises(ValueError, match="does not seem to be a vision-language model"):
        trainer(trl_jax, "GRPO", str(checkpoint()), tmp_path, **POLICY)
    content = [{"type": "image"}, {"type": "text", "text": "bake?"}]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": content}], "images": pictures(2)}] * 4)
    with pytest.raises(ValueError, match=r"Number of images provided \(2\) does not match"):
        trainer(trl_jax, "GRPO", llava, tmp_path, rows, **POLICY).train()
    with pytest.raises(ValueError, match="prompts with images cannot be cut to max_prompt_length=4"):
        trainer(trl_jax, "GRPO", llava, tmp_path, **POLICY, max_prompt_length=4).train()


if __name__ == "__main__":
    checkpoint, out, where = sys.argv[1:]
    made = trainer(trl_jax, "GRPO", checkpoint, out, **KILLED)
    if where == "training":
        made.add_callback(Killing())
    else:
        from trl_jax.generation import generator

        killing_prefill(generator, out)
    made.train()
