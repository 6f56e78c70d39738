"""A moving average of the weights beside the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer_callback import TrainerCallback

from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.mesh.arrays import fetched

logger = logging.getLogger(__name__)

Weights = dict[str, np.ndarray]


class BEMACallback(TrainerCallback):
    r"""Keeps a bias-corrected exponential moving average of the weights that train, and saves the model with it to
    `bema` in `output_dir` at the end (https://huggingface.co/papers/2508.00180). The run itself goes on as without.

    With $\theta_0$ the weights at step `update_after`, and every `update_freq` steps from there on at step $t$

    $$ EMA \leftarrow (1 - \beta) EMA + \beta \theta_t, \qquad \theta' = EMA + \alpha (\theta_t - \theta_0) $$

    with $\beta = (lag + multiplier \cdot t)^{-ema\_power}$, at least `min_ema_multiplier`, and
    $\alpha = (lag + multiplier \cdot t)^{-bias\_power}$. The arguments are TRL's, in TRL's order. A run that is resumed
    begins it anew.

    Args:
        update_freq: steps between two updates.
        ema_power, bias_power: exponents; an `ema_power` of 0.0 takes the weights as they are.
        lag, multiplier: age of the average at step 0, and how it grows with a step.
        update_after: the first steps, which have no part in it.
        min_ema_multiplier: the least that an update counts.
        device: has no effect: three copies of the weights that train are held in the host's memory.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
    ):
        del device
        self.update_freq, self.update_after = update_freq, update_after
        self.ema_power, self.bias_power, self.min_ema_multiplier = ema_power, bias_power, min_ema_multiplier
        self.lag, self.multiplier = lag, multiplier
        self._begin: Weights = {}
        self._average: Weights = {}
        self._corrected: Weights = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / "bema"
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link, which is not followed: remove it, or choose another output_dir.")
        self._begin = _weights(model)
        self._average = {path: array.copy() for path, array in self._begin.items()}
        self._corrected = self._begin

    def on_step_end(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        since = state.global_step - self.update_after
        if since == 0:
            self._begin = _weights(model)
            self._average = {path: array.copy() for path, array in self._begin.items()}
        elif since > 0 and since % self.update_freq == 0:
            self._update(state.global_step, _weights(model))
            logger.info("Updated BEMA weights at step %d", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / "bema"
        model.with_params(dict(self._corrected)).save_pretrained(folder)
        logger.info("Saved BEMA model to %s", folder)

    def _update(self, step: int, now: Weights) -> None:
        age = self.lag + self.multiplier * step
        beta, alpha = max(age**-self.ema_power, self.min_ema_multiplier), age**-self.bias_power
        self._corrected = {}
        for path, weights in now.items():
            average, kind = self._average[path], weights.dtype
            average += (beta * (weights - average)).astype(kind)
            self._corrected[path] = average + (alpha * (weights - self._begin[path])).astype(kind)


def _weights(model: PreTrainedModel) -> Weights:
    """Copies of those that train, in the host's memory: the step gives its arrays away."""
    return {path: np.array(fetched(array)) for path, array in model.params.items()}
