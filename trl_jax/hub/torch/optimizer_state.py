"""Optimizer states that torch wrote. Torch is imported where one is read, and nowhere else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from trl_jax.hub.formats.safetensors import SINGLE

OPTIMIZER = "optimizer.pt"


def write_adamw_moments(checkpoint: Path, folder: Path, decays: Callable[[str], bool]) -> int:
    """Write the moments of a Trainer's checkpoint as if they were weights: `folder`/mu and `folder`/nu, for `load`.

    torch numbers an optimizer's tensors; their names follow from the order of the model's, those that decay first.

    Returns:
        How many steps AdamW has taken.

    Raises:
        ValueError: it is no AdamW over this model's tensors, or not one that can be read without running code.
    """
    saved = _read(checkpoint / OPTIMIZER)
    names = _parameter_names(checkpoint)
    groups = [[name for name in names if decays(name)], [name for name in names if not decays(name)]]
    groups = [group for group in groups if group]
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"] if group["params"]]
        states = [saved["state"][index] for index in range(len(names))]
        moments = {"mu": [state["exp_avg"] for state in states], "nu": [state["exp_avg_sq"] for state in states]}
        [count] = {int(state["step"]) for state in states}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint / OPTIMIZER} is not AdamW's state of this model: {error!r}.") from error
    if sizes != [len(group) for group in groups]:
        raise ValueError(
            f"{checkpoint / OPTIMIZER} has groups of {sizes} tensors, the model {[len(group) for group in groups]}."
        )
    order = [name for group in groups for name in group]
    for part, values in moments.items():
        (folder / part).mkdir()
        shutil.copy(checkpoint / "config.json", folder / part)
        arrays = {name: value.float().contiguous().numpy() for name, value in zip(order, values, strict=True)}
        save_file(arrays, folder / part / SINGLE)
    return count


def _read(path: Path) -> Any:
    import pickle

    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # which runs no code of the file's
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _parameter_names(checkpoint: Path) -> list[str]:
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(checkpoint, attn_implementation="eager", trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
    return [name for name, _ in model.named_parameters()]
