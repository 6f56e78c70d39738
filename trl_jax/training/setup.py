"""Build a run from a trainer's arguments."""

from __future__ import annotations

import copy
import glob
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging as transformers_logging

from trl_jax.config.base import BaseConfig
from trl_jax.core.text import brief
from trl_jax.core.torch_random import set_seed
from trl_jax.data import chat
from trl_jax.data.chat import load_tokenizer
from trl_jax.hub.auto import Checkpoint
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_state import seed_if_imported
from trl_jax.hub.vision.processor import VisionProcessor, load_image_processor
from trl_jax.mesh.mesh import Fetched
from trl_jax.mesh.processes import check_alike, is_first, several
from trl_jax.training import data, layout, model
from trl_jax.training.devices import ShardedStep
from trl_jax.training.evaluate import CompletionEvaluator, Evaluator
from trl_jax.training.forward import Forward, check_noise
from trl_jax.training.logging import show_lines
from trl_jax.training.mesh import check_division, check_offloading, sharding_plan_of
from trl_jax.training.metrics import begin_state, events_of
from trl_jax.training.optimizer_choice import OptimizerChoice
from trl_jax.training.push import HubPublisher
from trl_jax.training.reference import PREFIX, ReferenceModel
from trl_jax.training.resume import Checkpointer, arguments_text
from trl_jax.training.rollout import RolloutParts, rollout_steps
from trl_jax.training.script_loss import UserLoss
from trl_jax.training.state import RunState, TrainerHooks
from trl_jax.training.step import TrainStep
from trl_jax.training.train import Training

logger = logging.getLogger(__name__)


def tokenizer_of(
    processing_class: Any,
    checkpoint: Checkpoint | PreTrainedModel,
    torch_model: Any,
    args: BaseConfig,
    sides: Mapping[str, str] | None = None,
) -> Any:
    """The tokenizer that was passed as `processing_class`, that of a processor that was, or the model's own, which then
    pads and cuts on these `sides`; None: on its own.

    Raises:
        TypeError: another thing was passed.
        ValueError: nothing was, and the model was loaded from nowhere.
    """
    if isinstance(processing_class, str | os.PathLike | dict | type):
        raise TypeError(
            "The `processing_class` must be either a `PreTrainedTokenizerBase` or a `ProcessorMixin`, found "
            f"{brief(processing_class)}: load it with transformers' AutoTokenizer.from_pretrained."
        )
    if _is_processor(processing_class):
        return _tokenizer_in(processing_class)
    if processing_class is not None:
        return processing_class
    options = {"trust_remote_code": args.trust_remote_code, "sides": sides}
    if torch_model is not None:
        if not torch_model.config._name_or_path:
            raise ValueError(
                f"model is a {type(torch_model).__qualname__} that was loaded from no folder or repository, where its "
                "tokenizer would be. Pass processing_class=AutoTokenizer.from_pretrained(...)."
            )
        return load_tokenizer(torch_model.config._name_or_path, torch_model.config, **options)
    return load_tokenizer(model.tokenizer_folder(checkpoint), checkpoint.config, **options)


def image_encoder(checkpoint: Checkpoint, tokenizer: Any, processing_class: Any) -> VisionProcessor:
    """What makes examples of rows with images: the image processor of the processor that was passed, or the
    checkpoint's."""
    if _is_processor(processing_class):
        image_processor = processing_class.image_processor
    else:
        image_processor = load_image_processor(checkpoint.folder)
    return VisionProcessor(checkpoint.native, checkpoint.config, tokenizer, image_processor)


def _is_processor(value: Any) -> bool:
    """Whoever made one has imported its class, and with it all that transformers' models need."""
    module = sys.modules.get("transformers.processing_utils")
    return module is not None and isinstance(value, module.ProcessorMixin)


def _tokenizer_in(processor: Any) -> Any:
    kind = type(processor).__qualname__
    if "tokenizer" not in vars(processor):
        raise TypeError(f"processing_class is a {kind} without a tokenizer: pass AutoTokenizer.from_pretrained(...).")
    logger.warning(
        "processing_class is a %s, of which only the tokenizer is saved. The files of the model's image processor are "
        "copied; save another processor with its save_pretrained.",
        kind,
    )  # fmt: skip
    tokenizer, template = processor.tokenizer, vars(processor).get("chat_template")
    if template is not None and tokenizer.chat_template is None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def settle_tokens(args: BaseConfig, tokenizer: Any, rows: int, *, can_resize: bool, head: str) -> tuple[int, list[int]]:
    """Give the tokenizer the special tokens and the chat template of the arguments; `head` is the model's.

    Returns:
        How many tokens the model has to embed: `rows`, or another number where it can be resized. And the ids of those
        that came with the template.
    """
    new: list[int] = []
    chat.settle(tokenizer, eos_token=args.eos_token, pad_token=args.pad_token)
    if head == "score":
        chat.warn_of_shared_pad(tokenizer)
    if args.chat_template_path is not None:
        path = args.chat_template_path
        rows, new = chat.settle_chat_template(tokenizer, path, rows=rows, can_resize=can_resize)
    chat.check_pad(tokenizer, rows)
    return rows, new


