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

from trl_jax.hub.torch.bridge import available
from trl_jax.run.user_loss.in_jax import in_jax

_PACKAGE = Path(__file__).parents[2]
# Of lines without the word: names that torch's functions go by, and what tensors take and have that arrays do not.
_OF_TORCH = re.compile(
    r"\btorch\b|\bF\.[a-z]|nn\.functional|\bdim=|\bkeepdim=|\.(unsqueeze|view|detach|cpu|numel|masked_fill|to|float|long|"
    r"expand|gather|logsumexp|log_softmax|softmax|sigmoid|contiguous|permute|chunk|exp|log|size|unbind|new_tensor)\("
)


_COMPLAINT = re.compile(r"\bTensors?\b")  # of torch's functions, about what is none
_SAYS_TORCH = re.compile(r"\btorch\b|\bF\.[a-z]|nn\.functional")


class WrittenInTorch(TypeError):
    """A loss has words of torch's, and arrays of JAX's.

    line: the script's.
    instead: what to write.
    """

    def __init__(self, line: str, error: BaseException):
        translated = in_jax(line)
        self.line = line
        self.instead = "write it with jax.numpy" if translated is None else f"in JAX: `{translated}`"
        super().__init__(
            f"compute_loss runs on JAX arrays, which torch cannot take, and which have NumPy's methods: `{line}`; "
            f"{self.instead}, with `import jax, optax, jax.numpy as jnp`. ({str(error).splitlines()[0]})"
        )


class NotGiven(AttributeError):
    """A loss in torch asked for more than the model's outputs."""


@contextlib.contextmanager
def torch_explained() -> Iterator[None]:
    """Explain errors of a loss: of torch about a JAX array, and of an array about torch's words, with the script's line
    translated to jax.numpy; of JAX about a value that does not exist while the loss is compiled, with the line and the
    way out.

    Raises:
        WrittenInTorch: the script's line has words of torch's.
    """
    try:
        yield
    except jax.errors.JAXTypeError as error:
        line = _line_of_script(error)
        if line is not None and _SAYS_TORCH.search(line):
            raise WrittenInTorch(line, error) from error
        raise TypeError(
            f"compute_loss is compiled once and has no values while it is: `{error if line is None else line}`. "
            "Choose with jnp.where, bound with jnp.minimum; float(), .item(), if and self.log need values. "
            "self.state's global_step and epoch are such arrays, too; to count on a call of the model write "
            "model(...), not self.model(...). What is to be logged is for a callback or compute_metrics."
        ) from error
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        line = _line_of_script(error)
        if line is None or not (_OF_TORCH.search(line) or _COMPLAINT.search(str(error))):
            raise
        raise WrittenInTorch(line, error) from error


@contextlib.contextmanager
def outputs_alone() -> Iterator[None]:
    """Name the line of a loss in torch that asks for more than the model's outputs."""
    try:
        yield
    except NotGiven as error:
        raise TypeError(
            f"compute_loss is written in torch and asks for {error}, which stays in JAX: `{_line_of_script(error)}`. "
            "It is given the outputs of model(input_ids, attention_mask): logits and, of a language model, the loss."
        ) from error


def may_run_in_torch(error: WrittenInTorch) -> bool:
    """Whether torch is there, and the line its own: where a script uses jax, a word that both have is JAX's."""
    if not available():
        return False
    surely = _SAYS_TORCH.search(error.line) or _COMPLAINT.search(str(error.__cause__))
    return surely is not None or not _uses_jax(error.__cause__)


def _uses_jax(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _of_script(frame.f_code.co_filename)]
    return any(value is jax or value is jax.numpy for value in frames[-1].f_globals.values())


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
