"""Resume from the files that transformers' Trainer writes into a checkpoint."""

from __future__ import annotations

import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from transformers.trainer_callback import TrainerState

from trl_jax.engine.checkpoints.progress import Progress
from trl_jax.engine.optimizers.optimizer import decays, with_adam_moments
from trl_jax.hub.network.fetch import ADAPTER
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch.optimizer_state import OPTIMIZER, write_adamw_moments
from trl_jax.hub.torch.random_state import random_state
from trl_jax.rollout.source import RolloutSteps

logger = logging.getLogger(__name__)
_ENTROPY = "entropy_ctrl_state.json"  # of TRL's GRPOTrainer with use_adaptive_entropy


def optimizer_state(
    folder: Path, fresh: Any, model: PreTrainedModel, load: Callable[[Path], dict[str, jax.Array]]
) -> Any:
    """`fresh` with AdamW's moments from optimizer.pt; unchanged, with a warning, where they cannot be read without
    torch, or those of an adapter without peft.

    Args:
        model: that trains.
        load: reads a folder of weights.
    """
    logger.warning("%s has no manifest: nothing tells whether its files are as they were written.", folder)
    for name in ("torch", "peft") if (folder / ADAPTER).is_file() else ("torch",):
        if importlib.util.find_spec(name) is None:
            logger.warning("%s takes %s to read, which is not installed: AdamW's moments restart from zero.",
                           folder / OPTIMIZER, name)  # fmt: skip
            return fresh
    with tempfile.TemporaryDirectory() as aside:
        count = write_adamw_moments(folder, Path(aside), model.config, model.backend.head, decays)
        return with_adam_moments(fresh, count, *(load(Path(aside, part)) for part in ("mu", "nu")))


def place(state: TrainerState, steps_an_epoch: int | None, examples_a_step: int) -> Progress:
    """The progress of a run of transformers, which counts steps only.

    Args:
        steps_an_epoch: None for a stream, which is then read from its beginning.
    """
    epoch, step = divmod(state.global_step, steps_an_epoch) if steps_an_epoch else (0, state.global_step)
    over = step == 0 and epoch > 0
    return Progress(
        epoch=epoch - over, epoch_over=over, examples=step * examples_a_step, loss_sum=_loss_sum(state.log_history)
    )


def rollout_place(
    folder: Path, state: TrainerState, steps: RolloutSteps, examples_a_step: int, *, model_only: bool
) -> Progress:
    """The same of a run whose rows are completions, of which transformers keeps none; with the place in the streams of
    random numbers, and the coefficient of the entropy bonus, unless the checkpoint has the model alone."""
    of_epoch = steps.pass_over(state.global_step)
    for rank, stream in enumerate(() if model_only else steps.streams):
        known = None
        if importlib.util.find_spec("torch") is not None:
            known = random_state(folder, rank, len(steps.streams))
        if known is None:
            logger.warning("%s: no state of torch's random numbers was read: completions are drawn anew.", folder)
        else:
            stream.restore(known)
    control = folder / _ENTROPY
    if steps.bonus is not None and control.is_file():
        kept = json.loads(control.read_text(encoding="utf-8"))
        steps.bonus.coef, steps.bonus.entropy = float(kept["entropy_coef"]), float(kept["last_world_entropy"])
    return Progress(
        epoch=steps.epoch, epoch_over=not steps.sampler.has_next, examples=of_epoch * examples_a_step,
        loss_sum=_loss_sum(state.log_history),
    )  # fmt: skip


def tokens_seen(state: TrainerState) -> int:
    """The number of tokens in the last log, 0 where there is none."""
    return int(max((log["num_tokens"] for log in state.log_history if "num_tokens" in log), default=0))


def _loss_sum(logs: list[dict[str, float]]) -> float:
    """The sum of the losses of all logged steps; each log has the mean since the one before."""
    total, before = 0.0, 0
    for log in logs:
        if "loss" in log:
            total, before = total + log["loss"] * (log["step"] - before), log["step"]
    return total
