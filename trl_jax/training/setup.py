"""Build a run from a trainer's arguments."""

from __future__ import annotations

import copy
import glob
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging as transformers_logging

from trl_jax.config.base import BaseConfig
from trl_jax.core.text import brief
from trl_jax.core.torch_random import set_seed
from trl_jax.data import chat
from trl_jax.data.chat import load_tokenizer
from trl_jax.data.checks import has_images
from trl_jax.hub.auto import Checkpoint, check_heads
from trl_jax.hub.backend import Backend
from trl_jax.hub.fetch import checkpoint_folder
from trl_jax.hub.peft_config import AdapterConfig, PromptLearningConfig, positions_left
from trl_jax.hub.peft_targets import with_new_tokens
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch_objects import resize
from trl_jax.hub.torch_state import seed_if_imported
from trl_jax.hub.vision import vision_families
from trl_jax.hub.vision.processor import (
    VisionProcessor,
    has_image_processor,
    has_processor,
    load_image_processor,
    native_of,
)
from trl_jax.mesh.mesh import SEQUENCE, Fetched, ShardingPlan
from trl_jax.mesh.processes import check_alike, is_first, several
from trl_jax.rollout.steps import RolloutSteps
from trl_jax.tasks.task import Task
from trl_jax.training import layout, model
from trl_jax.training.callbacks import begin_state, events_of
from trl_jax.training.checkpointer import Checkpointer, arguments_text
from trl_jax.training.devices import ShardedStep, sharding_plan_of
from trl_jax.training.evaluate import CompletionEvaluator, Evaluator
from trl_jax.training.features import FeatureStore
from trl_jax.training.forward import Forward, check_noise
from trl_jax.training.logging import show_lines
from trl_jax.training.optimizer_choice import OptimizerChoice
from trl_jax.training.push import HubPublisher
from trl_jax.training.reference import PREFIX, ReferenceModel
from trl_jax.training.rollout import RolloutParts, rollout_steps
from trl_jax.training.state import Editable, Hooks, Progress, Setup, Tokenization
from trl_jax.training.step import TrainStep
from trl_jax.training.train import Training
from trl_jax.training.user_loss import UserLoss

logger = logging.getLogger(__name__)


def tokenizer_of(
    processing_class: Any,
    checkpoint: Checkpoint | PreTrainedModel,
    torch_model: Any,
    args: BaseConfig,
    sides: Mapping[str, str] | None = None,
    *,
    with_processor: bool = False,
) -> Any:
    """The tokenizer passed as `processing_class` (directly or inside a processor), or the model's own.

    Args:
        sides: padding and truncation sides for the model's own tokenizer; None keeps its defaults.
        with_processor: whether TRL loads the model's processor, whose chat template is then used.

    Raises:
        TypeError: `processing_class` is neither a tokenizer nor a processor.
        ValueError: nothing was passed, and the model was not loaded from a folder or repository.
    """
    if _is_processor(processing_class):
        return _tokenizer_in(processing_class)
    # Models and functions can be called, too, but have no pad_token.
    is_tokenizer = callable(processing_class) and hasattr(processing_class, "pad_token")
    if processing_class is not None and (not is_tokenizer or isinstance(processing_class, type)):
        is_name = isinstance(processing_class, str | os.PathLike | type)
        actual = brief(processing_class) if is_name else f"a {type(processing_class).__name__}"
        raise TypeError(
            "The `processing_class` must be either a `PreTrainedTokenizerBase` or a `ProcessorMixin`, found "
            f"{actual}: load it with transformers' AutoTokenizer.from_pretrained."
        )
    if processing_class is not None:
        return processing_class
    options = {"trust_remote_code": args.trust_remote_code, "sides": sides, "with_processor": with_processor}
    if torch_model is not None:
        if not torch_model.config._name_or_path:
            raise ValueError(
                f"model is a {type(torch_model).__qualname__} that was loaded from no folder or repository, where its "
                "tokenizer would be. Pass processing_class=AutoTokenizer.from_pretrained(...)."
            )
        return load_tokenizer(torch_model.config._name_or_path, torch_model.config, **options)
    folder = model.tokenizer_folder(checkpoint)
    if isinstance(checkpoint, PreTrainedModel) and not folder.exists():  # made of a torch model, in a temporary folder
        folder, _ = checkpoint_folder(checkpoint.name_or_path)
    return load_tokenizer(folder, checkpoint.config, **options)


