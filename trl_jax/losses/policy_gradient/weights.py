"""The divisors of policy losses, as the weight that the loss of a token has in the step's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trl_jax.losses.policy_gradient.settings import PER_GENERATION, PolicyLoss


def token_weights(
    settings: PolicyLoss,
    lengths: Any,
    completion_weight: Any,
    micro_batch: Any,
    *,
    generated_tokens: Any = None,
    part: Any = 1.0,
) -> Any:
    r"""The weight `[X]` of each token of a completion: the step's loss is the sum over tokens of weight times loss.

    | loss_type | weight |
    | --- | --- |
    | grpo, sapo | completion_weight / max(length, 1) |
    | luspo | completion_weight |
    | dr_grpo | completion_weight / max_completion_length |
    | bnpo | sum of the micro-batch's completion_weight / max(its tokens, 1) |
    | dapo, cispo, vespo | 1 / (max(generated_tokens, 1) part) |

    Args:
        lengths: `[X]`, tokens that count of each completion.
        completion_weight: `[X]`, of each in a mean over a step's micro-batches, on all devices, of means over their
            completions: `1 / (completions of its micro-batch x micro-batches x devices)`. An evaluation's batch is one
            micro-batch.
        micro_batch: bool `[M, X]`, the completions of each micro-batch of a device.
        generated_tokens: the tokens that count of the whole generation, on all devices; of an evaluation's batch. None:
            of these completions.
        part: micro-batches of the step / micro-batches of the generation; 1 in an evaluation. So the divisor is the
            mean count of a step's tokens and not this step's, as in TRL.

    Returns:
        Float32, of NumPy if `lengths` is.
    """
    xp = jnp if isinstance(lengths, jax.Array) else np
    completion_weight = xp.asarray(completion_weight, xp.float32)
    if settings.loss_type in PER_GENERATION:
        tokens = xp.sum(lengths) if generated_tokens is None else generated_tokens
        return xp.where(completion_weight > 0, 1 / (xp.maximum(tokens, 1) * part), 0).astype(xp.float32)
    if settings.loss_type == "luspo":
        return completion_weight
    if settings.loss_type == "dr_grpo":
        return completion_weight / settings.max_completion_length
    if settings.loss_type == "bnpo":
        tokens, weights = (xp.sum(xp.where(micro_batch, values, 0), axis=1) for values in (lengths, completion_weight))
        of_micro_batch = weights / xp.maximum(tokens, 1)
        return xp.sum(xp.where(micro_batch, of_micro_batch[:, None], 0), axis=0).astype(xp.float32)
    return completion_weight / xp.maximum(xp.asarray(lengths, xp.float32), 1)
