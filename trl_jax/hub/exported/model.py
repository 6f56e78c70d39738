"""transformers' own models: their parameters, and the programs that they are exported to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from trl_jax.hub.exported.positions import max_positions_of
from trl_jax.hub.exported.translation import domain, translated
from trl_jax.hub.heads import HeadName
from trl_jax.hub.torch import bridge
from trl_jax.hub.torch.fake_pass import fake_pass
from trl_jax.nn.aten.program import Program

logger = logging.getLogger(__name__)

_MANY = 5000  # operations of a program that is long because of a loop over tokens


class TorchModel:
    """A model of transformers: its config, its parameters' values once, and its programs.

    Attributes:
        head: the head that it has.
        config: transformers' config object; `pad_token_id` in it is read whenever a program is made.
        dtypes: parameter name -> the dtype it was loaded in, and is saved in.
        shapes: parameter name -> shape.
        embeddings: the names of embedding tables.
        max_positions: the length of the longest text that has positions; None where any has.
    """

    def __init__(self, folder: Path, *, dtype: str, seed: int, head: HeadName = "score", config: Any = None):
        """`config` is transformers' config object of the folder; None reads it there."""
        self._module = bridge.load_model(folder, dtype, seed, config, head)
        self.head = head
        self.config = self._module.config
        if head == "score":
            self.config.use_cache = False
        named = dict(self._module.named_parameters())
        self.dtypes = {name: bridge.dtype_name(parameter.dtype) for name, parameter in named.items()}
        self.shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
        tables = bridge.members(self._module, "Embedding")
        self.embeddings = frozenset(name for name, parameter in named.items() if id(parameter) in tables)
        self.max_positions = max_positions_of(self._module)
        self._programs: dict[tuple, list[tuple[Callable[[int, int], bool], Program]]] = {}

    @cached_property
    def undecayed(self) -> frozenset[str]:
        """The parameters of layer norms, whatever they are called, those that do not train and those without use."""
        inside = bridge.members(self._module, "LayerNorm")
        named = self._module.named_parameters()
        undecayed = {name for name, parameter in named if id(parameter) in inside or not parameter.requires_grad}
        return self._without_gradient() | undecayed

    def _without_gradient(self) -> frozenset[str]:
        """The parameters that no logit has a gradient for, which torch's optimizers pass over."""
        found = fake_pass(self._module, 2, 16, training=False, head=self.head)
        if found is None:
            return self.program(2, 16, dtype="float32", training=False).unread()
        return frozenset(self.shapes) - found.differentiable

    def take(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, float32 array) of each parameter, once: its memory is freed when the next one is asked for.

        The shape of the model stays, enough to export and to save it.
        """
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach().float().numpy()
            bridge.empty(parameter, "float32")

    def save(self, folder: Path, params: dict[str, Any]) -> None:
        """Save with transformers' own save_pretrained, which knows names, fusion and shards."""
        parameters = dict(self._module.named_parameters())
        try:
            for name, parameter in parameters.items():
                bridge.empty(parameter, self.dtypes[name])
            state = self._module.state_dict(keep_vars=True)
            whole = {name: bridge.as_dtype(params[name], dtype) for name, dtype in self.dtypes.items()}
            state |= {name: whole[first] for name, first in self._names().items()}  # a tied one is written once
            self._module.save_pretrained(folder, state_dict=state)
        finally:
            for parameter in parameters.values():
                bridge.empty(parameter, "float32")

    def _names(self) -> dict[str, str]:
        """From each name of a parameter to the one that `named_parameters` gives it: a tied one has several."""
        first = {id(parameter): name for name, parameter in self._module.named_parameters()}
        every = self._module.named_parameters(remove_duplicate=False)
        return {name: first[id(parameter)] for name, parameter in every}

    def program(self, rows: int, length: int, *, dtype: str, training: bool) -> Program:
        """A program that is right for `[rows, length]`: exported before, or now."""
        pad = self.config.get_text_config().pad_token_id
        found = self._fitting((dtype, training, pad), rows, length)
        other = None if found else self._fitting((dtype, not training, pad), rows, length)
        if other and self._trains_as_it_evaluates(rows, length):
            return other
        return found or self._exported((dtype, training, pad), rows, length)

    def _fitting(self, kind: tuple, rows: int, length: int) -> Program | None:
        return next((program for fits, program in self._programs.get(kind, []) if fits(rows, length)), None)

    def _trains_as_it_evaluates(self, rows: int, length: int) -> bool:
        """Whether training changes nothing of what is computed, as where no dropout has a rate."""
        first, second = (fake_pass(self._module, rows, length, training, self.head) for training in (False, True))
        return first is not None and second is not None and first.operations == second.operations

    def _exported(self, of: tuple, rows: int, length: int) -> Program:
        dtype, training, _ = of
        made, kind = self._programs.setdefault(of, []), self.config.model_type
        logger.warning(
            f"model_type {kind!r}: torch exports transformers' code for {rows} rows of {length} tokens now, and JAX "
            "compiles it, which takes tens of seconds. One program serves other lengths where the code allows it."
        )
        exported = bridge.export(self._module, rows, length, dtype, training, self.head)
        fits = domain(exported)
        made.append((fits, translated(exported, kind, self._names())))
        count = len(exported.graph.nodes)
        if count > _MANY and not fits(rows, length + 1):
            logger.warning(
                f"model_type {kind!r}: its code goes through the {length} tokens one after the other, so its program "
                f"has {count:,} operations, and each length has one of its own. Compiling takes minutes, the more the "
                "longer rows are: lower max_length, and set pad_to_multiple_of to it, so that one program serves all."
            )
        return made[-1][1]
