"""A note on the error that ends a script, where transformers 5 is likely to be the reason."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from trl_jax.hub.torch.gpu_words import of_script

_TEMPLATE = (
    "The script calls apply_chat_template without return_dict. Since transformers 5 this gives a dictionary of "
    "input_ids and attention_mask; return_dict=False gives the token ids alone, as it did before."
)
_told: set[str] = set()  # the notes that the script has earned so far


def watching_templates(plain: Callable) -> Callable:
    """A tokenizer's apply_chat_template that remembers whether a script takes its default result, which changed."""

    @functools.wraps(plain)
    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        by_script = of_script(sys._getframe(1).f_code.co_filename)
        if by_script and options.get("tokenize", True) and "return_dict" not in options:
            _told.add(_TEMPLATE)
        return plain(self, *args, **options)

    return apply_chat_template


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Add the notes to an error of a kind that a result of another form gives."""
    try:
        yield
    except (AttributeError, LookupError, TypeError) as error:
        for note in _told:
            error.add_note(note)
        raise
