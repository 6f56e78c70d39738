"""DistillationConfig."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl_jax.config import base
from trl_jax.config.base import BaseConfig
from trl_jax.config.generation import shared
from trl_jax.config.tables import DISTILLATION


@dataclass(repr=False)
class DistillationConfig(BaseConfig):
    """The arguments of DistillationTrainer, in TRL's names, defaults and positional order; our own come last.

    Besides the fields of TrainingArguments and of BaseConfig (batch_layout, remat_policy, mesh_shape and others):

        teacher_model_name_or_path: the teacher, of the command `trl-jax distillation`; as in TRL, the trainer itself
            takes its argument teacher_model.
        teacher_model_revision: branch, tag or commit of the teacher.
        teacher_model_init_kwargs: further arguments of from_pretrained for the teacher, as a dict or JSON.
        disable_dropout: trains without dropout.
        remove_unused_columns: keeps the prompts alone.
        max_completion_length: most tokens of a completion.
        shuffle_dataset: takes the prompts in random order, by `seed`.
        pad_to_multiple_of: row lengths in tokens are rounded up to a multiple of it; "auto" rounds up to a short ladder
            of lengths, so that few shapes compile. Losses do not depend on it.
        temperature: logits are divided by it, when tokens are sampled, and those of both models in the loss.
        top_p, top_k, min_p, repetition_penalty: how tokens are sampled, as in transformers; `generation_kwargs` has
            more of its GenerationConfig's fields, and wins.
        chat_template_kwargs: arguments of the chat template.
        use_vllm, vllm_*: accepted; completions are written by trl_jax's own generator, in this process.
        beta: of the generalised Jensen-Shannon divergence: 0.0 is the forward KL(teacher || student), 1.0 the reverse
            KL(student || teacher), 0.5 the standard divergence.
        max_tool_calling_iterations: most turns in which tools are called; None: any number.
        log_completions: shows completions in a table of `num_completions_to_print` rows, or all; trackers get each
            prompt once with `log_unique_prompts`.
        max_prompt_length: the number of a prompt's last tokens that stay. None: all. Not in TRL.
        chat_template_path: .jinja or .j2 file with the chat template to use, or folder or Hub name of the tokenizer
            that has it; its new tokens come, too. Not in TRL.
    """

    argument_table = DISTILLATION
    _argument_group_name = "training"
    max_length: ClassVar[None] = None  # prompts are not cut, completions have a limit of their own
    dataset_num_proc: ClassVar[None] = None
    # A generation is a step, with one completion of a prompt, all of which count.
    num_generations: ClassVar[int] = 1
    num_generations_eval: ClassVar[None] = None
    num_iterations: ClassVar[int] = 1
    mask_truncated_completions: ClassVar[bool] = False
    router_aux_loss_coef: ClassVar[float] = 0.0  # as in TRL, experts are not balanced
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + [
        "teacher_model_init_kwargs", "generation_kwargs", "chat_template_kwargs",
    ]  # fmt: skip

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})

    teacher_model_name_or_path: str | None = field(
        default=None, metadata={"help": "The teacher: a checkpoint's folder or Hub id."}
    )
    teacher_model_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of the teacher."})
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further arguments of from_pretrained for the teacher, as a dict or JSON."}
    )
    disable_dropout: bool = base.disable_dropout(False)

    remove_unused_columns: bool | None = shared("remove_unused_columns", False)
    max_completion_length: int | None = shared("max_completion_length", 512)
    ds3_gather_for_generation: bool = shared("ds3_gather_for_generation", True)
    shuffle_dataset: bool | None = shared("shuffle_dataset", True)
    pad_to_multiple_of: int | str | None = base.pad_to_multiple_of()

    temperature: float = shared("temperature", 1.0)
    top_p: float = shared("top_p", 1.0)
    top_k: int = shared("top_k", 0)
    min_p: float | None = shared("min_p", None)
    generation_kwargs: dict | str | None = shared("generation_kwargs", None)
    chat_template_kwargs: dict | str | None = shared("chat_template_kwargs", None)
    repetition_penalty: float = shared("repetition_penalty", 1.0)
    cache_implementation: str | None = shared("cache_implementation", None)

    use_vllm: bool = shared("use_vllm", False)
    vllm_mode: str = shared("vllm_mode", "colocate")
    vllm_model_impl: str = shared("vllm_model_impl", "vllm")
    vllm_enable_sleep_mode: bool = shared("vllm_enable_sleep_mode", False)
    vllm_structured_outputs_regex: str | None = shared("vllm_structured_outputs_regex", None)
    vllm_server_base_url: str | None = shared("vllm_server_base_url", None)
    vllm_server_host: str = shared("vllm_server_host", "0.0.0.0")
    vllm_server_port: int = shared("vllm_server_port", 8000)
    vllm_server_timeout: float = shared("vllm_server_timeout", 240.0)
    vllm_group_port: int = shared("vllm_group_port", 51216)
    vllm_gpu_memory_utilization: float = shared("vllm_gpu_memory_utilization", 0.3)
    vllm_max_model_length: int | None = shared("vllm_max_model_length", None)
    vllm_tensor_parallel_size: int = shared("vllm_tensor_parallel_size", 1)

    beta: float = field(
        default=1.0,
        metadata={
            "help": "Of the divergence: 0.0, the forward KL from the teacher; 1.0, the reverse; 0.5, Jensen-Shannon's."
        },
    )
    max_tool_calling_iterations: int | None = shared("max_tool_calling_iterations", None)

    log_completions: bool = shared("log_completions", False)
    num_completions_to_print: int | None = shared("num_completions_to_print", None)
    log_unique_prompts: bool = shared("log_unique_prompts", False)

    max_prompt_length: int | None = field(
        default=None, kw_only=True, metadata={"help": "Tokens of a prompt, of which the last ones stay. Unset, all."}
    )
    chat_template_path: str | None = base.chat_template_path(kw_only=True)

    @property
    def generation_batch_size(self) -> int:
        """Completions of a generation, on all devices."""
        return self.per_device_train_batch_size * self.data_parallel_size * self.gradient_accumulation_steps

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches that they are divided into."""
        return self.gradient_accumulation_steps
