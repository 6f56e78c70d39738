"""Read optimizer.pt and rng_state.pth from TRL's checkpoints."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from trl_jax.core import text
from trl_jax.core.text import brief
from trl_jax.core.torch_random import GeneratorState, TorchGenerator, default_generator
from trl_jax.hub.formats import SINGLE
from trl_jax.hub.heads import HeadName
from trl_jax.hub.peft_config import CONFIG as ADAPTER
from trl_jax.hub.peft_config import VECTORS, WEIGHTS

# Optimizer states saved by torch, which is only imported to read one


OPTIMIZER = "optimizer.pt"  # of transformers' Trainer


def write_adamw_moments(
    checkpoint: Path, folder: Path, config: Any, head: HeadName, decays: Callable[[str], bool]
) -> int:
    """Write the moments in a Trainer checkpoint to `folder`/mu and `folder`/nu as weight files, which `Backend.load`
    reads.

    torch numbers an optimizer's tensors. Their names follow from the order of the model's parameters, with those that
    have weight decay first. For an adapter, peft is needed to know that order.

    Args:
        config: transformers' config object of the model, or of an adapter's base model.
        head: the model's head.

    Returns:
        The number of steps that AdamW has taken.

    Raises:
        ValueError: the file is not an AdamW state for this model, or cannot be read without running code.
    """
    saved = _read(checkpoint / OPTIMIZER)
    names, files = _parameter_names(checkpoint, config, head), (checkpoint / ADAPTER, checkpoint / "config.json")
    described, weights = (files[0], WEIGHTS) if files[0].is_file() else (files[1], SINGLE)
    groups = [[name for name in names if decays(name)], [name for name in names if not decays(name)]]
    groups = [group for group in groups if group]
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"] if group["params"]]
        states = [saved["state"][index] for index in range(len(names))]
        parts = {"mu": "exp_avg", "nu": "exp_avg_sq"}
        moments = {part: [state[key].float().contiguous().numpy() for state in states] for part, key in parts.items()}
        [count] = {int(state["step"]) for state in states}
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = brief(error, 300)
        raise ValueError(f"{checkpoint / OPTIMIZER} is not an AdamW state for this model: {reason}.") from error
    if sizes != [len(group) for group in groups]:
        raise ValueError(
            f"{checkpoint / OPTIMIZER} has groups of {sizes} tensors, but the model {[len(group) for group in groups]}."
        )
    order = [name for group in groups for name in group]
    for part, values in moments.items():
        (folder / part).mkdir()
        shutil.copy(described, folder / part)
        save_file({_on_disk(name): value for name, value in zip(order, values, strict=True)}, folder / part / weights)
    return count


def _read(path: Path) -> Any:
    import torch

    try:
        with text.out_of_memory_names(path):
            return torch.load(path, map_location="cpu", weights_only=True)  # does not run code from the file
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises many types of errors for a damaged file
        said = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read ({said[:200]}). Copy it again, or pass the folder "
            "as model= to start a new run from its weights."
        ) from error


def _parameter_names(checkpoint: Path, config: Any, head: HeadName) -> list[str]:
    """The names of the trained parameters in torch's order."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = {"score": AutoModelForSequenceClassification, "lm": AutoModelForCausalLM}[head]
    with torch.device("meta"):
        model = kind.from_config(config, attn_implementation="eager", trust_remote_code=False)
        if (checkpoint / ADAPTER).is_file():
            model = _adapted(model, checkpoint)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def _adapted(model: Any, checkpoint: Path) -> Any:
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(checkpoint)
    config.inference_mode = config.init_lora_weights = False  # no need to initialize values
    config.prompt_tuning_init = "RANDOM"
    return get_peft_model(model, config)


def _on_disk(name: str) -> str:
    """The name under which PEFT saves an adapter's parameter; other names are unchanged."""
    if name == "prompt_encoder.default.embedding.weight":
        return VECTORS
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector")
    return name.replace(".modules_to_save.default", "").replace(".default", "")


# torch's random state in a checkpoint, and seeding torch


_WORDS, _LEFT, _NEXT, _FIRST = 624, 8, 16, 24  # words of the Mersenne twister; byte offsets in torch's generator state


def random_state(checkpoint: Path, rank: int, ranks: int) -> GeneratorState | None:
    """The state of torch's CPU generator in one of `ranks` processes; None if the file does not exist."""
    path = checkpoint / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth")
    if not path.is_file():
        return None
    import torch
    from transformers.trainer_pt_utils import safe_globals

    with safe_globals():
        return place_of(torch.load(path, weights_only=True)["cpu"].numpy())


def seed_if_imported(seed: int) -> None:
    """Seed torch's generators if a script has imported torch and may use them."""
    if "torch" in sys.modules:
        import torch

        torch.manual_seed(seed)
    _note_seeds(default_generator())


_UNSEEDED = 67280421310721  # the seed of torch's global generator before a script seeds it
# How often our stream had been seeded, and the state of torch's global generator, when the two were last compared.
_noted: tuple[int, Any] | None = None


def follow_torch_seed(stream: TorchGenerator) -> None:
    """Continue `stream`, the process-wide one, where torch's global generator is, if a script has seeded the latter and
    not ours since the two were last compared.

    A script that seeds torch with the same seed again is noticed if it has not drawn from it yet: torch's generator
    therefore moves on by one number.
    """
    if "torch" not in sys.modules:
        return
    import torch

    state, seed = torch.get_rng_state(), torch.initial_seed()
    seedings, before = (1, None) if _noted is None else _noted
    if before is not None and torch.equal(state, before):
        return
    known = _UNSEEDED if before is None else int(np.frombuffer(before.numpy().tobytes(), np.uint64, 1)[0])
    fresh = before is not None and torch.equal(state, torch.Generator().manual_seed(seed).get_state())
    if stream.seedings == seedings and (seed != known or fresh):
        stream.restore(place_of(state.numpy()))
        torch.rand(1)
    _note_seeds(stream)


def _note_seeds(stream: TorchGenerator) -> None:
    global _noted
    _noted = stream.seedings, sys.modules["torch"].get_rng_state() if "torch" in sys.modules else None


def place_of(state: np.ndarray) -> GeneratorState:
    """Parse the uint8 `[5056]` array that `torch.get_rng_state()` returns."""
    raw = state.tobytes()
    key = np.frombuffer(raw, np.uint64, _WORDS, _FIRST).astype(np.uint32)
    [left], [used] = np.frombuffer(raw, np.int32, 1, _LEFT), np.frombuffer(raw, np.uint64, 1, _NEXT)
    return GeneratorState(key, _WORDS if left == 1 else int(used), 0)
