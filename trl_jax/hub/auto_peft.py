"""PEFT's classes that load an adapter with its base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl_jax.hub.auto import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl_jax.hub.network.fetch import ADAPTER
from trl_jax.hub.peft.backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel


class AutoPeftModelForCausalLM:
    """Loads an adapter, and the language model that it names, as peft's class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load the adapter of a folder or repository on its base model; `merge_and_unload()` gives the plain model.

        Args:
            adapter_name: "default". is_trainable: accepted; a trainer trains the adapter in either case.
            **kwargs: of `AutoModelForCausalLM.from_pretrained`.

        Raises:
            ValueError: there is no adapter, or another adapter_name.
        """
        _check_name(adapter_name)
        return _adapted(AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, **kwargs))


class AutoPeftModelForSequenceClassification:
    """Loads an adapter, and the model with the score head that it names, as peft's class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        adapter_name: str = "default",
        is_trainable: bool = False,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """As `AutoPeftModelForCausalLM.from_pretrained`."""
        _check_name(adapter_name)
        return _adapted(AutoModelForSequenceClassification.from_pretrained(pretrained_model_name_or_path, **kwargs))


def _check_name(adapter_name: str) -> None:
    if adapter_name != "default":
        raise ValueError(
            f"adapter_name={adapter_name!r} is not in this release of trl_jax: a model has one adapter. Leave it out."
        )


def _adapted(model: PreTrainedModel) -> PreTrainedModel:
    if not isinstance(model.backend, AdaptedBackend):
        raise ValueError(
            f"Can't find '{ADAPTER}' at '{model.name_or_path}': it is a whole model. Load it with AutoModelForCausalLM "
            "or AutoModelForSequenceClassification."
        )
    return model
