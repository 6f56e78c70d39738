"""The reference that a policy is compared with: frozen arrays beside the policy's, computed in the same step."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from trl_jax.data.layout.batch import Batch
from trl_jax.hub.backend import Backend
from trl_jax.hub.peft.backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.models.functional import merge

PREFIX = "reference."


@dataclass(frozen=True)
class ReferenceModel:
    """A model whose arrays are its own, or those of the policy that do not train.

    backend: computes it.
    arrays: its own, by path with `PREFIX`, as they go to the step beside the policy's frozen arrays.
    shared: paths of the policy's frozen arrays that it is computed with, too.
    """

    backend: Backend
    arrays: dict[str, Any] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    def split(self, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The policy's arrays and the reference's, by their paths in either."""
        policy = {path: array for path, array in arrays.items() if not path.startswith(PREFIX)}
        own = {path.removeprefix(PREFIX): array for path, array in arrays.items() if path.startswith(PREFIX)}
        return policy, {path: policy[path] for path in self.shared} | own

    def outputs(self, arrays: dict[str, Any], batch: Batch, **options: Any) -> Any:
        """The outputs of the reference's head, without gradient.

        Args:
            arrays: its own, of `split`.
            options: of the model's call.
        """
        model = merge(self.backend.graph, jax.lax.stop_gradient(arrays))
        return jax.lax.stop_gradient(model(batch.tokens, batch.positions, batch.reads, **options))


def initial_policy(model: PreTrainedModel, *, fresh_adapter: bool) -> ReferenceModel:
    """The policy as it is now: a copy of what trains. Under an adapter that was just made, the model without it.

    Args:
        fresh_adapter: whether the model's adapter was made for this run.
    """
    shared = frozenset(model.frozen)
    if not fresh_adapter:
        return ReferenceModel(model.backend, _own(model.params), shared)
    backend = model.backend
    assert isinstance(backend, AdaptedBackend)
    whole = {path: array for path, array in model.params.items() if path in backend.base.axes}
    return ReferenceModel(backend.base, _own(whole), shared)


def given(model: PreTrainedModel, vocab_size: int) -> ReferenceModel:
    """A model of the user's.

    Args:
        vocab_size: how many tokens the policy embeds.

    Raises:
        ValueError: it embeds fewer tokens than the policy's tokenizer has.
    """
    if model.vocab_size < vocab_size:
        raise ValueError(
            f"ref_model embeds {model.vocab_size:,} tokens, the policy {vocab_size:,}. Pass a ref_model with the "
            "same tokenizer, or resize it."
        )
    return ReferenceModel(model.backend, _own(model.arrays))


def create_reference_model(model: Any, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """A copy of a model as it is now, for `ref_model`. Where that is not passed, a trainer makes one itself.

    Args:
        model: what `trl_jax.AutoModelForCausalLM` loaded, or a torch model of transformers.
        num_shared_layers, pattern: refused: all layers are copied.
    """
    for name, value in {"num_shared_layers": num_shared_layers, "pattern": pattern}.items():
        if value is not None:
            raise ValueError(f"{name}={value!r}: a reference shares no layers with the policy. Leave it out.")
    if not isinstance(model, PreTrainedModel):
        return copy.deepcopy(model).eval().requires_grad_(False)
    twin = copy.copy(model)
    twin.params, twin.frozen = (jax.tree.map(jnp.copy, arrays) for arrays in (model.params, model.frozen))
    return twin


def _own(arrays: dict[str, Any]) -> dict[str, Any]:
    """Copies of arrays, by a reference's paths: those of the policy are given away at each step."""
    return {PREFIX + path: _copied(array) for path, array in arrays.items()}


def _copied(array: Any) -> Any:
    return array if isinstance(array, jax.ShapeDtypeStruct) else jnp.copy(array)