def image_encoder(
    checkpoint: Checkpoint | PreTrainedModel, torch_model: Any, tokenizer: Any, processing_class: Any
) -> VisionProcessor:
    """The encoder of rows with images. It uses the image processor and `images_kwargs` of the processor that was
    passed, or the checkpoint's image processor."""
    if _is_processor(processing_class):
        image_processor = processing_class.image_processor
        options = getattr(processing_class, "images_kwargs", {})  # some processors have none
    else:
        folder = checkpoint.folder
        if torch_model is not None:  # the checkpoint was read from a temporary folder that no longer exists
            folder, _ = checkpoint_folder(torch_model.config._name_or_path)
        image_processor, options = load_image_processor(folder), {}
    native = native_of(checkpoint) if isinstance(checkpoint, PreTrainedModel) else checkpoint.native
    return VisionProcessor(native, checkpoint.config, tokenizer, image_processor, **options)


def check_image_arguments(adapter: AdapterConfig | None) -> None:
    """Raise ValueError for arguments that no trainer supports together with images."""
    if isinstance(adapter, PromptLearningConfig):
        raise ValueError(
            "peft_config: adapters of virtual tokens are not supported for rows with images. Pass a LoraConfig."
        )


def _is_multimodal(checkpoint: Checkpoint | PreTrainedModel, processing_class: Any) -> bool:
    """Whether the model computes images and has an image processor: the cases in which TRL loads a whole processor."""
    loaded = isinstance(checkpoint, PreTrainedModel)
    native = native_of(checkpoint) if loaded else checkpoint.native
    if native is None or native.family.model_type not in vision_families():
        return False
    if native.vision_arch is None if loaded else "vision_config" not in native.raw:
        return False
    if processing_class is not None:
        return _is_processor(processing_class)
    return find_spec("PIL") is not None and has_image_processor(checkpoint.folder)


def _is_processor(value: Any) -> bool:
    """Avoids importing transformers' processors: if one was created, its module has been imported."""
    module = sys.modules.get("transformers.processing_utils")
    return module is not None and isinstance(value, module.ProcessorMixin)


def _tokenizer_in(processor: Any) -> Any:
    kind = type(processor).__qualname__
    if "tokenizer" not in vars(processor):
        raise TypeError(f"processing_class is a {kind} without a tokenizer: pass AutoTokenizer.from_pretrained(...).")
    tokenizer, template = processor.tokenizer, chat.default_template(vars(processor).get("chat_template"))
    if template is not None and template != tokenizer.chat_template:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def _saved_processor(policy: PreTrainedModel, torch_model: Any, processing_class: Any, *, takes_images: bool) -> Any:
    """The processor that was passed, or the folder whose processor files are saved with the model."""
    if _is_processor(processing_class):
        return processing_class
    if torch_model is not None and takes_images:  # it was read from a temporary folder without these files
        return checkpoint_folder(torch_model.config._name_or_path)[0]
    return policy.processor


def apply_special_tokens(
    args: BaseConfig, tokenizer: Any, rows: int, *, can_resize: bool, head: str
) -> tuple[int, list[int]]:
    """Apply the special tokens and the chat template of the arguments to the tokenizer. `head` is the model's.

    Returns:
        The number of tokens that the model must embed (`rows`, or another number if it can be resized), and the ids of
        the tokens that were added with the chat template.
    """
    new: list[int] = []
    chat.set_special_tokens(tokenizer, eos_token=args.eos_token, pad_token=args.pad_token)
    if head == "score":
        chat.warn_of_shared_pad(tokenizer)
    if args.chat_template_path is not None:
        path = args.chat_template_path
        rows, new = chat.set_chat_template(tokenizer, path, rows=rows, can_resize=can_resize)
    chat.check_pad(tokenizer, rows)
    return rows, new


