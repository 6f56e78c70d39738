"""OnlineDPOConfig."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.training_args import ParallelismConfig

from trl_jax.config import rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig, inherited
from trl_jax.config.generation import above, mesh_shape, online, parallelism_config
from trl_jax.config.rules import must_be
from trl_jax.config.shared import shared

_NATIVE_GENERATOR = "completions come from trl_jax's own generator"


def _betas(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    numbers = value if isinstance(value, list) and value else [value]
    problems = [above(0, rules.MOST_FLOAT32)(name, number, values) for number in numbers]
    if not any(problems):
        return None
    return must_be(name, "a number above 0, or a list of them, one for each epoch", value)


def _no_server(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if value == "server" and values["use_vllm"]:
        return (
            f"{name}='server' is not {rules.HERE} for OnlineDPOTrainer, whose completions come from trl_jax's own "
            "generator. Set use_vllm=False, or train with GRPOTrainer, which asks vLLM servers."
        )
    return rules.one_of("server", "colocate")(name, value, values)


def _note_native_generator(name: str, value: Any, values: Mapping[str, Any]) -> str | None:
    if not value:
        return None
    return f"{name}={value!r}: {_NATIVE_GENERATOR}, in this process. vLLM's options have no effect."


def _of_vllm(name: str, **changes: Any) -> Any:
    return online(
        name, help="A vLLM option, without effect.", how="silent", why=_NATIVE_GENERATOR, rule=None, **changes
    )


@dataclass(repr=False)
class OnlineDPOConfig(BaseConfig):
    """The arguments of OnlineDPOTrainer, in TRL's names and defaults; our own come last."""

    _argument_group_name = "training"
    dataset_num_proc: ClassVar[None] = None
    sync_ref_model: ClassVar[bool] = False
    router_aux_loss_coef: ClassVar[float] = 0.0  # as in TRL, no load-balancing loss
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["generation_kwargs"]

    learning_rate: float = inherited("learning_rate", default=5e-7, help="Peak learning rate.")
    remove_unused_columns: bool | None = online("remove_unused_columns")
    parallelism_config: ParallelismConfig | None = parallelism_config("OnlineDPOTrainer")
    mesh_shape: str | None = mesh_shape("OnlineDPOTrainer")

    reward_model_path: str | None = arg(
        None, help="For scripts that load a reward model from it; the trainer does not read it.", how="silent"
    )
    max_new_tokens: int = arg(64, help="Maximum number of tokens of a completion.", rule=rules.whole(1))
    max_length: int = shared(
        "max_length",
        default=512,
        help="Maximum length of prompt and completion together, in tokens, in the loss: longer prompts lose their "
        "beginning.",
        rule=rules.whole(1),
    )
    temperature: float = online(
        "temperature", default=0.9, help="Sampling temperature. The loss does not divide logits by it."
    )
    top_p: float = online("top_p")
    top_k: int = online("top_k")
    min_p: float | None = online("min_p")
    repetition_penalty: float = online("repetition_penalty")
    generation_kwargs: dict | str | None = online("generation_kwargs")
    cache_implementation: str | None = online("cache_implementation")
    missing_eos_penalty: float | None = arg(
        None,
        help="Amount subtracted from the score of a completion without EOS. If unset, nothing.",
        rule=above(0, rules.MOST_FLOAT32, optional=True),
    )
    beta: list[float] = arg(
        [0.1],
        help="Deviation from the reference model: higher means less; tau of 'ipo'. A list has one for each epoch, the "
        "last of which holds for all later ones.",
        rule=_betas,
    )
    loss_type: str = arg(
        "sigmoid",
        help="The loss of pairs: 'sigmoid' as in DPO, or 'ipo'.",
        choices=["sigmoid", "ipo"],
        rule=rules.one_of("sigmoid", "ipo"),
    )
    disable_dropout: bool = online("disable_dropout", default=True)

    use_vllm: bool = online(
        "use_vllm",
        help="Accepted: completions come from trl_jax's own generator.",
        rule=None,
        note=_note_native_generator,
    )
    vllm_model_impl: str = _of_vllm("vllm_model_impl")
    vllm_structured_outputs_regex: str | None = online(
        "vllm_structured_outputs_regex",
        help="Refused: trl_jax's own generator cannot constrain completions to a pattern.",
    )
    vllm_gpu_memory_utilization: float | None = _of_vllm("vllm_gpu_memory_utilization", default=0.55)
    vllm_mode: str = online("vllm_mode", help="'server' is refused with use_vllm=True.", rule=_no_server)
    vllm_server_base_url: str | None = _of_vllm("vllm_server_base_url")
    vllm_server_host: str = _of_vllm("vllm_server_host")
    vllm_server_port: int = _of_vllm("vllm_server_port")
    vllm_server_timeout: float = _of_vllm("vllm_server_timeout")
    vllm_group_port: int = _of_vllm("vllm_group_port")
    vllm_tensor_parallel_size: int = _of_vllm("vllm_tensor_parallel_size")
    vllm_enable_sleep_mode: bool = _of_vllm("vllm_enable_sleep_mode")
    ds3_gather_for_generation: bool = online("ds3_gather_for_generation")
    reward_weights: list[float] | None = online("reward_weights")

    pad_to_multiple_of: int | str | None = online("pad_to_multiple_of", kw_only=True)
    chat_template_path: str | None = online("chat_template_path", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.beta, list) and len(self.beta) == 1:
            [self.beta] = self.beta
        if self.max_new_tokens >= self.max_length:
            warnings.warn(
                f"The configuration has `max_new_tokens` ({self.max_new_tokens}) >= `max_length` ({self.max_length}). "
                "This will cause prompts to be truncated or completely removed in the forward pass. To preserve "
                "prompts, ensure  e.g. `max_length > max_new_tokens + 512`. A step whose prompts would be removed "
                "raises here.",
                stacklevel=self._frames_to_caller(),
            )
