"""Load the model to train from a trainer's argument `model`."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from trl_jax.data.chat import align
from trl_jax.hub.auto import Checkpoint, find_checkpoint, rows_on_disk, with_adapter
from trl_jax.hub.config import NativeConfig, naming_argument
from trl_jax.hub.heads import HeadName
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.peft_backend import AdaptedBackend, LoraBackend
from trl_jax.hub.peft_config import ENCODER, AdapterConfig, read_adapter_config
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.prompt_tuning import VirtualBackend
from trl_jax.hub.quantization import BitsAndBytesConfig, as_quantization
from trl_jax.hub.torch_objects import (
    TorchOriginal,
    as_checkpoint,
    check_adapter_flags,
    check_functions,
    frozen_names,
    is_adapted,
    is_torch_model,
    name_of,
)
from trl_jax.hub.vision import vision_families
from trl_jax.hub.vision.processor import native_of
from trl_jax.mesh.mesh import Fetched, ShardingPlan
from trl_jax.mesh.processes import several
from trl_jax.nn.linear import HALVES
from trl_jax.training.devices import run_device, sharding_plan_of
from trl_jax.training.failures import check_weights

if TYPE_CHECKING:
    from trl_jax.config.base import BaseConfig


logger = logging.getLogger(__name__)


def quantization_of(quantization_config: Any, args: BaseConfig) -> BitsAndBytesConfig | None:
    """The quantization config, from the trainer's argument or from `model_init_kwargs`.

    Raises:
        ValueError: both are given.
    """
    also = (args.model_init_kwargs or {}).get("quantization_config")
    if quantization_config is not None and also is not None:
        raise ValueError("quantization_config is given to the trainer and in model_init_kwargs, too. Leave one out.")
    either = also if quantization_config is None else quantization_config
    return None if either is None else as_quantization(either)


def tokenizer_folder(checkpoint: Checkpoint | PreTrainedModel) -> Path:
    """The folder of the tokenizer: the adapter's, if it has one, because tokens may have been added to it."""
    adapter = None if isinstance(checkpoint, PreTrainedModel) else checkpoint.adapter
    return adapter if adapter is not None and (adapter / "tokenizer_config.json").is_file() else checkpoint.folder


def find(
    model: str | PreTrainedModel,
    args: BaseConfig,
    head: HeadName,
    *,
    dtype: str = "float32",
    init_kwargs: Mapping[str, Any] | None = None,
) -> Checkpoint | PreTrainedModel:
    """Find a checkpoint by name or folder, without reading its weights. A loaded model is returned unchanged.

    Args:
        dtype: the default, if `init_kwargs` has none.
        init_kwargs: for from_pretrained; None uses the arguments' `model_init_kwargs`.
    """
    if isinstance(model, PreTrainedModel):
        _check_head(model, head)
        if args.model_init_kwargs is not None:
            logger.warning("model_init_kwargs has no effect: the model is loaded already.")
        return model
    options = {"dtype": dtype, **((args.model_init_kwargs if init_kwargs is None else init_kwargs) or {})}
    options.pop("quantization_config", None)
    if args.trust_remote_code:
        options.setdefault("trust_remote_code", True)
    # As in transformers, where TRL loads the class that the config names, and not an AutoModel.
    return replace(find_checkpoint(model, head=head, **options), generation=options)


def with_images(checkpoint: Checkpoint | PreTrainedModel) -> Checkpoint | PreTrainedModel:
    """The checkpoint with its vision tower, for rows with images. A loaded model must already have it.

    Raises:
        TypeError: the model was loaded without its tower.
        ValueError: the model has no tower, or an unsupported one.
    """
    if isinstance(checkpoint, PreTrainedModel) and "vision_config" in checkpoint.config.to_dict():
        native = native_of(checkpoint)
        if native is None or native.vision_arch is None:
            raise TypeError(
                f"model is {checkpoint.name_or_path}, which has been loaded without its vision tower, and the dataset "
                "has images. Load it with AutoModelForImageTextToText, or pass the model's name."
            )
        _check_rows(checkpoint.name_or_path, native, checkpoint.config)
        return checkpoint
    if "vision_config" not in checkpoint.config.to_dict():
        raise ValueError(
            "The dataset appears to be vision-related (contains 'image' or 'images' keys), but the provided model does "
            "not seem to be a vision-language model. Please check your model and dataset."
        )
    _check_rows(checkpoint.name, checkpoint.native, checkpoint.config)
    return checkpoint.with_images()


