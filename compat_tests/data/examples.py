"""Hypothesis strategies for examples of one to three texts with a common prefix and two named extras."""

from __future__ import annotations

from hypothesis import strategies as st

from trl_jax.data.batch import Columns, Example, Extras

PAD = 7
TEXTS = (1, 2, 3)
COLUMNS = {texts: Columns(tuple(f"text_{number}" for number in range(texts)), ("margin", "label")) for texts in TEXTS}

tokens = st.integers(0, 9)
ids = st.lists(tokens, min_size=1, max_size=12)
numbers = st.floats(-2, 2, width=32)


def examples_of(texts: int) -> st.SearchStrategy[Example]:
    """Examples of this many texts, which are often equal."""
    return st.builds(
        lambda prompt, ends, margin, label: Example(
            tuple(prompt + end for end in ends), Extras({"margin": margin, "label": label})
        ),
        st.lists(tokens, max_size=9),
        st.lists(ids, min_size=texts, max_size=texts),
        numbers,
        numbers,
    )


def steps_of(texts: int) -> st.SearchStrategy[tuple[int, list[list[Example]]]]:
    """The size of a micro-batch, and the micro-batches of a step, each of which may be short."""
    return st.integers(1, 4).flatmap(
        lambda size: st.tuples(
            st.just(size), st.lists(st.lists(examples_of(texts), min_size=1, max_size=size), min_size=1, max_size=3)
        )
    )


steps = st.one_of(*map(steps_of, TEXTS))


def row_of(example: Example) -> dict:
    """The row of a prepared dataset from which this example is read."""
    return dict(zip(COLUMNS[len(example.texts)].texts, example.texts, strict=True)) | dict(example.extras.example)
