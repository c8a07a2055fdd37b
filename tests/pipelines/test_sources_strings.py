"""Texts in arrays: a sequence as any other, that processes share."""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import sources
from pipelines.ipc import memory_pickle
from pipelines.sources._strings import Strings

any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates, as odd file names have


@given(st.lists(any_text) | st.lists(st.binary()))
def test_strings_are_the_sequence_that_they_were_made_of(values: list[Any]) -> None:
    for made in (Strings(values), pickle.loads(pickle.dumps(Strings(values)))):
        assert list(made) == values and len(made) == len(values)
        assert [made[i - len(values)] for i in range(len(values))] == values
        assert made[1:3] == values[1:3]
        for outside in (len(values), -len(values) - 1):
            with pytest.raises(IndexError):
                made[outside]


def test_a_process_maps_texts_where_they_are() -> None:
    """What is pickled is small; the arrays lie beside it, and each process maps them."""
    n = 50_000
    texts = [f"text {i}" for i in range(n)]
    source = sources.arrays(text=texts, raw=np.array([t.encode() for t in texts]), label=np.arange(n))
    fd = memory_pickle.dump(source)
    try:
        copy = memory_pickle.load(fd)
        header = int.from_bytes(os.pread(fd, 8, 8), "little")
        assert header < 3000, "bytes of the pickle itself"
        assert copy[n - 1] == {"text": f"text {n - 1}", "raw": f"text {n - 1}".encode(), "label": n - 1}
        assert copy.identity() == source.identity()
    finally:
        os.close(fd)


def test_columns_of_mixed_kinds_stay_what_they_are() -> None:
    mixed = ["one", b"two", None]
    assert [record["x"] for record in sources.arrays(x=mixed)] == mixed
