"""Plans of online training: the step, the two programs of a generation, and the cache."""

from __future__ import annotations

import json
import shutil
import socket
import warnings
from dataclasses import replace

import jax
import numpy as np
import pytest
from datasets import Dataset

import trl_jax
from compat_tests.effort import thorough
from compat_tests.parity.dpo_cases import CHAT, SMALL
from compat_tests.parity.grpo_cases import length_reward, prompt_rows
from compat_tests.plan.planned import with_figures
from compat_tests.trainer.test_image_rollouts import prompts
from compat_tests.trainer.vision_models import PATCH, SIZE, pairs, tiny_llava
from trl_jax.cli.main import main
from trl_jax.core.trainers import EXPERIMENTAL
from trl_jax.experimental.gkd import GKDConfig
from trl_jax.generation import generator
from trl_jax.generation.decode import Decoding
from trl_jax.hub.auto import find_checkpoint
from trl_jax.nn.cache import Cache
from trl_jax.plan import trace
from trl_jax.plan.chips import CHIPS, topology
from trl_jax.plan.compile import compiled
from trl_jax.plan.generation import Size, start_first_epoch
from trl_jax.plan.plan import Run, batch_sizes, generations, max_lengths, plan, suggestions_for
from trl_jax.scripts.plan import ignored_arguments, text
from trl_jax.trainer.dpo_config import DPOConfig
from trl_jax.trainer.grpo_config import GRPOConfig
from trl_jax.trainer.grpo_trainer import GRPOTrainer
from trl_jax.trainer.rloo_config import RLOOConfig
from trl_jax.training.forward import run_key
from trl_jax.training.model import outlined, with_images

SHAPE = {
    "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 40, "bf16": False,
    "report_to": "none", "use_cpu": True, "remat_policy": "nothing_saveable",
}  # fmt: skip


def config(out, kind=GRPOConfig, **changes):
    with pytest.warns(FutureWarning, match="max_prompt_length"):
        return kind(str(out), **SHAPE | {"max_prompt_length": 96} | changes)


@pytest.fixture
def bare(checkpoint, tmp_path):
    """The run of a checkpoint folder that contains only config.json."""
    shutil.copy(checkpoint(**SMALL) / "config.json", tmp_path / "config.json")
    return Run(find_checkpoint(str(tmp_path), head="lm", dtype="float32"))


class Calls:
    """Wraps a jitted function and keeps the traced program of its last call, and the bytes of the cache that it
    returned."""

    def __init__(self, function):
        self._function, self.traced, self.cache = function, None, 0

    def __call__(self, *given, **options):
        self.traced, found = self._function.trace(*given, **options), self._function(*given, **options)
        [own] = [one for one in found if isinstance(one, Decoding | Cache)]
        cache = own.cache if isinstance(own, Decoding) else own
        self.cache = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.parts))
        return found


def test_programs_and_memory_are_those_of_a_run(checkpoint, bare, tmp_path, monkeypatch):
    """The run's completions all have the maximum length."""
    place, rows = topology("cpu:1"), Dataset.from_list(prompt_rows(5))
    none = {"eos_token_id": [5000]}  # not an id of the vocabulary
    args = GRPOConfig(str(tmp_path / "out"), beta=0.1, steps_per_generation=2, generation_kwargs=none, **SHAPE)
    real = GRPOTrainer(str(checkpoint(**SMALL)), length_reward, args, rows)
    calls = {name: Calls(vars(generator)[name]) for name in ("prefill", "next_tokens")}
    for name, call in calls.items():
        monkeypatch.setattr(generator, name, call)
    source, parts = start_first_epoch(real.parts.rollout_steps), real.parts
    batch = parts.train_step.placed(next(iter(source))).arrays
    assert {len(row.completion) for row in source.generation.rows} == {40}
    tx = parts.training.build_optimizer()
    state = parts.train_step.new_optimizer_state(tx)
    with parts.setup.on_device():
        step = parts.train_step.compiled(tx, remat=True).trace(
            real.model.params, state, batch, np.float32(1e-4), run_key(args, real.model.backend), parts.setup.frozen
        )
    whole = [compiled(call.traced, place) for call in calls.values()]

    found = plan(replace(bare, rows=trace.Rows(rows, None, real.processing_class)), args, place)
    size = found.generation.size
    assert size.prompts == 2 and size.completions == 8 and size.new_places == 64
    assert found.generation.compiled.peak == max(one.peak for one in whole)
    assert found.generation.copied == 8 * 4 * 2 * 8 * 32  # completions, bytes, heads, channels, tokens
    assert found.compiled._replace(seconds=0) == compiled(step, place)._replace(seconds=0)
    assert found.generation.cache == calls["next_tokens"].cache > calls["prefill"].cache
    assert found.unread == 4 * found.parameters and found.memory.parameters == 2 * found.unread
    assert found.generation.other_bytes == found.unread + found.memory.moments
    assert f"Generation: 8 completions of 2 prompt(s), with room for {size.prompt_places} and 64 tokens" in text(found)


