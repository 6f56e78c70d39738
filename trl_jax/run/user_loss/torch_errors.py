"""Errors of a script's loss, explained: torch code on JAX arrays, translated, and values that are not there yet."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

# Pattern of torch code in a loss -> the same in JAX.
_IN_JAX = {
    r"(torch\.)?nn\.functional\.logsigmoid|F\.logsigmoid": "jax.nn.log_sigmoid",
    r"torch\.chunk\((.*?),\s*(?:chunks\s*=\s*)?(\d+)(,\s*dim\s*=\s*0)?\)": r"jnp.split(\1, \2)",
    r"(torch\.)?nn\.functional\.|F\.(?=[a-z])": "jax.nn.",
    r"torch\.sigmoid": "jax.nn.sigmoid",
    r"torch\.(softmax|log_softmax|relu|softplus)": r"jax.nn.\1",
    r"torch\.cat\(": "jnp.concatenate(",
    r"torch\.tensor\(": "jnp.asarray(",
    r"\bdim=": "axis=",
    r"\.unsqueeze\(-1\)": "[..., None]",
    r"torch\.": "jnp.",
}

_PACKAGE = Path(__file__).parents[2]


@contextlib.contextmanager
def torch_explained() -> Iterator[None]:
    """Explain errors of a loss: of torch about a JAX array, with the line translated to jax.numpy; of JAX about a value
    that does not exist while the loss is compiled, with the line and the way out."""
    try:
        yield
    except jax.errors.JAXTypeError as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _of_script(frame.filename)]
        raise TypeError(
            f"compute_loss is compiled once and has no values while it is: `{frames[-1].line if frames else error}`. "
            "Choose with jnp.where, bound with jnp.minimum; float(), .item(), if and self.log need values. "
            "self.state's global_step and epoch are such arrays, too; to count on a call of the model write "
            "model(...), not self.model(...). What is to be logged is for a callback or compute_metrics."
        ) from error
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame.line for frame in reversed(frames) if frame.line and "torch" in _called(frame.line)), None)
        if line is None:
            raise
        raise TypeError(
            f"compute_loss runs on JAX arrays, which torch cannot take: `{line}`. In JAX: `{in_jax(line)}`, with "
            "`import jax, jax.numpy as jnp`."
        ) from error


def _of_script(file: str) -> bool:
    return "site-packages" not in file and not Path(file).is_relative_to(_PACKAGE)


def _called(line: str) -> str:
    return line.replace("nn.functional", "torch").replace("F.", "torch.")


def in_jax(line: str) -> str:
    """Translate a line of torch to JAX, name by name."""
    for pattern, jax_name in _IN_JAX.items():
        line = re.sub(pattern, jax_name, line)
    return line