def configure_model(
    model: PreTrainedModel,
    torch_model: Any,
    tokenization: Tokenization,
    args: BaseConfig,
    *,
    head: str,
    tags: list[str],
) -> None:
    """Resize the model's embeddings, add tags, and write the tokenizer's ids and `use_cache` into the configs of the
    model and of the torch model, if one was passed."""
    if tokenization.vocab_size != model.vocab_size:
        model.resize_token_embeddings(tokenization.vocab_size)
    model.add_model_tags(tags)
    cloned = args.chat_template_path is not None and not chat.is_template_file(args.chat_template_path)
    eos = args.eos_token is not None or cloned
    for config in (model.config, *([] if torch_model is None else [torch_model.config])):
        chat.copy_special_ids(config, tokenization.tokenizer, eos=eos)
        config.use_cache = args.use_cache
    for lm in (model, torch_model):
        if lm is not None and head == "lm":
            chat.copy_ids_to_generation_config(lm.generation_config, tokenization.tokenizer, eos=eos, replaces=cloned)


def divide(model: PreTrainedModel, args: BaseConfig, batch_methods: frozenset[str]) -> ShardingPlan | None:
    """Shard the model's arrays over the mesh given by the arguments; returns None without a mesh.

    Args:
        batch_methods: the methods of a script that get whole batches.
    """
    plan = sharding_plan_of(args)
    _check_division(plan, model, batch_methods)
    if plan is not None:
        plan = replace(plan, axes=model.backend.axes)
        model.params, model.frozen = map(plan.placed, (model.params, model.frozen))
    if several():
        model.read, model.writes = Fetched, is_first()
    return plan


def _check_division(sharding_plan: ShardingPlan | None, model: PreTrainedModel, batch_methods: frozenset[str]) -> None:
    """Raise ValueError if the tensor axis does not divide the model's heads, or if the sequence axis cannot be used
    because of the model or of a script's `batch_methods`."""
    if sharding_plan is None:
        return
    _check_sequence(sharding_plan.size(SEQUENCE), model, batch_methods)
    check_heads(sharding_plan, model.backend.traits.heads, model.name_or_path)


def _check_sequence(size: int, model: PreTrainedModel, batch_methods: frozenset[str]) -> None:
    if size == 1:
        return
    ways = "Give these devices to data or fsdp instead."
    if not model.backend.traits.takes_stripes:
        raise ValueError(
            f"mesh: sequence {size} divides the tokens of a text over devices, which requires a native decoder with "
            f"attention in every layer; {model.name_or_path} is not one ({model.backend.name} backend). {ways}"
        )
    if batch_methods:
        raise ValueError(
            f"mesh: sequence {size} divides texts, and a script's own {min(batch_methods)} gets them whole. {ways}"
        )


def divide_reference(
    reference: ReferenceModel, plan: ShardingPlan | None
) -> tuple[ReferenceModel, ShardingPlan | None]:
    """Shard the reference's arrays over the policy's mesh. Returns the reference and the plan for both models."""
    if plan is None:
        return reference, None
    axes = {PREFIX + path: axes for path, axes in reference.backend.axes.items()}
    plan = replace(plan, axes={**plan.axes, **axes})
    return replace(reference, arrays=plan.placed(reference.arrays)), plan


