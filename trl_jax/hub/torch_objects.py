"""torch models that a script brings: their weights in, and the trained ones back out."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_jax.hub.engines import Engine


def is_torch_model(value: Any) -> bool:
    """Whether it is a module of torch's; torch is not imported to tell."""
    return "torch" in sys.modules and isinstance(value, sys.modules["torch"].nn.Module)


@contextmanager
def as_folder(model: Any) -> Iterator[Path]:
    """A folder, for as long as it is needed, with the model as transformers saves it.

    Raises:
        TypeError, ValueError: it is no sequence classifier of transformers with one label, or it is quantised.
    """
    _check(model)
    with tempfile.TemporaryDirectory(prefix="trl-jax-") as folder:
        model.save_pretrained(folder)
        yield Path(folder)


def _check(model: Any) -> None:
    from transformers import PreTrainedModel

    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith("peft."):
        raise ValueError(
            f"model is a {kind}: adapters are not in this release of trl_jax. Pass model.merge_and_unload()."
        )
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {kind}: wanted one of transformers' models, or a checkpoint's folder or Hub name.")
    if "quantization_config" in model.config.to_dict():
        raise ValueError(f"model is a quantised {kind}: load it without quantization_config.")
    if model.config.num_labels != 1:
        raise ValueError(f"model is a {kind} with {model.config.num_labels} labels: wanted num_labels=1.")


def give_back(engine: Engine, params: dict, config: Any, model: Any) -> None:
    """Write the parameters into the torch model they came from, in the dtypes it has and on its devices."""
    import torch

    state = model.state_dict()
    values = dict(engine.on_disk(params))
    if not values.keys() <= state.keys():  # transformers keeps some tensors in another form than files do
        values = _as_loaded(engine, params, config, type(model))
    with torch.no_grad():
        for name, value in values.items():
            state[name].copy_(torch.as_tensor(value))


def _as_loaded(engine: Engine, params: dict, config: Any, kind: type) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="trl-jax-") as folder:
        engine.save(Path(folder), params, config)
        return kind.from_pretrained(folder).state_dict()
