"""Whether a policy still is its reference. Until its first update the divergence of the two and its gradient are 0;
log-probabilities of two programs differ in their last digits, and Adam makes whole steps of such a gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.hub.peft.backend import LoraBackend
from trl_jax.run.model.reference import PREFIX
from trl_jax.run.state import RunState


class AtReference:
    """Asked before each step and evaluation of a run with a reference. Weights that have parted do not meet again, but
    where the reference moves: they are compared until they have."""

    def __init__(self, run: RunState):
        self._run, self._compared, self._parted = run, None, False  # the arrays of the reference that were compared

    def __call__(self) -> bool:
        run = self._run
        if run.reference is None:
            return False
        if run.reference.arrays is not self._compared:
            self._compared, self._parted = run.reference.arrays, False
        if not self._parted:
            with run.on_device():
                self._parted = not _is_reference(run)
        return not self._parted


def _is_reference(run: RunState) -> bool:
    reference, backend, params = run.reference, run.model.backend, run.model.params
    own = {path.removeprefix(PREFIX): array for path, array in reference.arrays.items()}
    if any(path not in params or _kind(params[path]) != _kind(array) for path, array in own.items()):
        return False
    if any(isinstance(array, jax.ShapeDtypeStruct) for array in params.values()):
        return False  # a plan has shapes alone
    if reference.backend is backend:
        added = []
    elif isinstance(backend, LoraBackend) and reference.backend is backend.base:
        added = [{kind: params[path] for kind, path in paths.items()} for paths in backend.plan.paths()]
    else:
        return False
    return bool(_same(own, {path: params[path] for path in own}, added))


def _kind(array: Any) -> tuple:
    return array.shape, array.dtype


@jax.jit
def _same(own: dict[str, Any], policy: dict[str, Any], added: list[dict[str, Any]]) -> jax.Array:
    """Whether arrays are equal and adapters, arrays by kind, add nothing."""
    equal = [jnp.all(array == policy[path]) for path, array in own.items()]
    for adapter in added:
        equal.append(~(jnp.any(adapter["a"] != 0) & jnp.any(adapter["b"] != 0)))
        equal.extend(jnp.all(adapter[kind] == 0) for kind in ("bias",) if kind in adapter)
    return jnp.all(jnp.stack(equal)) if equal else jnp.bool_(True)