def test_evaluation_and_generation_are_phases(bare, tmp_path):
    args = config(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=32)
    found = plan(bare, args, topology("h100:1"))
    assert [phase.name for phase in found.phases] == ["a step", "evaluation", "generation"]
    assert found.generation.size == Size.of(8, 4, 96, 40) and found.generation.evaluates
    assert "Evaluation: a pass of" in text(found) and "Whether it fits is unknown: weights" in text(found)
    assert generations(args, found) == [{"per_device_eval_batch_size": 32 >> power} for power in range(1, 6)]


@pytest.mark.parametrize(("mesh", "rows", "share"), [("data:8", 32, 1), ("fsdp:4,tensor:2", 16, 0.3)])
def test_sizes_are_of_the_planned_devices(bare, tmp_path, mesh, rows, share):
    found = plan(bare, config(tmp_path, RLOOConfig, mesh_shape=None), topology("h100:1"))
    args = config(tmp_path, RLOOConfig)
    args.mesh_shape = mesh  # set afterwards, because this machine has only one device
    many = plan(bare, args, topology("h100:8"))
    assert found.generation.size.completions == 4 and many.generation.size.completions == rows
    assert many.settings["generation_batch_size"] == rows
    assert many.memory.parameters <= share * found.memory.parameters


def test_completions_at_once_are_those_of_a_run(bare, tmp_path):
    """The number set by the argument, or the number that fits in the memory left by the run."""
    sizes = {"steps_per_generation": 16, "max_completion_length": 2048}
    place, args = topology("h100:1"), config(tmp_path, **sizes)
    whole = plan(bare, args, place).generation
    assert whole.size == whole.at_once == Size(16, 64, 96, 2048)
    bounded = plan(bare, config(tmp_path, max_completions_per_device=16, **sizes), place)
    assert bounded.generation.size == whole.size and bounded.generation.at_once == Size(16, 16, 96, 2048)
    assert "Generation: 64 completions of 16 prompt(s), 16 at once, with room for 96" in text(bounded)

    one = 2 * 4 * 2 * 8 * (96 + 2048)  # keys and values, bytes, heads, channels, tokens
    held = bounded.memory.parameters + bounded.memory.moments
    for slots in (1, 7, 61):
        memory = (held + (slots + 0.5) * one / 0.75) / 0.95 / 0.75
        small = place._replace(chip=CHIPS["h100"]._replace(memory=memory))
        assert plan(bare, args, small).generation.at_once == Size(slots, slots, 96, 2048)


def test_suggestions_keep_groups_and_generations_whole(bare, tmp_path):
    args = config(tmp_path, gradient_accumulation_steps=8)
    found = plan(bare, args, topology("h100:1"))
    assert batch_sizes(args)[0] == {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 16, "steps_per_generation": 16
    }  # fmt: skip
    assert generations(args, found) == [{"steps_per_generation": parts} for parts in (4, 2, 1)]
    args.max_completion_length = 1024
    assert max_lengths(args) == [{"max_completion_length": 512}, {"max_completion_length": 256}]


