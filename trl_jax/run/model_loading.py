"""From what was passed as `model=` to the model that trains."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from trl_jax.engine.processes import several
from trl_jax.engine.sharding import Fetched
from trl_jax.hub.auto import Checkpoint, find_checkpoint, with_adapter
from trl_jax.hub.peft.lora_config import LoraConfig, read_lora_config
from trl_jax.hub.peft.quantization import BitsAndBytesConfig, as_quantization
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.torch.objects import ADAPTER_FOLDER, as_folder, frozen_names, is_adapted, is_torch_model
from trl_jax.run.devices import run_device, sharding_plan_of
from trl_jax.run.nan_report import check_weights

if TYPE_CHECKING:
    from trl_jax.run.base_config import BaseConfig

logger = logging.getLogger(__name__)


def quantization_of(given: Any, args: BaseConfig) -> BitsAndBytesConfig | None:
    """What the trainer's argument says, or the model's own in `model_init_kwargs`."""
    also = (args.model_init_kwargs or {}).get("quantization_config")
    if given is not None and also is not None:
        raise ValueError("quantization_config is given to the trainer and in model_init_kwargs, too. Leave one out.")
    found = also if given is None else given
    return None if found is None else as_quantization(found)


def tokenizer_folder(checkpoint: Checkpoint | PreTrainedModel) -> Path:
    """An adapter's own, if it has one: it may have been given tokens."""
    adapter = None if isinstance(checkpoint, PreTrainedModel) else checkpoint.adapter
    return adapter if adapter is not None and (adapter / "tokenizer_config.json").is_file() else checkpoint.folder


def find(model: str | PreTrainedModel, args: BaseConfig) -> Checkpoint | PreTrainedModel:
    """The checkpoint of that name or folder, its weights not read yet; or the model that is there."""
    if isinstance(model, PreTrainedModel):
        if args.model_init_kwargs is not None:
            logger.warning("model_init_kwargs has no effect: the model is loaded already.")
        return model
    how = {"dtype": "float32", **(args.model_init_kwargs or {})}
    how.pop("quantization_config", None)
    if args.trust_remote_code:
        how.setdefault("trust_remote_code", True)
    return find_checkpoint(model, **how)


def taken(brought: Any, args: BaseConfig) -> PreTrainedModel:
    """The weights of a torch model, in the dtypes it has."""
    if args.model_init_kwargs is not None:
        logger.warning("model_init_kwargs has no effect: the model is loaded already.")
    with as_folder(brought) as folder:
        checkpoint = find_checkpoint(str(folder), dtype="auto")
        if is_adapted(brought):
            adapter = folder / ADAPTER_FOLDER
            checkpoint = replace(checkpoint, adapter=adapter, lora=read_lora_config(adapter))
        model = _loaded(checkpoint, args)
    model.name_or_path = brought.config._name_or_path or type(brought).__name__
    if frozen := frozen_names(brought):
        _hold(model, frozen)
    return model


def _hold(model: PreTrainedModel, names: list[str]) -> None:
    if unknown := sorted(set(names) - set(model.names())):
        raise ValueError(
            f"model: {unknown[0]} has requires_grad=False, and no tensor on disk is called so. Pass the checkpoint's "
            "folder, and set the flag on trainer.model's parameters."
        )
    model.set_trainable(*names, trainable=False)


def _loaded(
    checkpoint: Checkpoint,
    args: BaseConfig,
    adapter: LoraConfig | None = None,
    quantization: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    sharding_plan = sharding_plan_of(args)
    place = None if sharding_plan is None else sharding_plan.place
    with jax.default_device(run_device(args)):
        if adapter is None:
            model = checkpoint.load(args.seed, quantization, place)
        else:
            model = checkpoint.load_adapted(adapter, args.seed, quantization=quantization, place=place)
        if several():
            model.read = Fetched
        model = check_weights(model)
    logger.log(model.backend.log_level, "%s runs on the %s backend.", model.name_or_path, model.backend.name)
    return model


def ready(
    checkpoint: Checkpoint | PreTrainedModel,
    args: BaseConfig,
    adapter: LoraConfig | None,
    quantization: BitsAndBytesConfig | None,
) -> PreTrainedModel:
    """The model that trains: a checkpoint's, or one that is there, with an adapter where one is asked for."""
    there = isinstance(checkpoint, PreTrainedModel)
    if there and quantization is not None:
        logger.warning("quantization_config has no effect: the model is loaded already.")
    if adapter is None:
        model = checkpoint if there else _loaded(checkpoint, args, quantization=quantization)
        if model.frozen:
            _tell_adapter(model)
        return model
    _check_one_adapter(bool(checkpoint.frozen) if there else checkpoint.adapter is not None)
    if there:
        with jax.default_device(run_device(args)):
            model = with_adapter(checkpoint, adapter, args.seed)
        logger.log(model.backend.log_level, "%s runs on the %s backend.", model.name_or_path, model.backend.name)
    else:
        model = _loaded(checkpoint, args, adapter, quantization)
    _tell_adapter(model)
    return model


def outlined(
    checkpoint: Checkpoint, args: BaseConfig, adapter: LoraConfig | None, quantization: BitsAndBytesConfig | None
) -> PreTrainedModel:
    """The same of a checkpoint whose weights nobody has: shapes in the place of arrays."""
    if adapter is not None:
        _check_one_adapter(checkpoint.adapter is not None)
    return checkpoint.outline(adapter, quantization, parts=sharding_plan_of(args) is not None)


def _check_one_adapter(there: bool) -> None:
    if there:
        raise ValueError(
            "peft_config is given, but the model has an adapter already. Leave peft_config out to train that one "
            "further, or pass model.merge_and_unload()."
        )


def _tell_adapter(model: PreTrainedModel) -> None:
    train, count = model.num_parameters(only_trainable=True), model.num_parameters()
    logger.info("Training with adapter: %s of %s parameters (%.4f%%).", f"{train:,}", f"{count:,}", 100 * train / count)


def short_name(model: Any) -> str:
    """The last part of the name of what was passed as `model=`, after which a run is called."""
    ours, brought = told_apart(model)
    name = ours if isinstance(ours, str) else (ours or brought).name_or_path
    return (name or type(model).__name__).rstrip("/").split("/")[-1]


def told_apart(given: Any) -> tuple[str | PreTrainedModel | None, Any]:
    """(a name, a folder or our model; torch's model), one of which is None.

    Raises:
        TypeError: it is nothing that trains.
    """
    if is_torch_model(given):
        return None, given
    given = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(given, str | PreTrainedModel):
        raise TypeError(
            f"model is a {type(given).__module__}.{type(given).__name__}; this release of trl_jax takes a checkpoint's "
            "folder or Hub name, a torch model of transformers, or what "
            "trl_jax.AutoModelForSequenceClassification.from_pretrained returned."
        )
    return given, None
