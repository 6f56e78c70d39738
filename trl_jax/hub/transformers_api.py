"""The methods of a transformers model that scripts use besides calling it: its parameters by name, and the like."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from trl_jax.hub.torch.bridge import as_tensors


class Parameter(np.ndarray):
    """A parameter's values as they were when it was asked for, with torch's methods under torch's names.

    `requires_grad` is the model's flag of it: whether `train()` changes it.
    """

    _model: Any = None  # the model it belongs to; copies and slices belong to none
    _name: str = ""

    @property
    def requires_grad(self) -> bool:
        return self._model is not None and self._name not in self._model.frozen_names

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if self._model is None:
            raise ValueError("requires_grad is for a parameter itself, not for a copy or a part of one.")
        self._model.set_trainable(self._name, trainable=wanted)

    def requires_grad_(self, requires_grad: bool = True) -> Parameter:
        self.requires_grad = requires_grad
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

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give torch's functions tensors of the values: torch calls this for `torch.equal(parameter, other)`."""
        return function(*as_tensors(args), **as_tensors(kwargs or {}))


class Submodule:
    """The parameters of a model whose names begin alike, as scripts freeze them: `model.model`, `model.lm_head`."""

    def __init__(self, model: TransformersModelApi, name: str):
        self._model, self._name = model, name

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Each under the rest of its name, after this module's."""
        start = f"{self._name}."
        return (
            (name.removeprefix(start), values)
            for name, values in self._model.named_parameters()
            if name.startswith(start)
        )

    def parameters(self) -> Iterator[Parameter]:
        return (values for _, values in self.named_parameters())

    def requires_grad_(self, requires_grad: bool = True) -> Submodule:
        self._model.set_trainable(*self._names(), trainable=requires_grad)
        return self

    def _names(self) -> list[str]:
        return [name for name in self._model.names() if name.startswith(f"{self._name}.")]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._model.submodule(f"{self._name}.{name}")

    def __getitem__(self, number: int | slice) -> Any:
        selected = range(len(self))[number]
        if isinstance(selected, range):
            return [self[i] for i in selected]
        return self._model.submodule(f"{self._name}.{selected}")

    def __bool__(self) -> bool:
        return True  # with no numbered modules inside, too

    def __len__(self) -> int:
        begin = len(self._name) + 1
        numbers = {name[begin:].partition(".")[0] for name in self._names()}
        return len([number for number in numbers if number.isdigit()])


class TransformersModelApi:
    """Needs `backend`, `params`, `arrays`, `config`, `name_or_path` and `save_pretrained`."""

    backend: Any
    params: dict
    arrays: dict
    config: Any
    frozen_names: frozenset[str] | set[str] = frozenset()  # names on disk of parameters that `train()` leaves alone
    model_tags: list[str] | None = None

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Each parameter under its name on disk, of virtual tokens under peft's. Values are copies: to change them,
        change `params`."""
        for name, values in self.backend.named(self.readable):
            parameter = np.array(values).view(Parameter)
            parameter._model, parameter._name = self, name
            yield name, parameter

    def names(self) -> list[str]:
        """The names of the parameters."""
        return list(self.backend.locations(self.params))

    def set_trainable(self, *names: str, trainable: bool) -> None:
        """Let `train()` change these parameters, or freeze them.

        Raises:
            ValueError: an adapter trains beside the model; its config says what does.
        """
        wanted = self.frozen_names - set(names) if trainable else self.frozen_names | set(names)
        if wanted != self.frozen_names and not self.backend.can_freeze:
            raise ValueError(
                "requires_grad cannot be set beside an adapter: LoraConfig's target_modules, layers_to_transform and "
                "modules_to_save say what trains."
            )
        self.frozen_names = wanted

    def submodule(self, name: str) -> Any:
        """The parameter of this name, or those whose names begin with it. Raises AttributeError where there is none."""
        if name in (names := self.names()):
            return self.get_parameter(name)
        if not any(other.startswith(f"{name}.") for other in names):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return Submodule(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "backend" not in vars(self) or "params" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.submodule(name)

    def parameters(self) -> Iterator[Parameter]:
        return (values for _, values in self.named_parameters())

    def get_parameter(self, name: str) -> Parameter:
        """Raises KeyError where there is no parameter of this name."""
        for other, parameter in self.named_parameters():  # one at a time: all may be more than the host has room for
            if other == name:
                return parameter
        raise KeyError(f"{self.name_or_path} has no parameter {name!r}; it has {', '.join(self.names()[:8])}, ...")

    def state_dict(self) -> dict[str, Parameter]:
        return dict(self.named_parameters())

    def get_input_embeddings(self) -> Any:
        """An object with the embedding's `weight` and `num_embeddings`."""
        path = min(self.backend.embeddings)
        weight = np.array(self.backend.weight(self.arrays, path)).view(Parameter)
        return _Embedding(weight)

    def get_output_embeddings(self) -> Any:
        """An object with the `weight` of a language model's head `[vocabulary, hidden]`, the embedding's where both are
        one; None under a score head."""
        if self.backend.head != "lm":
            return None
        names = [name for name in self.names() if name.endswith(("lm_head.weight", "embed_out.weight"))]
        return _Embedding(self.get_parameter(names[0])) if names else self.get_input_embeddings()

    @property
    def dtype(self) -> Any:
        """The dtype that weights are saved in, those beneath an adapter: torch's where torch is imported, otherwise its
        name, as "bfloat16"."""
        name = self.backend.main_dtype
        return vars(sys.modules["torch"])[name] if "torch" in sys.modules else name

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of all arrays that the model is computed with; none of them is a buffer of torch's."""
        return sum(array.nbytes for array in self.arrays.values())

    def can_generate(self) -> bool:
        return self.backend.head == "lm" and self.backend.causal

    def tie_weights(self) -> None:
        """Without effect: where the config ties them, they are one array."""

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Without effect: `gradient_checkpointing` of the trainer's arguments, on by default, decides."""

    def gradient_checkpointing_disable(self) -> None:
        """As `gradient_checkpointing_enable`."""

    def enable_input_require_grads(self) -> None:
        """Without effect: gradients reach adapters without it."""

    def print_trainable_parameters(self) -> None:
        train, count = self.num_parameters(only_trainable=True), self.num_parameters()
        print(f"trainable params: {train:,} || all params: {count:,} || trainable%: {100 * train / count:.4f}")

    def add_model_tags(self, tags: str | list[str]) -> None:
        """Remember tags, each once."""
        new = [tags] if isinstance(tags, str) else list(tags)
        self.model_tags = list(dict.fromkeys([*(self.model_tags or []), *new]))

    training: bool = False  # for scripts that ask: whether dropout is on is decided where the model is called

    def eval(self) -> Any:
        return self.train(False)

    def train(self, mode: bool = True) -> Any:
        """Say whether the model is in training, for scripts that ask `model.training`; returns itself."""
        self.training = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.set_trainable(*self.names(), trainable=requires_grad)
        return self

    @property
    def device(self) -> str:
        """The device of a call's inputs, for `.to(model.device)` of a batch of torch's."""
        return "cpu"

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself: arrays stay where JAX puts them, in the dtype they have."""
        return self

    cpu = cuda = to


class _Embedding:
    def __init__(self, weight: Parameter):
        self.weight, (self.num_embeddings, self.embedding_dim) = weight, weight.shape
