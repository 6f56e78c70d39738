"""A script's own `_compute_loss` of completions, as a part of the compiled step.

Log-probabilities are computed in the step's own layout; the script sees all per-token numbers in TRL's rows `[B, C]`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.data.batch import Batch, Extras
from trl_jax.losses.policy_gradient import sampler_ratio
from trl_jax.losses.supervised import of_texts, real_examples
from trl_jax.rollout.rollout import TRL_LOGPS
from trl_jax.tasks.distillation import TokenDivergences
from trl_jax.training.forward import AUX_LOSS, with_aux_loss
from trl_jax.training.script_loss import described, own_metrics, own_sums, parameters_refused, read_in_jax
from trl_jax.training.state import Setup
from trl_jax.training.torch_errors import torch_explained


class OwnLoss:
    """Calls a script's own loss in the place of the task's, pass by pass.

    values: returns the numbers and strings on the script's trainer; the step is compiled again when they change.
    current: the pass that is being traced; None outside.
    """

    def __init__(
        self, compute_loss: Callable, setup: Callable[[], Setup], values: Callable[[], tuple], *, averaged: bool
    ):
        """
        Args:
            compute_loss: `(model, inputs) -> loss` of a micro-batch, a device's part of it on several devices.
            averaged: whether a step's loss is the mean of these losses over its micro-batches, instead of their sum.
        """
        self._compute_loss, self._setup, self.values, self._averaged = compute_loss, setup, values, averaged
        self.current: OwnPass | None = None

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The script's share of the step's loss, and sums over micro-batches; arguments as of `Task.loss`.

        Raises:
            TypeError: the script returned no scalar, or used what a compiled loss does not have.
        """
        setup, numbers = self._setup(), batch.completions.numbers
        share = 1 / setup.shards / (numbers["micro_batches"][0] if self._averaged else 1)
        self.current = one = OwnPass(setup, outputs, batch, share)
        state = {"global_step": numbers["global_step"][0].astype(jnp.int32), "epoch": numbers["epoch"][0]}
        refused = parameters_refused(setup.model, read_in_jax)
        try:
            with setup.events.state_replaced(state), torch_explained(), refused:
                loss = self._compute_loss(one.model, one.inputs)
        finally:
            self.current = None
        if not isinstance(loss, jax.Array) or loss.shape != ():
            raise TypeError(f"The trainer's own loss returned {described(loss)}; expected a JAX scalar, as of .mean().")
        if setup.rollout.bonus is not None and one.default_sums is None:
            raise TypeError(
                "entropy_coef and use_adaptive_entropy are part of super()._compute_loss(model, inputs), which the "
                "trainer's own loss does not call. Leave them out, and subtract the entropy in the loss itself."
            )
        return jnp.where(one.real, share * loss.astype(jnp.float32), 0), one.sums()

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """What `super()._compute_loss` logs, if the script calls it, and then what the script logs: the mean of each
        over the micro-batches where it is not NaN."""
        return own_metrics(self._setup().task, sums, split)


