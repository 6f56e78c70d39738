"""Group relative policy optimization: TRL's GRPOTrainer on JAX."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from datasets import Dataset, IterableDataset
from transformers.trainer_callback import TrainerCallback

from trl_jax.config.generation import uses_server
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_bridge import also_of_tensors, any_tensor
from trl_jax.losses.policy_gradient import MAX_LOG, MIN_LOG, PolicyLoss, entropy_mask
from trl_jax.rollout.completions_log import CompletionsRepo
from trl_jax.rollout.tools import Environments
from trl_jax.tasks.policy import EntropyBonus, EntropySettings, GrpoTask
from trl_jax.trainer.arguments import InitOnlyArg, MirroredArg, accepting_old_keywords, as_config
from trl_jax.trainer.grpo_config import GRPOConfig
from trl_jax.trainer.online import OnlineTrainer, clip_range

logger = logging.getLogger(__name__)


class GRPOTrainer(OnlineTrainer):
    """Trains a language model on its own completions, with advantages relative to other completions of the same prompt
    (DeepSeekMath, https://huggingface.co/papers/2402.03300). `loss_type` selects among GRPO and its variants.

    The arguments are TRL's, in TRL's order.

    Args:
        model: a checkpoint's folder or Hub name, a model that `trl_jax.AutoModelForCausalLM` loaded, or a torch model
            of transformers, which receives the trained weights after `train()`.
        reward_funcs: a reward function or reward model, or a list of them. A function is called with `prompts`,
            `completions`, `completion_ids`, the dataset's other columns, `trainer_state`, `log_extra` and `log_metric`,
            and returns a number or None for each completion; it may be async. A model is a folder or Hub name, a model
            that `trl_jax.AutoModelForSequenceClassification` loaded, or a torch model.
        args: a GRPOConfig; None means `GRPOConfig("<model>-GRPO")`.
        train_dataset: rows with a `prompt`, a text or messages; other columns go to the reward functions. With an
            `environment_factory` whose `reset()` returns the prompt, rows need none, and with `max_steps` set, the
            dataset may be None.
        eval_dataset: the same, or a dict of them.
        processing_class: the tokenizer; loaded with the model if None.
        reward_processing_classes: tokenizers of the reward models, one entry per reward function; None loads them with
            the models.
        callbacks: transformers callbacks, in addition to the default ones.
        optimizers: an optax transformation that includes its learning rate, and None or a function of the step.
        quantization_config: loads the base model of an adapter in 4 or 8 bits (QLoRA).
        peft_config: our or peft's LoraConfig or prompt-learning config.
        rollout_func: replaces the built-in generator. It is called with the prompts of a generation, each repeated once
            per completion, and this trainer. It returns a dict with `prompt_ids`, `completion_ids` and `logprobs`,
            lists with one item per prompt, and optionally `env_mask`, 0 for completion tokens that are not trained on;
            other keys go to the reward functions. `logprobs` are the sampler's; they are compared with the policy's
            if `use_vllm` and `vllm_importance_sampling_correction` are set, or `off_policy_mask_threshold`.
        tools: functions that the model may call by name in its completions; annotations and docstrings describe them.
            The result or error of a call becomes the next message, which is not trained on, and the model continues.
        environment_factory: creates an environment; or a dict of factories, selected by the column `environment`. Each
            completion has its own environment, whose methods are tools. `reset(**row)` starts it, and its result is
            appended to the prompt; `get_reward()`, if defined, is an additional reward function.
    """

    _name, _tag_names = "GRPO", ["trl", "grpo"]
    _paper = "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", "2402.03300"
    config_class = GRPOConfig
    epsilon_low, epsilon_high = clip_range()
    loss_type, importance_sampling_level = MirroredArg(), MirroredArg()
    top_entropy_quantile, scale_rewards = MirroredArg(), MirroredArg()
    off_policy_mask_threshold, multi_objective_aggregation = InitOnlyArg(), InitOnlyArg()
    use_adaptive_entropy = InitOnlyArg()
    vllm_importance_sampling_correction, vllm_importance_sampling_mode = InitOnlyArg(), InitOnlyArg()
    vllm_importance_sampling_clip_min, vllm_importance_sampling_clip_max = InitOnlyArg(), InitOnlyArg()

    @accepting_old_keywords()
    def __init__(
        self,
        model: str | os.PathLike | PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
    ):
        self.rollout_func, self.tools = rollout_func, list(tools or ())
        if (self.tools or environment_factory is not None) and rollout_func is not None:
            what = "tools=" if self.tools else "environment_factory="
            raise ValueError(
                f"{what} together with a rollout_func, which writes the completions: pass only one of them."
            )
        environments = None if environment_factory is None else Environments(environment_factory)
        args = None if args is None else as_config(args, GRPOConfig)
        if environments is not None:
            train_dataset = environments.training_rows(train_dataset, args)
            eval_dataset = environments.with_prompts(eval_dataset)
        super().__init__(
            model, reward_funcs, reward_processing_classes, args=args, train_dataset=train_dataset,
            eval_dataset=eval_dataset, processing_class=processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config, environments=environments,
        )  # fmt: skip
        if self.args.cast_lm_head_to_fp32 and any(
            path.startswith("lm_head.") and ".lora_" in path for path in self.model.arrays
        ):
            raise ValueError(
                "`cast_lm_head_to_fp32=True` is not supported when the lm_head carries a PEFT adapter (e.g. "
                "`target_modules` includes `lm_head`). Remove `lm_head` from the adapter's target modules, or set "
                "`cast_lm_head_to_fp32=False`."
            )
        _warn_of_levels(self.args.loss_type, self.args.importance_sampling_level)

    def make_task(self) -> GrpoTask:
        args = self.args
        sampled_elsewhere = self.rollout_func is not None or uses_server(vars(args))
        names = {field.name for field in fields(PolicyLoss)}
        options = {name: value for name, value in vars(args).items() if name in names}
        options |= {
            "loss_type": self.loss_type, "epsilon": self.epsilon_low, "epsilon_high": self.epsilon_high,
            "beta": self.beta, "importance_sampling_level": self.importance_sampling_level,
            "top_entropy_quantile": self.top_entropy_quantile,
        }  # fmt: skip
        if sampled_elsewhere and args.use_vllm and args.vllm_importance_sampling_correction:
            options |= _sampler_correction(args)
        return GrpoTask(
            **self._policy_options(),
            objective=PolicyLoss(**options),
            sampled_elsewhere=sampled_elsewhere,
            multi_objective_aggregation=args.multi_objective_aggregation,
            scale_rewards=self.scale_rewards,
            entropy_bonus=bool(args.entropy_coef or args.use_adaptive_entropy),
        )

    @property
    def entropy_coef(self) -> float:
        """The current coefficient of the entropy bonus: `args.entropy_coef`, or its adapted value with
        `use_adaptive_entropy`."""
        bonus = self.parts.rollout_steps.bonus
        return self.args.entropy_coef if bonus is None else bonus.now

    @property
    def _entropy_bonus_enabled(self) -> bool:
        return self.parts.rollout_steps.bonus is not None

    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> Any:
        """The unmasked tokens whose entropy is at least the `threshold` quantile of all unmasked tokens: bool `[B, C]`.
        Here and in the next two methods, arguments may be JAX or NumPy arrays or torch tensors."""
        if not any_tensor(entropies):
            return entropy_mask(entropies, mask, 1 - threshold)
        entropies, counted = entropies.detach(), mask.bool()
        return counted & (entropies >= entropies[counted].float().quantile(threshold)) if counted.any() else counted

    @staticmethod
    @also_of_tensors
    def get_off_policy_mask(
        advantages: Any, per_token_logps: Any, sampling_per_token_logps: Any, mask: Any, off_policy_threshold: float
    ) -> Any:
        """1 for completions to train on, else 0, `[B, 1]`; see `losses.policy_gradient.off_policy_mask`.

        Args:
            advantages: `[B, 1]`.
        """
        xp = jnp if isinstance(per_token_logps, jax.Array) else np
        divergence, counted = xp.nan_to_num(sampling_per_token_logps - per_token_logps), mask.astype(xp.float32)
        lengths = xp.maximum(xp.sum(counted, axis=1, keepdims=True), 1)
        mean = xp.sum(divergence * counted, axis=1, keepdims=True) / lengths
        return ((advantages >= 0) | (mean <= off_policy_threshold)).astype(mask.dtype)

    @staticmethod
    @also_of_tensors
    def get_gamma_weights(
        advantages: Any,
        log_ratio_per_token: Any,
        mask: Any,
        importance_sampling_ratio: Any,
        k_pos: float = 2.0,
        lambda_pos: float = 3.0,
        k_neg: float = 3.0,
        lambda_neg: float = 2.0,
    ) -> Any:
        """VESPO's weight of each completion, `[B, 1]`; see `losses.policy_gradient.gamma_weights`.

        Args:
            advantages: `[B, 1]`.
        """
        xp = jnp if isinstance(log_ratio_per_token, jax.Array) else np
        log_ratio = xp.clip(log_ratio_per_token, -MAX_LOG, MAX_LOG) * mask.astype(log_ratio_per_token.dtype)
        log_w = xp.sum(log_ratio, axis=-1, keepdims=True)
        if importance_sampling_ratio is not None:
            logs = xp.clip(xp.log(importance_sampling_ratio), MIN_LOG, MAX_LOG)
            log_w = log_w + xp.sum(logs, axis=-1, keepdims=True)
        log_w = xp.clip(log_w, MIN_LOG, MAX_LOG)
        k = xp.where(advantages >= 0, k_pos, k_neg).astype(log_w.dtype)
        decay = xp.maximum(xp.where(advantages >= 0, lambda_pos, lambda_neg), 1e-4).astype(log_w.dtype)
        weights = xp.nan_to_num(xp.exp(decay + k * log_w - decay * xp.exp(log_w)), nan=0.0, posinf=0.0, neginf=0.0)
        return jax.lax.stop_gradient(weights) if xp is jnp else weights

    def _completions_repo(self) -> CompletionsRepo | None:
        args, name = self.args, self.args.log_completions_hub_repo
        return None if name is None else CompletionsRepo(name, token=args.hub_token, private=args.hub_private_repo)

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: None,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """One completion per prompt, and its tokens' log-probabilities from the vLLM servers (None without servers). A
        `rollout_func` may call it.

        Args:
            prompt_ids: token ids. `num_generations` equal prompts in a row are sent as one request.
            images: must be None.
            multimodal_fields, has_tool_images: ignored.
        """
        del multimodal_fields, has_tool_images
        return self._complete_once(prompt_ids, images, num_generations)

    def _bonus(self) -> EntropyBonus | None:
        coef = self.args.entropy_coef
        if self.args.use_adaptive_entropy:
            return EntropyBonus(coef, self._entropy_settings)
        return EntropyBonus(coef) if coef else None

    def _entropy_settings(self) -> EntropySettings:
        args = self.args
        return EntropySettings(
            args.entropy_target, args.entropy_coef_delta, args.entropy_coef_min, args.entropy_coef_max
        )


def _sampler_correction(args: GRPOConfig) -> dict[str, Any]:
    """The options of `PolicyLoss` that correct for a sampler other than the policy.

    Raises:
        ValueError: VESPO with a sequence-level correction (TRL's message).
    """
    mode = args.vllm_importance_sampling_mode
    if args.loss_type == "vespo" and mode not in ("token_truncate", "token_mask"):
        raise ValueError(
            "VESPO loss requires `vllm_importance_sampling_mode` to be either 'token_truncate' or 'token_mask'. Got: "
            f"{mode}."
        )
    bounds = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
    return {"sampler_correction": mode, "sampler_clip_min": bounds[0], "sampler_clip_max": bounds[1]}


def _warn_of_levels(loss_type: str, level: str) -> None:
    """Warn, in TRL's words, if importance_sampling_level differs from the paper of the loss."""
    if loss_type == "luspo" and level != "sequence":
        logger.warning(
            "When using `'luspo'` loss, `importance_sampling_level` should be set to `'sequence'` to mirror the "
            "paper's setup."
        )
    if loss_type == "vespo" and level != "token":
        logger.warning(
            "VESPO computes sequence-level importance weights internally. `importance_sampling_level` should be set to "
            "`'token'` (the default)."
        )
    if level == "sequence" and loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        logger.warning(
            "When using `importance_sampling_level='sequence'`, the `'%s'` loss sums per-token contributions, which "
            "effectively weights each sequence by its completion length instead of optimizing the per-sequence "
            "objective. To reproduce the GSPO paper's setup, set `loss_type='grpo'`.",
            loss_type,
        )
