"""A program of torch.export as plain data: a graph of ATen operations, and the shapes that it is right for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from trl_jax.hub.torch.bridge import operation_of, plain, recorded
from trl_jax.nn.aten.program import Node, Program
from trl_jax.nn.aten.table import OPERATIONS

_MODEL = "model."  # the module's name in what is exported
_LAYER = re.compile(r"\.\d+(?:@\d+)?$")  # a numbered submodule; @1 marks that it is called for the second time
_SILENT = ("aten._assert_tensor_metadata.default", "aten.sym_constrain_range_for_size.default")
_INERT = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "dtype"}  # dtypes stand in the result


def domain(exported: Any) -> Callable[[int, int], bool]:
    """Tells whether the program is right for a number of rows and tokens, by the guards that the tracer relied on."""
    value = _input(exported).meta["val"]
    sizes = value.shape[1:]
    guards = [guard.expr for guard in value.fake_mode.shape_env.guards]
    ranges = exported.range_constraints

    def fits(rows: int, length: int) -> bool:
        values: dict[Any, int] = {}
        for size, number in zip(sizes, (rows, length), strict=True):
            symbol = size if isinstance(size, int) else size.node.expr
            if isinstance(symbol, int) or symbol.is_number:
                if int(symbol) != number:
                    return False
            elif values.setdefault(symbol, number) != number or number not in ranges[symbol]:
                return False
        return all(bool(guard.subs(values)) for guard in guards)

    return fits


def _input(exported: Any) -> Any:
    [name] = exported.graph_signature.user_inputs
    return next(node for node in exported.graph.nodes if node.name == name)


def translated(exported: Any, model_type: str, names: Mapping[str, str]) -> Program:
    """The graph as plain data.

    Args:
        names: from every name of a parameter to the one that it goes by; a tied one has several.

    Raises:
        ValueError: an operation has no counterpart here.
    """
    signature = exported.graph_signature
    paths = signature.inputs_to_parameters
    parameters = {name: names[path.removeprefix(_MODEL)] for name, path in paths.items()}
    frozen = frozenset(parameters.values()) - {names[name] for name in _trained(exported)}
    tensors = {**exported.state_dict, **exported.constants}
    paths = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    nodes, layer = [], None
    for node in exported.graph.nodes:
        if node.op == "call_function" and operation_of(node) not in _SILENT:
            layer = _layer(node, layer)
            nodes.append(_node(node, layer))
    unknown = sorted({node.op for node in nodes} - set(OPERATIONS))
    if unknown:
        raise ValueError(
            f"model_type {model_type!r} needs operations that trl_jax has no counterpart of: {', '.join(unknown)}. "
            "Pass a checkpoint of another type."
        )
    constants = {name: tensors[path].detach().cpu().numpy() for name, path in paths.items()}
    [output] = signature.user_outputs
    return Program(tuple(nodes), parameters, frozen, constants, _input(exported).name, output)


def _trained(exported: Any) -> set[str]:
    return {name.removeprefix(_MODEL) for name, value in exported.named_parameters() if value.requires_grad}


def _node(node: Any, layer: str | None) -> Node:
    kwargs = {name: plain(value) for name, value in node.kwargs.items() if name not in _INERT}
    return Node(node.name, operation_of(node), plain(tuple(node.args)), kwargs, recorded(node.meta.get("val")), layer)


def _layer(node: Any, before: str | None) -> str | None:
    """The outermost numbered submodule the node belongs to; where torch noted none, that of its neighbour."""
    stack = node.meta.get("nn_module_stack", {})
    if not any(key.startswith("L__self__") for key in stack):
        return before
    return next((key for key in stack if _LAYER.search(key)), None)
