"""The random numbers of a training step: dropout, experts that routers draw, and noise on the embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from trl_jax.nn.noise import Noise

if TYPE_CHECKING:
    from trl_jax.hub.backend import Backend
    from trl_jax.run.arguments.base_config import BaseConfig

_NOISE, _ROUTERS = 1000, 1001  # folded into the key; dropout folds in smaller numbers


def run_key(args: BaseConfig, backend: Backend) -> jax.Array | None:
    """The key of a run, None where nothing is random. A step folds its number in, so a resumed run draws the same."""
    drawn = not args.disable_dropout or args.neftune_noise_alpha or backend.draws_experts
    return jax.random.key(args.seed) if drawn else None


def random_options(
    args: BaseConfig, backend: Backend, key: jax.Array | None, lengths: jax.Array, multiple: int | str | None
) -> dict[str, Any]:
    """The options of the model's call in training. Routers draw with `disable_dropout`, too: it is how they learn.

    Args:
        lengths: of the texts that are read. The strength of the noise depends on the longest, as in TRL, where rows are
            as long as that one, rounded up to the next `multiple`.
    """
    if key is None:
        return {}
    options = {} if args.disable_dropout else {"dropout_key": key}
    options |= {"router_key": jax.random.fold_in(key, _ROUTERS)} if backend.draws_experts else {}
    if not args.neftune_noise_alpha:
        return options
    multiple = multiple if isinstance(multiple, int) else 1
    longest = -(-(jnp.max(lengths) - backend.virtual.count) // multiple) * multiple
    return options | {"noise": Noise(args.neftune_noise_alpha, jax.random.fold_in(key, _NOISE), longest)}


def check_noise(args: BaseConfig, backend: Backend) -> None:
    """Raise ValueError where noise is asked for and the model's backend cannot add it."""
    if args.neftune_noise_alpha and not backend.takes_noise:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha}: this model runs on the {backend.name} backend, whose "
            "embedding is part of a program that noise cannot be put into. Leave neftune_noise_alpha out."
        )
