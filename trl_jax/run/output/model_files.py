"""Write the files of save_model: the model, its tokenizer and the arguments of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trl_jax.core.files.whole_file import write_whole
from trl_jax.core.secrets import masked
from trl_jax.engine.devices.processes import barrier, is_first
from trl_jax.hub.checkpoint.processor_files import keep_processor_files
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run.arguments.base_config import BaseConfig

ARGUMENTS = "training_args.json"


def arguments_text(args: BaseConfig) -> str:
    """The arguments as JSON, without secrets, dtypes by name."""
    values = args.to_dict()  # hides every name that ends in _token, of which two are no secrets
    values |= {name: vars(args)[name] for name in ("eos_token", "pad_token") if name in values}
    for name, value in values.items():
        if isinstance(value, dict):
            values[name] = {key: str(entry) if "dtype" in key else entry for key, entry in value.items()}
    return json.dumps(masked(values), indent=2)  # a script's own to_dict may add secrets


def write_model(folder: Path, model: PreTrainedModel, processing_class: Any, arguments: str) -> None:
    """Write a folder that transformers loads: config, weights, tokenizer, what prepares images, and
    training_args.json.

    Args:
        model: the trainer's, or a copy of it.
        arguments: the text that `arguments_text` made.
    """
    model.save_pretrained(folder)
    if is_first():
        processing_class.save_pretrained(folder)
        keep_processor_files(model.folder, folder)
        write_whole(folder / ARGUMENTS, arguments + "\n")
    barrier("save_model")
