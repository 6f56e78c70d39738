"""What scripts ask of a transformers model beside calling it: its parameters by their names, and small habits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

ALL_TRAIN = (
    "Every parameter trains here, or an adapter beside a frozen model: pass peft_config=LoraConfig(...), whose "
    "modules_to_save and layers_to_transform say what trains. To hold some still, give them no updates: "
    "optimizers=(optax.multi_transform({'train': optax.adamw(1e-5), 'still': optax.set_to_zero()}, lambda params: "
    "{path: 'train' if 'score' in path else 'still' for path in params}), None)."
)


class Parameter(np.ndarray):
    """A parameter's values as they were when it was asked for, with torch's words for what NumPy has too."""

    @property
    def requires_grad(self) -> bool:
        return True

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        self.requires_grad_(wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Parameter:
        """Raises ValueError for False."""
        if not requires_grad:
            raise ValueError(f"requires_grad=False has no effect in trl_jax. {ALL_TRAIN}")
        return self

    def clone(self) -> Parameter:
        return self.copy()

    def detach(self) -> Parameter:
        return self

    cpu = float = detach

    def numel(self) -> int:
        return self.size

    def numpy(self) -> np.ndarray:
        return np.asarray(self)


class Habits:
    """Needs `engine`, `params`, `config`, `name_or_path` and `save_pretrained`."""

    engine: Any
    params: dict
    arrays: dict
    config: Any
    model_tags: list[str] | None = None

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Each parameter under its name on disk. Values are copies: to change them, change `params`."""
        for name, values in self.engine.on_disk(self.readable):
            yield name, np.array(values).view(Parameter)

    def parameters(self) -> Iterator[Parameter]:
        return (values for _, values in self.named_parameters())

    def get_parameter(self, name: str) -> Parameter:
        """Raises KeyError where there is no parameter of this name."""
        found = dict(self.named_parameters())
        if name not in found:
            raise KeyError(f"{self.name_or_path} has no parameter {name!r}; it has {', '.join(list(found)[:8])}, ...")
        return found[name]

    def state_dict(self) -> dict[str, Parameter]:
        return dict(self.named_parameters())

    def get_input_embeddings(self) -> Any:
        """Something with the embedding's `weight` and `num_embeddings`."""
        path = min(self.engine.embeddings)
        weight = np.array(self.engine.weight(self.arrays, path)).view(Parameter)
        return _Embedding(weight)

    def print_trainable_parameters(self) -> None:
        train, count = self.num_parameters(only_trainable=True), self.num_parameters()
        print(f"trainable params: {train:,} || all params: {count:,} || trainable%: {100 * train / count:.4f}")

    def add_model_tags(self, tags: str | list[str]) -> None:
        """Remember tags, each once."""
        new = [tags] if isinstance(tags, str) else list(tags)
        self.model_tags = list(dict.fromkeys([*(self.model_tags or []), *new]))

    def eval(self) -> Any:
        """Itself: whether dropout is on is decided where the model is called."""
        return self

    def train(self, mode: bool = True) -> Any:
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Raises ValueError for False."""
        if not requires_grad:
            raise ValueError(f"requires_grad_(False) has no effect in trl_jax. {ALL_TRAIN}")
        return self

    @property
    def device(self) -> str:
        """Where inputs of a call may lie; `.to(model.device)` of a batch of torch's is what asks."""
        return "cpu"

    def to(self, *where: Any, **how: Any) -> Any:
        """Itself: arrays are where JAX puts them, and of the dtype they have."""
        return self


class _Embedding:
    def __init__(self, weight: Parameter):
        self.weight, (self.num_embeddings, self.embedding_dim) = weight, weight.shape