def check_strategies(args: BaseConfig, eval_dataset: Any) -> None:
    """Raise ValueError if eval_strategy or save_strategy lacks the evaluation set or the metric that it needs."""
    if args.eval_strategy != "no" and eval_dataset is None:
        raise ValueError(
            f"eval_strategy={str(args.eval_strategy.value)!r} needs an eval_dataset. Pass one, or set "
            "eval_strategy='no'."
        )
    if args.eval_on_start and eval_dataset is None:
        raise ValueError("eval_on_start=True needs an eval_dataset. Pass one, or leave eval_on_start out.")
    metric = args.metric_for_best_model
    if metric is not None and isinstance(eval_dataset, dict):
        if not any(metric.removeprefix("eval_").startswith(f"{name}_") for name in eval_dataset):
            raise ValueError(
                f"metric_for_best_model={metric!r} names none of the evaluation sets ({', '.join(eval_dataset)}): "
                f"their metrics are called eval_<name>_loss and so on, as in 'eval_{next(iter(eval_dataset))}_loss'."
            )
    if args.save_strategy == SaveStrategy.BEST and args.metric_for_best_model is None:
        raise ValueError(
            "save_strategy='best' requires metric_for_best_model, the evaluation metric to compare checkpoints by, "
            "such as metric_for_best_model='loss', got None."
        )


def set_log_level(level: int, *, asked: bool) -> None:
    """Set the level of transformers' loggers and of ours. asked: whether the user set `log_level`.

    TRANSFORMERS_VERBOSITY=error hides neither our warnings nor TRL's.
    """
    transformers_logging.set_verbosity(level)
    ours = logging.getLogger("trl_jax")
    ours.setLevel(level if asked else min(level, logging.WARNING))
    show_lines(level, asked=asked)
    if not ours.hasHandlers():
        ours.addHandler(logging.StreamHandler())


def seed_script(args: BaseConfig, *, apart: bool) -> None:
    """Seed the global generators that user-defined functions may use, as transformers' Trainer does at construction:
    `random`, NumPy, the process's torch-compatible generator and, if it is imported, torch. No step uses them.

    Args:
        apart: whether each process gets a seed of its own.
    """
    seed = args.seed + (jax.process_index() if apart else 0)
    set_seed(seed)
    seed_if_imported(seed)


def warn_of_idle_devices(args: BaseConfig) -> None:
    """Warn when training on the CPU of a machine with an accelerator: without its plugin, JAX barely mentions it."""
    if args.use_cpu or os.environ.get("JAX_PLATFORMS") or jax.default_backend() != "cpu":
        return
    for kind, extra, pattern in (("GPU", "cuda", "/dev/nvidia[0-9]*"), ("TPU", "tpu", "/dev/accel[0-9]*")):
        if glob.glob(pattern):
            logger.warning(
                'Training on the CPU although this machine has a %s. To use it, run pip install "trl_jax[%s]"; to '
                "silence this warning, pass use_cpu=True.",
                kind,
                extra,
            )


class Policy(NamedTuple):
    """The model that is trained, sharded over the mesh.

    vocab_size: all token ids are below it.
    """

    model: PreTrainedModel
    vocab_size: int
    sharding_plan: ShardingPlan | None

    @property
    def has_tower(self) -> bool:
        """Whether the model has a vision tower."""
        return any(path.startswith("vision.") for path in self.model.arrays)


class TrainerSpec(NamedTuple):
    """What a trainer contributes to its run, besides its task and hooks. Only `BaseTrainer._spec` creates it.

    make_reference: creates the reference model; returns None if the task needs none.
    make_rollout: how an online trainer makes its training rows; None if the rows come from the dataset.
    balance_experts: returns the weight of the load-balancing loss of a mixture of experts; 0.0 if it is never added.
    tags: for the model card.
    tokenizer_sides: padding and truncation sides for a tokenizer that is loaded with the model; None keeps its own.
    check_images: raises ValueError for arguments that do not support images; None if the trainer takes no images.
    may_get_images: whether images may come from tools although the rows have none. A model with a processor then keeps
        its vision tower, as in TRL.
    reader: tokenizes conversations without images as the processor of a vision-language model does for this trainer in
        TRL; None if TRL's trainer uses the tokenizer.
    """

    make_reference: Callable[[BaseConfig, Task, Policy], ReferenceModel | None]
    make_rollout: Callable[[Setup], RolloutParts] | None
    balance_experts: Callable[[PreTrainedModel, BaseConfig], float]
    tags: list[str]
    tokenizer_sides: Mapping[str, str] | None
    check_images: Callable[[], None] | None
    may_get_images: bool
    reader: type[chat.ProcessorTokenizer] | None


