"""TRL's callbacks."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.core.text import brief
from trl_jax.core.trainers import placeholder
from trl_jax.data.chat import rendered
from trl_jax.data.prompts import is_conversation
from trl_jax.hub.torch_bridge import as_arrays, as_tensors
from trl_jax.hub.torch_objects import is_torch_model
from trl_jax.mesh.mesh import fetched
from trl_jax.rollout.completions_log import trackers

# Completions of evaluation prompts, logged to trackers during training.


class LogCompletionsCallback(TrainerCallback):
    """Completes prompts of the evaluation set every `freq` steps, and logs a table of all completions so far (step,
    prompt, completion) to those of wandb, comet_ml and trackio that are in `report_to`. Without such a tracker, it
    prints the first two completions.

    Args:
        trainer: a trainer of a language model, whose evaluation set has a column `prompt` of texts or messages.
        generation_config: transformers' object; None uses the model's own.
        num_prompts: complete only the first `num_prompts` prompts; None: all.
        freq: number of steps between two tables; None: `eval_steps`.

    Raises:
        ValueError: the trainer has no evaluation set.
    """

    def __init__(
        self, trainer: Any, generation_config: Any = None, num_prompts: int | None = None, freq: int | None = None
    ):
        if trainer.eval_dataset is None:
            raise ValueError("Trainer must have an evaluation dataset to use the LogCompletionsCallback.")
        self.trainer, self.generation_config, self.freq = trainer, generation_config, freq
        self.eval_dataset = trainer.eval_dataset
        if num_prompts is not None:
            self.eval_dataset = self.eval_dataset.select(range(num_prompts))
        self.table: list[tuple[str, str, str]] = []
        self._last_step = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if step == self._last_step or step % (self.freq or state.eval_steps):
            return
        self._last_step = step
        tokenizer = kwargs["processing_class"]
        prompts = [_text(prompt, tokenizer) for prompt in self.eval_dataset["prompt"]]
        completions = self._completed(prompts, tokenizer, args.per_device_eval_batch_size)
        if not state.is_world_process_zero:
            return
        self.table += [(str(step), *row) for row in zip(prompts, completions, strict=True)]
        frame = pd.DataFrame(self.table, columns=["step", "prompt", "completion"])
        for track in trackers(args.report_to):
            track(frame)
        if "comet_ml" in args.report_to:
            experiment = importlib.import_module("comet_ml").get_running_experiment()
            if experiment is not None:
                experiment.log_table(tabular_data=frame, filename="completions.csv")
        elif not trackers(args.report_to):
            for prompt, completion in list(zip(prompts, completions, strict=True))[:2]:
                print(f"step {step}: {prompt!r} -> {completion!r}", flush=True)

    def _completed(self, prompts: list[str], tokenizer: Any, batch_size: int) -> list[str]:
        completions, side, tokenizer.padding_side = [], tokenizer.padding_side, "left"
        try:
            for start in range(0, len(prompts), batch_size):
                batch = tokenizer(prompts[start : start + batch_size], return_tensors="np", padding=True)
                rows = self.trainer.model.generate(**batch, generation_config=self.generation_config)
                new = rows[:, batch["input_ids"].shape[1] :]
                completions += tokenizer.batch_decode(new, skip_special_tokens=True)
        finally:
            tokenizer.padding_side = side
        return completions


def _text(prompt: str | list[dict[str, Any]], tokenizer: Any) -> str:
    """The prompt as text: messages are rendered with the chat template, ready for the assistant's answer."""
    if not is_conversation(prompt):
        return prompt
    answers = prompt[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not answers, "continue_final_message": answers}
    return rendered(tokenizer, prompt, f"The prompt {brief(prompt, 300)}", tokenize=False, **options)


# A moving average of the weights.


logger = logging.getLogger(__name__)

Weights = dict[str, np.ndarray]


