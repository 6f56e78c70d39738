"""OnlineConfig."""

from dataclasses import dataclass, field
from typing import ClassVar

from trl_jax.config import base, generation
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import shared
from trl_jax.config.tables import ONLINE


@dataclass(repr=False)
class OnlineConfig(BaseConfig):
    """The arguments of every online trainer with reward functions. Derive the config of your own trainer from it.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        router_aux_loss_coef: weight of the load-balancing loss of mixtures of experts; None takes the model's own, 0.0
            leaves it out.
        disable_dropout: train without dropout.
        remove_unused_columns: pass only the prompts to reward functions, not the other columns.
        num_generations, num_generations_eval: completions per prompt, in training and in evaluations.
        max_completion_length: longest completion, in tokens.
        max_prompt_length: only so many of a prompt's last tokens are kept; None keeps all.
        shuffle_dataset: take the prompts in random order, by `seed`.
        pad_to_multiple_of: round row lengths up to a multiple of it. Losses do not depend on it.
        generation_batch_size: completions that are sampled at once, on all devices; or
        steps_per_generation: micro-batches that they are divided into, gradient_accumulation_steps unless set.
        num_iterations: how often the completions of a generation are trained on.
        temperature: divides the logits, in sampling and in the loss.
        top_p, top_k, min_p, repetition_penalty, generation_kwargs: how tokens are sampled, as in transformers.
        chat_template_kwargs: arguments of the chat template.
        beta: weight of the KL divergence from the reference; 0.0 trains without a reference.
        reward_weights: weight of each reward function.
        reward_timeout: seconds that an asynchronous reward function may take; None: any.
        scale_rewards: divide advantages by the standard deviation of the "group", of the "batch", or "none".
        mask_truncated_completions: leave completions out of the loss that were cut at max_completion_length.
        sync_ref_model, ref_model_mixup_alpha, ref_model_sync_steps: move the reference towards the policy (TR-DPO).
        log_completions: show completions in a table of `num_completions_to_print` rows, and write them to
            output_dir/completions; trackers get each prompt once with `log_unique_prompts`.
        chat_template_path: .jinja or .j2 file with the chat template, or folder or Hub name of a tokenizer that has it.
    """

    argument_table = ONLINE
    max_length: ClassVar[None] = None  # prompts are not cut, completions have a limit of their own
    dataset_num_proc: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["generation_kwargs", "chat_template_kwargs"]

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})
    router_aux_loss_coef: float | None = base.router_aux_loss_coef()
    disable_dropout: bool = base.disable_dropout(False)

    remove_unused_columns: bool | None = shared("remove_unused_columns", False)
    num_generations: int = shared("num_generations", 8)
    num_generations_eval: int | None = shared("num_generations_eval", None)
    max_completion_length: int = shared("max_completion_length", 512)
    max_prompt_length: int | None = generation.max_prompt_length()
    shuffle_dataset: bool = shared("shuffle_dataset", True)
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()

    generation_batch_size: int | None = shared("generation_batch_size", None)
    steps_per_generation: int | None = shared("steps_per_generation", None)
    num_iterations: int = shared("num_iterations", 1)
    temperature: float = shared("temperature", 1.0)
    top_p: float = shared("top_p", 1.0)
    top_k: int = shared("top_k", 0)
    min_p: float | None = shared("min_p", None)
    repetition_penalty: float = shared("repetition_penalty", 1.0)
    generation_kwargs: dict | str | None = shared("generation_kwargs", None)
    chat_template_kwargs: dict | str | None = shared("chat_template_kwargs", None)

    beta: float = field(
        default=0.0, metadata={"help": "Weight of the KL divergence from the reference; 0.0: no reference."}
    )
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each reward function. Unset, 1.0."}
    )
    reward_timeout: float | None = field(
        default=None, metadata={"help": "Seconds that an asynchronous reward function may take. Unset, any."}
    )
    scale_rewards: str = field(
        default="group",
        metadata={"help": "Divide advantages by the standard deviation of the 'group', of the 'batch', or 'none'."},
    )
    mask_truncated_completions: bool = shared("mask_truncated_completions", False)
    sync_ref_model: bool = base.sync_ref_model()
    ref_model_mixup_alpha: float = base.ref_model_mixup_alpha()
    ref_model_sync_steps: int = base.ref_model_sync_steps()

    log_completions: bool = shared("log_completions", False)
    num_completions_to_print: int | None = shared("num_completions_to_print", None)
    log_unique_prompts: bool = shared("log_unique_prompts", False)
    chat_template_path: str | None = base.chat_template_path(kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.counts_devices:
            self.settle_sizes()

    def settle_sizes(self) -> None:
        generation.settle_sizes(type(self).__name__.removesuffix("Config"), self)