def settle_model(run: RunState, tags: list[str], torch_model: Any) -> None:
    """Resize the model to the tokens, add TRL's tags, and write the tokenizer's ids and `use_cache` into the model's
    configs.

    The configs of torch's model, if one was passed, get them, too.
    """
    model, args = run.model, run.args
    if run.vocab_size != model.vocab_size:
        model.resize_token_embeddings(run.vocab_size)
    model.add_model_tags(tags)
    eos = args.eos_token is not None or args.chat_template_path is not None
    for config in (model.config, *([] if torch_model is None else [torch_model.config])):
        chat.settle_ids(config, run.processing_class, eos=eos)
        config.use_cache = args.use_cache
    for one in (model, torch_model):
        if one is not None and run.task.head == "lm":
            chat.settle_generation(one.generation_config, run.processing_class, eos=eos)


def divide(run: RunState) -> None:
    """Distribute the model's arrays over the mesh of the arguments, if there is one."""
    run.sharding_plan = sharding_plan_of(run.args)
    check_division(run.sharding_plan, run.model, run.own_loss)
    model = run.model
    if run.sharding_plan is not None:
        run.sharding_plan = replace(run.sharding_plan, axes=model.backend.axes)
        model.params, model.frozen = map(run.sharding_plan.placed, (model.params, model.frozen))
    if several():
        model.read, model.writes = Fetched, is_first()


def attach_reference(run: RunState, reference: ReferenceModel) -> None:
    """Let a run's step compute a reference, too, its arrays divided over the mesh as the policy's are."""
    plan = run.sharding_plan
    if plan is not None:
        axes = {PREFIX + path: axes for path, axes in reference.backend.axes.items()}
        run.sharding_plan = plan = replace(plan, axes={**plan.axes, **axes})
        reference = replace(reference, arrays=plan.placed(reference.arrays))
    run.reference = reference


def check_strategies(args: BaseConfig, eval_dataset: Any) -> None:
    """Raise ValueError where a strategy of the arguments lacks an evaluation set or a metric that it needs."""
    if args.eval_strategy != "no" and eval_dataset is None:
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy.value)!r} needs an eval_dataset. Pass one, or set "
            "eval_strategy='no'."
        )
    if args.eval_on_start and eval_dataset is None:
        raise ValueError("eval_on_start=True needs an eval_dataset. Pass one, or leave eval_on_start out.")
    wanted = args.metric_for_best_model
    if wanted is not None and isinstance(eval_dataset, dict):
        if not any(wanted.removeprefix("eval_").startswith(f"{name}_") for name in eval_dataset):
            raise ValueError(
                f"metric_for_best_model={wanted!r} names none of the evaluation sets ({', '.join(eval_dataset)}): "
                f"their metrics are called eval_<name>_loss and so on, as in 'eval_{next(iter(eval_dataset))}_loss'."
            )
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        raise ValueError(
            "save_strategy='best' needs metric_for_best_model, which is None: say which metric of the evaluation "
            "decides, as in metric_for_best_model='loss'."
        )


def set_log_level(level: int, *, asked: bool) -> None:
    """Set transformers' loggers and ours to what `log_level` asks for; `asked`: it is not left to transformers."""
    transformers_logging.set_verbosity(level)
    ours = logging.getLogger("trl_jax")
    ours.setLevel(level)
    show_lines(level, asked=asked)
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())


def seed_script(args: BaseConfig, *, apart: bool) -> None:
    """Seed what functions of a script draw from, as transformers' Trainer does when it is made: `random`, NumPy, the
    process's stream of tokens and, where it is imported, torch. No step draws from these.

    Args:
        apart: whether each process has numbers of its own.
    """
    seed = args.seed + (jax.process_index() if apart else 0)
    set_seed(seed)
    seed_if_imported(seed)


def warn_of_idle_devices(args: BaseConfig) -> None:
    """Warn where training is on the CPU of a machine that has an accelerator: JAX lacks its plugin and hardly says
    so."""
    if args.use_cpu or os.environ.get("JAX_PLATFORMS") or jax.default_backend() != "cpu":
        return
    for kind, extra, pattern in (("GPU", "cuda", "/dev/nvidia[0-9]*"), ("TPU", "tpu", "/dev/accel[0-9]*")):
        if glob.glob(pattern):
            logger.warning(
                'Training on the CPU, though this machine has a %s: pip install "trl_jax[%s]", or pass use_cpu=True.',
                kind,
                extra,
            )


