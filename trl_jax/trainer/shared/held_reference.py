"""The reference that a trainer's policy is compared with: a model of the script's, or the policy as it begins."""

from __future__ import annotations

from typing import Any

from trl_jax.hub.peft.backend import AdaptedBackend
from trl_jax.hub.pretrained import PreTrainedModel
from trl_jax.run import construction
from trl_jax.run.model import loading as model_loading
from trl_jax.run.model.reference import ReferenceModel, Sync, check_sync, given, initial_policy
from trl_jax.run.state import RunState


class HeldReference:
    """A part of trainers whose arguments have `sync_ref_model`."""

    _run: RunState
    _given_reference: Any = None
    _fresh_adapter: bool = False

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The reference as it is now; None where it is not in memory as a model of its own: where nothing is compared
        in the run, with `precompute_ref_log_probs`, and of an adapter, whose reference is the model under it."""
        model, reference = self._run.model, self._run.reference
        if reference is None or (self._given_reference is None and isinstance(model.backend, AdaptedBackend)):
            return None
        return reference.as_model(model)

    def _hold_reference(self, run: RunState) -> None:
        """Let the run's step compute it; it follows the policy where the arguments say so."""
        args, reference = run.args, self._reference(run)
        if args.sync_ref_model:
            check_sync(run.model)
            sync = Sync(args.ref_model_mixup_alpha, args.ref_model_sync_steps)
            reference = reference.following(sync, run.model.arrays)
        construction.attach_reference(run, reference)

    def _reference(self, run: RunState) -> ReferenceModel:
        if self._given_reference is None:
            return initial_policy(run.model, fresh_adapter=self._fresh_adapter)
        as_bits = run.sharding_plan is None and not run.args.sync_ref_model
        return given(model_loading.load_reference(self._given_reference, run.args), run.vocab_size, as_bits=as_bits)
