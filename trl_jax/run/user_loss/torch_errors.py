"""Errors of a script's loss, explained: torch code on JAX arrays, translated, and values that are not there yet."""

from __future__ import annotations

import contextlib
import linecache
import re
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from trl_jax.run.user_loss.in_jax import in_jax

_PACKAGE = Path(__file__).parents[2]
# Of lines without the word: names that torch's functions go by, and what tensors take and have that arrays do not.
_OF_TORCH = re.compile(
    r"\btorch\b|\bF\.[a-z]|nn\.functional|\bdim=|\bkeepdim=|\.(unsqueeze|view|detach|cpu|numel|masked_fill|to|float|long|"
    r"expand|gather|logsumexp|log_softmax|softmax|sigmoid|contiguous|permute|chunk|exp|log|size|unbind|new_tensor)\("
)


@contextlib.contextmanager
def torch_explained() -> Iterator[None]:
    """Explain errors of a loss: of torch about a JAX array, and of an array about torch's words, with the script's line
    translated to jax.numpy; of JAX about a value that does not exist while the loss is compiled, with the line and the
    way out."""
    try:
        yield
    except jax.errors.JAXTypeError as error:
        line = _line_of_script(error)
        raise TypeError(
            f"compute_loss is compiled once and has no values while it is: `{error if line is None else line}`. "
            "Choose with jnp.where, bound with jnp.minimum; float(), .item(), if and self.log need values. "
            "self.state's global_step and epoch are such arrays, too; to count on a call of the model write "
            "model(...), not self.model(...). What is to be logged is for a callback or compute_metrics."
        ) from error
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        line = _line_of_script(error)
        if line is None or not _OF_TORCH.search(line):
            raise
        translated = in_jax(line)
        instead = "write it with jax.numpy" if translated is None else f"in JAX: `{translated}`"
        raise TypeError(
            f"compute_loss runs on JAX arrays, which torch cannot take, and which have NumPy's methods: `{line}`; "
            f"{instead}, with `import jax, optax, jax.numpy as jnp`. ({str(error).splitlines()[0]})"
        ) from error


def _line_of_script(error: BaseException) -> str | None:
    """The statement, or the part of it, in which a script's own code raised; None where none of it did."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _of_script(frame.filename)]
    if not frames:
        return None
    last = frames[-1]
    lines = [linecache.getline(last.filename, number) for number in range(last.lineno, last.end_lineno + 1)]
    return " ".join(textwrap.dedent("".join(lines)).split()) or last.line


def _of_script(file: str) -> bool:
    return "site-packages" not in file and not Path(file).is_relative_to(_PACKAGE)
