"""A forward pass of a torch module with fake tensors, which have shapes but no values."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trl_jax.hub.torch_bridge import of_rows, scanned

_TRACER = "torch._subclasses.fake_tensor"  # logs failures as errors


@dataclass(frozen=True)
class FakePass:
    """The operations of a forward pass, and the parameters that get a gradient.

    Attributes:
        differentiable: names of the parameters that the logits depend on differentiably.
        operations: the ATen operations with their arguments; tensors are numbered in order of creation. Two passes with
            equal operations compute the same.
    """

    differentiable: frozenset[str]
    operations: tuple[tuple, ...]


def fake_pass(module: Any, rows: int, length: int, training: bool, head: str) -> FakePass | None:
    """The forward pass over `[rows, length]` tokens; None if the code depends on values, for example in a branch."""
    import torch
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake, operations = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), []
    try:
        with _quiet():
            with FakeCopyMode(fake):
                copied = copy.deepcopy(of_rows(module, head))  # the module may cache tensors
            if copied.model._can_set_experts_implementation():
                copied.model.set_experts_implementation("batched_mm")  # grouped_mm has no shapes in float32
            copied.train(training)
            names = {id(parameter): name for name, parameter in copied.model.named_parameters()}
            with scanned(copied), fake, _recorder(operations, names):
                logits = copied(torch.ones((2, rows, length), dtype=torch.int64))
    except Exception:  # torch raises many types; the caller has a fallback
        return None
    return FakePass(frozenset(names[id(leaf)] for leaf in _leaves(logits)), tuple(operations))


def _leaves(result: Any) -> Iterator[Any]:
    """The leaf tensors of the autograd graph of a result."""
    seen, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            yield node.variable
        todo.extend(following for following, _ in node.next_functions)


def _recorder(operations: list[tuple], names: dict[int, str]) -> Any:
    """A dispatch mode that records every operation; `names` maps ids of existing tensors to names."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    made: dict[int, Any] = {}  # keeps tensors alive, so that their ids stay unique

    def recorded(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        if not isinstance(value, FakeTensor):  # a constant in the code
            with unset_fake_temporarily():
                return hashlib.sha256(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        made.setdefault(id(value), (len(made), value))
        return names.get(id(value), made[id(value)][0])

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            flat, tree = tree_flatten((args, kwargs, result))
            if func.namespace != "prim":  # queries, such as the device
                operations.append((str(func), str(tree), *map(recorded, flat)))
            return result

    return Recorder()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger(_TRACER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
