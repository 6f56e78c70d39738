"""Explain errors of a user-defined loss, by the name of what the user defined or passed."""

from __future__ import annotations

import ast
import contextlib
import dis
import inspect
import io
import linecache
import logging
import re
import textwrap
import tokenize
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from trl_jax.hub import torch_bridge
from trl_jax.hub.parameters import Refusal
from trl_jax.hub.torch_bridge import available, imports_package, knows_torch, takes_tensors

# Errors of a user-defined loss: torch code on JAX arrays, and values that do not exist in a trace.


logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
# Torch code, even without the word: names of its functions, and what only tensors have or accept.
_OF_TORCH = re.compile(
    r"\btorch\b|\bF\.[a-z]|nn\.functional|\bdim=|\bkeepdim=|\.(unsqueeze|view|detach|cpu|numel|masked_fill|to|float|long|"
    r"expand|gather|logsumexp|log_softmax|softmax|sigmoid|contiguous|permute|chunk|exp|log|size|unbind|new_tensor)\("
)


_COMPLAINT = re.compile(r"\bTensors?\b")  # in torch's errors about arguments that are not tensors
_OF_ARRAYS = re.compile(
    r"Tracer\b|\b(ShapedArray|ArrayImpl|JAX arrays|jax\.Array)\b"
)  # names of JAX's types, in errors about arguments that are not tensors
_SAYS_TORCH = re.compile(r"\btorch\b|\bF\.[a-z]|nn\.functional")
# Methods that arrays also have, but with another meaning.
_DIFFERS = re.compile(r"\.(std|var|repeat|sort|transpose)\(|\.(max|min)\([^)]")


class WrittenInTorch(TypeError):
    """A loss uses torch on JAX arrays.

    name: of the loss.
    line: the script's line.
    instead: what to write instead.
    """

    def __init__(self, name: str, line: str, error: BaseException):
        self.name, self.line, self.instead = name, line, "write it with jax.numpy"
        cause = "" if str(error) == line else f" ({str(error).splitlines()[0]})"
        super().__init__(
            f"{name} receives JAX arrays: torch functions do not accept them, and their methods follow NumPy: "
            f"`{line}`. Write it with jax.numpy, jax.nn and optax, or install torch, in which it then runs.{cause}"
        )


class NeedsValues(WrittenInTorch):
    """A loss needs the values of arrays while it is compiled, such as with `.item()`; a loss in torch has them."""

    def __init__(self, name: str, line: str, ways_out: str):
        self.name, self.line, self.instead = name, line, "choose with jnp.where, bound with jnp.minimum"
        TypeError.__init__(
            self, f"{name} is traced and compiled, so its arrays have no concrete values: `{line}`. {ways_out}"
        )


class NotGiven(AttributeError):
    """A loss reads something that the model's outputs do not have."""


@contextlib.contextmanager
def torch_explained(name: str) -> Iterator[None]:
    """Explain errors of a loss, with the script's line.

    These are errors of torch about JAX arrays, or of arrays about torch's names, and errors of JAX about values that do
    not exist while the loss is traced.

    Raises:
        WrittenInTorch: the line uses torch, or (as NeedsValues) needs such values.
    """
    try:
        yield
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        line = _line_of_script(error)
        if line is not None and _SAYS_TORCH.search(line):
            raise WrittenInTorch(name, line, error) from error
        ways_out = (
            "Use jnp.where for conditions and jnp.minimum for bounds; float(), .item(), if and self.log need concrete "
            "values. self.state.global_step and epoch are traced, too. Call model(...), not self.model(...). To log a "
            "number, append the array to self._metrics[mode][name]."
        )
        raise NeedsValues(name, str(error) if line is None else line, ways_out) from error
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        line, text = _line_of_script(error), str(error)
        of_arrays = _OF_ARRAYS.search(text) and not _imports(error, "jax")
        if line is None or not (_OF_TORCH.search(line) or _COMPLAINT.search(text) or of_arrays):
            raise
        raise WrittenInTorch(name, line, error) from error