class Inputs(NamedTuple):
    """What was passed to the trainer's constructor, besides the arguments.

    model, torch_model: exactly one of them is set, as returned by `model.split_model`.
    callbacks: in addition to the default ones.
    """

    model: str | PreTrainedModel | None
    torch_model: Any
    tokenizer: Any
    train: Any
    evaluation: Any
    adapter: AdapterConfig | None
    quantization_config: Any
    callbacks: list[TrainerCallback] | None


def build(spec: TrainerSpec, hooks: Hooks, editable: Editable, progress: Progress, inputs: Inputs) -> Setup:
    """Assemble a run, in this order: tokenizer, rows, model, mesh, reference, events.

    Args:
        editable: with the arguments and the task; the rest is filled in.
        progress: a new one.

    Raises:
        TypeError, ValueError: names the invalid argument, row or checkpoint.
    """
    args, task, torch_model = editable.args, editable.task, inputs.torch_model
    batch_size, batch_methods = args.per_device_train_batch_size, hooks.batch_methods

    quantization = model.quantization_of(inputs.quantization_config, args)
    checkpoint, takes_images = _checkpoint_of(spec, args, task.head, inputs, batch_methods)
    tokenization, new_tokens = _tokenization(spec, args, task.head, checkpoint, inputs)
    if takes_images:
        encoder = image_encoder(checkpoint, torch_model, tokenization.tokenizer, inputs.tokenizer)
        tokenization = tokenization._replace(encoder=encoder)

    # Before the weights are read: bad rows are reported early, and num_proc forks before JAX starts threads.
    editable.tokenization = tokenization  # which an overridden `prepare_dataset` may read
    train_dataset = hooks.prepare_dataset(inputs.train, "train")
    eval_dataset = _prepared_for_evaluation(hooks, inputs.evaluation)

    args.check()  # again: setters and plain assignment bypass the check at construction
    check_strategies(args, eval_dataset)
    if torch_model is not None and checkpoint.can_resize:
        resize(torch_model, tokenization.vocab_size)
    adapter = inputs.adapter
    if adapter is not None and new_tokens:
        adapter = with_new_tokens(adapter, new_tokens, task.head)
    policy = model.load_policy(checkpoint, args, adapter, quantization, tokenization.vocab_size)
    policy.processor = _saved_processor(policy, torch_model, inputs.tokenizer, takes_images=takes_images)
    configure_model(policy, torch_model, tokenization, args, head=task.head, tags=[*spec.tags, "trl_jax"])

    reference, sharding_plan = _reference(spec, args, task, policy, tokenization.vocab_size, batch_methods)

    seed_script(args, apart=spec.make_rollout is not None)
    events = events_of(args, policy, tokenization.tokenizer, inputs.callbacks)

    editable.model, editable.train_dataset, editable.eval_dataset = policy, train_dataset, eval_dataset
    setup = Setup(
        editable=editable,
        progress=progress,
        overridden=hooks.overridden,
        batch_methods=batch_methods,
        batch_size=batch_size,
        events=events,
        sharding_plan=sharding_plan,
        reference=reference,
        router_aux_loss_coef=spec.balance_experts(policy, args),
        features=FeatureStore(args) if takes_images and sharding_plan is None and not several() else None,
        loss_compares=hooks.loss_compares,
        completions_loss=hooks.completions_loss,
    )
    begin_state(events, setup.train_batch_size)

    check_batch_methods(batch_methods, task, policy)
    set_log_level(args.get_process_log_level(), asked=args.log_level != "passive")
    warn_of_idle_devices(args)
    os.makedirs(args.output_dir, exist_ok=True)
    return setup


