"""The base of online trainers: GRPO, RLOO and distillation."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from datasets import Dataset, IterableDataset
from transformers.training_args import ParallelismConfig

from trl_jax.config import generation, rules
from trl_jax.config.arguments import arg
from trl_jax.config.base import BaseConfig
from trl_jax.config.devices import accelerator_options
from trl_jax.config.generation import auto_find_batch_size, mesh_shape, online, parallelism_config, uses_server
from trl_jax.config.rules import as_dict
from trl_jax.data.checks import argument as argument_checks
from trl_jax.data.checks import has_images, has_transform
from trl_jax.hub.generate import check_completes
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_bridge import batch_tensor, batch_tensors, knows_torch
from trl_jax.mesh.processes import several
from trl_jax.rollout.completions_log import CompletionsLog, CompletionsRepo, trackers
from trl_jax.rollout.rewards import (
    HELPERS,
    RewardFunctions,
    check_columns,
    check_signature,
    is_model,
    reward_functions,
)
from trl_jax.rollout.server import Limits, Requirements, SamplingOptions, is_local, server_urls
from trl_jax.rollout.tools import Environments, Tools, tools_of
from trl_jax.rollout.user_methods import USER_METHODS, UserMethods
from trl_jax.tasks.policy import Cycle, EntropyBonus
from trl_jax.tasks.task import Task
from trl_jax.trainer.arguments import InitOnlyArg, MirroredArg, check_config
from trl_jax.trainer.base_trainer import BaseTrainer
from trl_jax.trainer.overrides import (
    REFUSED_IN_ROLLOUTS,
    REFUSED_WITH_REWARDS,
    Absent,
    RefusedNames,
    TrainerTraits,
    check_generate,
    classes_of_script,
    names_of_script,
)
from trl_jax.trainer.reference import policy_reference, reference_as_model, set_reference
from trl_jax.training import setup
from trl_jax.training.forward import balance_experts
from trl_jax.training.logging import tell
from trl_jax.training.policy_generator import Sampling
from trl_jax.training.reference import ReferenceModel
from trl_jax.training.rollout import RolloutParts
from trl_jax.training.server import ServerParts, adapter_rank, by_first, connect, default_root, fused_adapter
from trl_jax.training.state import Hooks

# Arguments that TRL's online trainers also have as attributes, for scripts that read them there.


_LEFT = {"padding_side": "left", "truncation_side": "left"}  # as in TRL, also when the tokenizer is saved
_FOR_SAMPLING = "generation_config of {}: its arguments control sampling. Set generation_kwargs in its config."


def clip_range() -> tuple[MirroredArg, MirroredArg]:
    """The attributes `epsilon_low` and `epsilon_high`, which a script may set at any time."""
    highest = MirroredArg("epsilon_high", lambda args: args.epsilon if args.epsilon_high is None else args.epsilon_high)
    return MirroredArg("epsilon"), highest


@dataclass(frozen=True)
class OnlineTraits(TrainerTraits):
    """How an online trainer differs from others.

    optional_arguments: fields of `OnlineConfig` that its config may lack.
    reward_helpers: the arguments that reward functions get besides the columns.
    writes_completions: whether tables of completions are also written to output_dir.
    parses_messages: as in `Sampling`.
    averages_losses: whether a step's loss is the mean over micro-batches, not the sum.
    """

    refused: RefusedNames = REFUSED_IN_ROLLOUTS
    takes_transforms: bool = True
    tokenizer_sides: Mapping[str, str] | None = field(default_factory=lambda: _LEFT)
    optional_arguments: frozenset[str] = frozenset({"scale_rewards"})
    reward_helpers: tuple[str, ...] = HELPERS
    writes_completions: bool = True
    parses_messages: bool = True
    averages_losses: bool = False


class RolloutTrainer(BaseTrainer):
    """The base of online trainers: rows are prompts, and the model learns from its own completions.

    Attributes:
        tools: functions that the model may call in its completions.
        rollout_func: a user-defined function that completes prompts, or None.
    """

    tools: Sequence[Callable] = ()
    rollout_func: Callable[[list, Any], Mapping[str, Any]] | None = None
    _environments: Environments | None = None
    _user_methods: UserMethods | None = None
    _traits: ClassVar[OnlineTraits] = OnlineTraits()

    temperature, top_p, top_k, min_p = InitOnlyArg(), InitOnlyArg(), InitOnlyArg(), InitOnlyArg()
    repetition_penalty, max_completion_length = InitOnlyArg(), InitOnlyArg()
    shuffle_dataset, pad_to_multiple_of = InitOnlyArg(), InitOnlyArg()
    log_completions, num_completions_to_print = InitOnlyArg(), InitOnlyArg()
    log_unique_prompts, beta, use_vllm = InitOnlyArg(), InitOnlyArg(), InitOnlyArg()
    chat_template_kwargs = InitOnlyArg(lambda args: args.chat_template_kwargs or {})

    vllm_generation, vllm_client = Absent(), Absent()

    @property
    def generation_config(self) -> Any:
        """Raises AttributeError: sampling is controlled by the arguments."""
        raise AttributeError(_FOR_SAMPLING.format(type(self).__name__))

    @generation_config.setter
    def generation_config(self, value: Any) -> None:
        raise AttributeError(_FOR_SAMPLING.format(type(self).__name__))

    def __init__(self, model: Any, **arguments: Any):
        """`arguments` are passed to `BaseTrainer`."""
        self._passed_model = model
        _settle_for_streams(arguments.get("args"), arguments.get("train_dataset"), arguments.get("eval_dataset"))
        super().__init__(model, **arguments)
        overridden = "_set_signature_columns_if_needed" in names_of_script(type(self))
        if overridden and not self.args.keeps_columns:
            raise ValueError(
                f"remove_unused_columns=True keeps only the prompts, whatever {type(self).__name__}."
                "_set_signature_columns_if_needed adds. Leave it out, and reward functions get all columns."
            )

    def _refresh_task(self) -> None:
        if self.rollout_func is None:
            check_generate(self.model, self._passed_model)
        super()._refresh_task()

    def _balance_experts(self, model: PreTrainedModel, args: BaseConfig) -> float:
        return balance_experts(model, args.router_aux_loss_coef)

    def get_train_dataloader(self) -> Any:
        """Raises TypeError: batches are generated during training."""
        raise TypeError(
            f"get_train_dataloader() of {type(self).__name__}: batches consist of completions that are "
            "generated during training. The prompts are in trainer.train_dataset, and the completions in the tables of "
            "log_completions=True."
        )

    @property
    def _metrics(self) -> dict[str, dict[str, list[float]]]:
        """The numbers since the last log, as lists by mode ("train" or "eval") and name; a script may append to them.
        Inside a user-defined loss, they are arrays of the current step."""
        if self._completions_pass is not None:
            return dict.fromkeys(("train", "eval"), self._completions_pass.metrics)
        return {mode: log.values for mode, log in self.parts.rollout_steps.rollout.metrics.items()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        metrics = self.parts.rollout_steps.rollout.metrics["train" if self.model.training else "eval"]
        logs |= {f"{metrics.prefix}{name}": value for name, value in metrics.means().items()}
        try:
            super().log(logs, start_time)
        finally:  # otherwise a checkpoint would have them again
            metrics.values.clear()

    def _evaluate_one(self, dataset: Any, prefix: str) -> dict[str, float]:
        metrics = self.parts.rollout_steps.rollout.metrics["eval"]
        before, metrics.prefix = metrics.prefix, f"{prefix}_"
        try:
            return super()._evaluate_one(dataset, prefix)
        finally:
            metrics.prefix = before

    @property
    def _logs(self) -> dict[str, Any]:
        """The columns of the completions table, under TRL's names. During training, those of "train", else of "eval",
        whichever has rows; during evaluation, the other way round. Changes by a script appear in the table.

        Raises:
            AttributeError: there is no table.
        """
        table = self.parts.rollout_steps.rollout.table
        if table is None:
            raise AttributeError(
                "_logs has the columns of the completions table, which this trainer does not keep. Set "
                "log_completions=True, and read it in the first process."
            )
        modes = ("train", "eval") if self.model.training else ("eval", "train")
        return next((rows for mode in modes if (rows := table.columns(mode))["prompt"]), table.columns(modes[0]))

    @property
    def _completions_pass(self) -> Any:
        """The pass whose loss a user-defined method is computing; None outside of it."""
        completions_loss = self._setup.completions_loss if "_setup" in vars(self) else None
        return None if completions_loss is None else completions_loss.current

    @property
    def current_gradient_accumulation_steps(self) -> Any:
        """Micro-batches per step. Inside a user-defined loss it is an array, because the last step of an epoch may have
        fewer."""
        return (
            self.args.gradient_accumulation_steps
            if self._completions_pass is None
            else self._completions_pass.micro_batches
        )

    def _hooks(self) -> Hooks:
        hooks = super()._hooks()
        methods = hooks.overridden & {"compute_loss", "_compute_loss"}
        if not methods:
            return hooks
        from trl_jax.training.user_completions_loss import UserCompletionsLoss

        def user_loss(model: Any, inputs: dict[str, jax.Array]) -> jax.Array:
            world = self.accelerator.num_processes
            # For the script, a shard of the batch is what a process is in TRL.
            self.accelerator.num_processes = self._setup.shards
            try:
                return self.compute_loss(model, inputs)
            finally:
                self.accelerator.num_processes = world

        name = "compute_loss" if "compute_loss" in methods else "_compute_loss"
        options = {"name": name, "averaged": self._traits.averages_losses, "functions": hooks.loss_functions}
        loss = UserCompletionsLoss(user_loss, lambda: self._setup, hooks.script_values, **options)
        return hooks._replace(batch_methods=frozenset(), completions_loss=loss)

    def _current_pass(self, name: str) -> Any:
        if self._completions_pass is None:
            raise RuntimeError(f"{name} of {type(self).__name__} can be called within its own _compute_loss only.")
        return self._completions_pass

    @abc.abstractmethod
    def _make_reference(self, args: BaseConfig, task: Task, policy: setup.Policy) -> ReferenceModel | None: ...

    def _rewards(self, run: setup.Setup) -> RewardFunctions | None:
        """The reward functions; None if training uses no rewards."""
        del run
        return None

    def _check_images(self) -> None:
        """All arguments are compatible with images."""

    @property
    def _may_get_images(self) -> bool:
        """Whether tools or environments may return images."""
        return bool(self.tools) or self._environments is not None

    @property
    def _uses_server(self) -> bool:
        """Whether completions come from servers."""
        return uses_server(vars(self.args))

    def _limits(self) -> Limits:
        """Timeouts and the request limit for the vLLM servers."""
        return Limits(self.args.vllm_server_timeout, restart=self.args.vllm_server_restart_timeout)

    def _generates_ahead(self) -> bool:
        """Whether servers generate the next completions while a step trains."""
        return vars(self.args).get("generate_ahead", False)

    def _sync_steps(self) -> int:
        """The number of steps between two updates of the servers' weights."""
        return 1

    def _make_rollout(self, run: setup.Setup) -> RolloutParts:
        args, model, tokenizer = run.args, run.model, run.processing_class
        _check_processes(type(self).__name__, run.shards)
        rollout_func = None if self.rollout_func is None else self._call_rollout_func
        server = self._server(run) if self._uses_server and args.contacts_servers else None
        rewards = self._rewards(run)
        tools, template_options = self._tools(run)
        options = sampling_options(args, tokenizer, model, image_token_of(run), new_tokens=args.max_completion_length)
        if not self._uses_server and rollout_func is None:
            check_completes(model, options)
        of_script = type(self).__module__.partition(".")[0] != "trl_jax"  # a user's subclass may read _logs
        self._user_methods = self._overridden_methods(run)
        sampling = Sampling(
            template_options, args.max_prompt_length, options, extra_ends=eos_token_ids(tokenizer, model),
            parses_messages=self._traits.parses_messages, tools=tools,
        )  # fmt: skip
        return RolloutParts(
            sampling, rewards, drops_truncated=args.mask_truncated_completions, shuffle=args.shuffle_dataset,
            bonus=self._bonus(), table=self._table(rewards) if args.log_completions or of_script else None,
            rollout_func=rollout_func, server=server, own=self._user_methods,
        )  # fmt: skip

    def _overridden_methods(self, run: setup.Setup) -> UserMethods | None:
        """The user-defined methods that generate or score completions; None if there are none."""
        return None

    def _server(self, run: setup.Setup) -> ServerParts:
        """The servers, checked to be reachable and compatible with the run.

        Raises:
            ValueError: the run uses a feature that is not supported with servers.
            ServerError: a server does not answer, or was started with incompatible options.
        """
        args, model, encoder = run.args, run.model, run.encoder
        if model.backend.virtual.count:
            raise ValueError(
                "vllm_mode='server' together with an adapter of virtual tokens is not in this release of trl_jax. "
                "Train without an adapter of virtual tokens, or with GRPOTrainer and use_vllm=False."
            )
        urls = server_urls(args.vllm_server_base_url, args.vllm_server_host, args.vllm_server_port)
        if args.vllm_weights_dir is None and (distant := [url for url in urls if not is_local(url)]):
            raise ValueError(
                f"The server at {distant[0]} is on another machine: set vllm_weights_dir to a folder that both "
                "machines have under the same path. The weights are handed over in it."
            )
        root = default_root(args.output_dir) if args.vllm_weights_dir is None else Path(args.vllm_weights_dir)
        others = as_dict("generation_kwargs", args.generation_kwargs) if args.generation_kwargs else {}
        others = {name: value for name, value in others.items() if value is not None}
        rank = adapter_rank(model)
        if rank is not None and encoder is not None and not has_images(run.train_dataset):
            tell(
                run.progress.printed,
                "merged adapter",
                "The servers get the adapter merged into the model, because tools may return images. If they do not, "
                "pass the model's tokenizer as processing_class: then servers with --enable-lora get the adapter only.",
            )
        needs = Requirements(
            model=model.name_or_path,
            vocab_size=run.vocab_size,
            max_tokens=others.get("max_tokens", args.max_completion_length) + (args.max_prompt_length or 1),
            processed_logps="sampling_logps" in run.task.logps,
            image_token=None if encoder is None else encoder.image_token_id,
            other_media=()
            if encoder is None
            else [token for token in encoder.other_media_ids if token < run.vocab_size],
            adapter_rank=rank if encoder is None else None,
            fused_adapter=fused_adapter(model),
        )
        servers = by_first(lambda: connect(urls, needs, self._limits()))
        options = SamplingOptions(
            max_tokens=args.max_completion_length, temperature=args.temperature, top_p=args.top_p, top_k=args.top_k,
            min_p=args.min_p, repetition_penalty=args.repetition_penalty,
            eos_token_ids=eos_token_ids(run.processing_class, model), regex=args.vllm_structured_outputs_regex,
            # In a completion they would stand for an image, a video or audio that is not there.
            suppressed_ids=() if encoder is None else (encoder.image_token_id, *needs.other_media),
            generation_kwargs=others,
        )  # fmt: skip
        sampling = servers.engine.parameters(options)
        ahead = self._generates_ahead()
        if ahead and self.rollout_func is not None:
            raise ValueError(
                "generate_ahead=True has the servers generate, but the completions of this run come from rollout_func. "
                "Leave one of the two out."
            )
        if ahead and self._environments is not None:
            raise ValueError(
                "generate_ahead=True with environment_factory= would reset environments whose completions are not "
                "judged yet. Set generate_ahead=False."
            )
        return ServerParts(servers, sampling, root, ahead, self._sync_steps())

    def _table(self, rewards: RewardFunctions | None) -> CompletionsLog:
        args = self.args
        return CompletionsLog(
            None if rewards is None else rewards.columns, args.generation_batch_size,
            num_to_print=args.num_completions_to_print, unique_prompts=args.log_unique_prompts,
            folder=Path(args.output_dir) / "completions" if self._traits.writes_completions else None,
            trackers=trackers(args.report_to or ()), repo=self._completions_repo(),
            multimodal=vars(args).get("log_multimodal", False), shows=args.log_completions,
        )  # fmt: skip

    def _completions_repo(self) -> CompletionsRepo | None:
        """The Hub dataset to which completions tables are uploaded, or None."""
        return None

    def _bonus(self) -> EntropyBonus | None:
        """The entropy bonus, or None."""
        return None

    def _tools(self, run: setup.Setup) -> tuple[Tools | None, dict[str, Any]]:
        """The tools that the model may call, and the extra arguments for rendering prompts with the chat template."""
        args = run.args
        if not self.tools and self._environments is None:
            return None, args.chat_template_kwargs or {}
        if self._environments is not None:
            self._environments.check(run.train_dataset, "train_dataset")
            self._environments.has_vision = run.encoder is not None
        return tools_of(
            self.tools, self._environments, run.processing_class, args.chat_template_kwargs or {},
            most_turns=args.max_tool_calling_iterations, longest=args.max_completion_length,
            positions=getattr(run.model.config.get_text_config(), "max_position_embeddings", None),
            vocab_size=run.vocab_size, encoder=run.encoder,
        )  # fmt: skip

    def _call_rollout_func(self, prompts: list) -> Mapping[str, Any]:
        return self.rollout_func(prompts, self)

    def _complete_once(
        self, prompt_ids: Sequence[Sequence[int]], images: Any, group: int
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Complete text prompts, as `PolicyGenerator.complete_once` does, for `_generate_single_turn`.

        Raises:
            ValueError: there are images, or a token id outside of the model's vocabulary.
            RuntimeError: several processes without vLLM servers.
        """
        if images is not None or self._setup.encoder is not None:
            raise ValueError(
                "_generate_single_turn completes texts, and this run has images. Leave rollout_func out, and the "
                "trainer completes them itself."
            )
        if several() and not self._uses_server:
            raise RuntimeError(
                "_generate_single_turn on several processes needs a server. Set use_vllm=True and "
                "vllm_mode='server', or train in one process."
            )
        with self._setup.on_device():
            completions, logps = self.parts.rollout_steps.rollout.generator.complete_once(prompt_ids, group)
        return [ids.tolist() for ids in completions], None if logps is None else [row.tolist() for row in logps]

    def _rollout_options(self) -> dict[str, Any]:
        """The task fields that all online trainers share."""
        args = self.args
        cycle = Cycle(
            group=args.num_generations,
            prompts=args.generation_batch_size // args.num_generations,
            parts=args.steps_per_generation,
            iterations=args.num_iterations,
            accumulation=args.gradient_accumulation_steps,
        )
        return {
            "num_generations": args.num_generations,
            "num_generations_eval": args.num_generations_eval or args.num_generations,
            "temperature": args.temperature,
            "cycle": cycle,
        }


def _settle_for_streams(args: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Set the dataloader arguments that TRL sets for streaming datasets. They have no effect here.

    Raises:
        ValueError: `dispatch_batches` is True (TRL's message).
    """
    sets = [train_dataset, *(eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset])]
    if args is None or not any(isinstance(dataset, IterableDataset) for dataset in sets):
        return
    if accelerator_options(args)["dispatch_batches"]:
        raise ValueError(
            "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`. "
            "Please set it to `False`."
        )
    if is_dataclass(args.accelerator_config):
        args.accelerator_config.dispatch_batches = False
    if isinstance(train_dataset, IterableDataset):
        args.dataloader_num_workers = 0


