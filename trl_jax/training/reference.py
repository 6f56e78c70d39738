"""The reference model of a policy."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.core.text import brief
from trl_jax.data.batch import Batch
from trl_jax.hub.backend import Backend
from trl_jax.hub.native_backend import NativeBackend
from trl_jax.hub.parameters import Weights
from trl_jax.hub.peft_backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.hub.quantization import halves
from trl_jax.mesh.mesh import layers_of
from trl_jax.models.model import merge
from trl_jax.nn.linear import HALVES

PREFIX = "reference."


class Sync(NamedTuple):
    """How a reference follows the policy (sync_ref_model).

    mixup_alpha: weight of the policy in the new reference.
    steps: number of steps between two updates.
    """

    mixup_alpha: float
    steps: int


@dataclass
class ReferenceModel:
    """A reference model, computed from its own arrays and from arrays of the policy that are not trained.

    Only `arrays` ever changes.

    backend: computes the model.
    config: transformers' config of its checkpoint.
    arrays: its own, by path with `PREFIX`, as passed to the step together with the policy's frozen arrays.
    shared: paths of the policy's frozen arrays that it also uses.
    sync: how its own arrays follow the policy's; None keeps them fixed.
    dtype: "bfloat16" or "float16", its compute dtype if the policy computes in float32; None uses the policy's.
    """

    backend: Backend
    config: Any
    arrays: dict[str, Any] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()
    sync: Sync | None = None
    dtype: str | None = None

    def moves_after(self, step: int) -> bool:
        """Whether the reference is updated after this step, counted from 1."""
        return self.sync is not None and step % self.sync.steps == 0

    def follow(self, policy: dict[str, jax.Array]) -> None:
        """Move towards the policy. The previous arrays are donated.

        Args:
            policy: the policy's arrays by path, after the step.
        """
        policy = {path: policy[path.removeprefix(PREFIX)] for path in self.arrays}
        self.arrays = _mixed(self.arrays, policy, self.sync.mixup_alpha)

    def following(self, sync: Sync, policy: dict[str, Any]) -> ReferenceModel:
        """The same reference, but following the policy.

        Raises:
            ValueError: its parameters do not match the policy's.
        """
        shapes = {path.removeprefix(PREFIX): array.shape for path, array in self.arrays.items()}
        mismatched = [path for path, shape in shapes.items() if path not in policy or policy[path].shape != shape]
        if mismatched:
            raise ValueError(
                f"sync_ref_model=True: {brief(mismatched[0])} of ref_model is not a parameter of the model in the same "
                "shape, so they cannot be mixed. Pass a ref_model of the same architecture, or leave one of both out."
            )
        return replace(self, sync=sync)

    def split(self, arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split arrays into the policy's and the reference's, each by its own paths."""
        policy = {path: array for path, array in arrays.items() if not path.startswith(PREFIX)}
        ref_arrays = {path.removeprefix(PREFIX): array for path, array in arrays.items() if path.startswith(PREFIX)}
        return policy, {path: policy[path] for path in self.shared} | ref_arrays

    def as_model(self, policy: PreTrainedModel) -> PreTrainedModel:
        """The reference as a model, with the policy's tokenizer. It shares the arrays: if the reference is updated,
        they are donated."""
        arrays, backend = {path.removeprefix(PREFIX): array for path, array in self.arrays.items()}, self.backend
        if isinstance(backend, NativeBackend) and not self.shared:
            arrays, backend = backend.without_bits(arrays)
        shared = {path: policy.frozen[path] for path in self.shared}
        view = _ReferenceView(arrays, backend, self.config, policy.folder, policy.name_or_path, shared)
        view._reference = self
        return view

    def take(self, params: dict[str, Any]) -> None:
        """Replace the reference's arrays. `params` has the paths of the model that scripts see.

        Raises:
            ValueError: the reference is stored in another form than `params`.
        """
        arrays = {PREFIX + path: _copied(array) for path, array in params.items()}
        if arrays.keys() != self.arrays.keys():
            raise ValueError(
                "load_state_dict: this reference is stored in 16 bits or fewer, so its values cannot be set during a "
                "run. Pass a ref_model in float32, or set sync_ref_model=True, which moves it with the policy."
            )
        self.arrays = arrays

    def outputs(self, arrays: dict[str, Any], batch: Batch, **options: Any) -> Any:
        """The outputs of the reference's head, without gradients.

        Args:
            arrays: its own, from `split`.
            options: of the model's call.
        """
        if self.dtype is not None and options["dtype"] == jnp.float32:
            options["dtype"] = jnp.dtype(self.dtype)
        model = merge(self.backend.graph, jax.lax.stop_gradient(arrays))
        with layers_of(PREFIX):
            return jax.lax.stop_gradient(model(batch.tokens, batch.positions, batch.reads, **options))


