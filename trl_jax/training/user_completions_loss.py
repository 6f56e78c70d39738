"""User-defined `_compute_loss` of online trainers, as a part of the compiled step. `user_loss.py` lists all hooks.

Log-probabilities are computed in the step's own layout; the script sees all per-token values in TRL's rows `[B, C]`. If
it calls the model, the step is traced again, and computes the logits of the completions, too.

`UserCompletionsLoss.loss` takes the place of the task's loss, for each pass:

- A loss in jax.numpy is traced, with a `CompletionsPass`.
- A loss in torch is called back by the compiled step (`TorchCalls`), with a `TorchPass`, and also returns its gradient.
  If it changes what it passes to `super()`, it is called twice: first up to that call, to learn the inputs of the
  task's loss, which JAX computes before the second call.

The trainer's methods that such a loss may call (`super()._compute_loss`, `_get_per_token_logps_and_entropies`, ...) ask
the `current` pass.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from trl_jax.data.batch import Batch, CompletionRows, Extras, padded_length
from trl_jax.data.packed import by_shard
from trl_jax.hub import torch_bridge
from trl_jax.losses.policy_gradient import sampler_ratio
from trl_jax.losses.supervised import of_texts
from trl_jax.mesh.mesh import on_each_device, platform
from trl_jax.mesh.processes import several
from trl_jax.rollout.rollout import TRL_LOGPS, Experience, ScoredCompletion
from trl_jax.tasks.distillation import TokenDivergences
from trl_jax.tasks.policy import micro_batches_of, ref_logps_of
from trl_jax.training.forward import AUX_LOSS, LOGITS, TraceAgain, with_aux_loss
from trl_jax.training.logging import tell
from trl_jax.training.metrics import USER_METRIC, user_metrics, user_sums
from trl_jax.training.state import Setup
from trl_jax.training.user_loss import described
from trl_jax.training.user_loss_errors import (
    WrittenInTorch,
    base_in_pass_error,
    found_in_torch,
    may_run_in_torch,
    other_values,
    parameters_refused,
    read_in_jax_error,
    torch_explained,
    torch_scalar,
    warn_of_torch,
)
from trl_jax.training.user_loss_model import Outputs


class UserCompletionsLoss:
    """Calls a user-defined loss instead of the task's, pass by pass.

    current: the pass that is being traced, or computed in torch; None outside.
    needs_logits: whether the script was found to call the model.
    changed_inputs: names of inputs that a script in torch was found to change for `super()`.
    """

    needs_logits = False
    changed_inputs: frozenset[str] = frozenset()

    def __init__(
        self,
        compute_loss: Callable,
        setup: Callable[[], Setup],
        values: Callable[[], tuple],
        *,
        name: str,
        averaged: bool,
        functions: Sequence[Callable],
    ):
        """
        Args:
            name: of the method that the user defined.
            compute_loss: `(model, inputs) -> loss` of a micro-batch, or of each device's part of it.
            values: returns the numbers and strings on the script's trainer; each change recompiles the step.
            averaged: whether a step's loss is the mean of these losses over its micro-batches, instead of their sum.
            functions: the user-defined functions that compute the loss, searched for torch code.
        """
        self.compute_loss, self.setup, self._values, self._averaged = compute_loss, setup, values, averaged
        self.current: CompletionsPass | TorchPass | None = None
        self._in_torch: TorchCalls | None = None
        self.name, self._found_in_torch = name, found_in_torch(name, functions)
        if self._found_in_torch is not None and not torch_bridge.available():
            raise self._found_in_torch
        self._last_values: tuple[tuple[str, Any], ...] = ()

    def values(self) -> tuple[tuple[str, Any], ...]:
        """The numbers and strings that a compiled loss contains. A loss in torch reads them itself, so the last values
        are returned, and nothing is recompiled."""
        if self._in_torch is None:
            self._last_values = self._values()
        return self._last_values

    def loss(self, outputs: dict[str, jax.Array], batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """This pass's share of the step's loss, and sums over micro-batches; arguments as in `Task.loss`.

        Raises:
            TypeError: the script did not return a scalar, or used what a compiled loss does not have.
            TraceAgain: it called the model, and the outputs have no logits yet.
        """
        setup, numbers = self.setup(), batch.completions.numbers
        share = 1 / setup.shards / (numbers["micro_batches"][0] if self._averaged else 1)
        if self._in_torch is None and self._found_in_torch is None:
            try:
                return self._compiled(CompletionsPass(setup, outputs, batch, share), numbers, share)
            except WrittenInTorch as error:
                if not may_run_in_torch(error):
                    raise
                self._found_in_torch = error
        if several():
            raise self._found_in_torch
        if self._in_torch is None:
            warn_of_torch(self._found_in_torch)
            self._in_torch = TorchCalls(self)
        of_pass = CompletionsPass(setup, outputs, batch, share)
        loss, sums = self._in_torch(of_pass)
        return jnp.where(of_pass.real, share * loss, 0), sums

    def _compiled(
        self, of_pass: CompletionsPass, numbers: dict[str, jax.Array], share: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        setup, self.current = self.setup(), of_pass
        state = {"global_step": numbers["global_step"][0].astype(jnp.int32), "epoch": numbers["epoch"][0]}
        try:
            with setup.events.state_replaced(state), torch_explained(self.name), self.parameters_refused():
                loss = self.compute_loss(of_pass.model, of_pass.inputs)
        except TraceAgain:
            self.need_logits(of_pass.inputs["completion_ids"].shape)
            raise
        finally:
            self.current = None
        if not isinstance(loss, jax.Array) or loss.shape != ():
            raise TypeError(f"The trainer's own loss returned {described(loss)}; expected a JAX scalar, as of .mean().")
        check_bonus(setup, asked=of_pass.default_sums is not None)
        return jnp.where(of_pass.real, share * loss.astype(jnp.float32), 0), of_pass.sums()

    def parameters_refused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the loss cannot use the model itself."""
        return parameters_refused(
            self.name, self.setup().model, partial(read_in_jax_error, self.name), base_in_pass_error
        )

    def need_logits(self, completions: tuple[int, int]) -> None:
        """Compute logits from the next trace on, because the script calls the model. `completions` is `(B, C)`."""
        setup = self.setup()
        shape = *completions, setup.vocab_size
        tell(
            setup.progress.printed,
            "logits",
            f"_compute_loss calls the model, so the step computes the logits of completions: float32 {list(shape)} for "
            f"each micro-batch of a device, {4 * math.prod(shape) / 2**20:,.1f} MiB, and as much for their gradient.",
        )
        self.needs_logits = True

    def need_inputs(self, names: frozenset[str]) -> None:
        """Learn these inputs of `super()` in a first call of a loss in torch, from the next trace on."""
        tell(
            self.setup().progress.printed,
            "inputs of super()",
            f"_compute_loss passes other {', '.join(sorted(names))} to super(), so the step calls it twice for each "
            "micro-batch: first up to super(), then as a whole.",
        )
        self.changed_inputs |= names

    def with_rows(
        self, arrays: Batch, micro_batches: Sequence[Sequence[ScoredCompletion]], generations: Sequence[Experience]
    ) -> Batch:
        """Add the completions as rows to the arrays of a step.

        Args:
            generations: for each micro-batch, the generation that it is a slice of.
        """
        setup = self.setup()
        shards, pad_token_id = setup.shards, setup.processing_class.pad_token_id
        multiple = setup.pad_to_multiple_of if isinstance(setup.pad_to_multiple_of, int) else 1  # TRL's padding

        def longest(rows: Sequence[ScoredCompletion]) -> tuple[int, int]:
            """The widths of prompts and completions that TRL pads these rows to."""
            lengths = max(len(row.prompt) for row in rows), max(len(row.completion) for row in rows)
            return tuple(-(-length // multiple) * multiple for length in lengths)

        every = [row for generation in generations for row in generation.rows]
        prompt, completion = longest(every)
        width_P = padded_length(prompt, "auto")
        width_C = padded_length(max(completion, setup.args.max_completion_length), "auto")
        leading, reads = arrays.weight.shape, arrays.reads.shape[-1]

        def filled(width: int, value: int) -> np.ndarray:
            return np.full((*leading, width), value, np.int32)

        prompts, completions = filled(width_P, pad_token_id), filled(width_C, pad_token_id)
        prompt_mask, mask, read = filled(width_P, 0), filled(width_C, 0), filled(width_C, reads)
        extras = {
            name: np.zeros((*leading, width_C) if values.ndim else leading, values.dtype)
            for name, values in (every[0].extras or {}).items()
        }
        numbers = {"global_step": setup.state.global_step, "epoch": setup.state.epoch or 0.0}
        numbers |= {
            "micro_batches": len(micro_batches),
            "generated_tokens": 1,
            "prompt_width": 1,
            "completion_width": 1,
        }
        scalars = {name: np.full((*leading[:-1], 1), value, np.float32) for name, value in numbers.items()}
        parts = zip(np.ndindex(leading[:-1]), by_shard(micro_batches, shards), strict=False)  # a short step has fewer
        for number, (index, rows) in enumerate(parts):
            generation = generations[number // shards]
            scalars["generated_tokens"][index] = generation.num_tokens
            scalars["prompt_width"][index], scalars["completion_width"][index] = longest(generation.rows)
            for slot, row in enumerate(rows):
                at, start, length = (*index, slot), width_P - len(row.prompt), len(row.completion)
                prompts[at][start:], prompt_mask[at][start:] = row.prompt, 1
                completions[at][:length], mask[at][:length] = row.completion, row.completion_mask
                read[at][:length][row.completion_mask] = np.flatnonzero(arrays.text[index] == slot)
                for name, values in (row.extras or {}).items():
                    extras[name][(*at, slice(length))[: extras[name].ndim]] = values
        return arrays._replace(
            completions=CompletionRows(prompts, prompt_mask, completions, mask, read, scalars, extras)
        )

    def finish(self, results: dict[str, Any]) -> dict[str, Any]:
        """The results of a step. For a loss in torch, waits for the step (such a loss reads the trainer's state during
        the step), raises the script's error, and adds the numbers that it logged."""
        return results if self._in_torch is None else self._in_torch.finished(jax.block_until_ready(results))

    def metrics(self, sums: list[dict[str, np.ndarray]], split: str) -> dict[str, float | None]:
        """The metrics of the task's loss, if the script calls `super()._compute_loss`, followed by those that the
        script logs, each averaged over the micro-batches in which it is not NaN."""
        return user_metrics(self.setup().task, sums, split)


def corrects_sampler(args: Any) -> bool:
    """Whether TRL would correct for a sampler that differs from the policy."""
    return bool(vars(args).get("use_vllm") and vars(args).get("vllm_importance_sampling_correction"))


def check_bonus(setup: Setup, *, asked: bool) -> None:
    """Raise TypeError if the arguments set an entropy bonus, but the user-defined loss does not include it.

    Args:
        asked: whether the script called `super()`.
    """
    if setup.task.entropy_bonus and not asked:
        raise TypeError(
            "entropy_coef and use_adaptive_entropy are part of super()._compute_loss(model, inputs), which the "
            "trainer's own loss does not call. Leave them out, and subtract the entropy in the loss itself."
        )


class CompletionsPass:
    """A pass as a user-defined loss sees it, while it is traced.

    inputs: those of TRL.
    metrics: what the script appends to `self._metrics[mode]`, by name.
    default_sums: of the task's loss; None unless the script calls `super()`.
    real: whether the pass has completions; a step at the end of an epoch may have fewer passes.
    """

    def __init__(self, setup: Setup, outputs: dict[str, jax.Array], batch: Batch, share: Any):
        self._setup, self._outputs, self._batch, self._share = setup, outputs, batch, share
        self.model, self.real = PolicyInPass(setup.model, self), jnp.any(batch.weight > 0)
        self.metrics: dict[str, list[Any]] = defaultdict(list)
        self.default_sums: dict[str, jax.Array] | None = None
        numbers = batch.completions.numbers
        self.micro_batches = numbers["micro_batches"][0]
        self.widths = numbers["prompt_width"][0], numbers["completion_width"][0]
        self.inputs = self._inputs()
        self._given = dict(self.inputs)

    def _inputs(self) -> dict[str, jax.Array]:
        rows, extras, task = self._batch.completions, self._batch.extras, self._setup.task
        mask = jnp.where(self.real, rows.completion_mask, 1)  # keeps a mean over the tokens of an empty pass finite
        inputs = {
            "prompt_ids": rows.prompt_ids, "prompt_mask": rows.prompt_mask, "completion_ids": rows.completion_ids,
            "completion_mask": mask, "num_items_in_batch": rows.numbers["generated_tokens"][0],
        }  # fmt: skip
        if "advantage" in extras.example:
            inputs["advantages"] = extras.example["advantage"]
        if "old_logps" in extras.example:  # per completion
            inputs["old_logps"] = extras.example["old_logps"]
        of_reads = dict(extras.read)
        if "ref_logps" in of_reads and task.diverges_in_loss:
            of_reads["ref_logps"] = ref_logps_of(self._batch, self._outputs["logps"])
        inputs |= {name: self._by_row(of_reads[key]) for name, key in TRL_LOGPS.items() if key in of_reads}
        if "sampling_logps" in of_reads and task.correction is not None:
            old, sampling = inputs["old_per_token_logps"], inputs["sampling_per_token_logps"]
            ratio = sampler_ratio(old, sampling, mask, settings=task.correction)
            inputs["importance_sampling_ratio"] = ratio.reshape(len(mask), -1)
        elif corrects_sampler(self._setup.args):  # the policy itself is the sampler
            inputs["importance_sampling_ratio"] = jnp.ones(mask.shape, jnp.float32)
        return {name: jnp.asarray(value) for name, value in (inputs | dict(rows.extras)).items()}

    @property
    def _ids(self) -> jax.Array:
        rows = self._batch.completions
        return jnp.concatenate([rows.prompt_ids, rows.completion_ids], axis=1)

    @property
    def _num_positions(self) -> int:
        return self._batch.completions.completion_ids.shape[1]

    def _by_row(self, values: jax.Array) -> jax.Array:
        """Gather values of reads `[N, ...]` into rows of completions `[B, C, ...]`; 0 for tokens that do not count."""
        return values.at[self._batch.completions.read].get(mode="fill", fill_value=0)

    def _by_read(self, values: jax.Array, name: str) -> jax.Array:
        """The inverse of `_by_row`."""
        rows = self._batch.completions.read
        if values.shape != rows.shape:
            raise TypeError(
                f"{name} has the shape {list(values.shape)}; super()._compute_loss takes {list(rows.shape)}."
            )
        return jnp.zeros(len(self._batch.reads), jnp.float32).at[rows].set(values, mode="drop")

    def logps(
        self, model: Any, input_ids: Any, logits_to_keep: int, *, entropy: bool, aux_loss: bool
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Log-probabilities and entropies `[B, C]`, and the load-balancing loss, each as TRL returns them. Values are
        NaN if `input_ids` differ from the pass's ids.

        Raises:
            TypeError: called with another model, or with ids of another shape, than the pass has.
        """
        ids = self._ids
        check_asked(self.model, model, ids, input_ids, self._num_positions, logits_to_keep)
        same = jnp.all(jnp.asarray(input_ids) == ids)  # checked at run time: values are unknown while tracing
        logps, entropies = (
            jnp.where(same, self._by_row(self._outputs[name]), jnp.nan) for name in ("logps", "entropy")
        )
        balance = None
        if aux_loss:
            of_examples = self._outputs[AUX_LOSS][: len(self._batch.weight)]
            balance = jnp.sum(jnp.where(self._batch.weight > 0, of_examples, 0))
            balance /= jnp.maximum(jnp.sum(self._batch.weight > 0), 1)
        return logps, entropies if entropy else None, balance

    def logits(self, input_ids: Any, attention_mask: Any, logits_to_keep: int) -> jax.Array:
        """The model's logits as `PolicyInPass.__call__` returns them. Values are NaN if the ids or the mask
        differ from the pass's."""
        if self._setup.task.compares_distributions:
            raise TypeError(
                "The model cannot be called in a loss of distillation, because full logits are never materialized. Use "
                "self._get_per_token_divergences(model)."
            )
        rows, ids = self._batch.completions, self._ids
        if np.shape(input_ids) != ids.shape:
            raise other_ids_error(input_ids, ids)
        if LOGITS not in self._outputs:
            raise TraceAgain
        same = jnp.all(jnp.asarray(input_ids) == ids)  # checked at run time, as in `logps`
        prompt = rows.prompt_ids.shape[1]
        if attention_mask is not None:
            mask = jnp.concatenate([rows.prompt_mask, self._given["completion_mask"]], axis=1)
            same &= ~attends_otherwise(jnp.asarray(attention_mask), mask, prompt)
        first, before = logits_kept(prompt, self._num_positions, logits_to_keep)
        logits = jnp.where(same, self._by_row(self._outputs[LOGITS]), jnp.nan)[:, first:]
        return jnp.pad(logits, ((0, 0), (before, 1), (0, 0)), constant_values=jnp.nan)

    def of_model(self) -> dict[str, jax.Array]:
        """The differentiable values that a loss may use: `logps` and `entropy` `[B, C]` and, if available, `aux_loss`
        and `logits` `[B, C, V]`."""
        options = {"entropy": True, "aux_loss": AUX_LOSS in self._outputs}
        logps = self.logps(self.model, self._ids, self._num_positions, **options)
        values = dict(zip(("logps", "entropy", "aux_loss"), logps, strict=True))
        if LOGITS in self._outputs:
            values[LOGITS] = self._by_row(self._outputs[LOGITS])
        return {name: value for name, value in values.items() if value is not None}

    def only_where(self, used: jax.Array) -> CompletionsPass:
        """The pass with outputs that get a gradient only if `used`: an unused loss may have infinite derivatives, and
        0 * inf is NaN."""
        outputs = jax.tree.map(lambda array: jnp.where(used, array, 0), self._outputs)
        return CompletionsPass(self._setup, outputs, self._batch, self._share)

    def divergences(self, model: Any, beta: float) -> TokenDivergences:
        """Per-token divergences `[B, C]`, for a distillation loss."""
        if model is not self.model:
            raise TypeError("_get_per_token_divergences must be called with the model that the loss receives.")
        return jax.tree.map(self._by_row, self._setup.task.of_tokens(self._outputs["distributions"], beta))

    def default_loss(self, inputs: dict[str, Any]) -> jax.Array:
        """The task's loss of the micro-batch, scaled as in TRL.

        Args:
            inputs: the pass's; a script may have replaced the advantages, the log-probabilities and the mask, or have
                added a `tool_mask`. A mask with other tokens than the pass has, or with weights, gives NaN.

        Raises:
            TypeError: something else was replaced.
        """
        batch, task = self._batch, self._setup.task
        check_names(inputs, self._given)
        inputs = with_tool_mask(inputs)
        changed = {name for name in inputs if name in self._given and inputs[name] is not self._given[name]}
        changed |= batch.completions.extras.keys() & {"advantages"}  # per token
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
        if "ref_per_token_logps" in changed:
            example["at_reference"] = jnp.zeros_like(example["at_reference"])
        valid = jnp.array(True)
        if "completion_mask" in changed:
            mask = jnp.asarray(inputs["completion_mask"], jnp.float32)
            counts = self._by_read(mask, "completion_mask") > 0
            valid = jnp.all((mask == 0) | (mask == 1) & (self._given["completion_mask"] > 0))
            batch = batch._replace(text=jnp.where(counts, batch.text, len(batch.weight)))
            if "token_weight" in example:
                lengths = of_texts(jnp.ones(len(batch.text)), batch.text, len(batch.weight))
                part = self.micro_batches / task.cycle.parts if self._setup.model.training else 1.0
                example["token_weight"] = task.token_weights(
                    lengths,
                    batch.weight,
                    micro_batches_of(batch),
                    generated_tokens=inputs["num_items_in_batch"],
                    part=part,
                )
        check_replaceable(changed)
        loss, sums = task.loss(self._outputs, batch._replace(extras=Extras(example, batch.extras.text, read)))
        if self._setup.router_aux_loss_coef:
            loss, sums = with_aux_loss(loss, sums, self._outputs[AUX_LOSS], batch, self._setup.router_aux_loss_coef)
        self.default_sums = sums
        return jnp.where(valid, loss / self._share, jnp.nan)

    def sums(self) -> dict[str, jax.Array]:
        """Sums over micro-batches `[M]`: the task's, if its loss was computed, and those of the script's metrics."""
        members = jnp.any(jnp.atleast_2d(self._batch.micro_batch) & (self._batch.weight > 0), axis=-1)
        return (self.default_sums or {}) | user_sums(self.metrics, members)


def check_replaceable(names: set[str]) -> None:
    """Raise TypeError if `super()._compute_loss` does not take other values for all of these inputs."""
    if altered := sorted(names - {"advantages", "old_logps", "completion_mask", *TRL_LOGPS}):
        raise TypeError(
            f"super()._compute_loss got another {', '.join(altered)} than the inputs have. It takes other "
            "advantages, log-probabilities and another completion_mask; write the rest in the method itself."
        )


def check_names(inputs: dict[str, Any], given: dict[str, Any]) -> None:
    """Raise TypeError if a script adds an input to those that it got, or removes one, that TRL's loss reads."""
    names = {name for name, value in inputs.items() if value is not None}
    added = (names - given.keys()) & (TRL_LOGPS.keys() - {"ref_per_token_logps"})  # which only beta makes TRL read
    removed = (given.keys() - names) & {"advantages", "old_logps", *TRL_LOGPS}
    for altered, words in ((added, "which the inputs do not have"), (removed, "which the inputs have")):
        if altered:
            raise TypeError(
                f"super()._compute_loss got {'' if altered is added else 'no '}{', '.join(sorted(altered))}, {words}. "
                "It takes other values of the same names; write the rest in the method itself."
            )


def with_tool_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs without a `tool_mask`, which the script may add: it becomes part of `completion_mask`. As in TRL, only
    GRPO reads it."""
    others = {name: value for name, value in inputs.items() if name != "tool_mask"}
    if "tool_mask" in inputs and "old_logps" not in inputs:
        others["completion_mask"] = inputs["completion_mask"] * inputs["tool_mask"]
    return others


def check_mask(mask: np.ndarray, counts: np.ndarray, given: np.ndarray, *, tool_mask: bool) -> None:
    """Raise TypeError if `super()._compute_loss` does not take a script's `completion_mask`, `[B, C]`.

    Args:
        counts: the mask and the script's `tool_mask`, multiplied.
        given: the pass's mask.
        tool_mask: whether the task's loss takes one.
    """
    if np.any((mask != 0) & (mask != 1)):
        raise TypeError(
            "completion_mask has other values than 0 and 1, and super()._compute_loss takes no weights of tokens. "
            "Write the loss in the method itself."
        )
    if np.any(mask > given):
        raise TypeError(
            "completion_mask is 1 for tokens that do not count in the inputs, such as padding. super()._compute_loss "
            "takes masks with fewer tokens only."
        )
    later = counts[:, ::-1].cumsum(axis=1)[:, ::-1] - counts
    if np.any((mask < given) & (later > 0)):
        raise TypeError(
            "completion_mask is 0 for a token before others that count. In super()._compute_loss, it would also hide "
            "this token from them, but the step has already run the model. "
            + (
                "To leave the token out of the loss only, pass 0 in inputs['tool_mask'], not in completion_mask."
                if tool_mask
                else "Write the loss in the method itself, or write it in jax.numpy, where the token stays visible."
            )
        )


def check_asked(model_of_pass: Any, model: Any, ids: Any, input_ids: Any, completion: int, logits_to_keep: int) -> None:
    """Raise TypeError if log-probabilities are requested from another model, or for other shapes, than a pass has.

    Args:
        model_of_pass, ids, completion: the pass's model, its token ids, and the length of its completions.
    """
    if model is not model_of_pass:
        raise TypeError(
            "_get_per_token_logps_and_entropies must be called with the model that the loss receives, not with "
            "self.model. The reference's log-probabilities are in inputs['ref_per_token_logps'] (if beta is not 0)."
        )
    if np.shape(input_ids) != np.shape(ids) or int(logits_to_keep) != completion:
        raise TypeError(
            f"_get_per_token_logps_and_entropies was called with input_ids {list(np.shape(input_ids))} and "
            f"logits_to_keep={logits_to_keep}; expected the ids of the inputs, {list(np.shape(ids))} and "
            f"{completion}: the step computes each token once."
        )


def other_ids_error(input_ids: Any, ids: Any) -> TypeError:
    return TypeError(
        f"model(...) was called with input_ids {list(np.shape(input_ids))}, which are not the ids of the inputs, "
        f"{list(np.shape(ids))}: the step computes each token once. Pass prompt_ids and completion_ids, concatenated."
    )


def attends_otherwise(mask: Any, expected: Any, prompt: int) -> Any:
    """Whether an attention mask hides a token from a later one, or shows the padding of prompts, other than the mask
    `expected` by the pass; both `[B, prompt + C]`. Tool answers may be in either mask, and padding at the end, too."""
    later = expected[:, ::-1].cumsum(1)[:, ::-1] - expected
    return ((mask < expected) & (later > 0)).any() | (mask[:, :prompt] > expected[:, :prompt]).any()


def logits_kept(prompt: int, completion: int, logits_to_keep: int) -> tuple[int, int]:
    """The first completion token whose logits are among the last `logits_to_keep` of a row (0: all), and the number of
    positions before it. The last position of a row predicts the token after the completion."""
    before, positions = prompt - 1, logits_to_keep or prompt + completion
    return min(max(completion + 1 - positions, 0), completion), max(min(before, positions - completion - 1), 0)


class PassOutputs(Outputs):
    """The outputs of `PolicyInPass`: `logits`, by attribute, key or index."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"model(...) returns only logits in a loss on completions, and no {name}. Log-probabilities, entropies and "
            "the load-balancing loss are results of self._get_per_token_logps_and_entropies(model, ...)."
        )


class PolicyInPass:
    """The model that a user-defined loss gets: to be called, or passed to `_get_per_token_logps_and_entropies`."""

    def __init__(self, model: Any, of_pass: CompletionsPass | TorchPass):
        self._model, self._pass = model, of_pass

    def __call__(
        self, input_ids: Any = None, attention_mask: Any = None, *, logits_to_keep: int = 0, **options: Any
    ) -> PassOutputs:
        """The logits of the pass, `[B, P + C, V]` or the last `logits_to_keep` positions, float32, before the division
        by the temperature.

        Only the C positions that predict tokens of the completion have values, the last one of the prompt included;
        they are 0 where `completion_mask` is 0. All other positions are NaN.

        Args:
            input_ids, attention_mask: `prompt_ids` and `completion_ids` of the inputs, concatenated, and their masks.
            options: `use_cache` and `return_dict` have no effect; others must be None or False.

        Raises:
            TypeError: other ids, or other options.
        """
        passed = {name for name, value in options.items() if value is not None and value is not False}
        if refused := sorted(passed - {"use_cache", "return_dict"}):
            raise TypeError(
                f"model(...) got {', '.join(refused)}; in a loss on completions it takes input_ids, attention_mask and "
                "logits_to_keep, and returns logits, because the step has already run the model. Log-probabilities, "
                "entropies and the load-balancing loss are results of "
                "self._get_per_token_logps_and_entropies(model, ...)."
            )
        return PassOutputs(logits=self._pass.logits(input_ids, attention_mask, operator.index(logits_to_keep)))

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


# A loss in torch: a host callback of the compiled step, called for each pass.

SLOTS = 32  # maximum number of metrics that such a loss may log: a compiled step has a fixed number of outputs


class ChangesInputs(TraceAgain):
    """The loss passes other values of the inputs `names` to `super()` than it got, and the step has not asked for them
    before. It will if it is traced again."""

    def __init__(self, names: frozenset[str]):
        super().__init__()
        self.names = names


class _Reached(BaseException):
    """A loss that is called to learn what it passes to `super()` got there, with these inputs. Not an Exception, which
    the script may catch."""

    def __init__(self, inputs: dict[str, Any]):
        super().__init__()
        self.inputs = inputs


class TorchCalls:
    """Calls a loss in torch from within the compiled step. The script gets log-probabilities and entropies as tensors
    that require gradients, and JAX continues the backward pass from their gradients."""

    def __init__(self, owner: UserCompletionsLoss):
        self._owner = owner
        self._lock = threading.Lock()  # devices call it concurrently
        self._error: BaseException | None = None
        self._names: list[str] = []  # names of the metrics logged so far, in the order of their slots
        self._asked = False  # whether the script has called super() in this step
        self._was_finite = False  # whether a loss was; one that reads positions without logits never is
        self._task_sums: set[str] = set()

    def __call__(self, of_pass: CompletionsPass) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Trace a call of the script's loss. Returns the loss of the pass, and sums over micro-batches."""
        leaves, refusal = of_pass.of_model(), None
        if LOGITS in leaves:
            check_threads(self._owner.setup())
        others = {"inputs": of_pass.inputs, "widths": of_pass.widths, "real": of_pass.real}
        others["micro_batches"] = jnp.asarray(of_pass.micro_batches)
        changed = {name: of_pass.inputs[name] for name in self._owner.changed_inputs & of_pass.inputs.keys()}
        if changed:
            changed = _called_back(self._changed_inputs, _float32(changed), leaves, others)
        try:
            leaves["loss"] = of_pass.default_loss(of_pass.inputs | changed)
        except TypeError as error:
            refusal = str(error)
        results = _float32((jnp.zeros(()), leaves, jnp.zeros(SLOTS)))
        others["changed"] = changed
        loss, gradients, logged = _called_back(partial(self._call, refusal=refusal), results, leaves, others)
        of_pass.metrics |= {f"{number}": [logged[number]] for number in range(SLOTS)}
        self._task_sums |= set(of_pass.default_sums or ())
        sums = of_pass.sums()
        if "loss" in leaves:
            used = of_pass.only_where(gradients["loss"] != 0)
            leaves["loss"] = used.default_loss(used.inputs | changed)
        return _continued(loss, leaves, gradients), sums

    def _changed_inputs(self, results: Any, leaves: dict, others: dict) -> dict[str, np.ndarray]:
        """The inputs with the names in `results` that the script passes to `super()`, from a call that ends there."""
        inputs = {name: np.array(others["inputs"][name], np.float32) for name in results}

        def learned() -> dict[str, np.ndarray]:
            of_pass = self._pass(leaves, others, None, learns=True)
            try:
                with torch_bridge.random_states_unchanged():
                    self._loss(of_pass)
            except _Reached as reached:
                for name in inputs.keys() & reached.inputs.keys():
                    passed = reached.inputs[name]
                    inputs[name][tuple(map(slice, passed.shape))] = passed
            return inputs

        return self._stored(learned, results, leaves) if others["real"] else inputs

    def _call(self, results: Any, leaves: dict, others: dict, *, refusal: str | None) -> tuple:
        """The loss, its gradients with respect to the leaves, and the numbers that the script logs, NaN in free
        slots."""
        if not others["real"]:  # the last step of an epoch may have fewer passes than others
            return (*_filled(results[:2], 0), *_filled(results[2:], np.nan))
        return self._stored(partial(self._computed, leaves, others, refusal), results, leaves)

    def _stored(self, compute: Callable[[], Any], results: Any, leaves: dict) -> Any:
        """What `compute` returns, or NaN if it raised an error, now or before in this step. The error is stored for
        `finished`: raised here, it would become a long message of the XLA runtime."""
        with self._lock:
            try:
                if self._error is None:
                    return compute()
            except ChangesInputs as error:
                self._owner.need_inputs(error.names)
                self._error = error
            except TraceAgain as error:
                self._owner.need_logits(leaves["logps"].shape)
                self._error = error
            except Exception as error:
                self._error = error
            finally:
                self._owner.current = None
            return _filled(results, np.nan)

    def _pass(self, leaves: dict, others: dict, refusal: str | None, *, learns: bool = False) -> TorchPass:
        """The pass with TRL's widths: the step's are rounded up."""
        arrays, (prompt, completion) = jax.tree.map(np.asarray, others["inputs"]), map(int, others["widths"])
        length = arrays["completion_ids"].shape[1]
        arrays, leaves, changed = (
            {name: _cut(name, np.asarray(values), prompt, completion, length) for name, values in of_kind.items()}
            for of_kind in (arrays, leaves, others.get("changed", {}))
        )
        micro_batches = int(others["micro_batches"])
        return TorchPass(self._owner.setup().model, arrays, leaves, changed, micro_batches, refusal, learns=learns)

    def _loss(self, of_pass: TorchPass) -> Any:
        self._owner.current = of_pass
        evaluates = contextlib.nullcontext() if self._owner.setup().model.training else torch_bridge.without_gradient()
        with self._owner.parameters_refused(), evaluates:
            return torch_scalar(self._owner.name, self._owner.compute_loss(of_pass.model, of_pass.inputs))

    def _computed(self, leaves: dict, others: dict, refusal: str | None) -> tuple:
        setup, whole = self._owner.setup(), jax.tree.map(np.asarray, leaves)
        of_pass = self._pass(leaves, others, refusal)
        loss = self._loss(of_pass)
        check_bonus(setup, asked=of_pass.asked)
        self._was_finite |= np.isfinite(loss.item())
        counts = np.any(others["inputs"]["completion_mask"])  # without a token that counts, a mean is NaN
        if of_pass.gave_logits and counts and not self._was_finite and np.isfinite(whole[LOGITS]).all():
            raise ValueError(
                "The trainer's own loss is not finite, although all logits of completions are. It may read positions "
                "that predict no token of the completion, where model(...) gives NaN. Select logits[:, -C - 1 : -1] "
                "(with C = completion_ids.size(1)) before any sum, or pass logits_to_keep=C + 1."
            )
        if loss.requires_grad:
            gradients = {
                name: torch_bridge.padded_gradient(values, np.shape(whole[name]))
                for name, values in of_pass.gradients(loss).items()
            }
        elif setup.model.training:
            raise TypeError(
                "The trainer's own loss returned a tensor without a gradient; expected one that is computed from "
                "_get_per_token_logps_and_entropies or model(...), outside of torch.no_grad()."
            )
        else:
            gradients = jax.tree.map(np.zeros_like, whole)
        self._asked |= of_pass.asked
        return np.float32(loss.item()), gradients, self._slots(of_pass.metrics)

    def _slots(self, metrics: dict[str, list[Any]]) -> np.ndarray:
        slots = np.full(SLOTS, np.nan, np.float32)
        self._names += [name for name in metrics if name not in self._names]
        if len(self._names) > SLOTS:
            raise ValueError(f"The trainer's own loss logs more than {SLOTS} numbers: {', '.join(self._names)}.")
        for name, values in torch_bridge.as_arrays(metrics).items():
            if values:
                slots[self._names.index(name)] = np.mean(np.asarray(values, np.float32))
        return slots

    def finished(self, results: dict[str, Any]) -> dict[str, Any]:
        """The results of a step, with the script's metrics under their names, and without the sums of the task's loss
        if the script did not call `super()`.

        Raises:
            Exception: what the script raised.
        """
        error, self._error = self._error, None
        requested, self._asked = self._asked, False
        if error is not None:
            raise error
        dropped = {f"{USER_METRIC}{number}" for number in range(SLOTS)} | (set() if requested else self._task_sums)
        slots = {name: results[f"{USER_METRIC}{slot}"] for slot, name in enumerate(self._names)}
        logged = {USER_METRIC + name: values for name, values in slots.items() if not np.all(np.isnan(values))}
        return {name: value for name, value in results.items() if name not in dropped} | logged


def check_threads(setup: Setup) -> None:
    """Raise ValueError if a callback with logits would wait forever: on CPUs, JAX copies large arrays in the threads in
    which devices run callbacks, as many as there are cores."""
    devices = 1 if setup.sharding_plan is None else setup.sharding_plan.mesh.devices.size
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if devices > 1 and devices >= cores and platform() == "cpu":
        raise ValueError(
            f"A loss in torch that calls the model would wait forever on {devices} CPU devices with {cores} cores. "
            "Train on fewer devices, or write the loss in jax.numpy."
        )


def _called_back(function: Callable, results: Any, leaves: dict, others: dict) -> Any:
    """Call `function(results, leaves, others)` on the host, once per device. Returns arrays as `results` describes."""

    def of_device(*arrays: Any) -> Any:
        return jax.pure_callback(partial(function, results), results, *arrays)

    everywhere = PartitionSpec()  # replicated on all devices over which XLA partitions matrix products
    return on_each_device(of_device, everywhere, everywhere)(jax.lax.stop_gradient(leaves), others)


def _float32(arrays: Any) -> Any:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, jnp.float32), arrays)


def _filled(results: Any, value: float) -> Any:
    """Arrays with the shapes of `results`, filled with this value."""
    return jax.tree.map(lambda result: np.full(result.shape, value, np.float32), results)


def _cut(name: str, values: np.ndarray, prompt: int, completion: int, length: int) -> np.ndarray:
    """Cut prompts to their last `prompt` tokens, and rows of `length` to the first `completion`; keep other arrays."""
    if name in ("prompt_ids", "prompt_mask"):
        return values[:, values.shape[1] - prompt :]
    return values[:, :completion] if np.ndim(values) >= 2 and values.shape[1] == length else values


class TorchPass:
    """A pass as a user-defined loss in torch sees it: like `CompletionsPass`, with tensors.

    asked: whether the script called `super()`. gave_logits: whether it called the model.
    """

    def __init__(
        self,
        model: Any,
        arrays: dict,
        leaves: dict,
        changed: dict,
        micro_batches: int,
        refusal: str | None,
        *,
        learns: bool = False,
    ):
        """
        Args:
            model: the policy.
            leaves: what has gradients: `CompletionsPass.of_model`, and the task's loss.
            changed: the inputs of the task's loss that differ from `arrays`, by the script's first call.
            refusal: why the task's loss is not available.
            learns: whether this is the first call, which ends with `_Reached` in `super()`.
        """
        self.model = PolicyInPass(model, self)
        self.inputs, self.micro_batches = torch_bridge.batch_tensors(arrays), micro_batches
        self._arrays, self._changed, self._refusal, self._learns = arrays, changed, refusal, learns
        self._ids = np.concatenate([arrays["prompt_ids"], arrays["completion_ids"]], axis=1)
        self.asked = self.gave_logits = False
        self._leaves = torch_bridge.as_leaves(leaves)[0]
        self.metrics: dict[str, list[Any]] = defaultdict(list)

    def logps(
        self, model: Any, input_ids: Any, logits_to_keep: int, *, entropy: bool, aux_loss: bool
    ) -> tuple[Any, Any, Any]:
        """Like `CompletionsPass.logps`."""
        ids, completion = self._ids, self._arrays["completion_ids"].shape[1]
        check_asked(self.model, model, ids, input_ids, completion, logits_to_keep)
        if not np.array_equal(ids, torch_bridge.as_arrays(input_ids)):
            raise TypeError(
                "_get_per_token_logps_and_entropies was called with other token ids than prompt_ids and completion_ids "
                "of the inputs: the step computes each token once."
            )
        if aux_loss and "aux_loss" not in self._leaves:
            raise TypeError("The run has no load-balancing loss. Pass compute_aux_loss=self.aux_loss_enabled.")
        requested = {"logps": True, "entropy": entropy, "aux_loss": aux_loss}
        # Clones, because the script may change them in place; under torch.no_grad() they have no gradient.
        return tuple(self._leaves[name].clone() if is_wanted else None for name, is_wanted in requested.items())

    def logits(self, input_ids: Any, attention_mask: Any, logits_to_keep: int) -> Any:
        """Like `CompletionsPass.logits`, also for some of the rows.

        Raises:
            TypeError: the ids or the mask differ from the pass's.
            TraceAgain: the step has no logits yet.
        """
        arrays, ids, tokens = self._arrays, self._ids, np.asarray(torch_bridge.as_arrays(input_ids))
        if tokens.ndim != 2 or tokens.shape[1] != ids.shape[1]:
            raise other_ids_error(tokens, ids)
        equal = np.all(tokens[:, None] == ids, axis=-1)
        if not equal.any(axis=-1).all():
            raise other_ids_error(tokens, ids)
        prompt, completion = arrays["prompt_ids"].shape[1], arrays["completion_ids"].shape[1]
        rows = np.arange(len(ids)) if len(tokens) == len(ids) and equal.diagonal().all() else equal.argmax(axis=-1)
        if attention_mask is not None:
            mask = np.concatenate([arrays["prompt_mask"], arrays["completion_mask"]], axis=1)[rows]
            if attends_otherwise(np.asarray(torch_bridge.as_arrays(attention_mask)), mask, prompt):
                raise TypeError(
                    "model(...) was called with another attention_mask than prompt_mask and completion_mask of the "
                    "inputs, but the step computes each token once. Pass these, concatenated, or no attention_mask."
                )
        if LOGITS not in self._leaves:
            raise TraceAgain
        self.gave_logits = True
        first, before = logits_kept(prompt, completion, logits_to_keep)
        return torch_bridge.padded_positions(self._leaves[LOGITS][rows, first:], before, 1)

    def divergences(self, model: Any, beta: float) -> Any:
        """Raise TypeError: this is not available in torch."""
        del model, beta
        raise TypeError("_get_per_token_divergences is part of a loss in jax.numpy, and this one is written in torch.")

    def default_loss(self, inputs: dict[str, Any]) -> Any:
        """The task's loss of the micro-batch, scaled as in TRL.

        Args:
            inputs: the pass's; a script may have changed the advantages, the log-probabilities and the mask.

        Raises:
            TypeError: something else was changed, or these depend on the parameters or on anything but the inputs.
            ChangesInputs: the task's loss of the changed inputs has not been computed.
        """
        check_names(inputs, self._arrays)
        mask, inputs = inputs["completion_mask"], with_tool_mask(inputs)
        changed = set(other_values(inputs, self._arrays))
        check_replaceable(changed)
        self._check_changed(inputs, changed)
        if "completion_mask" in changed:
            counts, mask = (
                torch_bridge.as_arrays(values).astype(np.float32) for values in (inputs["completion_mask"], mask)
            )
            check_mask(mask, counts, self._arrays["completion_mask"], tool_mask="old_logps" not in self._arrays)
        arrays = {
            name: np.asarray(torch_bridge.as_arrays(inputs[name])) for name in self._arrays.keys() & inputs.keys()
        }
        if self._learns:
            raise _Reached(arrays)
        if changed - self._changed.keys():
            raise ChangesInputs(frozenset(changed))
        if self._refusal is not None:
            raise TypeError(self._refusal)
        arrays |= {name: arrays[name].astype(np.float32) for name in self._changed.keys() & arrays.keys()}
        if others := other_values(arrays, self._arrays | self._changed):
            raise TypeError(
                f"super()._compute_loss got another {', '.join(others)} than in the method's first call. A method that "
                "changes inputs is called twice for each micro-batch, so what it passes to super() may only depend on "
                "them, and it may call super() once. Or write the loss in jax.numpy."
            )
        self.asked = True
        return self._leaves["loss"].clone()

    def _check_changed(self, inputs: dict[str, Any], changed: set[str]) -> None:
        for name in sorted(changed):
            if np.shape(inputs[name]) != self._arrays[name].shape:
                raise TypeError(
                    f"{name} has the shape {list(np.shape(inputs[name]))}; super()._compute_loss takes "
                    f"{list(self._arrays[name].shape)}. Write the loss of other shapes in the method itself."
                )
            if getattr(inputs[name], "requires_grad", False):
                raise TypeError(
                    f"{name} depends on the parameters, and super()._compute_loss takes it as a constant. Pass "
                    f"{name}.detach(), or write the loss in the method itself."
                )

    def gradients(self, loss: Any) -> dict[str, np.ndarray]:
        """The derivatives of the loss with respect to the leaves."""
        return torch_bridge.gradients(loss, [self._leaves])[0]


@jax.custom_vjp
def _continued(loss: jax.Array, leaves: dict[str, jax.Array], gradients: dict[str, jax.Array]) -> jax.Array:
    """The loss, with a custom VJP: its gradients with respect to the leaves were already computed in torch."""
    del leaves, gradients
    return loss


def _forward(loss: jax.Array, leaves: dict, gradients: dict) -> tuple[jax.Array, dict]:
    return _continued(loss, leaves, gradients), gradients


def _backward(gradients: dict, cotangent: jax.Array) -> tuple:
    return None, jax.tree.map(lambda gradient: gradient * cotangent, gradients), None


_continued.defvjp(_forward, _backward)