def _reference(
    spec: TrainerSpec,
    args: BaseConfig,
    task: Task,
    policy: PreTrainedModel,
    vocab_size: int,
    batch_methods: frozenset[str],
) -> tuple[ReferenceModel | None, ShardingPlan | None]:
    """The reference, None without one, and the sharding plan of the policy and the reference."""
    plan = divide(policy, args, batch_methods)
    reference = spec.make_reference(args, task, Policy(policy, vocab_size, plan))
    return (None, plan) if reference is None else divide_reference(reference, plan)


def _checkpoint_of(
    spec: TrainerSpec, args: BaseConfig, head: str, inputs: Inputs, batch_methods: frozenset[str]
) -> tuple[Checkpoint | PreTrainedModel, bool]:
    """The model (without weights, unless it was passed as a model), and whether the run uses images: if its rows have
    images, or if tools may return some and the model has a processor."""
    takes_images = spec.check_images is not None and has_images(inputs.train)
    may_see = spec.may_get_images and not batch_methods and not isinstance(inputs.adapter, PromptLearningConfig)
    if inputs.torch_model is None:
        checkpoint = model.find(inputs.model, args, head)
        takes_images = takes_images or (may_see and _is_multimodal(checkpoint, inputs.tokenizer))
        checkpoint = model.with_images(checkpoint) if takes_images else checkpoint
    else:
        takes_images = takes_images or (may_see and _is_processor(inputs.tokenizer))
        checkpoint = model.from_torch(inputs.torch_model, args, head, images=takes_images)
    if takes_images:
        check_image_arguments(inputs.adapter)
        spec.check_images()
    return checkpoint, takes_images


def _tokenization(
    spec: TrainerSpec, args: BaseConfig, head: str, checkpoint: Checkpoint | PreTrainedModel, inputs: Inputs
) -> tuple[Tokenization, list[int]]:
    """The tokenizer with its limits, and the ids of the tokens that were added with the chat template; an adapter
    trains these, too."""
    processed = _has_processor(spec, checkpoint, inputs)
    tokenizer = tokenizer_of(
        inputs.tokenizer, checkpoint, inputs.torch_model, args, spec.tokenizer_sides, with_processor=processed
    )
    vocab_size, new_tokens = apply_special_tokens(
        args, tokenizer, checkpoint.vocab_size, can_resize=checkpoint.can_resize, head=head
    )
    reader = spec.reader if head == "lm" and processed else None
    most = positions_left(checkpoint.max_positions, inputs.adapter)
    return Tokenization(tokenizer, vocab_size, most, reader=reader), new_tokens


def _has_processor(spec: TrainerSpec, checkpoint: Checkpoint | PreTrainedModel, inputs: Inputs) -> bool:
    """Whether TRL tokenizes texts with a processor: one that was passed or, in a trainer that takes images, the one
    saved with a vision-language model."""
    if inputs.tokenizer is not None or spec.check_images is None:
        return _is_processor(inputs.tokenizer)
    folder = checkpoint.folder
    if inputs.torch_model is not None:  # the checkpoint was read from a temporary folder that no longer exists
        folder, _ = checkpoint_folder(inputs.torch_model.config._name_or_path)
    return has_processor(folder)


def _prepared_for_evaluation(hooks: Hooks, dataset: Any) -> Any:
    if dataset is None:
        return None
    if not isinstance(dataset, dict):
        return hooks.prepare_dataset(dataset, "eval")
    return {name: hooks.prepare_dataset(part, f"eval_dataset[{name!r}]") for name, part in dataset.items()}


