"""GRPO while vLLM servers generate: TRL's experimental AsyncGRPOTrainer on JAX."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.base import BaseConfig
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.losses.policy_gradient import PolicyLoss
from trl_jax.rollout.server import Limits
from trl_jax.rollout.tools import Environments
from trl_jax.tasks.policy import AsyncGrpoTask
from trl_jax.trainer.arguments import InitOnlyArg, accepting_old_keywords, as_config, refuse
from trl_jax.trainer.async_grpo_config import AsyncGRPOConfig
from trl_jax.trainer.online import OnlineConfig, OnlineTrainer, clip_range
from trl_jax.trainer.overrides import REFUSED_WITH_REWARDS, by_name

_FOR_LOSS = (
    "The step is one compiled function, and a loss of the script's own is not in this release of trl_jax for "
    "AsyncGRPO: override _compute_loss of GRPOTrainer, which takes use_vllm=True, vllm_mode='server' and "
    "generate_ahead=True."
)
_FOR_WEIGHTS = "Weights reach the servers through a folder: set vllm_weights_dir."


class AsyncGRPOTrainer(OnlineTrainer):
    """Trains a language model by GRPO on completions that vLLM servers generate while it trains.

    The arguments are TRL's, in TRL's order. The loss is TRL's: it clips the ratio of the policy to the sampler, whose
    weights are older, and averages over the tokens of a micro-batch. There is no reference model.

    The servers work one generation ahead. A generation has the completions of one step, or of several steps if the
    completions of one step are not a multiple of `num_generations`. Generating ahead is skipped if the completions
    would become older than `max_staleness` allows, so no completion is ever discarded. Nothing is generated ahead with
    environments, and only the first turn with tools. `num_train_epochs` counts passes over the prompts, in dataset
    order; a pass may end within a step. A resumed run continues with the same completions if its checkpoint was saved
    at a multiple of `weight_sync_steps`.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a torch model
            of transformers, which receives the trained weights after `train()`. The servers must have the same model.
        reward_funcs: a reward function or reward model, or a list of them, whose rewards are added. A function is
            called with `prompts`, `completions`, `completion_ids` and the dataset's other columns, in this process, and
            returns a number or None for each completion; it may be async.
        args: an AsyncGRPOConfig; None means `AsyncGRPOConfig("<model>-AsyncGRPO")`.
        train_dataset: rows with a `prompt`, a text or messages; other columns go to the reward functions.
        processing_class: the tokenizer; loaded with the model if None.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step.
        peft_config: our or peft's LoraConfig. Servers get the merged weights.
        tools, environment_factory: as in `GRPOTrainer`.
        rollout_worker, weight_transfer: refused: they are TRL's classes for queues and torch tensors.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
        ServerError: a server does not answer, or its options do not fit the run.
    """

    _name, _tag_names = "AsyncGRPO", ["trl", "async-grpo"]
    _paper = "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "2402.03300"
    config_class = AsyncGRPOConfig
    epsilon_low, epsilon_high = clip_range()
    _traits = replace(
        OnlineTrainer._traits,
        refused=replace(
            REFUSED_WITH_REWARDS,
            never_called=REFUSED_WITH_REWARDS.never_called
            | by_name(("compute_loss _compute_loss", _FOR_LOSS), ("_sync_weight _streaming_iter", _FOR_WEIGHTS)),
        ),
        reader=None,  # TRL's AsyncGRPOTrainer has a tokenizer, not a processor
        optional_arguments=frozenset(field.name for field in fields(OnlineConfig))
        - {field.name for field in fields(AsyncGRPOConfig)},
        reward_helpers=(),
        writes_completions=False,
    )
    _may_get_images = False  # from tools, as in TRL
    _uses_server = True
    max_staleness, weight_sync_steps = InitOnlyArg(), InitOnlyArg()

    @accepting_old_keywords()
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        reward_funcs: Any = None,
        args: AsyncGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        processing_class: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        rollout_worker: None = None,
        weight_transfer: None = None,
    ):
        refuse(rollout_worker=rollout_worker, weight_transfer=weight_transfer)
        self.tools = list(tools or ())
        super().__init__(
            model, reward_funcs, args=None if args is None else as_config(args, AsyncGRPOConfig),
            train_dataset=train_dataset, processing_class=processing_class, callbacks=callbacks, optimizers=optimizers,
            peft_config=peft_config,
            environments=None if environment_factory is None else Environments(environment_factory),
        )  # fmt: skip

    def _config(self, args: BaseConfig | None, model: Any) -> AsyncGRPOConfig:
        """As in BaseTrainer; also copies `dtype` into `model_init_kwargs`, where a `dtype` takes precedence."""
        args = super()._config(args, model)
        if args.dtype == "float32" or not isinstance(model, str | os.PathLike):
            return args
        args = copy.copy(args)
        args.model_init_kwargs = {"dtype": args.dtype, **(args.model_init_kwargs or {})}
        return args

    def make_task(self) -> AsyncGrpoTask:
        options = self._policy_options()
        options["cycle"] = replace(options["cycle"], wraps=True)
        loss = PolicyLoss(loss_type="bnpo", epsilon=self.epsilon_low, epsilon_high=self.epsilon_high)
        return AsyncGrpoTask(**options, objective=loss, sampled_elsewhere=True)

    def _sync_steps(self) -> int:
        return self.args.weight_sync_steps

    def _limits(self) -> Limits:
        args, at_once = self.args, self.args.max_inflight_tasks
        return Limits(
            args.vllm_server_timeout, args.heartbeat_stale_after_s, args.request_timeout, args.weight_sync_timeout,
            None if at_once < 0 else at_once, args.vllm_server_restart_timeout,
        )  # fmt: skip

    def _generates_ahead(self) -> bool:
        """Whether to generate one generation ahead: its completions stay within `max_staleness` and `queue_maxsize`.

        Raises:
            ValueError: a generation is trained on for so many steps that it exceeds `max_staleness` even if it is not
                generated ahead.
        """
        args = self.args
        steps = args.generation_batch_size // args.step_completions
        oldest = _staleness(steps - 1, args.weight_sync_steps)
        if oldest > args.max_staleness:
            raise ValueError(
                f"A step has {args.step_completions} completions and a prompt num_generations={args.num_generations}, "
                f"so a generation trains for {steps} steps, in which the weights are updated up to {oldest} times, "
                f"more than max_staleness={args.max_staleness}. Make per_device_train_batch_size x "
                "gradient_accumulation_steps x devices a multiple of num_generations, or raise max_staleness."
            )
        if self._environments is not None:  # it would reset environments that are not judged yet
            return False
        fits = not args.queue_maxsize or args.generation_batch_size <= args.queue_maxsize
        return fits and _staleness(2 * steps - 1, args.weight_sync_steps) <= args.max_staleness


def _staleness(steps: int, sync_steps: int) -> int:
    """The maximum number of updates of the servers' weights within `steps` steps."""
    return math.ceil(steps / sync_steps)
