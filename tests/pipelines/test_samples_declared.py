"""`stages.text`, `binary` and `ragged`: what they take and refuse, and what a ragged field of a batch offers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import leaves_nothing  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Pipeline, PipelineError, Ragged, SampleError, sources, stages
from pipelines.loader.batch import Batch


def read(values: list[Any], *declared: Any, **options: Any) -> Batch:
    """One batch of samples {"x": value}."""
    pipeline = Pipeline(sources.arrays(at=np.arange(len(values))), shuffle=False, **options)
    pipeline = pipeline.map(lambda sample: {"x": values[int(sample["at"])]}, id="x")
    for stage in declared:
        pipeline = pipeline.map(stage)
    return next(iter(pipeline.loader(len(values), 1)))


def test_texts_and_bytes_are_lists_and_bytes_may_be_declared_as_text() -> None:
    texts = ["", "a film", "caf\u00e9 \U0001f600", "lone \ud800"]
    assert read(texts, stages.text("x", 16))["x"] == texts
    assert read([b"caf\xc3\xa9", b""], stages.text("x", 5))["x"] == ["caf\u00e9", ""]
    assert read([b"\x00\xff", b""], stages.binary("x", 2))["x"] == [b"\x00\xff", b""]


@given(st.text(max_size=8), st.integers(1, 12))
def test_a_text_is_cut_between_two_characters(text: str, most: int) -> None:
    cut = stages.text("x", most, truncate=True)({"x": text})["x"]
    assert text.startswith(cut) and len(cut.encode("utf-8", "surrogatepass")) <= most
    longer = text[: len(cut) + 1]
    assert cut == text or len(longer.encode("utf-8", "surrogatepass")) > most


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize(
    ("values", "stage", "said"),
    [
        (["ok", "too long"], stages.text("x", 4), r"'x' has 8 bytes, more than most_bytes=4: take more, or trunc"),
        (["ok", 3], stages.text("x", 4), r"field 'x' is int, not a str"),
        ([b"ok", b"\xff\xfe"], stages.text("x", 4), r"bytes that are no UTF-8"),
        ([b"ok", b"12345"], stages.binary("x", 4), r"'x' has 5 bytes, more than most_bytes=4"),
        ([b"ok", "text"], stages.binary("x", 4), r"field 'x' is str, not bytes"),
        (
            [np.zeros(2), np.zeros(5)],
            stages.ragged("x", 4),
            r"'x' has 5 entries, more than most=4: .*truncate='end'",
        ),
        ([np.zeros(2), np.zeros((2, 2))], stages.ragged("x", 4), r"'x' is float64\[2, 2\], .* float64\[n\]"),
        ([np.zeros(2), np.zeros(2, "int32")], stages.ragged("x", 4), r"'x' is int32\[2\], .* float64\[n\]"),
        ([np.zeros(2), np.float64(3)], stages.ragged("x", 4), r"float64\[\], not an array \[n, \.\.\.\]"),
        (
            [[1], []],
            stages.ragged("x", 4),
            r"an empty list, which says neither dtype nor shape .*give ragged shape=",
        ),
        ([[[1, 2]], [[1]]], stages.ragged("x", 4, shape=(2,)), r"entries of \[1\], not \[2\]"),
        ([[1], [256]], stages.ragged("x", 4, dtype="uint8"), r"'x' holds 256, which uint8 cannot: .*stages\.cast"),
        ([[1], [-1]], stages.ragged("x", 4, dtype="uint64"), r"'x' holds -1, which uint64 cannot"),
        ([[1.0], [2.0, 1.5]], stages.ragged("x", 4, dtype="int64"), r"'x' holds 1\.5, which int64 cannot"),
        ([[1.0], [np.nan]], stages.ragged("x", 4, dtype="int32"), r"'x' holds nan, which int32 cannot"),
        ([[1.0], [1e5]], stages.ragged("x", 4, dtype="float16"), r"'x' holds 100000\.0, which float16 cannot"),
        ([[1], [1j]], stages.ragged("x", 4, dtype="float32"), r"'x' holds 1j, which float32 cannot"),
        ([[1], ["1"]], stages.ragged("x", 4, dtype="int64"), r"'x' is of <U1\[1\], not an array"),
        ([[[1, 2]], [[1], [2, 3]]], stages.ragged("x", 4), r"'x' is no array"),
    ],
)
def test_a_value_that_does_not_fit_is_an_error_that_names_the_sample(values: Any, stage: Any, said: str) -> None:
    with pytest.raises(SampleError, match=rf"sample 1 .*{said}"):
        read(values, stage)
    left = read([values[0], values[1], values[0]], stage, on_error="skip")
    assert left["index"].tolist() == [0, 2] and left.global_size == 2


@pytest.mark.parametrize("make", [stages.text, stages.binary, stages.ragged])
@pytest.mark.parametrize("size", [0, -1, 2.5, True, None])
def test_a_size_that_is_none_is_refused(make: Any, size: Any) -> None:
    with pytest.raises(PipelineError, match="must be an integer of 1 or more"):
        make("x", size)


def test_a_list_that_may_be_empty_is_declared_with_shape_and_dtype() -> None:
    stage = stages.ragged("x", most=3, shape=(4,), dtype="float32")
    batch = read([[], [[1, 2, 3, 4]], np.zeros((3, 4))], stage)
    assert [tuple(row.shape) for row in batch["x"]] == [(0, 4), (1, 4), (3, 4)]
    assert all(row.dtype == torch.float32 for row in batch["x"])
    kept = [stages.ragged("x", most=2, truncate=side)({"x": [1, 2, 3]})["x"].tolist() for side in ("end", "start")]
    assert kept == [[1, 2], [2, 3]]


@pytest.mark.parametrize("dtype", ["object", "datetime64[s]", "U3"])
def test_a_dtype_of_no_numbers_is_refused_where_it_is_declared(dtype: str) -> None:
    with pytest.raises(PipelineError, match="is none of numbers"):
        stages.ragged("x", most=4, dtype=dtype)


def test_values_that_the_declared_dtype_holds_are_converted() -> None:
    pairs: Any = [([0.1, np.nan, np.inf], "float16"), ([1.0, 2.0], "uint8"), ([0, 1], "bool"), ([1], "complex64")]
    for values, dtype in pairs:
        made = stages.ragged("x", most=4, dtype=dtype)({"x": values})["x"]
        assert made.dtype == dtype and np.array_equal(made, np.array(values).astype(dtype), equal_nan=True)


def test_a_declaration_ends_where_the_value_is_of_another_kind() -> None:
    tokens = stages.tokenize("x", ("a", "b"))
    batch = read(["a b", "b a"], stages.text("x", 8), tokens)
    assert batch["x"].tolist() == [[2, 3], [3, 2]]
    padded = read([np.arange(2), np.arange(3)], stages.ragged("x", 4), stages.pad("x", 4))
    assert padded["x"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 0]]
    again = read(["a b", "b"], stages.text("x", 8), tokens, stages.ragged("x", 4))
    assert [row.tolist() for row in again["x"]] == [[2, 3], [3]]


def test_fields_are_declared_flat_or_found_out() -> None:
    pipeline = Pipeline(sources.arrays(x=np.zeros((4, 2))))
    for fields in ({"x": {"y": ((2,), "float64")}}, {"x": ((2,), "float64")}):
        with pytest.raises(PipelineError, match="fields= declares flat fields: leave it out"):
            pipeline.map(stages.ragged("x", 4)).map(dict, fields=fields)  # type: ignore[arg-type]
    assert pipeline.map(stages.ragged("x", 4)).fields == {"x": ((4,), "float64"), "x.length": ((), "int64")}


def rows(*lengths: int, shape: tuple[int, ...] = (2,)) -> Ragged:
    made = [torch.arange(n * 2.0).reshape(n, 2)[:, : shape[0]] for n in lengths]
    return Ragged(made, torch.empty(0, *shape))


def test_a_ragged_field_is_a_list_that_pads_packs_and_nests() -> None:
    ragged = rows(2, 0, 3)
    assert isinstance(ragged, list) and ragged.lengths.tolist() == [2, 0, 3]
    padded = ragged.padded(-1)
    assert padded.shape == (3, 3, 2) and (padded[~ragged.mask()] == -1).all()
    assert torch.equal(padded[ragged.mask()], torch.cat(ragged))  # type: ignore[arg-type]
    assert ragged.padded(length=5).shape == (3, 5, 2) and ragged.mask(5).sum() == 5
    with pytest.raises(PipelineError, match="a sample has 3 entries, more than length=2"):
        ragged.padded(length=2)
    values, offsets = ragged.packed()
    assert torch.equal(values, torch.cat(ragged)) and offsets.tolist() == [0, 2, 2, 5]  # type: ignore[arg-type]
    assert [tuple(row.shape) for row in ragged.nested().unbind()] == [(2, 2), (0, 2), (3, 2)]
    assert torch.equal(torch.nn.utils.rnn.pad_sequence(ragged, batch_first=True), ragged.padded())  # type: ignore[arg-type]
    assert type(ragged[1:]) is Ragged and ragged[1:].lengths.tolist() == [0, 3]
    again = pickle.loads(pickle.dumps(ragged))
    assert type(again) is Ragged and torch.equal(again.padded(), ragged.padded())


def test_a_batch_without_samples_keeps_dtype_and_shape() -> None:
    none = rows(shape=(2,))
    assert none.padded().shape == (0, 0, 2) and none.packed()[0].shape == (0, 2) and none.mask().shape == (0, 0)
    empty = rows(0, 0)
    assert empty.padded().shape == (2, 0, 2) and empty.padded(length=3).shape == (2, 3, 2)


def test_rows_are_views_of_the_slots_and_a_copy_is_of_the_valid_rows_alone() -> None:
    values = [np.full((n, 64), n, np.float32) for n in (1, 3, 2)]
    batch = read(values, stages.ragged("x", most=100))
    base = batch["x"][0].untyped_storage().data_ptr()
    assert all(row.untyped_storage().data_ptr() == base for row in batch["x"]) and base % 64 == 0
    for copy in (batch.clone(), batch.to("meta")):
        assert copy["x"][0].untyped_storage().nbytes() == 6 * 64 * 4
        assert copy["x"].lengths.tolist() == [1, 3, 2]
    assert batch.to("cpu")["x"].packed()[0].tolist() == np.concatenate(values).tolist()