def _sharded_step(plan: ShardingPlan | None, policy: PreTrainedModel, frozen: dict[str, Any]) -> ShardedStep | None:
    return None if plan is None else ShardedStep(plan, policy.params, frozen)


def check_batch_methods(batch_methods: frozenset[str], task: Task, policy: PreTrainedModel) -> None:
    """Raise TypeError if the model or the task cannot provide whole batches for a script's methods."""
    names, way_out = f"An overridden {' and '.join(sorted(batch_methods))}", "Remove the override"
    if "compute_loss_func" in batch_methods:
        names, way_out = " and ".join(sorted(batch_methods)), "Leave it out"
    if batch_methods and policy.backend.virtual.count:
        raise TypeError(
            f"{names} would receive logits for the text tokens only, but the first token of a text is predicted by the "
            f"virtual tokens before it. {way_out}, or use a LoraConfig."
        )
    if batch_methods and task.head == "lm" and task.axis == "read":
        raise TypeError(
            f"{names} would receive logits, but the loss of {type(task).__name__} also needs per-token values. "
            f"{way_out}, and write a task with another loss."
        )


def check_offloading(args: BaseConfig, backend: Backend) -> None:
    """Raise ValueError if activation_offloading is set for a model without scanned layers; warn on a CPU, where it has
    no effect."""
    if not args.activation_offloading:
        return
    if backend.traits.heads is None:
        raise ValueError(
            f"activation_offloading=True: this model runs on the {backend.name} backend, whose activations stay on the "
            "device. Leave it out."
        )
    if args.device.type == "cpu":
        logger.warning("activation_offloading has no effect on a CPU: its activations are in the host's memory.")


class RunParts(NamedTuple):
    """The parts of a trainer, for tools that inspect a run without training."""

    setup: Setup
    forward: Forward
    rollout_steps: RolloutSteps | None
    evaluator: Evaluator | CompletionEvaluator
    train_step: TrainStep
    checkpointer: Checkpointer
    publisher: HubPublisher
    training: Training


def assemble(
    setup: Setup,
    spec: TrainerSpec,
    hooks: Hooks,
    publisher: HubPublisher,
    choose: Callable[[], OptimizerChoice],
    torch_model: Any,
) -> RunParts:
    """Create the parts of a run.

    Args:
        choose: chooses an optimizer from the current arguments and those of the constructor.
        torch_model: the torch model that was passed and receives the trained weights; None without one.

    Raises:
        ValueError: the run has no end, or an argument does not fit the model.
    """
    args, policy, forward = setup.args, setup.model, Forward(setup)
    sharded_step = _sharded_step(setup.sharding_plan, policy, setup.frozen)
    source = None
    if spec.make_rollout is not None:
        source = rollout_steps(setup, spec.make_rollout(setup), forward, sharded_step)
    checkpointer = Checkpointer(setup, arguments_text(args), hooks, source)
    user_loss = None
    if setup.batch_methods:
        hooked = hooks.compute_loss, hooks.script_values, hooks.user_step, hooks.loss_functions
        user_loss = UserLoss(setup, forward, *hooked)
    if source is None:
        evaluator = Evaluator(setup, forward, sharded_step, user_loss, hooks.prediction_step)
    else:
        evaluator = CompletionEvaluator(setup, forward, sharded_step, source)
    after_step = None if source is None else source.stepped
    loss_of_steps = user_loss if setup.steps_by_batch else None
    train_step = TrainStep(setup, forward, hooks.loss, sharded_step, loss_of_steps, after_step)
    training = Training(setup, hooks, train_step, checkpointer, publisher, choose, torch_model, source)
    _ = setup.length  # raises ValueError for a run without an end
    if several():
        check_alike(checkpointer.digests())
    setup.events.fire("on_init_end")
    check_noise(args, policy.backend)
    layout.check_layout(args, policy.backend, compares=setup.compares)
    check_offloading(args, policy.backend)
    return RunParts(setup, forward, source, evaluator, train_step, checkpointer, publisher, training)
