"""Arguments that TRL's trainers which write completions keep on themselves, for scripts that read them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trl_jax.trainer.base_trainer import BaseTrainer

_OWN_SAMPLING = "generation_config of {}: tokens are sampled by its arguments. Say generation_kwargs in its config."


def argument(name: str, read: Callable[[Any], Any] | None = None) -> property:
    """An attribute that has the value of an argument, `read` from the arguments or that of this name. Setting another
    one raises AttributeError: nobody would look at it."""

    def get(self: BaseTrainer) -> Any:
        return vars(self.args)[name] if read is None else read(self.args)

    def put(self: BaseTrainer, value: Any) -> None:
        if "_run" not in vars(self) or value is get(self) or value == get(self):
            return  # before the constructor, as in TRL, which then overwrites it; or nothing new
        raise AttributeError(
            f"{name} was set on the trainer, which reads its arguments once: the step is compiled from them. Say "
            f"{name} in {self.config_class.__name__}."
        )

    return property(get, put, doc=f"`args.{name}`.")


class RolloutAttributes(BaseTrainer):
    """Attributes of all of them."""

    temperature, top_p, top_k, min_p = map(argument, ("temperature", "top_p", "top_k", "min_p"))
    repetition_penalty, max_completion_length = map(argument, ("repetition_penalty", "max_completion_length"))
    shuffle_dataset, pad_to_multiple_of = map(argument, ("shuffle_dataset", "pad_to_multiple_of"))
    log_completions, num_completions_to_print = map(argument, ("log_completions", "num_completions_to_print"))
    log_unique_prompts, beta, use_vllm = map(argument, ("log_unique_prompts", "beta", "use_vllm"))
    chat_template_kwargs = argument("chat_template_kwargs", lambda args: args.chat_template_kwargs or {})

    @property
    def generation_config(self) -> Any:
        """Raises AttributeError: tokens are sampled by the arguments."""
        raise AttributeError(_OWN_SAMPLING.format(type(self).__name__))

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        raise AttributeError(_OWN_SAMPLING.format(type(self).__name__))