def _check_processes(trainer: str, shards: int) -> None:
    """Raise ValueError if the prompts cannot be divided evenly over the processes."""
    count = jax.process_count() if several() else 1
    if shards % count:
        raise ValueError(
            f"{trainer} divides its prompts over {shards} devices (data x fsdp of the mesh), and this run has {count} "
            f"processes. It must be a multiple of {count}, so that each process has its own prompts. Set mesh_shape: "
            f"mesh_shape='fsdp:{count}'."
        )


def eos_token_ids(tokenizer: Any, model: PreTrainedModel) -> list[int]:
    """The model's EOS token ids, preceded by the tokenizer's if it is not among them."""
    first, ids = tokenizer.eos_token_id, model.generation_config.eos_token_id
    ids = [ids] if isinstance(ids, int) else list(ids or ())
    return ids if first in ids or first is None else [first, *ids]


def image_token_of(run: setup.Setup) -> int | None:
    """The image token if the run has a processor, as in TRL also if no row has an image; else None."""
    if run.encoder is not None:
        return run.encoder.image_token_id
    # some configs have no such field, and a processor may be passed for a text model
    return None if run.reader is None else getattr(run.model.config, "image_token_id", None)


def sampling_options(
    args: BaseConfig,
    tokenizer: Any,
    model: PreTrainedModel,
    image_token: int | None = None,
    *,
    new_tokens: int | None,
) -> dict[str, Any]:
    """GenerationConfig fields for sampling completions.

    Args:
        image_token: suppressed, because a sampled one would have no image.
        new_tokens: maximum number of tokens of a completion.
    """
    options = {name: vars(args)[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    options["top_k"] = 0 if args.top_k == -1 else args.top_k
    ids = {"eos_token_id": eos_token_ids(tokenizer, model), "pad_token_id": tokenizer.pad_token_id}
    ids["bos_token_id"] = tokenizer.bos_token_id
    options |= {"max_new_tokens": new_tokens, "do_sample": True} | ids
    options |= {} if image_token is None else {"suppress_tokens": [image_token]}
    options |= args.generation_kwargs or {}
    return options if options["eos_token_id"] is not None else options | {"eos_token_id": ids["eos_token_id"]}


# GRPO and RLOO.


@dataclass(repr=False)
class OnlineConfig(BaseConfig):
    """The arguments of all online trainers with reward functions. Derive the config of your own trainer from it."""

    max_length: ClassVar[None] = None  # prompts are not truncated; completions have max_completion_length
    dataset_num_proc: ClassVar[None] = None
    _VALID_DICT_FIELDS = BaseConfig._VALID_DICT_FIELDS + ["generation_kwargs", "chat_template_kwargs"]

    learning_rate: float = online("learning_rate")
    train_sampling_strategy: str = online("train_sampling_strategy")
    data_seed: int | None = online("data_seed")
    dataloader_drop_last: bool = online("dataloader_drop_last")
    parallelism_config: ParallelismConfig | None = parallelism_config("OnlineTrainer")
    mesh_shape: str | None = mesh_shape("OnlineTrainer")
    auto_find_batch_size: bool = auto_find_batch_size("OnlineTrainer")
    router_aux_loss_coef: float | None = online("router_aux_loss_coef")
    disable_dropout: bool = online("disable_dropout", default=False)

    remove_unused_columns: bool | None = online("remove_unused_columns")
    num_generations: int = online("num_generations")
    num_generations_eval: int | None = online("num_generations_eval")
    max_completion_length: int = online("max_completion_length")
    max_prompt_length: int | None = online("max_prompt_length")
    shuffle_dataset: bool = online("shuffle_dataset")
    pad_to_multiple_of: int | str | None = online("pad_to_multiple_of")

    generation_batch_size: int | None = online("generation_batch_size")
    steps_per_generation: int | None = online("steps_per_generation")
    num_iterations: int = online("num_iterations")
    temperature: float = online("temperature")
    top_p: float = online("top_p")
    top_k: int = online("top_k")
    min_p: float | None = online("min_p")
    repetition_penalty: float = online("repetition_penalty")
    generation_kwargs: dict | str | None = online("generation_kwargs")
    chat_template_kwargs: dict | str | None = online("chat_template_kwargs")

    beta: float = online("beta")
    reward_weights: list[float] | None = online("reward_weights")
    reward_timeout: float | None = online("reward_timeout")
    scale_rewards: str = arg(
        "group",
        help="Divide advantages by the standard deviation of the rewards in the 'group' or in the "
        "'batch'; 'none' does not divide.",
        rule=rules.one_of("batch", "group", "none"),
    )
    mask_truncated_completions: bool = online("mask_truncated_completions")
    sync_ref_model: bool = online("sync_ref_model")
    ref_model_mixup_alpha: float = online("ref_model_mixup_alpha")
    ref_model_sync_steps: int = online("ref_model_sync_steps")

    log_completions: bool = online("log_completions")
    num_completions_to_print: int | None = online("num_completions_to_print")
    log_unique_prompts: bool = online("log_unique_prompts")
    chat_template_path: str | None = online("chat_template_path", kw_only=True)
    max_completions_per_device: int | None = online("max_completions_per_device", kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        if self.counts_devices:
            self.resolve_sizes()

    def resolve_sizes(self) -> None:
        generation.resolve_sizes(type(self).__name__.removesuffix("Config"), self)


class OnlineTrainer(RolloutTrainer):
    """The base of online trainers with reward functions and, if `args.beta` is not 0, a reference model: GRPO and RLOO.

    To derive your own trainer, set `config_class` to a dataclass derived from `OnlineConfig`, and have `make_task`
    return an `OnlineTask` with `**self.task_options()`.
    """

    config_class = OnlineConfig
    _traits = OnlineTraits(refused=REFUSED_WITH_REWARDS)
    _reward_functions: RewardFunctions
    _ref_model: Any = None  # passed by scripts of TRL up to 0.21; None: the policy before training
    num_generations, num_iterations = InitOnlyArg(), InitOnlyArg()
    num_generations_eval = InitOnlyArg(lambda args: args.num_generations_eval or args.num_generations)
    mask_truncated_completions, log_multimodal = InitOnlyArg(), InitOnlyArg()
    beta = MirroredArg()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> jax.Array:
        """Call `_compute_loss`, as in TRL. Scripts may override either, in jax.numpy or torch.

        Raises:
            ValueError: `return_outputs` is True (TRL's message).
        """
        if return_outputs:
            raise ValueError(f"The {self._name}Trainer does not support returning outputs")
        return self._compute_loss(model, inputs)

    def _compute_loss(self, model: Any, inputs: dict[str, jax.Array]) -> jax.Array:
        """The loss of a micro-batch of completions, scaled as in TRL: the loss of a step is the sum over its
        micro-batches in GRPO, and their mean in RLOO. A subclass may override it: in jax.numpy it is compiled together
        with its gradient; in torch it is called from the compiled step.

        Args:
            model: to be passed to `_get_per_token_logps_and_entropies`, or called with the ids of the inputs; see
                `user_completions_loss.PolicyInPass`.
            inputs: TRL's, under TRL's names: `prompt_ids`, `prompt_mask` `[B, P]`, `completion_ids`, `completion_mask`
                `[B, C]` (also 0 for tool results), `advantages` `[B]`, and, depending on the arguments,
                `old_per_token_logps`, `ref_per_token_logps`, `sampling_per_token_logps`, `importance_sampling_ratio`
                (GRPO) and `old_logps` `[B]` (RLOO).
        """
        del model
        return self._current_pass("_compute_loss").default_loss(inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: jax.Array,
        attention_mask: Any,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Log-probabilities of the completion tokens at the sampling temperature, float32 `[B, C]`, 0 for masked
        tokens; their entropies; and the load-balancing loss of the experts. For a user-defined loss.

        Args:
            model: the model that the loss was called with.
            input_ids: the concatenated `prompt_ids` and `completion_ids` of the inputs. For other ids the result is
                NaN; torch losses get an error.
            attention_mask, batch_size, images: ignored, because the step has already run the model.
        """
        del attention_mask, batch_size, images
        current = self._current_pass("_get_per_token_logps_and_entropies")
        return current.logps(model, input_ids, logits_to_keep, entropy=compute_entropy, aux_loss=compute_aux_loss)

    def _overridden_methods(self, run: setup.Setup) -> UserMethods | None:
        overridden = [name for name in USER_METHODS if name in run.overridden]
        if not overridden:
            return None
        if several():
            raise ValueError(
                f"{type(self).__name__} overrides {', '.join(overridden)}, which is not in this release of trl_jax on "
                "several processes. Train in one process, or override _calculate_rewards."
            )
        return UserMethods(
            type(self).__name__,
            score=self._generate_and_score_completions if "_generate_and_score_completions" in overridden else None,
            generate=self._generate if "_generate" in overridden else None,
            tokenize=self._tokenize_prompts if "_tokenize_prompts" in overridden else None,
            grpo_form=not self._traits.averages_losses, keeps_extras=run.completions_loss is not None,
            pad_token_id=run.processing_class.pad_token_id,
        )  # fmt: skip

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list, completions: list, completion_ids_list: list[list[int]]
    ) -> np.ndarray:
        """The rewards, float32 `[N, F]`, NaN where a function does not apply. A subclass may override it and change the
        result of `super()`; the returned rewards are weighted, logged and trained on. With several processes, each
        passes only its own completions. The result is a tensor if the overriding method or its module imports torch.

        Args:
            inputs: the rows of the dataset, one per completion.
        """
        rewards = self._reward_functions.calculate(inputs, prompts, completions, completion_ids_list)
        return batch_tensor(rewards) if self._overridden_in_torch("_calculate_rewards") else rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's outputs for the prompts of a generation, as NumPy arrays: `prompt_ids`, `prompt_mask` `[N, P]`,
        `completion_ids`, `completion_mask` `[N, C]`, `advantages` `[N]`, `num_items_in_batch` and any
        log-probabilities. They are tensors if the overriding method or its module imports torch. A subclass may
        override it: changes to the advantages, the mask and the log-probabilities of `super()` are trained on, and
        additional numbers `[N]` or `[N, C]` are passed to its `_compute_loss`.

        Args:
            inputs: the rows of the dataset, each repeated once per completion.
        """
        name = "_generate_and_score_completions"
        outputs = self._user_method(name).default_score(inputs)
        return batch_tensors(outputs) if self._overridden_in_torch(name) else outputs

    def _overridden_in_torch(self, name: str) -> bool:
        """Whether a user-defined method of this name, or its module, imports torch."""
        return any(knows_torch(vars(cls)[name]) for cls in classes_of_script(type(self)) if name in vars(cls))

    def _generate(self, prompts: list) -> tuple:
        """TRL's tuple of lists: prompt ids, completion ids, the tool mask (GRPO only), the completions as reward
        functions see them, and, for GRPO only, the sampler's log-probabilities, extra columns, None and []. A subclass
        may override it and change the result of `super()`."""
        return self._user_method("_generate").default_generate(prompts)

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict[str, Any]]:
        """`(prompt ids, None, {})`, as in TRL for text prompts. A `rollout_func` may call it, and a subclass may
        override it and change the ids of `super()`.

        Raises:
            RuntimeError: the run has rows with images.
        """
        if self._user_methods is None:
            if self._setup.encoder is not None:
                raise RuntimeError(
                    "_tokenize_prompts gives the ids of texts, and this run has images. Call trainer.processing_class."
                )
            return self.parts.rollout_steps.rollout.generator.prompt_ids(prompts), None, {}
        return self._user_method("_tokenize_prompts").default_tokenize(prompts)

    def _user_method(self, name: str) -> UserMethods:
        if self._user_methods is None:
            raise RuntimeError(f"{name} of {type(self).__name__} can only be called by a method of the same name.")
        return self._user_methods

    @property
    def reward_funcs(self) -> list[Any]:
        """The list of reward functions. Entries may be replaced at any time, with effect from the next generation."""
        return self._reward_funcs

    @reward_funcs.setter
    def reward_funcs(self, functions: Sequence[Any]) -> None:
        if "_reward_funcs" in vars(self):
            self._reward_funcs[:] = functions
        else:
            self._reward_funcs = list(functions)

    @property
    def reward_func_names(self) -> list[str]:
        """The reward functions' names in metrics and in the completions table. The list and its entries may be replaced
        at any time, with effect from the next generation."""
        return self._reward_functions.names

    @reward_func_names.setter
    def reward_func_names(self, names: Sequence[str]) -> None:
        if "_reward_functions" in vars(self):  # otherwise super().__init__ overwrites it, as in TRL
            self._reward_functions.set_names(names)

    @property
    def reward_weights(self) -> Any:
        """The weight of each reward function, float32. It and its values may be set at any time, with effect from the
        next generation."""
        return self._reward_functions.weights

    @reward_weights.setter
    def reward_weights(self, weights: Any) -> None:
        if "_reward_functions" in vars(self):  # otherwise super().__init__ overwrites it, as in TRL
            self._reward_functions.set_weights(weights)

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The current reference model; None if `beta` is 0, or with an adapter. Setting it, or loading a state dict
        into it, changes the reference's values from the next generation on."""
        return reference_as_model(self._setup.reference, self.model, self._ref_model)

    @ref_model.setter
    def ref_model(self, ref_model: Any) -> None:
        set_reference(self, ref_model)

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        reward_processing_classes: Any = None,
        *,
        peft_config: Any = None,
        environments: Environments | None = None,
        **arguments: Any,
    ):
        """
        Args:
            reward_funcs: a reward function or reward model, or a list of them, as in `GRPOTrainer`.
            environments: the environments of completions, some of which have their own rewards; may be None.
            arguments: the other arguments of `BaseTrainer`, by name.
        """
        check_config(type(self), OnlineConfig, self._traits.optional_arguments)
        functions = () if reward_funcs is None else reward_funcs
        self.reward_funcs = list(functions) if isinstance(functions, list | tuple) else [functions]
        self._reward_processing_classes, self._fresh_adapter = reward_processing_classes, peft_config is not None
        self._environments, self._own_rewards = environments, [] if environments is None else environments.rewards
        for function in self.reward_funcs:
            if callable(function) and not is_model(function):
                # Fail before weights are read; checked again later with the columns of the rows.
                check_signature(function, helpers=self._traits.reward_helpers)
        self.reward_funcs += self._own_rewards
        if isinstance(reward_processing_classes, list | tuple):
            self._reward_processing_classes = [*reward_processing_classes, *(None for _ in self._own_rewards)]
        super().__init__(model, peft_config=peft_config, **arguments)

    def prepare_dataset(self, dataset: Any, name: str, *, bounded: bool = True) -> Dataset | IterableDataset:
        prepared = super().prepare_dataset(dataset, name, bounded=bounded)
        if self.args.keeps_columns and not has_transform(prepared):
            columns = prepared.column_names or next(iter(prepared.take(1)), {})
            more = () if self._environments is None else ("environments",)
            check_columns(columns, f"{argument_checks(name)} has the column", *more)
        return prepared

    def _other_models(self) -> dict[str, Any]:
        rewards = {f"reward_funcs[{index}]": function for index, function in enumerate(self._reward_funcs)}
        return {"ref_model": self._ref_model, **rewards}

    def _make_reference(self, args: BaseConfig, task: Task, policy: setup.Policy) -> ReferenceModel | None:
        del task
        if not args.beta:
            if args.sync_ref_model:
                raise ValueError(
                    "You passed `sync_ref_model=True` while `beta=0.0`, which means the reference model is not used "
                    "during training: there is nothing to synchronize. Please set `sync_ref_model=False`, or set "
                    "`beta` to a non-zero value."
                )
            return None
        return policy_reference(args, policy, self._ref_model, fresh_adapter=self._fresh_adapter)

    def _rewards(self, run: setup.Setup) -> RewardFunctions:
        args, events = self.args, run.events
        # Environments and rollout_func add columns, and a transform replaces them.
        open_ended = self._environments is not None or self.rollout_func is not None
        rows = run.train_dataset
        rewards = reward_functions(
            self.reward_funcs, self._reward_processing_classes, weights=run.task.reward_weights,
            trainer_state=lambda: events.state, timeout=args.reward_timeout, template_options=args.chat_template_kwargs,
            model_init_kwargs=args.model_init_kwargs, trust_remote_code=args.trust_remote_code, seed=args.seed,
            metrics_of_run=("kl",) if args.beta else (),
            columns=None if open_ended or has_transform(rows) else rows.column_names,
            helpers=self._traits.reward_helpers,
        )  # fmt: skip
        if "_calculate_rewards" in run.overridden:
            rewards.override = self._calculate_rewards
        self._reward_functions, self.reward_processing_classes = rewards, rewards.tokenizers
        return rewards

    def _reward_weights(self) -> tuple[float, ...] | None:
        """The weights from the arguments; the environments' own rewards have weight 1."""
        weights = self.args.reward_weights
        return None if weights is None else (*weights, *(1.0 for _ in self._own_rewards))

    def task_options(self) -> dict[str, Any]:
        """The fields of an `OnlineTask` that come from `self.args`, for `make_task`."""
        return self._policy_options() | {"scale_rewards": self.args.scale_rewards}

    def _policy_options(self) -> dict[str, Any]:
        """The task fields that GRPO and RLOO share."""
        return self._rollout_options() | {"beta": self.beta, "reward_weights": self._reward_weights()}
