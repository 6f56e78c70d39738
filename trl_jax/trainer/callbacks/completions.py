"""Completions of the evaluation set's prompts, shown to trackers while a model trains."""

from __future__ import annotations

import importlib
from typing import Any

import pandas as pd
from transformers.trainer_callback import TrainerCallback

from trl_jax.core.printable import brief
from trl_jax.data.rows.chat import rendered
from trl_jax.data.rows.prompts import is_messages
from trl_jax.rollout.completions.log import trackers


class LogCompletionsCallback(TrainerCallback):
    """Completes prompts of the evaluation set every so many steps, and gives wandb, comet_ml and trackio, of those that
    `report_to` names, a table of all so far: step, prompt, completion.

    Args:
        trainer: of a language model; its evaluation set has a column `prompt`, of texts or messages.
        generation_config: transformers' object; None takes the model's own.
        num_prompts: how many of the first ones; None: all.
        freq: steps between two; None: `eval_steps`.

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

    def _completed(self, prompts: list[str], tokenizer: Any, batch_size: int) -> list[str]:
        found, side, tokenizer.padding_side = [], tokenizer.padding_side, "left"
        try:
            for start in range(0, len(prompts), batch_size):
                batch = tokenizer(prompts[start : start + batch_size], return_tensors="np", padding=True)
                rows = self.trainer.model.generate(**batch, generation_config=self.generation_config)
                new = rows[:, batch["input_ids"].shape[1] :]
                found += tokenizer.batch_decode(new, skip_special_tokens=True)
        finally:
            tokenizer.padding_side = side
        return found


def _text(prompt: str | list[dict[str, Any]], tokenizer: Any) -> str:
    """The prompt as the model is given it: messages by the chat template, open for the answer."""
    if not is_messages(prompt):
        return prompt
    answers = prompt[-1]["role"] == "assistant"
    options = {"add_generation_prompt": not answers, "continue_final_message": answers}
    return rendered(tokenizer, prompt, f"The prompt {brief(prompt, 300)}", tokenize=False, **options)
