"""`stages.text`, `binary` and `ragged`: what they take and refuse, and what a ragged field of a batch offers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from core_pipes import Job, leaves_nothing, read  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Feeder, Pipeline, PipelineError, Ragged, attach, find_shared_stages, sources, stages
from pipelines.loader.batch import Batch


def read_batch(values: list[Any], *declared: Any, **options: Any) -> Batch:
    """One batch of samples {"x": value}."""
    pipeline = Pipeline(sources.arrays(at=np.arange(len(values))), shuffle=False, **options)
    pipeline = pipeline.map(lambda sample: {"x": values[int(sample["at"])]}, id="x")
    for stage in declared:
        pipeline = pipeline.map(stage)
    return next(iter(pipeline.loader(len(values), 1)))


def test_texts_and_bytes_are_lists_and_bytes_may_be_declared_as_text() -> None:
    texts = ["", "a film", "caf\u00e9 \U0001f600", "lone \ud800"]
    assert read_batch(texts, stages.text("x", 16))["x"] == texts
    assert read_batch([b"caf\xc3\xa9", b""], stages.text("x", 5))["x"] == ["caf\u00e9", ""]
    assert read_batch([b"\x00\xff", b""], stages.binary("x", 2))["x"] == [b"\x00\xff", b""]


@given(st.text(max_size=8), st.integers(1, 12))
def test_a_text_is_cut_between_two_characters(text: str, most: int) -> None:
    cut = stages.text("x", most, truncate=True)({"x": text})["x"]
    assert text.startswith(cut) and len(cut.encode("utf-8", "surrogatepass")) <= most
    longer = text[: len(cut) + 1]
    assert cut == text or len(longer.encode("utf-8", "surrogatepass")) > most


@pytest.mark.filterwarnings("ignore:left out")
def test_a_value_that_does_not_fit_is_left_out_where_bad_records_are() -> None:
    batch = read_batch([[1], [256], [1]], stages.ragged("x", 4, dtype="uint8"), on_error="skip", max_skipped=1.0)
    assert batch["index"].tolist() == [0, 2] and batch.global_size == 2


def test_a_list_that_may_be_empty_is_declared_with_shape_and_dtype() -> None:
    stage = stages.ragged("x", most=3, shape=(4,), dtype="float32")
    batch = read_batch([[], [[1, 2, 3, 4]], np.zeros((3, 4))], stage)
    assert [tuple(row.shape) for row in batch["x"]] == [(0, 4), (1, 4), (3, 4)]
    assert all(row.dtype == torch.float32 for row in batch["x"])
    kept = [stages.ragged("x", most=2, truncate=side)({"x": [1, 2, 3]})["x"].tolist() for side in ("end", "start")]
    assert kept == [[1, 2], [2, 3]]


def test_values_that_the_declared_dtype_holds_are_converted() -> None:
    pairs: Any = [([0.1, np.nan, np.inf], "float16"), ([1.0, 2.0], "uint8"), ([0, 1], "bool"), ([1], "complex64")]
    for values, dtype in pairs:
        made = stages.ragged("x", most=4, dtype=dtype)({"x": values})["x"]
        assert made.dtype == dtype and np.array_equal(made, np.array(values).astype(dtype), equal_nan=True)


def test_a_declaration_ends_where_the_value_is_of_another_kind() -> None:
    tokens = stages.tokenize("x", ("a", "b"))
    batch = read_batch(["a b", "b a"], stages.text("x", 8), tokens)
    assert batch["x"].tolist() == [[2, 3], [3, 2]]
    padded = read_batch([np.arange(2), np.arange(3)], stages.ragged("x", 4), stages.pad("x", 4))
    assert padded["x"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 0]]
    again = read_batch(["a b", "b"], stages.text("x", 8), tokens, stages.ragged("x", 4))
    assert [row.tolist() for row in again["x"]] == [[2, 3], [3]]


def test_fields_are_declared_flat_or_found_out() -> None:
    pipeline = Pipeline(sources.arrays(x=np.zeros((4, 2))))
    with pytest.raises(PipelineError, match="fields= declares flat fields: leave it out"):
        pipeline.map(stages.ragged("x", 4)).map(dict, fields={"x": ((2,), "float64")})
    assert pipeline.map(stages.ragged("x", 4)).fields == {"x": ((4,), "float64"), "x.length": ((), "int64")}


def rows(*lengths: int) -> Ragged:
    return Ragged([torch.arange(n * 2.0).reshape(n, 2) for n in lengths], torch.empty(0, 2))


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
    none, empty = rows(), rows(0, 0)
    assert none.padded().shape == (0, 0, 2) and none.packed()[0].shape == (0, 2) and none.mask().shape == (0, 0)
    assert empty.padded().shape == (2, 0, 2) and empty.padded(length=3).shape == (2, 3, 2)
    again = pickle.loads(pickle.dumps(ragged))
    assert type(again) is Ragged and torch.equal(again.padded(), ragged.padded())


def test_rows_are_views_of_the_slots_and_a_copy_is_of_the_valid_rows_alone() -> None:
    values = [np.full((n, 64), n, np.float32) for n in (1, 3, 2)]
    batch = read_batch(values, stages.ragged("x", most=100))
    base = batch["x"][0].untyped_storage().data_ptr()
    assert all(row.untyped_storage().data_ptr() == base for row in batch["x"]) and base % 64 == 0
    for copy in (batch.clone(), batch.to("meta")):
        assert copy["x"][0].untyped_storage().nbytes() == 6 * 64 * 4
        assert copy["x"].lengths.tolist() == [1, 3, 2]
    assert batch.to("cpu")["x"].packed()[0].tolist() == np.concatenate(values).tolist()


N = 40


class Halved(dict[str, Any]):
    """Has a weight that is none of its items."""

    def __missing__(self, name: str) -> Any:
        return np.float32(0.5)


def late_halved(sample: dict[str, Any]) -> dict[str, Any]:
    """Not the first, by which all others are judged."""
    return Halved(sample) if sample["x"] % 4 == 3 else sample


def copied(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "y": sample["x"] * 2}


def weighed(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": sample["x"] * (sample["weight"] if type(sample) is Halved else np.float32(3))}


def drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": weighed(sample)["x"] + rng.random(dtype=np.float32)}


def numbers() -> Pipeline:
    return Pipeline(sources.arrays(x=np.arange(N, dtype=np.float32)), seed=0)


JOB = Job(spoil=False)


def test_a_sample_of_a_class_of_its_own_is_not_kept_and_the_reason_is_said() -> None:
    with pytest.raises(
        PipelineError, match=r"nothing of .* can be cached: after Halved the sample is .*Halved, not a plain"
    ):
        Feeder(numbers().map(Halved).map(drawn), cache="memory")
    pipeline = numbers().map(copied).map(Halved).map(drawn)
    with pytest.warns(UserWarning, match="the cache keeps samples up to copied"):
        feeder = Feeder(pipeline, cache="memory")
    with feeder:
        assert read(attach(feeder.address, pipeline, 8, range(2)), JOB) == read(pipeline.loader(8, range(2)), JOB)
        assert feeder.stats()["cache"]["samples"] == N and feeder.stats()["bad"] == {}


@pytest.mark.parametrize("is_cut", [True, False])
def test_where_a_later_sample_is_of_a_class_of_its_own_the_others_are_kept_or_shared(is_cut: bool) -> None:
    begun = numbers().map(late_halved)
    whole = begun.map(weighed if is_cut else drawn)
    options: dict[str, Any] = {} if is_cut else {"cache": "memory"}
    with Feeder(begun if is_cut else whole, capacity=16, **options) as feeder:
        loader = attach(feeder.address, whole, 8, range(2))
        assert read(loader, JOB) == read(whole.loader(8, range(2)), JOB)
        assert loader.stats()["private_batches"] == 0
        assert is_cut or feeder.stats()["cache"]["samples"] == N * 3 // 4


def test_no_pipeline_is_cut_behind_a_sample_of_a_class_of_its_own() -> None:
    begun = numbers().map(copied).map(Halved)
    with pytest.warns(UserWarning, match=r"only the stages up to copied .* the sample is Halved, not a plain"):
        assert len(find_shared_stages([begun.map(weighed), begun.map(drawn)]).stages) == 1
    with Feeder(begun) as feeder:
        with pytest.warns(UserWarning, match=r"working alone: .*not a plain dict"):
            loader = attach(feeder.address, begun.map(weighed), 8, range(1))
        assert len(list(loader)) == N // 8