@contextlib.contextmanager
def outputs_alone(name: str) -> Iterator[None]:
    """Name the script's line that reads more than the model's outputs."""
    try:
        yield
    except NotGiven as error:
        raise TypeError(
            f"{name} uses {error}, which is not available here: `{_line_of_script(error)}`. "
            "It is given the outputs of model(input_ids, attention_mask): logits and, of a language model, the loss; "
            "in DPO and KTO log_probs and entropy, with labels=labels, fused_lm_head=True."
        ) from error


def may_run_in_torch(error: WrittenInTorch) -> bool:
    """Whether torch is installed and the line is really torch's. A name that both have is JAX's if the script imports
    jax; values are only expected to exist if the script imports torch and not jax."""
    if not available():
        return False
    if isinstance(error, NeedsValues):
        return _imports(error.__cause__, "torch") and not _imports(error.__cause__, "jax")
    surely = _SAYS_TORCH.search(error.line) or _COMPLAINT.search(str(error.__cause__))
    return surely is not None or not _imports(error.__cause__, "jax")


def found_in_torch(name: str, functions: Iterable[Callable]) -> WrittenInTorch | None:
    """Check, before calling it, whether a user-defined loss is written in torch; returns the error to report, or None.

    Searches these functions, and the user-defined ones that they call, for a statement in a file that imports torch and
    not jax. The statement names torch, or a method that arrays have with another meaning, such as `.std()`.
    """
    waiting, seen = [inspect.unwrap(function) for function in functions], set()
    while waiting:
        function = waiting.pop(0)
        if not inspect.isfunction(function) or function in seen or not _of_script(function.__code__.co_filename):
            continue
        seen.add(function)
        line = _line_in_torch(function) if knows_torch(function) and takes_tensors(function) else None
        if line is not None:
            return WrittenInTorch(name, line, TypeError(line))
        # Not co_names, which has the names of attributes, too: `self.model` is not the script's function `model`.
        read = dict.fromkeys(step.argval for step in dis.get_instructions(function) if step.opname == "LOAD_GLOBAL")
        waiting += [function.__globals__[name] for name in read if name in function.__globals__]
    return None


class ArraysOrTensors:
    """A user-defined function that is called with arrays, or with tensors if it is found to be written in torch (arrays
    with the methods of tensors where torch is not installed); its result is arrays in both cases.

    name: of the function, for errors.
    """

    def __init__(self, function: Callable, name: str):
        self.function, self._name = function, name
        func = inspect.unwrap(function)
        readable = takes_tensors(func) and (inspect.isfunction(func) or inspect.ismethod(func))
        self._in_torch = found_in_torch(name, [func]) is not None or (readable and _line_in_torch(func) is not None)

    def __call__(self, *values: Any) -> Any:
        if not self._in_torch:
            try:
                with torch_explained(self._name):
                    return self.function(*values)
            except WrittenInTorch as error:
                if not may_run_in_torch(error) and (available() or imports_package(self.function, "jax")):
                    text = f"{self._name} receives arrays: `{error.line}`; {error.instead}."
                    raise TypeError(text) from error.__cause__
            self._in_torch = True
        return jax.tree.map(torch_bridge.as_arrays, self.function(*jax.tree.map(torch_bridge.batch_tensor, values)))


def _line_in_torch(function: Callable) -> str | None:
    try:
        text = textwrap.dedent(inspect.getsource(function))
        statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    except (OSError, SyntaxError):  # not defined in a file
        return None
    simple = [node for node in statements if "body" not in node._fields and not _is_text(node)]
    lines = [" ".join((ast.get_source_segment(text, node) or "").split()) for node in simple]
    return next((line for line in lines if _SAYS_TORCH.search(line) or _DIFFERS.search(line)), None)


