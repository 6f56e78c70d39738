"""A plan against a trainer with weights: whether both would run the same programs on the same number of bytes."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from datasets import Dataset

from trl_jax.config.base import BaseConfig
from trl_jax.hub.auto import find_checkpoint
from trl_jax.hub.peft_config import LoraConfig
from trl_jax.hub.quantization import BitsAndBytesConfig
from trl_jax.plan import trace
from trl_jax.plan.chips import topology
from trl_jax.plan.compile import Compiled
from trl_jax.plan.plan import Plan, Run, plan
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.reward_trainer import RewardTrainer
from trl_jax.training.forward import run_key
from trl_jax.training.model import outlined

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="SEQ_CLS")
NESTED = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
LENGTH, PAIRS = 96, 4
SIDES = {"chosen": 1, "rejected": 2}  # the token id in answers of this column
PAIR = {f"{side}_ids": [id] * LENGTH for side, id in SIDES.items()}


def alike(
    weights: Path,
    out: Path,
    devices: int = 1,
    adapter: LoraConfig | None = None,
    quantization: BitsAndBytesConfig | None = None,
    kind: type[BaseTrainer] = RewardTrainer,
    row: dict[str, Any] = PAIR,
    **config,
) -> Plan:
    """The plan for a config.json alone, after asserting that its programs equal those of a run on the weights in a
    folder.

    row: the longest row of the trainer.
    """
    args = kind.config_class(
        str(out), per_device_train_batch_size=PAIRS, per_device_eval_batch_size=2 * PAIRS, max_length=LENGTH,
        eval_strategy="epoch", report_to="none", remat_policy="nothing_saveable", model_init_kwargs={"dtype": "auto"},
        **config,
    )  # fmt: skip
    real = _real(kind, row, weights, args, devices, adapter, quantization)
    tx, batch = (
        real.parts.training.build_optimizer(),
        real.parts.train_step.placed(next(iter(real.loader(real.train_dataset, training=True)))).arrays,
    )
    state, rate = real.parts.train_step.new_optimizer_state(tx), np.float32(1e-4)
    with real.parts.setup.on_device():
        step = real.parts.train_step.compiled(tx, remat=True).trace(
            real.model.params, state, batch, rate, run_key(args, real.model.backend), real.parts.setup.frozen
        )
    shutil.copy(weights / "config.json", out)
    checkpoint = find_checkpoint(str(out), head=trace.task_of(kind, args).head, dtype="auto")
    run = Run(checkpoint, adapter=adapter, quantization=quantization, trainer=kind)
    place = topology(f"cpu:{devices}")
    traced, found = _traced(run, trace.planned_config(args, place, str(out))), plan(run, args, place)
    assert _letters(traced) == _letters(step)
    assert found.compiled.arguments == _memory(step).argument_size_in_bytes
    assert found.memory.parameters == _held((real.model.params, real.parts.setup.frozen))
    assert found.memory.moments == _held(state)
    with real.parts.setup.on_device():
        window = trace.largest_evaluated(real)
        place = None if real.sharding_plan is None else real.sharding_plan.rows
        scored = jax.jit(real.parts.evaluator.outputs, static_argnames="dtype").trace(
            real.parts.setup.arrays, jax.device_put(window, place), dtype=args.compute_dtype
        )
    told, memory = found.evaluation.compiled, _memory(scored)
    unread = told.arguments - _held(state) - memory.argument_size_in_bytes  # parts of the batch: weights, margins
    assert 0 <= unread < found.evaluation.memory.batch
    assert told.allocated == memory.temp_size_in_bytes
    return found


def _real(
    kind: type[BaseTrainer],
    row: dict[str, Any],
    weights: Path,
    args: BaseConfig,
    devices: int,
    adapter: LoraConfig | None,
    quantization: Any,
) -> BaseTrainer:
    def rows(count: int) -> Dataset:
        return Dataset.from_list([row] * count)

    return kind(
        str(weights),
        args=args,
        train_dataset=rows(PAIRS * args.gradient_accumulation_steps * devices),
        eval_dataset=rows(2 * PAIRS * devices),
        peft_config=adapter,
        quantization_config=quantization,
    )


def _traced(run: Run, args: trace.PlannedConfig) -> Any:
    model = outlined(run.checkpoint, args, run.adapter, run.quantization)
    trainer = trace.trainer_of(run.trainer, model, args, run.rows)
    tx, found = trainer.parts.training.build_optimizer(), trace.survey_steps(trainer)
    texts = len(trainer.make_task().columns.texts)
    assert found.tokens == texts * LENGTH * PAIRS * args.gradient_accumulation_steps * trainer.parts.setup.shards
    return trace.trace_step(trainer, tx, trace.step_arguments(trainer, tx, found.largest), remat=True)


def _memory(traced: Any) -> Any:
    return traced.lower().compile().memory_analysis()


def _held(arrays: Any) -> int:
    """Their bytes on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))


def with_figures(found: Plan, args: BaseConfig) -> Plan:
    """The plan with made-up compiler figures: temporaries are proportional to the tokens of a pass."""
    each = (2 if args.bf16 else 4) * (1_000 if args.gradient_checkpointing else 3_000)

    def figures(arguments: int, tokens: int) -> Compiled:
        return Compiled(0.0, arguments + each * tokens, True, None, arguments, each * tokens)

    evaluation, generation = found.evaluation, found.generation
    if evaluation is not None:
        evaluation = evaluation._replace(compiled=figures(sum(evaluation.memory), evaluation.one.tokens))
    if generation is not None:
        generation = generation._replace(compiled=figures(0, generation.size.tokens))
    step = figures(sum(found.memory), found.one.tokens)
    return replace(found, compiled=step, evaluation=evaluation, generation=generation)


def _letters(traced: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", str(traced.jaxpr))
