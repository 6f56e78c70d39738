"""AsyncGRPOConfig."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.training_args import ParallelismConfig

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig, inherited
from trl_jax.config.generation import above, auto_find_batch_size, mesh_shape, online, parallelism_config
from trl_jax.config.rules import must_be


def _budget(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.whole(-(2**31), optional=True, most=2**31 - 1)(name, value, values):
        return problem
    if value is None or value <= 0:
        return None
    return (
        f"{name}={value!r} is not {rules.HERE}: micro-batches have per_device_train_batch_size completions per device. "
        f"Leave {name} out, and lower per_device_train_batch_size (and raise gradient_accumulation_steps) if a step "
        "does not fit into memory."
    )


def _in_flight(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if problem := rules.whole(-1, most=2**31 - 1)(name, value, values):
        return problem
    least = values["num_generations"]
    if value == -1 or not isinstance(least, int) or value >= least:
        return None
    return must_be(
        name, f"-1 or at least num_generations ({least}), because one request asks for all completions of a prompt",
        value,
    )  # fmt: skip


@dataclass(repr=False)
class AsyncGRPOConfig(BaseConfig):
    """The arguments of AsyncGRPOTrainer, in TRL's names, defaults and positional order, except for `dtype`, which comes
    after `trust_remote_code`; our own come last."""

    _argument_group_name = "training"
    max_length: ClassVar[None] = None  # prompts are not truncated; completions have max_completion_length
    dataset_num_proc: ClassVar[None] = None
    # Arguments of the other online trainers, fixed here.
    num_generations_eval: ClassVar[None] = None
    num_iterations: ClassVar[int] = 1
    max_prompt_length: ClassVar[None] = None
    shuffle_dataset: ClassVar[bool] = False
    beta: ClassVar[float] = 0.0
    sync_ref_model: ClassVar[bool] = False
    reward_weights: ClassVar[None] = None
    mask_truncated_completions: ClassVar[bool] = False
    generation_kwargs: ClassVar[None] = None
    log_unique_prompts: ClassVar[bool] = False
    log_multimodal: ClassVar[bool] = False
    vllm_server_host: ClassVar[str] = ""
    vllm_server_port: ClassVar[int] = 0
    vllm_structured_outputs_regex: ClassVar[None] = None
    use_vllm: ClassVar[bool] = True
    max_completions_per_device: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["chat_template_kwargs"]

    learning_rate: float = online("learning_rate")
    logging_steps: float = inherited("logging_steps", default=1)
    lr_scheduler_type: str = inherited("lr_scheduler_type", default="constant")
    ignore_data_skip: bool = inherited(
        "ignore_data_skip",
        default=True,
        how="silent",
        why="a resumed run always continues with the prompts after its last step",
    )
    train_sampling_strategy: str = online("train_sampling_strategy")
    data_seed: int | None = online("data_seed")
    dataloader_drop_last: bool = online("dataloader_drop_last")
    parallelism_config: ParallelismConfig | None = parallelism_config("AsyncGRPOTrainer")
    mesh_shape: str | None = mesh_shape("AsyncGRPOTrainer")
    auto_find_batch_size: bool = auto_find_batch_size("AsyncGRPO")

    dtype: str = arg(
        "float32",
        help="Dtype of the saved weights; during training they are float32. A dtype in model_init_kwargs takes "
        "precedence.",
        choices=["auto", "bfloat16", "float16", "float32"],
        rule=rules.one_of("auto", "bfloat16", "float16", "float32"),
    )
    router_aux_loss_coef: float | None = online("router_aux_loss_coef")

    num_generations: int = online("num_generations", rule=rules.whole(2, most=rules.MOST_EXAMPLES))
    max_completion_length: int = online("max_completion_length", default=2048)
    temperature: float = online("temperature")
    top_p: float = online("top_p")
    top_k: int = online("top_k")
    min_p: float | None = online("min_p")
    repetition_penalty: float = online("repetition_penalty")
    chat_template_kwargs: dict | str | None = online("chat_template_kwargs")
    max_tool_calling_iterations: int | None = online("max_tool_calling_iterations")
    fork_threshold_tokens: int = arg(
        1024,
        help="Refused: the turns of a conversation are appended as tokens, so it is always one training row.",
        how="refused",
        why="the turns of a conversation are appended as tokens and never tokenized again, so it is always one "
        "training row. Leave it out.",
    )

    vllm_server_base_url: str = online("vllm_server_base_url", default="http://localhost:8000")
    vllm_server_timeout: float = online("vllm_server_timeout")
    request_timeout: int = arg(
        600,
        help="Seconds that a server may take to complete a prompt. Then the request is sent again, until "
        "vllm_server_timeout has passed, too.",
        rule=above(0, math.inf),
    )
    weight_sync_timeout: int = arg(
        1800,
        help="Seconds that a server may take to load weights, after which the run ends.",
        rule=above(0, math.inf),
    )

    epsilon: float = online("epsilon")
    epsilon_high: float | None = online("epsilon_high", help="Upper clip range: the policy ratio is clipped at "
                                        "1 + epsilon_high. If unset, epsilon.")  # fmt: skip
    token_budget: int | None = arg(
        None,
        help="Values above 0 are refused: a micro-batch has per_device_train_batch_size completions per device.",
        rule=_budget,
    )

    max_inflight_tasks: int = arg(
        -1,
        help="Maximum number of completions that the servers are asked for at once. -1 asks for all completions "
        "of a generation.",
        rule=_in_flight,
    )
    max_staleness: int = arg(
        4,
        help="Maximum number of weight updates between the weights that a completion comes from and those that it "
        "trains. Completions above it are never generated; with 0, none is generated while a step trains.",
        rule=rules.whole(0, most=rules.MOST_STEPS),
    )
    queue_maxsize: int = arg(
        1024,
        help="Maximum number of completions that wait for a step; 0 is no limit. If a generation is larger, it is not "
        "generated while a step trains.",
        rule=rules.whole(0, most=2**31 - 1),
    )
    weight_sync_steps: int = arg(
        1, help="Number of steps between two updates of the servers' weights.", rule=rules.whole(1)
    )
    heartbeat_stale_after_s: float = arg(
        300.0,
        help="Seconds without an answer to /health, while a server generates, after which the run ends.",
        rule=above(0, math.inf),
    )

    log_completions: bool = online("log_completions", help="Print completions in a table.")
    num_completions_to_print: int | None = online("num_completions_to_print")

    pad_to_multiple_of: int | str | None = online("pad_to_multiple_of", kw_only=True)
    vllm_server_restart_timeout: float | None = online("vllm_server_restart_timeout", kw_only=True)
    vllm_weights_dir: str | None = online("vllm_weights_dir", kw_only=True)
    reward_timeout: float | None = online("reward_timeout", kw_only=True)

    @property
    def step_completions(self) -> int:
        """Completions per step, over all devices. Reading it initializes JAX."""
        return self.per_device_train_batch_size * self.data_parallel_size * self.gradient_accumulation_steps

    @property
    def generation_batch_size(self) -> int:
        """Completions per generation: the smallest multiple of both `step_completions` and `num_generations`."""
        return math.lcm(self.step_completions, self.num_generations)

    @property
    def steps_per_generation(self) -> int:
        """Micro-batches per generation."""
        return self.generation_batch_size // (self.per_device_train_batch_size * self.data_parallel_size)

    @property
    def keeps_columns(self) -> bool:
        return True

    @property
    def restarts_epoch(self) -> bool:
        return False