def _is_text(node: ast.stmt) -> bool:
    """Whether the statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def warn_of_torch(error: WrittenInTorch) -> None:
    """Warn that a loss continues in torch."""
    logger.warning(
        "%s %s (`%s`), so for each batch the model's outputs are copied to torch and their gradients "
        "back to JAX. A loss in jax.numpy is compiled with the model and faster: %s.",
        error.name,
        "needs values" if isinstance(error, NeedsValues) else "is written in torch",
        error.line,
        error.instead,
    )


def torch_scalar(name: str, result: Any) -> Any:
    """The loss that the method of this name returned, alone or with outputs, as a scalar tensor.

    Raises:
        TypeError: it is not a tensor with one element.
    """
    loss = result[0] if isinstance(result, tuple) else result
    if not torch_bridge.is_torch(loss) or loss.numel() != 1:
        what = f"a tensor {list(loss.shape)}" if torch_bridge.is_torch(loss) else f"a {type(loss).__qualname__}"
        raise TypeError(f"{name} returned {what}; expected a tensor of one number, as in loss.mean().")
    return loss.reshape(())


def other_values(inputs: dict[str, Any], originals: dict[str, np.ndarray]) -> list[str]:
    """The names of torch inputs that differ from the arrays that the script got, even by a change in place."""
    arrays = {name: np.asarray(torch_bridge.as_arrays(inputs.get(name))) for name in originals.keys() & inputs.keys()}
    return sorted(name for name, values in arrays.items() if not _equal(values, originals.get(name)))


def _equal(values: np.ndarray, expected: np.ndarray | None) -> bool:
    if expected is None or values.shape != expected.shape:
        return False
    return bool(np.all((values == expected) | (values != values) & (expected != expected)))


def check_same(inputs: dict[str, Any], originals: dict[str, Any], *, in_torch: bool = False) -> None:
    """Raise TypeError if a script passes other inputs to `super()` than it got."""
    changed = other_values({name: inputs.get(name) for name in originals}, originals) if in_torch else ()
    replaced = (name for name in originals if inputs.get(name) is not originals[name])
    if altered := sorted(changed if in_torch else replaced):
        raise TypeError(
            f"super()._compute_loss got another {', '.join(altered)} than the inputs have. Scale what it returns, or "
            "write the loss in the method itself."
        )


def _imports(error: BaseException, package: str) -> bool:
    """Whether the innermost user code in the error's traceback refers to a module of the package."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _of_script(frame.f_code.co_filename)]
    names = frames[-1].f_globals | frames[-1].f_locals if frames else {}
    modules = [value.__name__ for value in names.values() if isinstance(value, ModuleType)]
    return any(name.partition(".")[0] == package for name in modules)


def _line_of_script(error: BaseException) -> str | None:
    """The statement, or the part of it, in which user code raised; None if no user code was involved."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _of_script(frame.filename)]
    if not frames:
        return None
    last = frames[-1]
    lines = [linecache.getline(last.filename, number) for number in range(last.lineno, last.end_lineno + 1)]
    return " ".join(_without_comments(textwrap.dedent("".join(lines))).split()) or last.line


def _without_comments(source: str) -> str:
    """Source code, which may be a part of a statement, without its comments."""
    lines = source.splitlines(keepends=True)
    with contextlib.suppress(tokenize.TokenError, IndentationError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column] + "\n"
    return "".join(lines)


def _of_script(file: str) -> bool:
    return "site-packages" not in file and not Path(file).is_relative_to(_PACKAGE)


# A user-defined loss cannot read the model's parameters: they would be constants without a gradient.


@contextlib.contextmanager
def parameters_refused(
    name: str, model: Any, error: Callable[[], Exception], base: Callable[[], Exception] | None = None
) -> Iterator[None]:
    """A context in which reading the model's parameters raises `error()`, disabling its adapter `base()`, unless it is
    None, and calling the model raises a TypeError that says what to call instead."""

    def called() -> TypeError:
        return TypeError(
            f"{name} calls self.model, whose outputs have no gradient inside it. Call the model that the method "
            "receives: model(...), or, in GRPO and RLOO, self._get_per_token_logps_and_entropies(model, ...)."
        )

    before, model.weights.refusal = model.weights.refusal, Refusal(error, called, base)
    try:
        yield
    finally:
        model.weights.refusal = before


def base_in_pass_error() -> TypeError:
    return TypeError(
        "The loss disables the adapter, but the step computes each token once, with the adapter. In GRPO and RLOO, the "
        "base model's log-probabilities are in inputs['ref_per_token_logps'] if beta is not 0."
    )


def read_in_jax_error(name: str) -> TypeError:
    return TypeError(
        f"{name} reads the model's parameters, which have no gradient inside it; compute the loss from the "
        "outputs of model(...). For a penalty on weights, set weight_decay, or return a chain from create_optimizer, "
        "such as optax.chain(optax.add_decayed_weights(0.01), optax.adam(1e-5)). To inspect parameters, read them "
        "before train()."
    )
