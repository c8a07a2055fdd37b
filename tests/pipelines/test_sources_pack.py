"""Documents packed into rows: every token once, positions and segments, the best fit, who shares a document."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest
from core_pipes import count_shared_records
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, SampleError, sources
from pipelines.sources._pack import pack_pieces

COUNTS = st.lists(st.integers(0, 25), min_size=1, max_size=40).filter(any)


def documents(counts: list[int]) -> Any:
    """Documents of so many tokens, which are numbers from 1 on: no two are equal."""
    bounds = np.cumsum([1, *counts])
    tokens = [np.arange(first, first + count) for first, count in zip(bounds, counts, strict=False)]
    return sources.arrays(tokens=[*tokens, np.arange(0)]).take(len(counts))


@given(COUNTS, st.integers(1, 12), st.integers(1, 50), st.none() | st.integers(0, 3))
def test_every_token_is_in_one_row_beside_those_of_its_document(
    counts: list[int], length: int, buffer: int, seed: int | None
) -> None:
    rows = sources.pack(documents(counts), "tokens", length, buffer=buffer, pad=-1, seed=seed)
    pieces = []
    for row in rows:
        tokens, position, segment = row["tokens"], row["position"], row["segment"]
        assert {values.shape for values in row.values()} == {(length,)} and list(row) == [
            "tokens",
            "position",
            "segment",
        ]
        used = int((segment > 0).sum())
        assert (
            used and (segment[used:] == 0).all() and (tokens[used:] == -1).all() and (position[used:] == 0).all()
        )
        for number in range(1, segment.max() + 1):
            own = np.flatnonzero(segment == number)
            assert position[own].tolist() == [*range(len(own))] and (np.diff(tokens[own]) == 1).all()
            pieces.append((int(tokens[own[0]]), len(own)))
        assert (np.diff(segment[:used]) >= 0).all()
    firsts = np.cumsum([1, *counts])[:-1].tolist()
    expected = [
        (first + start, min(length, count - start))
        for first, count in zip(firsts, counts, strict=True)
        for start in range(0, count, length)
    ]
    assert sorted(pieces) == expected


@given(COUNTS, st.integers(1, 12), st.integers(1, 50))
def test_a_row_takes_the_longest_piece_that_fits_and_nothing_later_in_the_stream_changes_it(
    counts: list[int], length: int, buffer: int
) -> None:
    stream = list(enumerate(counts))
    rows = list(pack_pieces(stream, length, buffer))
    order = [(number, start) for number, count in stream for start in range(0, count, length)]
    waiting: list[tuple[int, int, int]] = []
    taken = 0

    def fill() -> None:
        nonlocal taken
        while len(waiting) < buffer and taken < len(order):
            number, start = order[taken]
            waiting.append((number, start, min(length, counts[number] - start)))
            taken += 1

    for row in rows:
        room = length
        for piece in row:
            fill()
            fitting = [other for other in waiting if other[2] <= room]
            longest = max(other[2] for other in fitting)
            assert piece == next(other for other in fitting if other[2] == longest)
            waiting.remove(piece)
            room -= piece[2]
        fill()
        assert all(other[2] > room for other in waiting)
    assert not waiting and taken == len(order)
    longer = list(pack_pieces([*stream, (len(counts), 3), (len(counts) + 1, 1)], length, buffer))
    used = np.cumsum([len(row) for row in rows])
    safe = int((used + buffer <= len(order)).sum())
    assert longer[:safe] == rows[:safe]


def test_rows_of_real_lengths_have_little_padding() -> None:
    counts = np.random.default_rng(0).lognormal(5, 0.7, 5000).astype(int).tolist()
    tokens, padding = sum(counts), {}
    for buffer in (1, 100, 1000):
        rows = list(pack_pieces(enumerate(counts), 512, buffer))
        padding[buffer] = 1 - tokens / (512 * len(rows))
    assert padding[1] > 0.2 > 0.02 > padding[100] > padding[1000], padding


def test_rows_are_known_by_their_tokens_and_pickled_in_the_smallest_numbers() -> None:
    counts = [5, 3, 9, 1, 4, 2, 2, 6, 3, 1]
    made = [
        sources.pack(documents(counts), "tokens", 6),
        sources.pack(documents(counts), lambda one: list(one["tokens"] + 1), 6),
        sources.pack(documents(counts), "tokens", 7),
        sources.pack(documents(counts), "tokens", 6, buffer=1),
        sources.pack(documents(counts), "tokens", 6, pad=9),
        sources.pack(documents(counts), "tokens", 6, seed=1),
        sources.pack(documents([*counts[:-1], 2]), "tokens", 6),
    ]
    assert len({Pipeline(source).fingerprint for source in made}) == len(made)
    same = sources.pack(documents(counts), lambda one: one["tokens"].astype(np.int8), 6)
    assert Pipeline(same).fingerprint == Pipeline(made[0]).fingerprint is not None
    long = sources.pack(documents([50_000]), "tokens", 64)
    assert len(pickle.dumps(long)) < 150_000, "two bytes a token"
    copy = pickle.loads(cloudpickle.dumps(made[0]))
    assert [row["tokens"].tolist() for row in copy] == [row["tokens"].tolist() for row in made[0]]
    signed = sources.pack(sources.arrays(tokens=[np.array([-1, 200]), np.array([70_000])]), "tokens", 3)
    assert signed[0]["tokens"].tolist() == [-1, 200, 70_000]
    hashes = sources.pack(sources.arrays(tokens=[np.array([-1, 2**60 + 1]), np.array([-3])]), "tokens", 3)
    assert hashes[0]["tokens"].tolist() == [-1, 2**60 + 1, -3]


def test_rows_are_divided_where_no_document_is_cut_else_the_documents_are() -> None:
    source = documents([6] * 20)
    whole, cut = (sources.pack(source, "tokens", length) for length in (6, 4))
    assert [len(part) for part in whole.split(0.75)] == [15, 5] and len(whole.folds(4)) == 4
    for divide in (lambda: cut.split(0.75), lambda: cut.folds(4)):
        with pytest.raises(PipelineError, match="split the records first, then make pieces"):
            divide()
    train, valid = (sources.pack(part, "tokens", 4) for part in source.split(0.75))
    assert count_shared_records(train, valid) == 0 and count_shared_records(cut, train) == len(train)
    assert count_shared_records(cut.take(1), cut) == 2, (
        "the row of the document's first four tokens, that of the rest"
    )


def test_a_record_that_cannot_be_packed_is_named() -> None:
    with pytest.raises(
        SampleError, match=r"sample 1 \(arrays\(x\):row 1\): tokens must be integers \[n\], got float64"
    ):
        sources.pack(sources.arrays(x=np.arange(3)), lambda one: [1.5] if one["x"] == 1 else [1], 4)
    with pytest.raises(SampleError, match=r"sample 2 .* ZeroDivisionError"):
        sources.pack(sources.arrays(x=np.array([1, 1, 0])), lambda one: [1 // int(one["x"])], 4)