class _ReferenceView(PreTrainedModel):
    """A reference as a model: `load_state_dict` also sets the reference that the steps compute with."""

    _reference: ReferenceModel | None = None  # None for copies

    def load_values(self, *args: Any) -> Any:
        loaded = super().load_values(*args)
        if self._reference is not None:
            self._reference.take(self.params)
        return loaded

    def _set_weights(self, weights: Weights) -> None:
        super()._set_weights(weights)
        self._reference = None  # also in a copy, whose weights are its own


def _mixed(reference: dict[str, jax.Array], policy: dict[str, jax.Array], mixup_alpha: float) -> dict[str, jax.Array]:
    """`(1 - mixup_alpha) * reference + mixup_alpha * policy`, computed in float32, in the reference's dtypes.

    Where the two are equal, the reference is unchanged: rounding could change it.
    """
    return _weighted(reference, policy, np.float32(1 - mixup_alpha), np.float32(mixup_alpha))


@partial(jax.jit, donate_argnums=0)
def _weighted(
    reference: dict[str, jax.Array], policy: dict[str, jax.Array], ref_weight: jax.Array, policy_weight: jax.Array
) -> dict[str, jax.Array]:
    def mixed(ref: jax.Array, new: jax.Array) -> jax.Array:
        total = ref_weight * ref.astype(jnp.float32) + policy_weight * new.astype(jnp.float32)
        return jnp.where(ref == new, ref, total.astype(ref.dtype))

    return jax.tree.map(mixed, reference, policy)


def initial_policy(model: PreTrainedModel, *, fresh_adapter: bool) -> ReferenceModel:
    """A reference equal to the current policy: a copy of what is trained or, under a fresh adapter, the base model.

    Args:
        fresh_adapter: whether the model's adapter was made for this run.
    """
    shared = frozenset(model.frozen)
    if not fresh_adapter:
        return ReferenceModel(model.backend, model.config, _own(model.params), shared)
    backend = model.backend
    assert isinstance(backend, AdaptedBackend)
    whole = {path: array for path, array in model.params.items() if path in backend.base.axes}
    return ReferenceModel(backend.base, model.config, _own(whole), shared)


def given(model: PreTrainedModel, vocab_size: int, *, as_bits: bool) -> ReferenceModel:
    """A reference that the user passed, in its own dtype.

    Args:
        vocab_size: number of tokens that the policy embeds.
        as_bits: store 16-bit matrices as integers (`nn.linear.EncodedWeight`).

    Raises:
        ValueError: it embeds fewer tokens than the policy.
    """
    if model.vocab_size < vocab_size:
        raise ValueError(
            f"ref_model embeds {model.vocab_size:,} tokens, the policy {vocab_size:,}. Pass a ref_model with the "
            "same tokenizer, or resize it."
        )
    arrays, backend = model.arrays, model.backend
    native = backend.base if isinstance(backend, AdaptedBackend) else backend
    stored = native.source.dtype if isinstance(native, NativeBackend) else "float32"
    if isinstance(backend, NativeBackend):
        bits = halves(None, backend.source.config) if as_bits else ()
        arrays, backend = backend.as_stored(arrays, bits)
    return ReferenceModel(backend, model.config, _own(arrays), dtype=stored if stored in HALVES else None)


def create_reference_model(model: Any, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """Copy a model, for use as `ref_model`. A trainer does this itself if `ref_model` is not passed.

    Args:
        model: loaded by `trl_jax.AutoModelForCausalLM`, or a torch model of transformers.
        num_shared_layers, pattern: not supported, because all layers are copied.
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
    """Copies of arrays, by a reference's paths. The policy's own arrays are donated at each step."""
    return {PREFIX + path: _copied(array) for path, array in arrays.items()}


def _copied(array: Any) -> Any:
    return array if isinstance(array, jax.ShapeDtypeStruct) else jnp.copy(array)


def check_sync(model: Any) -> None:
    """Raise NotImplementedError, as in TRL, if the reference has no weights of its own to update."""
    if isinstance(model.backend, AdaptedBackend):
        raise NotImplementedError(
            "You passed `sync_ref_model=True` while using a PEFT model, which is currently not supported: the "
            "reference is the base model, which training an adapter does not change. Leave sync_ref_model out, or "
            "train all weights."
        )