def _check_rows(name: str, native: NativeConfig | None, config: Any) -> None:
    families = vision_families()
    if native is None or config.model_type not in families:
        raise ValueError(
            f"{name}: rows with images are not supported yet for model_type {config.model_type!r}, only text. They are "
            f"supported for {', '.join(families)}."
        )


def _check_head(model: PreTrainedModel, head: HeadName) -> None:
    if model.backend.head != head:
        auto_class = {"score": "AutoModelForSequenceClassification", "lm": "AutoModelForCausalLM"}[head]
        raise TypeError(
            f"model is {model.name_or_path} with the head of another task: pass its name, or load it with "
            f"trl_jax.{auto_class}.from_pretrained."
        )


def from_torch(
    torch_model: Any,
    args: BaseConfig,
    head: HeadName,
    *,
    trains: bool = True,
    images: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load the weights of a torch model.

    Args:
        trains: whether this is the model that is trained.
        images: load the vision tower, too.
        options: for `Checkpoint.load`.
    """
    if args.model_init_kwargs is not None:
        logger.warning("model_init_kwargs has no effect: the model is loaded already.")
    dropout = trains and not vars(args).get("disable_dropout", False)
    with as_checkpoint(torch_model, head, dropout=dropout) as checkpoint:
        rows = rows_on_disk(checkpoint.name, torch_model.config)
        few = checkpoint.quantization is not None
        checkpoint = with_images(checkpoint) if images else checkpoint
        model = _loaded(checkpoint, args, **(options | {"as_stored": True} if few else options))
        if isinstance(model.backend, AdaptedBackend):
            model.backend.saved_config = read_adapter_config(checkpoint.adapter)
    model.accepts_loss_kwargs = getattr(torch_model, "accepts_loss_kwargs", None)
    if isinstance(model.backend, NativeBackend) and rows not in (None, model.vocab_size):
        model.backend.source = replace(model.source, resized=True)
    if isinstance(model.backend, NativeBackend | AdaptedBackend) and not few:
        model.config = torch_model.config  # shared, so that a script's changes to it are saved, as in TRL
        if head == "lm":
            model.generation_config = torch_model.generation_config
    if frozen := frozen_names(torch_model):
        _set_trainable(model, frozen, False)
    if trains and is_adapted(torch_model) and not model.backend.virtual.count:
        check_adapter_flags(torch_model, {name: model.is_trained(name) for name in model.names()})
    return model


def take_over(
    model: PreTrainedModel,
    torch_model: Any,
    original: TorchOriginal,
    args: BaseConfig,
    plan: ShardingPlan | None,
    *,
    trains: bool,
) -> None:
    """Apply changes that a script made to the torch model since its weights were copied: values, frozen parameters, and
    the dtype that it is saved in.

    Args:
        trains: whether the model is about to be trained. If not, changes that cannot be applied only cause a warning.

    Raises:
        ValueError: the model has an adapter, other parameters than before, or hooks.
    """
    try:
        check_functions(torch_model)
    except ValueError as error:
        if trains:
            raise
        logger.warning("%s", error)
    if (dtype := original.changed_dtype()) is not None:
        try:
            model.to(dtype)
        except ValueError as error:
            if trains:
                raise
            logger.warning("The torch model was cast: %s", error)
    adapted, params = isinstance(model.backend, AdaptedBackend), None
    name = original.changed(ignore_casts=adapted)  # the base model keeps its values, without the cast's rounding
    flags = original.changed_flags() if trains else {}
    if name is None and not flags:
        original.mark(flags=trains)
        return
    if name is not None and not adapted and original.same_parameters():
        images = any(path.startswith("vision.") for path in model.arrays)
        params = from_torch(torch_model, args, model.backend.head, images=images).params
    if adapted or (name is not None and params is None):
        told = (
            f"The torch model was changed after the trainer was made: {name or next(iter(flags))}. This has no effect, "
            "because the trainer's own copy has an adapter or other parameters. Change it before the trainer is made."
        )
        if trains:
            raise ValueError(told)
        logger.warning(told)
        return  # a later train() refuses the change
    if params is not None:
        model.params = params if plan is None else plan.placed(params)
    for trainable in (False, True):
        _set_trainable(model, [param for param, flag in flags.items() if flag is trainable], trainable)
    original.mark(flags=trains)


def _set_trainable(model: PreTrainedModel, names: list[str], trainable: bool) -> None:
    """Set `requires_grad` of parameters by their names in the torch model."""
    names = _computed(model, names)
    if unknown := sorted(set(names) - set(model.names())):
        raise ValueError(
            f"model: {unknown[0]} has requires_grad={trainable}, but trl_jax has no parameter of this name. Pass the "
            "checkpoint's folder, and set the flag on trainer.model's parameters."
        )
    model.set_trainable(*names, trainable=trainable)


def _computed(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Drop the names of parameters that trl_jax does not compute, such as those of an unused vision tower: training
    does not change them."""
    if not isinstance(model.backend, NativeBackend):
        return names
    model_names, towers = set(model.names()), re.compile(model.backend.source.config.family.carried or "(?!)")
    return [name for name in names if name in model_names or not towers.search(name)]


def _loaded(
    checkpoint: Checkpoint,
    args: BaseConfig,
    adapter: AdapterConfig | None = None,
    quantization: BitsAndBytesConfig | None = None,
    **options: Any,
) -> PreTrainedModel:
    sharding_plan = sharding_plan_of(args)
    sharding_of = None if sharding_plan is None else sharding_plan.sharding_of
    with jax.default_device(run_device(args)):
        if adapter is None:
            model = checkpoint.load(args.seed, quantization, sharding_of, **options)
        else:
            model = checkpoint.load_adapted(adapter, args.seed, quantization=quantization, sharding_of=sharding_of)
        if several():
            model.read = Fetched
        model = check_weights(model)
    logger.log(model.backend.log_level, "%s runs on the %s backend.", model.name_or_path, model.backend.name)
    return model


def load_policy(
    checkpoint: Checkpoint | PreTrainedModel,
    args: BaseConfig,
    adapter: AdapterConfig | None,
    quantization: BitsAndBytesConfig | None,
    rows: int,
) -> PreTrainedModel:
    """The model to train, loaded if necessary, with an adapter if one is configured.

    Args:
        rows: number of token embeddings for a model that gets an adapter; the adapter fits only tables of this size.
    """
    loaded = isinstance(checkpoint, PreTrainedModel)
    if loaded and adapter is not None and _has_this_adapter(checkpoint, adapter):
        logger.warning("peft_config has no effect: the model already has this adapter, which is trained. Leave it out.")
        adapter = None
    if loaded and quantization is not None:
        logger.warning("quantization_config has no effect: the model is loaded already.")
    if loaded and adapter is None and checkpoint.was_merged:
        logger.warning(
            "model comes from merge_and_unload, after which PEFT leaves all parameters frozen, so TRL would train none "
            "unless the script sets requires_grad. They are trained here."
        )
    if adapter is None:
        model = checkpoint if loaded else _loaded(checkpoint, args, quantization=quantization)
        _check_floats(model)
        if model.frozen:
            _check_trains(model)
            _train_whole_adapter(model)
            _log_adapter(model)
        return model
    _check_one_adapter(bool(checkpoint.frozen) if loaded else checkpoint.adapter is not None)
    if loaded:
        with jax.default_device(run_device(args)):
            if rows != checkpoint.vocab_size:
                checkpoint.resize_token_embeddings(rows)
            model = with_adapter(checkpoint, adapter, args.seed)
        logger.log(model.backend.log_level, "%s runs on the %s backend.", model.name_or_path, model.backend.name)
    else:
        model = _loaded(replace(checkpoint, vocab_size=rows), args, adapter, quantization)
    _log_adapter(model)
    return model


def _check_trains(model: PreTrainedModel) -> None:
    """Raise ValueError for virtual tokens of P-tuning whose encoder network was not saved."""
    if isinstance(model.backend, VirtualBackend) and not model.backend.trains:
        raise ValueError(
            "Cannot set a prompt learning adapter to trainable when loading pretrained adapter: of P-tuning, PEFT "
            f"saves only the vectors of the virtual tokens, not the network that computes them ({ENCODER}). Pass "
            "peft_config with the base model to start over."
        )


def _train_whole_adapter(model: PreTrainedModel) -> None:
    """Train an adapter that was loaded without is_trainable.

    Raises:
        ValueError: a script has set `requires_grad` of some of its parameters.
    """
    if not model.frozen_names:
        return
    if trained := next(filter(model.is_trained, model.names()), None):
        raise ValueError(
            f"model: {trained} has requires_grad=True, but {min(model.frozen_names)} has not: an adapter is trained as "
            "a whole. Load it with is_trainable=True."
        )
    logger.warning(
        "The adapter of model was loaded without is_trainable=True, so TRL would train nothing. It is trained here."
    )
    model.frozen_names = frozenset()


def _check_floats(model: PreTrainedModel) -> None:
    """Raise ValueError for a quantized model without an adapter."""
    backend = model.backend
    if isinstance(backend, NativeBackend) and any(form.kind not in HALVES for form in backend.formats.values()):
        raise ValueError(
            "You cannot perform fine-tuning on purely quantized models: model was loaded with a quantization_config. "
            "Pass peft_config=LoraConfig(...), which trains an adapter on top of it, or load it without."
        )


def load_reference(
    model: Any, args: BaseConfig, argument: str = "ref_model", *, images: bool = False
) -> PreTrainedModel:
    """Load a language model that runs alongside the policy, from an `argument` like `model`. Its weights keep their
    dtypes. With `images`, it has its vision tower."""
    name_or_ours, torch_model = split_model(model)
    if torch_model is not None:
        return from_torch(torch_model, args, "lm", trains=False, images=images, as_stored=True)
    with naming_argument(argument):
        source = find(name_or_ours, args, "lm", dtype="auto")
        if images:
            source = with_images(source)
        return source if isinstance(source, PreTrainedModel) else _loaded(source, args, as_stored=True)


def load_teacher(
    model: Any,
    args: BaseConfig,
    init_kwargs: Mapping[str, Any] | None,
    revision: str | None,
    *,
    images: bool = False,
) -> PreTrainedModel:
    """Load the argument `teacher_model`, which has its own arguments of from_pretrained.

    Raises:
        ValueError: such arguments are given, but the model is already loaded.
    """
    if init_kwargs is not None and not isinstance(model, str | os.PathLike):
        raise ValueError(
            "You passed teacher_model_init_kwargs to the config, but your teacher_model is already instantiated."
        )
    if not isinstance(model, str | os.PathLike):
        return load_reference(model, args, "teacher_model", images=images)
    options = {"revision": revision, **(init_kwargs or {})}
    kwargs = {name: value for name, value in options.items() if value is not None}
    with naming_argument("teacher_model"):
        source = find(os.fspath(model), args, "lm", dtype="auto", init_kwargs=kwargs)
        if "quantization_config" in kwargs:
            source = replace(source, quantization=as_quantization(kwargs["quantization_config"]))
        if images:
            source = with_images(source)
        return _loaded(source, args, as_stored=True)


def check_teacher(teacher: PreTrainedModel, student: PreTrainedModel, method: str) -> None:
    """Raise ValueError if the teacher's distributions cannot be compared to the student's; errors name `method`."""
    student_size, teacher_size = (model.config.get_text_config().vocab_size for model in (student, teacher))
    if student_size != teacher_size:
        raise ValueError(
            f"The student model has vocab_size {student_size} but the teacher model has vocab_size {teacher_size}. "
            f"{method} compares the teacher's full next-token distribution, which requires a shared vocabulary. Use a "
            "teacher with the same vocab_size."
        )
    if not isinstance(teacher.backend, NativeBackend | LoraBackend):
        raise ValueError(
            f"teacher_model runs on the {teacher.backend.name} backend, whose logits cannot be compared a chunk of "
            "tokens at a time. Use a family that trl_jax computes itself (docs/models lists them)."
        )


def outlined(
    checkpoint: Checkpoint, args: BaseConfig, adapter: AdapterConfig | None, quantization: BitsAndBytesConfig | None
) -> PreTrainedModel:
    """The model to train without weights: shapes instead of arrays."""
    if adapter is not None:
        _check_one_adapter(checkpoint.adapter is not None)
    return checkpoint.outline(adapter, quantization, sharded=sharding_plan_of(args) is not None)


def _has_this_adapter(model: PreTrainedModel, adapter: AdapterConfig) -> bool:
    """Whether the model already has an adapter of the same config, as in scripts for early TRL that add it by hand."""
    if not isinstance(model.backend, AdaptedBackend):
        return False
    told = {"base_model_name_or_path": None, "inference_mode": False, "revision": None, "auto_mapping": None}
    return replace(model.backend.saved_config, **told).to_dict() == replace(adapter, **told).to_dict()


def _check_one_adapter(has_adapter: bool) -> None:
    if has_adapter:
        raise ValueError(
            "peft_config is given, but the model has an adapter already. Leave peft_config out to train that one "
            "further, or pass model.merge_and_unload()."
        )


def _log_adapter(model: PreTrainedModel) -> None:
    train, count = model.num_parameters(only_trainable=True), model.num_parameters()
    logger.info("Training with adapter: %s of %s parameters (%.4f%%).", f"{train:,}", f"{count:,}", 100 * train / count)


def short_name(model: Any) -> str:
    """The last part of the model's name, which names a run."""
    ours, torch_model = split_model(model)
    name = name_of(torch_model) if ours is None else ours if isinstance(ours, str) else ours.name_or_path
    return name.rstrip("/").split("/")[-1]


def split_model(model: Any) -> tuple[str | PreTrainedModel | None, Any]:
    """Split the argument `model` into (a name, a folder or our model; a torch model), one of which is None.

    Raises:
        TypeError: it is none of these.
    """
    if is_torch_model(model):
        return None, model
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    if not isinstance(model, str | PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__module__}.{type(model).__name__}; this release of trl_jax takes a checkpoint's "
            "folder or Hub name, a torch model of transformers, or what "
            "from_pretrained of trl_jax's AutoModelForSequenceClassification or AutoModelForCausalLM returned."
        )
    return model, None


def align_special_tokens(model: PreTrainedModel, torch_model: Any, tokenizer: Any, *, head: str) -> None:
    """Write the tokenizer's special tokens into the configs of the model to train and of the torch model that was
    passed, if any."""
    updated = {}
    for target in (model, torch_model):
        if target is not None:
            ends = target.generation_config if head == "lm" else None
            updated |= align(target.config, ends, tokenizer)
    if updated:
        logger.warning(
            "The tokenizer has new PAD/BOS/EOS tokens that differ from the model config and generation config. "
            "The model config and generation config were aligned accordingly, being updated with the tokenizer's "
            "values. Updated tokens: %s.",
            updated,
        )