# ---- The parts of a run, made in order, each with what it needs


class Parts(NamedTuple):
    """The parts of a trainer, for tools that look at a run without training it."""

    run: RunState
    forward: Forward
    evaluator: Evaluator | CompletionEvaluator
    train_step: TrainStep
    checkpointer: Checkpointer
    publisher: HubPublisher
    training: Training


class TrainerSpec(NamedTuple):
    """What a trainer class contributes to its run, besides its task.

    attach_reference: gives the run the model that the policy is compared with, if there is one; None: there is none.
    rollout: how an online trainer makes its training rows; None: the rows are the dataset's.
    balance_experts: adds the load-balancing loss of a mixture of experts to the run; None: it is never added.
    """

    attach_reference: Callable[[RunState], None] | None = None
    rollout: Callable[[RunState], RolloutParts] | None = None
    balance_experts: Callable[[RunState], object] | None = None


def assemble(
    run: RunState,
    spec: TrainerSpec,
    hooks: TrainerHooks,
    publisher: HubPublisher,
    callbacks: Any,
    choose: Callable[[], OptimizerChoice],
    torch_model: Any,
) -> Parts:
    """Make the parts of a run whose tokenizer, rows and model are there: placed on the devices, with its reference, its
    callbacks, and the functions that steps and evaluations are compiled from.

    Args:
        callbacks: those that the constructor was given.
        choose: the optimizer that the arguments and the constructor ask for, as they are now.
        torch_model: the torch model that was passed, which gets the trained weights; None without one.

    Raises:
        ValueError: the run has no end, or an argument does not fit the model.
        TypeError: a script overrides the loss of a task that needs per-token numbers.
    """
    args = run.args
    divide(run)
    if spec.attach_reference is not None:
        spec.attach_reference(run)
    seed_script(args, apart=spec.rollout is not None)
    run.events = events_of(run, callbacks)
    begin_state(run)
    if spec.balance_experts is not None:
        spec.balance_experts(run)
    rollout = None if spec.rollout is None else spec.rollout(run)
    parts = _make_parts(run, hooks, publisher, choose, torch_model, rollout)
    run.end_setup()
    run.events.fire("on_init_end")
    check_noise(args, run.model.backend)
    layout.check_layout(args, run.model.backend, compares=run.compares)
    check_offloading(args, run.model.backend)
    return parts


def _make_parts(
    run: RunState,
    hooks: TrainerHooks,
    publisher: HubPublisher,
    choose: Callable[[], OptimizerChoice],
    torch_model: Any,
    rollout: RolloutParts | None,
) -> Parts:
    _check_own_loss(run)
    arguments = arguments_text(run.args)
    set_log_level(run.args.get_process_log_level(), asked=run.args.log_level != "passive")
    warn_of_idle_devices(run.args)
    os.makedirs(run.args.output_dir, exist_ok=True)
    checkpointer, forward = Checkpointer(run, arguments, hooks), Forward(run)
    plan = run.sharding_plan
    sharded_step = None if plan is None else ShardedStep(plan, run.model.params, run.frozen)
    user_loss = UserLoss(run, forward, hooks.compute_loss, hooks.script_values) if run.own_loss else None
    if rollout is None:
        evaluator = Evaluator(run, forward, sharded_step, user_loss, hooks.prediction_step)
    else:
        run.rollout = rollout_steps(run, rollout, forward, sharded_step)
        evaluator = CompletionEvaluator(run, forward, sharded_step, run.rollout)
    trained_by_script = user_loss if "compute_loss" in run.overridden else None
    train_step = TrainStep(run, hooks.loss, sharded_step, trained_by_script)
    training = Training(run, hooks, train_step, checkpointer, publisher, choose, torch_model)
    data.length_of(run)
    if several():
        check_alike(checkpointer.digests())
    return Parts(run, forward, evaluator, train_step, checkpointer, publisher, training)


def _check_own_loss(run: RunState) -> None:
    if run.own_loss and run.virtual.count:
        raise TypeError(
            f"The trainer's own {' and '.join(sorted(run.own_loss))} would be given logits of the texts alone, and the "
            "first token of a text is predicted by the virtual tokens before it. Leave it out, or take a LoraConfig."
        )
    if run.own_loss and run.task.head == "lm" and run.task.axis == "read":
        raise TypeError(
            f"The trainer's own {' and '.join(sorted(run.own_loss))} would be given whole logits, and the loss of "
            f"{type(run.task).__name__} asks for numbers of each token beside them. Leave the method out, and write a "
            "task with another loss."
        )