@pytest.mark.parametrize(("kind", "own"), [
    (GRPOConfig, {"generation_kwargs": {"max_tokens": 24, "min_tokens": 2}}), (RLOOConfig, {}),
])  # fmt: skip
def test_a_plan_contacts_no_server(bare, tmp_path, kind, own):
    """No server runs at that port. Connecting would end in an error after the timeout."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    server = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": port, "vllm_server_timeout": 600.0}
    args = config(tmp_path, kind, **server, **own)
    found = plan(bare, args, topology("h100:1"), compiles=False)
    assert found.generation is None and [phase.name for phase in found.phases] == ["a step"]
    assert "servers generate the completions (vllm_mode='server')" in text(found)
    assert not {"use_vllm", "vllm_mode"} & {*ignored_arguments(args)} and "vllm_server_port" in ignored_arguments(args)
    alone = plan(
        bare, config(tmp_path, kind, max_completion_length=24 if own else 40), topology("h100:1"), compiles=False
    )
    assert found.lengths == alone.lengths and "servers generate" not in text(alone)


def test_a_plan_names_the_cache_between_turns(bare, tmp_path):
    found = plan(bare, config(tmp_path, max_tool_calling_iterations=2), topology("h100:1"), compiles=False)
    assert "With tools, the cache of the turn before is kept where memory allows it; this is not counted." in text(
        found
    )


def test_a_generation_that_does_not_fit_is_made_smaller(bare, tmp_path):
    sizes = {"per_device_train_batch_size": 1, "steps_per_generation": 1024}
    args = config(tmp_path, max_completion_length=512, max_prompt_length=16, **sizes)
    whole = with_figures(plan(bare, args, topology("h100:1")), args).largest
    assert whole.name == "generation"
    place = topology("h100:1")._replace(chip=CHIPS["h100"]._replace(memory=0.7 * whole.peak))

    def planned(changed):
        return with_figures(plan(bare, changed, place), changed)

    found = {suggestion.name: suggestion.plan.fits for suggestion in suggestions_for(args, planned(args), planned)}
    assert found["--steps_per_generation 512"] and found["--max_completion_length 256"] and found["--bf16 True"]
    assert "It does not fit in generation: " in text(planned(args))


def test_prompts_of_any_length_have_no_plan(bare, tmp_path):
    args = GRPOConfig(str(tmp_path), **SHAPE)
    with pytest.raises(
        ValueError, match="max_prompt_length=None leaves the length of prompts open: pass --max_prompt_length, or"
    ):
        plan(bare, args, topology("h100:1"))


@pytest.mark.parametrize("name", ["gkd", thorough("online_dpo")])
def test_completions_that_are_written_before_a_step(checkpoint, bare, tmp_path, name):
    """The step's program is that of a run whose completions all have the maximum length."""
    place, names = topology("cpu:1"), EXPERIMENTAL[name]
    small = {"bf16": False, "report_to": "none", "use_cpu": True, "remat_policy": "nothing_saveable", "max_steps": 1}
    # Not an id of the vocabulary.
    own = {"lmbda": 1.0} if name == "gkd" else {"generation_kwargs": {"eos_token_id": [5000]}}
    args = names.load_config()(
        str(tmp_path / "out"), per_device_train_batch_size=2, max_length=64, max_new_tokens=20, **small, **own
    )
    prompts = prompt_rows(2, "chat" if name == "gkd" else "text")
    answer = [{"role": "assistant", "content": "steady"}]
    rows = [{"messages": row["prompt"] + answer} for row in prompts] if name == "gkd" else prompts
    given = {"teacher_model": str(checkpoint(**CHAT))} if name == "gkd" else {"reward_funcs": length_reward}
    real = names.load_trainer()(
        model=str(checkpoint(**CHAT)), args=args, train_dataset=Dataset.from_list(rows), **given
    )
    if name == "gkd":
        real._ends = 5000
        real._mixture = real._mixed()
    parts, steps = real.parts, real.batches(real.train_dataset, training=True).steps
    batch = parts.train_step.placed(next(iter(steps))).arrays
    tx = parts.training.build_optimizer()
    with parts.setup.on_device():
        step = parts.train_step.compiled(tx, remat=True).trace(
            real.model.params, parts.train_step.new_optimizer_state(tx), batch, np.float32(1e-4),
            run_key(args, real.model.backend), parts.setup.frozen,
        )  # fmt: skip
    shutil.copy(checkpoint(**CHAT) / "config.json", tmp_path / "config.json")
    checkpoint = find_checkpoint(str(tmp_path), head="lm", dtype="float32")
    run = Run(checkpoint, trace.Rows(Dataset.from_list(rows), None, real.processing_class))
    found = plan(replace(run, teacher=checkpoint if name == "gkd" else None), args, place)
    assert found.compiled._replace(seconds=0) == compiled(step, place)._replace(seconds=0)
    prompts = 2 if name == "gkd" else 4
    assert found.generation.size == Size.of(prompts, 1, found.generation.size.prompt_places, 20)
    assert found.generation.cache > 0 and found.memory.parameters == 8 * found.parameters


