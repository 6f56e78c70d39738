"""transformers' classes that load a model by name or folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trl_jax.hub.config.native import native_config
from trl_jax.hub.families import families
from trl_jax.hub.find import Checkpoint, find_checkpoint
from trl_jax.hub.heads import HeadName
from trl_jax.hub.new_model import new_model
from trl_jax.hub.peft.quantization import as_quantization
from trl_jax.hub.placing import sharding_plan
from trl_jax.hub.pretrained import PreTrainedModel


class AutoModelForSequenceClassification:
    """Loads a model with the score head by name or folder, as transformers' class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        num_labels: int = 1,
        dtype: Any = "auto",
        seed: int = 42,
        mesh_shape: str | Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a checkpoint of a supported model_type: classifier, causal LM (its head is dropped) or bare base.

        Args:
            pretrained_model_name_or_path: a folder, a repository on the Hub, or a GGUF file.
            num_labels: 1, which is one score a text.
            dtype: "float32", "bfloat16", "float16" or "auto" (as stored), which the weights are rounded to, and saved
                in. Arrays and computation are float32.
            seed: draws the score head where the checkpoint has none.
            mesh_shape: as of a trainer's config, "fsdp:8" say: the model lies in parts on all devices. None: on one; a
                trainer divides it by its own arguments in either case.
            kwargs: revision, subfolder, token, cache_dir, local_files_only, gguf_file as in transformers;
                attn_implementation is accepted (the backend picks its kernels); trust_remote_code fetches `*.py`
                for the tokenizer, whose own code AutoTokenizer may then run; a model's is never run; device_map and
                its like are warned of. quantization_config holds the weights in few bits, for an adapter that trains
                beside them or for a reference. config is one that was read from there: what is changed in it is saved.
                Others are values of the config, as in transformers: rms_norm_eps=1e-5, say.

        Raises:
            ValueError, TypeError: an argument or a checkpoint at fault, by name.
        """
        kwargs |= {"num_labels": num_labels, "dtype": dtype, "mesh_shape": mesh_shape}
        return _from_pretrained(str(pretrained_model_name_or_path), "score", seed, **kwargs)

    @staticmethod
    def from_config(config: Any, *, seed: int = 42, dtype: Any = None) -> PreTrainedModel:
        """As `AutoModelForCausalLM.from_config`, with the score head."""
        return new_model(config, "score", seed, dtype)


class AutoModelForCausalLM:
    """Loads a causal language model by name or folder, as transformers' class of that name does."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | Path,
        *,
        dtype: Any = "auto",
        seed: int = 42,
        mesh_shape: str | Mapping[str, int] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        """Load a checkpoint of a supported model_type: a causal LM, or a classifier or bare base, whose head is then
        drawn unless it is tied to the embedding.

        Args:
            pretrained_model_name_or_path: a folder, a repository on the Hub, or a GGUF file.
            dtype: as in `AutoModelForSequenceClassification.from_pretrained`.
            **kwargs: likewise.
            seed: draws the head where the checkpoint has none.
            mesh_shape: likewise; each device then writes completions of its own.

        Raises:
            ValueError, TypeError: an argument or a checkpoint at fault, by name.
        """
        kwargs |= {"dtype": dtype, "mesh_shape": mesh_shape}
        return _from_pretrained(str(pretrained_model_name_or_path), "lm", seed, **kwargs)

    @staticmethod
    def from_config(config: Any, *, seed: int = 42, dtype: Any = None) -> PreTrainedModel:
        """Make a model of a config, of transformers or a dict, with new weights; `seed` draws them. They are not those
        that torch would draw.

        Args:
            dtype: what they are saved in, as in `from_pretrained`; None: as the config says.

        Raises:
            ValueError: a model_type, key or value that is not supported, by name.
        """
        return new_model(config, "lm", seed, dtype)


def _from_pretrained(
    name: str,
    head: HeadName,
    seed: int,
    *,
    quantization_config: Any = None,
    config: Any = None,
    mesh_shape: str | Mapping[str, int] | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    plan = sharding_plan(mesh_shape)
    checkpoint = find_checkpoint(name, head=head, **kwargs)
    if config is not None:
        checkpoint = replace(checkpoint, config=_same_architecture(config, checkpoint))
    few = None if quantization_config is None else as_quantization(quantization_config)
    if few is not None:
        checkpoint = replace(checkpoint, quantization=few)
    return checkpoint.load(seed, place=checkpoint.placement(plan), as_stored=few is not None)


def _same_architecture(config: Any, checkpoint: Checkpoint) -> Any:
    """Return a config of transformers' that a script passes beside a checkpoint.

    Raises:
        ValueError: it would have the checkpoint computed in another way.
    """
    native, given = checkpoint.native, json.loads(config.to_json_string(use_diff=False))
    known = type(config)().to_dict().keys() | ({} if native is None else native.raw).keys()
    raw = {key: value for key, value in given.items() if key in known}  # a script's own keys are no architecture
    if native is None or native_config(raw, native.path, checkpoint.head).arch != native.arch:
        raise ValueError(
            f"config={type(config).__qualname__}: it says another architecture than {checkpoint.folder / 'config.json'}"
            ", which is computed here. Leave config out, and write what shall be saved into model.config; for new "
            "weights, from_config takes it."
        )
    return config


def class_of_family(name: str) -> type:
    """The class of that name in transformers, LlamaForCausalLM, as one of ours: `from_pretrained`, and new weights of
    a config where it is called.

    Raises:
        AttributeError: there is no family with such a class.
    """
    prefix, ending = name.split("For", 1) if "For" in name else (name, "")
    auto = AutoModelForSequenceClassification if ending == "SequenceClassification" else AutoModelForCausalLM
    if prefix not in {family.class_prefix for family in families().values()}:
        raise AttributeError(
            f"module 'trl_jax' has no attribute {name!r}: {auto.__name__} loads every type of model that there is."
        )
    return type(name, (auto,), {"__new__": lambda cls, config, **options: cls.from_config(config, **options)})