class BEMACallback(TrainerCallback):
    r"""Keeps a bias-corrected exponential moving average (BEMA) of the trainable weights, and saves the model with it
    to `output_dir/bema` after training (https://huggingface.co/papers/2508.00180). Training itself is unaffected.

    Let $\theta_0$ be the weights at step `update_after`. After every further `update_freq` steps, at step $t$:

    $$ EMA \leftarrow (1 - \beta) EMA + \beta \theta_t, \qquad \theta' = EMA + \alpha (\theta_t - \theta_0) $$

    with $\beta = \max((lag + multiplier \cdot t)^{-ema\_power}, min\_ema\_multiplier)$ and
    $\alpha = (lag + multiplier \cdot t)^{-bias\_power}$. The arguments are TRL's, in TRL's order. A resumed run starts
    the average from scratch.

    Args:
        update_freq: number of steps between two updates.
        ema_power, bias_power: exponents of $\beta$ and $\alpha$; `ema_power=0.0` disables averaging.
        lag, multiplier: offset and scale of the step in $\beta$ and $\alpha$.
        update_after: the step at which averaging starts.
        min_ema_multiplier: lower bound of $\beta$.
        device: has no effect: three copies of the trainable weights are kept in host memory.
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
        self._model: Any = None
        self._begin: Weights = {}
        self._average: Weights = {}
        self._corrected: Weights = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / "bema"
        if folder.is_symlink():
            raise ValueError(f"{folder} is a link, which is not followed: remove it, or choose another output_dir.")
        self._model = model
        self._start()
        self._corrected = self._begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        since = state.global_step - self.update_after
        if since == 0:
            self._start()
        elif since > 0 and since % self.update_freq == 0:
            self._update_bema_weights(state.global_step)
            logger.info("Updated BEMA weights at step %d", state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / "bema"
        _with_weights(self._model, self._corrected).save_pretrained(folder)
        logger.info("Saved BEMA model to %s", folder)

    def _start(self) -> None:
        self._begin = _weights(self._model)
        self._average = {path: array.copy() for path, array in self._begin.items()}

    def _ema_beta(self, step: int) -> float:
        return max((self.lag + self.multiplier * step) ** -self.ema_power, self.min_ema_multiplier)

    def _bema_alpha(self, step: int) -> float:
        return (self.lag + self.multiplier * step) ** -self.bias_power

    def _update_bema_weights(self, step: int) -> None:
        beta, alpha = self._ema_beta(step), self._bema_alpha(step)
        self._corrected = {}
        for path, weights in _weights(self._model).items():
            average, kind = self._average[path], weights.dtype
            average += (beta * (weights - average)).astype(kind)
            self._corrected[path] = average + (alpha * (weights - self._begin[path])).astype(kind)


def _weights(model: Any) -> Weights:
    """Copies of the trainable weights in host memory: the step donates its arrays."""
    if is_torch_model(model):  # of transformers' own Trainer, or of a trainer of the installed trl
        trained = {name: param.detach().cpu() for name, param in model.named_parameters() if param.requires_grad}
        return {name: array.copy() for name, array in as_arrays(trained).items()}
    return {path: np.array(fetched(array)) for path, array in model.params.items()}


def _with_weights(model: Any, weights: Weights) -> Any:
    """A copy of the model with these trainable weights."""
    if is_torch_model(model):
        changed = copy.deepcopy(model)
        changed.load_state_dict(as_tensors(weights), strict=False)
        return changed
    return model.with_params(dict(weights))


# Progress bars drawn by rich.


class RichProgressCallback(TrainerCallback):
    """Shows progress bars for training and evaluation and a table of the last logs, updated live in the terminal.

    Raises:
        ImportError: rich is not installed.
    """

    def __init__(self):
        if importlib.util.find_spec("rich") is None:
            raise ImportError("RichProgressCallback draws with rich, which is not installed: pip install rich.")
        self._live: Any = None

    def on_train_begin(self, args, state, control, **kwargs):
        from rich.console import Group
        from rich.live import Live
        from rich.panel import Panel
        from rich.progress import Progress
        from rich.text import Text

        if not state.is_world_process_zero:
            return
        self._training, self._evaluation, self._evaluating = Progress(), Progress(), None
        self._steps = self._training.add_task("[blue]Training  ", total=state.max_steps, completed=state.global_step)
        self._group, self._panel = Group, Panel
        self._live = Live()
        self._live.start()
        self._show(Text("Nothing was logged yet."))

    def on_step_end(self, args, state, control, **kwargs):
        if self._live is not None:
            self._training.update(self._steps, completed=state.global_step)

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self._live is None:
            return
        if self._evaluating is None:
            total = len(eval_dataloader) if isinstance(eval_dataloader.dataset, Dataset) else None
            self._evaluating = self._evaluation.add_task("[blue]Evaluation", total=total)
        self._evaluation.advance(self._evaluating)

    def on_evaluate(self, args, state, control, **kwargs):
        if self._live is not None and self._evaluating is not None:
            self._evaluation.remove_task(self._evaluating)
            self._evaluating = None

    on_predict = on_evaluate

    def on_log(self, args, state, control, logs=None, **kwargs):
        from rich.columns import Columns

        if self._live is None:
            return
        tables = [self._table(group, values) for group, values in _grouped(logs or {}).items()]
        self._show(self._panel(Columns(tables, expand=True), title=f"[bold green]Step {state.global_step}"))

    def on_train_end(self, args, state, control, **kwargs):
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, last: Any) -> None:
        self._live.update(self._panel(self._group(self._training, self._evaluation, last)), refresh=True)

    def _table(self, group: str, values: dict[str, Any]) -> Any:
        from rich.table import Table

        table = Table("Metric", title=f"[bold blue]{group}" if group else None, header_style="bold magenta", box=None)
        table.add_column("Value", justify="right")
        for name, value in values.items():
            table.add_row(name, f"{value:.3f}" if isinstance(value, int | float) else str(value))
        return self._panel(table, border_style="cyan")


def _grouped(logs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Group logs by the part of their name before the slash: {"a/b": 1, "c": 2} -> {"a": {"b": 1}, "": {"c": 2}}."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in logs.items():
        group, slash, name = key.partition("/")
        groups.setdefault(group if slash else "", {})[name if slash else key] = value
    return groups


def __getattr__(name: str) -> type:
    if name in ("SyncRefModelCallback", "WeaveCallback"):  # TRL has them here
        return placeholder(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