@pytest.mark.parametrize(("name", "flags", "prompts"), [
    ("gkd", "--lmbda 0 --seq_kd true --teacher_model_name_or_path", 2),
    ("gkd", "--lmbda 0 --teacher_model_name_or_path", 0),
    ("online_dpo", "--reward_model_name_or_path", 4),
])  # fmt: skip
def test_made_up_rows_of_trainers_that_write(checkpoint, monkeypatch, tmp_path, name, flags, prompts):
    # JAX is already initialized in this process.
    monkeypatch.setattr("trl_jax.plan.compile.prepare", lambda place: None)
    other = checkpoint(**SMALL) if name == "gkd" else checkpoint()
    flags = f"--model_name_or_path {checkpoint(**SMALL)} --topology h100:1 --trainer {name} {flags} {other}"
    flags += " --max_length 96 --max_new_tokens 32 --per_device_train_batch_size 2"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert main(["plan", *flags.split(), "--json", str(tmp_path / "plan.json")]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert list(found["lengths"]) and found["tokens"] == 2 * 96 * (2 if name == "online_dpo" else 1)
    if not prompts:
        assert found["generation"] is None
        return
    assert found["generation"]["size"] == Size.of(prompts, 1, 64, 32)._asdict()
    if name == "gkd":
        with pytest.raises(ValueError, match="max_length=16 leaves no room for a prompt before 32 new tokens"):
            plan(Run(find_checkpoint(str(other), head="lm")), GKDConfig("o", max_length=16, max_new_tokens=32),
                 topology("h100:1"))  # fmt: skip


def test_a_generation_beside_other_rows(bare, tmp_path):
    args = DPOConfig(str(tmp_path), max_length=64, bf16=True, report_to="none", use_cpu=True)
    found = plan(replace(bare, generation=Size.parse("64x100+33")), args, topology("cpu:1"))
    own = found.generation
    assert own.size == Size(64, 64, 128, 64) and found.unread == 0
    assert own.other_bytes == found.memory.moments + 4 * found.parameters
    assert own.cache == 2 * 2 * 2 * 8 * 64 * (128 + 64)  # keys and values, bytes, heads, channels, tokens
    assert generations(args, found) == []


@pytest.mark.parametrize("given", ["", "64", "64x0+5", "64*100+5", "-1x2+3"])
def test_a_generation_in_other_words_is_refused(given):
    with pytest.raises(ValueError, match="expected PROMPTSxTOKENS"):
        Size.parse(given)


def test_the_command_plans_it(checkpoint, monkeypatch, tmp_path, capsys):
    # JAX is already initialized in this process.
    monkeypatch.setattr("trl_jax.plan.compile.prepare", lambda place: None)
    flags = f"--model_name_or_path {checkpoint(**SMALL)} --topology h100:8 --trainer rloo --max_prompt_length 50"
    flags += f" --reward_model_name_or_path {checkpoint()} --mesh_shape fsdp:8 --generation_batch_size 128"
    assert main(["plan", *flags.split(), "--json", str(tmp_path / "plan.json")]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["generation"]["size"]["completions"] == 128 and found["mesh"] == {"fsdp": 8}
    assert found["scorer"] > 4 * 100_000 and "MiB of reward model in memory: at least" in capsys.readouterr().out
    score = f"--model_name_or_path {checkpoint()} --topology h100:1 --max_length 64 --generate 4x16+8"
    assert main(["plan", *score.split()]) == 2
    assert "cannot generate: it runs on the native backend with a 'score' head" in capsys.readouterr().err


def test_tpus_read_completions_by_text(bare, tmp_path):
    found = plan(bare, config(tmp_path), topology("v5e:1x1"), compiles=False)
    assert found.attention.startswith("splash attention") and found.layout == "shared"


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_the_largest_step_has_the_images_of_its_rows(kind, tmp_path):
    """An image has 16 patches, and as many tokens in its prompt."""
    folder, rows = tiny_llava(tmp_path / "llava"), {"DPO": pairs, "GRPO": prompts}[kind](4)
    sizes = {"num_generations": 2, "max_completion_length": 6} if kind == "GRPO" else {"max_length": None}
    args = getattr(trl_jax, f"{kind}Config")(
        str(tmp_path / "out"), per_device_train_batch_size=4, bf16=False, report_to="none", use_cpu=True, **sizes
    )
    planned = trace.planned_config(args, topology("cpu:1"), str(tmp_path / "out"))
    model = outlined(with_images(find_checkpoint(str(folder), head="lm", dtype="float32")), planned, None, None)
    trainer = trace.trainer_of(getattr(trl_jax, f"{kind}Trainer"), model, planned, trace.Rows(rows))
    largest, tokens = trace.survey_steps(trainer).largest, (SIZE // PATCH) ** 2
    assert largest.images.patches.shape[-2] >= 2 * tokens
    assert (largest.images.at >= 0).sum() % tokens == 0 and (largest.images.at >= 0).sum() >= 2 * tokens
    if kind == "GRPO":
        assert trainer.parts.rollout_steps.rollout.generator.longest > tokens
    found = plan(
        Run(find_checkpoint(str(folder), head="lm", dtype="float32"), trace.Rows(rows)),
        args,
        topology("cpu:1"),
        compiles=False,
    )
    assert found.tokens > 0 and found.memory.batch >= largest.images.patches.nbytes
