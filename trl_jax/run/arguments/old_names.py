"""Accepts arguments of a config class by the names that earlier releases of transformers had for them."""

import inspect
import os
import warnings

from trl_jax.core.arguments.renamed import translated, way_out


class OldNames(type):
    """Metaclass of the config classes: translates old names, warns of each, and names the nearest for an unknown one.

    Raises:
        TypeError: at construction, for a name that is neither an argument nor an old name of one.
    """

    def __call__(cls, *args, **kwargs):
        accepted = inspect.signature(cls.__init__).parameters
        # A subclass's own __init__ may take **kwargs and pass them on.
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        kwargs, environment, notes = translated(kwargs, accepted)
        for name in kwargs.keys() - accepted.keys() if not open_ended else ():
            raise TypeError(f"{cls.__name__} has no argument {name!r}: {way_out(name, accepted)}")
        os.environ.update(environment)
        for note in notes:
            warnings.warn(note, FutureWarning, stacklevel=2)
        return super().__call__(*args, **kwargs)