class OwnPass:
    """A pass as a script's own loss sees it, while it is traced.

    inputs: TRL's, by its names.
    metrics: what the script appends to `self._metrics[mode]`, by name.
    default_sums: of the task's loss; None until the script asks for it.
    real: whether the pass has completions; a step at the end of an epoch may have fewer.
    """

    def __init__(self, setup: Setup, outputs: dict[str, jax.Array], batch: Batch, share: Any):
        self._setup, self._outputs, self._batch, self._share = setup, outputs, batch, share
        self.model, self.real = PolicyInPass(setup.model), jnp.any(batch.weight > 0)
        self.metrics: dict[str, list[Any]] = defaultdict(list)
        self.default_sums: dict[str, jax.Array] | None = None
        self.micro_batches = batch.completions.numbers["micro_batches"][0]
        self.inputs = self._inputs()
        self._given = dict(self.inputs)

    def _inputs(self) -> dict[str, jax.Array]:
        rows, extras, task = self._batch.completions, self._batch.extras, self._setup.task
        mask = jnp.where(self.real, rows.completion_mask, 1)  # a mean over the tokens of an empty pass is finite
        inputs = {
            "prompt_ids": rows.prompt_ids, "prompt_mask": rows.prompt_mask, "completion_ids": rows.completion_ids,
            "completion_mask": mask, "num_items_in_batch": rows.numbers["generated_tokens"][0],
        }  # fmt: skip
        if "advantage" in extras.example:
            inputs["advantages"] = extras.example["advantage"]
        if "old_logps" in extras.example:  # of whole completions
            inputs["old_logps"] = extras.example["old_logps"]
        of_reads = dict(extras.read)
        if "ref_logps" in of_reads and task.diverges_in_loss:
            itself = jnp.max(extras.example["at_reference"]) > 0
            of_reads["ref_logps"] = jnp.where(
                itself, jax.lax.stop_gradient(self._outputs["logps"]), of_reads["ref_logps"]
            )
        inputs |= {name: self._by_row(of_reads[key]) for name, key in TRL_LOGPS.items() if key in of_reads}
        if "sampling_logps" in of_reads and task.correction is not None:
            old, sampling = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
            ratio = sampler_ratio(old, sampling, mask, settings=task.correction)
            inputs["importance_sampling_ratio"] = ratio.reshape(len(mask), -1)
        return {name: jnp.asarray(value) for name, value in (inputs | dict(rows.extras)).items()}

    def _by_row(self, values: jax.Array) -> jax.Array:
        """Numbers of reads `[N]` as rows of completions `[B, C]`; 0 where a token does not count."""
        return values.at[self._batch.completions.read].get(mode="fill", fill_value=0)

    def _by_read(self, values: jax.Array, name: str) -> jax.Array:
        """The reverse of `_by_row`."""
        rows = self._batch.completions.read
        if values.shape != rows.shape:
            raise TypeError(
                f"{name} has the shape {list(values.shape)}; super()._compute_loss takes {list(rows.shape)}."
            )
        return jnp.zeros(len(self._batch.reads), jnp.float32).at[rows].set(values, mode="drop")

    def logps(
        self, model: Any, input_ids: Any, logits_to_keep: int, *, entropy: bool, aux_loss: bool
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Log-probabilities and entropies `[B, C]`, and the load-balancing loss, each as TRL returns them.

        Raises:
            TypeError: these are of another model, or of other tokens, than the pass has.
        """
        rows = self._batch.completions
        ids = jnp.concatenate([rows.prompt_ids, rows.completion_ids], axis=1)
        if model is not self.model:
            raise TypeError(
                "_get_per_token_logps_and_entropies was called with another model than the one that the loss is given. "
                "The reference's log-probabilities are inputs['ref_per_token_logps'] (where beta is not 0)."
            )
        if jnp.shape(input_ids) != ids.shape or int(logits_to_keep) != rows.completion_ids.shape[1]:
            raise TypeError(
                f"_get_per_token_logps_and_entropies was called with input_ids {list(jnp.shape(input_ids))} and "
                f"logits_to_keep={logits_to_keep}; expected the ids of the inputs, {list(ids.shape)} and "
                f"{rows.completion_ids.shape[1]}: the step computes each token once."
            )
        same = jnp.all(jnp.asarray(input_ids) == ids)  # values are not known while the loss is compiled
        logps, entropies = (
            jnp.where(same, self._by_row(self._outputs[name]), jnp.nan) for name in ("logps", "entropy")
        )
        balance = None
        if aux_loss:
            of_examples = self._outputs[AUX_LOSS][: len(self._batch.weight)]
            balance = jnp.sum(jnp.where(self._batch.weight > 0, of_examples, 0))
            balance /= jnp.maximum(jnp.sum(self._batch.weight > 0), 1)
        return logps, entropies if entropy else None, balance

    def divergences(self, model: Any, beta: float) -> TokenDivergences:
        """Numbers of tokens `[B, C]`, for the loss of a distillation."""
        if model is not self.model:
            raise TypeError("_get_per_token_divergences was called with another model than the one the loss is given.")
        return jax.tree.map(self._by_row, self._setup.task.of_tokens(self._outputs["distributions"], beta))

    def default_loss(self, inputs: dict[str, Any]) -> jax.Array:
        """The task's loss of the micro-batch, scaled as TRL's.

        Args:
            inputs: the pass's; a script may have replaced the advantages, the log-probabilities and the mask.

        Raises:
            TypeError: something else was replaced.
        """
        batch, task = self._batch, self._setup.task
        changed = {name for name in inputs if name in self._given and inputs[name] is not self._given[name]}
        changed |= batch.completions.extras.keys() & {"advantages"}  # of tokens
        example, read = dict(batch.extras.example), dict(batch.extras.read)
        for name, key in (("advantages", "advantage"), ("old_logps", "old_logps")):
            if name in changed:
                example[key] = jnp.asarray(inputs[name], jnp.float32)
                if example[key].shape != batch.weight.shape:
                    raise TypeError(
                        f"{name} has the shape {list(example[key].shape)}; super()._compute_loss takes one number for "
                        f"each completion, {list(batch.weight.shape)}. Write the loss of tokens in the method itself."
                    )
        read |= {key: self._by_read(inputs[name], name) for name, key in TRL_LOGPS.items() if name in changed}
        if "completion_mask" in changed:
            kept = self._by_read(jnp.asarray(inputs["completion_mask"], jnp.float32), "completion_mask") > 0
            batch = batch._replace(text=jnp.where(kept, batch.text, len(batch.weight)))
            if "token_weight" in example:
                micro_batch = real_examples(batch.weight, jnp.atleast_2d(batch.micro_batch))
                lengths = of_texts(jnp.ones(len(batch.text)), batch.text, len(batch.weight))
                part = self.micro_batches / task.cycle.parts if self._setup.model.training else 1.0
                example["token_weight"] = task.token_weights(
                    lengths, batch.weight, micro_batch, generated_tokens=inputs["num_items_in_batch"], part=part
                )
        if other := sorted(changed - {"advantages", "old_logps", "completion_mask", *TRL_LOGPS}):
            raise TypeError(
                f"super()._compute_loss got another {', '.join(other)} than the inputs have. It takes other "
                "advantages, log-probabilities and another completion_mask; write the rest in the method itself."
            )
        loss, sums = task.loss(self._outputs, batch._replace(extras=Extras(example, batch.extras.text, read)))
        if self._setup.router_aux_loss_coef:
            loss, sums = with_aux_loss(loss, sums, self._outputs[AUX_LOSS], batch, self._setup.router_aux_loss_coef)
        self.default_sums = sums
        return loss / self._share

    def sums(self) -> dict[str, jax.Array]:
        """Sums over micro-batches `[M]`: those of the task's loss, if it was computed, and of the script's metrics."""
        members = jnp.any(jnp.atleast_2d(self._batch.micro_batch) & (self._batch.weight > 0), axis=-1)
        return (self.default_sums or {}) | own_sums(self.metrics, members)


class PolicyInPass:
    """The model that a script's own loss of completions is given, for `_get_per_token_logps_and_entropies`."""

    def __init__(self, model: Any):
        self._model = model

    def __call__(self, *given: Any, **options: Any) -> Any:
        raise TypeError(
            "The model was called in a loss of completions, where logits are never there as a whole. Their "
            "log-probabilities and entropies are those of self._get_per_token_logps_and_entropies(model, input_ids, "
            "attention_mask, logits_to_keep, compute_entropy=True), or in a distillation of "
            "self._get_per_token_divergences(model)."
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
