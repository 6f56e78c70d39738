"""A script's own loss and the model's parameters, which it cannot read: they would be numbers without a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

READ = ("named_parameters", "get_input_embeddings")  # all other ways to the values go through these


@contextlib.contextmanager
def parameters_refused(model: Any, error: Callable[[], Exception]) -> Iterator[None]:
    """A context in which asking for the model's parameters raises the error that is made then."""

    def asked() -> Any:
        raise error()

    vars(model).update(dict.fromkeys(READ, asked))
    try:
        yield
    finally:
        for name in READ:
            del vars(model)[name]


def read_in_jax() -> TypeError:
    return TypeError(
        "compute_loss reads the model's parameters, which have no gradient there: a loss is of what model(...) gives. "
        "For a penalty on weights set weight_decay, or return one from create_optimizer, as in "
        "optax.chain(optax.add_decayed_weights(0.01), optax.adam(1e-5)); what a script only looks at, it can read "
        "before train()."
    )
