"""A forward pass of a torch module over tensors that have shapes and no numbers."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trl_jax.hub.torch_bridge import of_rows, scanned

_TRACER = "torch._subclasses.fake_tensor"  # logs what it fails at as an error


@dataclass(frozen=True)
class FakePass:
    """The operations of a forward pass, and which parameters it has a gradient for.

    Attributes:
        differentiable: the names of the parameters that the logits have a gradient for.
        operations: each ATen operation with its arguments: numbers as they are, tensors by the order in which they
            were made. Two passes with equal ones compute the same.
    """

    differentiable: frozenset[str]
    operations: tuple[tuple, ...]


def fake_pass(module: Any, rows: int, length: int, training: bool, head: str) -> FakePass | None:
    """The forward pass over `[rows, length]` tokens; None where the code asks for numbers, as for a branch."""
    import torch
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake, operations = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), []
    try:
        with _quiet():
            with FakeCopyMode(fake):
                copied = copy.deepcopy(of_rows(module, head))  # the module itself may remember tensors that it made
            if copied.model._can_set_experts_implementation():
                copied.model.set_experts_implementation("batched_mm")  # grouped_mm has no shapes in float32
            copied.train(training)
            names = {id(parameter): name for name, parameter in copied.model.named_parameters()}
            with scanned(copied), fake, _recorder(operations, names):
                logits = copied(torch.ones((2, rows, length), dtype=torch.int64))
    except Exception:  # torch fails with errors of many types; who calls has another way
        return None
    return FakePass(frozenset(names[id(leaf)] for leaf in _leaves(logits)), tuple(operations))


def _leaves(result: Any) -> Iterator[Any]:
    """The tensors that backpropagation from a result ends at."""
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
    """A mode that notes every operation; `names` are those of tensors that there are before, by id."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    made: dict[int, Any] = {}  # keeps tensors, so that no other gets the id of one

    def told(value: Any) -> Any:
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
            if func.namespace != "prim":  # questions, as for the device
                operations.append((str(func), str(tree), *map(told, flat)))
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
