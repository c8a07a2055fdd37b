"""Stages on texts, numbers and fields; and what makes two stages the same."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import stages
from pipelines.errors import PipelineError

VOCABULARY = ("the", "film", "don't", "is")


def test_words_become_their_position_plus_two() -> None:
    sample = {"text": "The FILM isn't; don't-the größe!", "label": 1}
    result = stages.tokenize("text", VOCABULARY)(sample)
    assert result["text"].tolist() == [2, 3, 1, 4, 2, 1]
    assert result["text"].dtype == np.int64 and result["label"] == 1
    assert sample["text"].startswith("The FILM")


def test_case_unknown_words_and_bytes() -> None:
    assert stages.tokenize("t", VOCABULARY, unknown=9, lowercase=False)({"t": "The film"})["t"].tolist() == [9, 3]
    assert stages.tokenize("t", VOCABULARY)({"t": b"the film"})["t"].tolist() == [2, 3]
    empty = stages.tokenize("t", VOCABULARY)({"t": "..."})["t"]
    assert (empty.shape, empty.dtype) == ((0,), np.int64)


def test_what_is_no_text_is_refused_by_its_field() -> None:
    with pytest.raises(PipelineError, match="field 't' holds int, not a text"):
        stages.tokenize("t", VOCABULARY)({"t": 5})
    with pytest.raises(PipelineError, match="field 't' holds bytes that are not UTF-8"):
        stages.tokenize("t", VOCABULARY)({"t": b"\xff\xfe"})


def test_the_vocabulary_has_the_most_frequent_words_ties_by_name() -> None:
    texts = ["b b B a", "a c", "d"]
    assert stages.build_vocabulary(texts, 3) == ("b", "a", "c")
    assert stages.build_vocabulary(iter(texts), 100, lowercase=False) == ("a", "b", "B", "c", "d")


@given(st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_with_the_texts_own_vocabulary_no_word_is_unknown(texts: list[str]) -> None:
    vocabulary = stages.build_vocabulary(texts, 1000)
    if vocabulary:
        stage = stages.tokenize("t", vocabulary)
        assert all((stage({"t": text})["t"] >= 2).all() for text in texts)


@given(
    n=st.integers(0, 20),
    length=st.integers(1, 20),
    others=st.lists(st.integers(1, 3), max_size=2),
    value=st.integers(-5, 5),
    side=st.sampled_from(["end", "start"]),
    truncate=st.sampled_from(["end", "start", None]),
    data=st.data(),
)
def test_pad_brings_any_axis_to_its_length(
    n: int, length: int, others: list[int], value: int, side: Any, truncate: Any, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(others)))
    axis = data.draw(st.sampled_from([at, at - len(others) - 1]))
    shape = [*others[:at], n, *others[at:]]
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    before = array.copy()
    stage = stages.pad("x", length, value, "n", mask="own", axis=axis, side=side, truncate=truncate)
    if n > length and truncate is None:
        with pytest.raises(
            PipelineError, match=rf"field 'x' has {n} entries, more than length={length}: .*truncate="
        ):
            stage({"x": array})
        return
    result = stage({"x": array})
    padded, entries = np.moveaxis(result["x"], at, 0), np.moveaxis(array, at, 0)
    kept = min(n, length)
    assert result["x"].dtype == np.int32 and padded.shape == (length, *others)
    assert result["n"] == kept and result["n"].dtype == np.int64
    assert result["own"].dtype == bool and result["own"].shape == (length,)
    wanted = entries[n - kept :] if truncate == "start" else entries[:kept]
    np.testing.assert_array_equal(padded[result["own"]], wanted)
    assert (padded[~result["own"]] == value).all() and result["own"].sum() == kept
    whole = padded[length - kept :] if side == "start" else padded[:kept]
    np.testing.assert_array_equal(whole, wanted)
    np.testing.assert_array_equal(array, before)


def test_pad_refuses_what_has_no_length_and_a_name_that_is_taken() -> None:
    assert list(stages.pad("x", 3)({"x": np.ones(2)})) == ["x"]
    with pytest.raises(PipelineError, match=r"field 'x' .* has no length"):
        stages.pad("x", 3)({"x": np.float32(1)})
    with pytest.raises(PipelineError, match=r"field 'x' .* has no length"):
        stages.pad("x", 3)({"x": "text"})
    with pytest.raises(PipelineError, match="has a field 'n' already"):
        stages.pad("x", 3, lengths="n")({"x": np.ones(2), "n": 1})
    with pytest.raises(PipelineError, match="has a field 'm' already"):
        stages.pad("x", 3, mask="m")({"x": np.ones(2), "m": 1})
    with pytest.raises(PipelineError, match=r"float64\[2\], which has no length along axis 1"):
        stages.pad("x", 3, axis=1)({"x": np.ones(2)})


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (np.array([1.9, 2.1]), "int32", np.array([1, 2], np.int32)),
        (7, "float32", np.float32(7)),
        (np.int64(300), "int16", np.int16(300)),
        (b"12", "int64", np.int64(12)),
        ("1.5", "float32", np.float32(1.5)),
        (b" 9007199254740993\n", "int64", np.int64(9007199254740993)),
        ([1, 2], "bool", np.array([True, True])),
    ],
)
def test_cast_converts(value: Any, dtype: str, expected: Any) -> None:
    result = stages.cast("x", dtype)({"x": value, "y": 0})
    assert result["y"] == 0 and result["x"].dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result["x"], expected)


def test_cast_names_a_text_that_is_no_number() -> None:
    with pytest.raises(PipelineError, match="field 'x' holds 'seven', not a number"):
        stages.cast("x", "int64")({"x": b"seven"})


def test_fields_are_selected_dropped_and_renamed() -> None:
    sample = {"a": 1, "b": 2, "c": 3}
    assert list(stages.select("c", "a")(sample).items()) == [("c", 3), ("a", 1)]
    assert stages.drop("b")(sample) == {"a": 1, "c": 3}
    assert stages.rename(a="x", c="y")(sample) == {"x": 1, "b": 2, "y": 3}
    assert stages.rename(a="b", b="a")(sample) == {"b": 1, "a": 2, "c": 3}
    assert sample == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize(
    "stage",
    [
        stages.select("a", "z"),
        stages.drop("z"),
        stages.rename(z="y"),
        stages.cast("z", "int64"),
        stages.pad("z", 4),
        stages.tokenize("z", VOCABULARY),
        stages.decode_jpeg("z"),
        stages.decode_image("z"),
    ],
    ids=lambda stage: type(stage).__name__,
)
def test_a_missing_field_is_named_with_those_there_are(stage: Any) -> None:
    with pytest.raises(PipelineError, match=r"no field 'z' \(the sample has: a, b\)"):
        stage({"a": 1, "b": 2})


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(PipelineError, match="cannot rename to 'b'"):
        stages.rename(a="b")({"a": 1, "b": 2})


@pytest.mark.parametrize(
    "make",
    [
        lambda: stages.tokenize("t", ()),
        lambda: stages.tokenize("t", "words"),
        lambda: stages.tokenize("t", ("a", "a")),
        lambda: stages.build_vocabulary("one text", 5),
        lambda: stages.build_vocabulary(["a"], 0),
        lambda: stages.pad("x", 0),
        lambda: stages.pad("x", True),
        lambda: stages.pad("x", 3, axis=0.5),  # type: ignore[arg-type]
        lambda: stages.pad("x", 3, side="left"),  # type: ignore[arg-type]
        lambda: stages.pad("x", 3, truncate=True),  # type: ignore[arg-type]
        lambda: stages.pad("x", 3, lengths="n", mask="n"),
        lambda: stages.cast("x", "no such"),
        lambda: stages.cast("x", "datetime64[s]"),
        lambda: stages.select(),
        lambda: stages.drop(),
        lambda: stages.rename(),
        lambda: stages.rename(a="x", b="x"),
    ],
)
def test_impossible_arguments_are_refused_when_the_stage_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(PipelineError):
        make()


SAMPLE = {"image": np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8), "text": "the film", "x": np.arange(4)}
ALL: list[tuple[Callable[[], Any], bool]] = [
    (lambda: stages.decode_jpeg("image", min_size=8), False),
    (lambda: stages.decode_image("image"), False),
    (lambda: stages.resize("image", size=(4, 4)), False),
    (lambda: stages.center_crop("image", 4), False),
    (lambda: stages.random_crop("image", size=8, padding=4), True),
    (lambda: stages.random_resized_crop("image", 4), True),
    (lambda: stages.random_flip("image"), True),
    (lambda: stages.scale("image", mean=[0.5, 0.4, 0.3], std=0.2), False),
    (lambda: stages.tokenize("text", list(VOCABULARY)), False),
    (lambda: stages.pad("x", 6, lengths="n"), False),
    (lambda: stages.pad("x", 3, mask="m", axis=-1, side="start", truncate="end"), False),
    (lambda: stages.select("image", "x"), False),
    (lambda: stages.drop("x"), False),
    (lambda: stages.rename(x="y"), False),
    (lambda: stages.cast("x", np.float32), False),  # type: ignore[arg-type]
]


def plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


@pytest.mark.parametrize(("make", "random"), ALL)
def test_a_stage_is_a_plain_value_that_pickles(make: Callable[[], Any], random: bool) -> None:
    stage = make()
    arguments = (np.random.default_rng(0),) if random else ()
    decodes = "Decode" in type(stage).__name__
    first = None if decodes else stage(SAMPLE, *arguments)  # which may derive things from its values
    copy = pickle.loads(cloudpickle.dumps(stage))
    assert copy == stage == make() and hash(copy) == hash(stage)
    assert set(vars(copy)) == {f.name for f in dataclasses.fields(stage)}
    assert all(plain(getattr(stage, f.name)) for f in dataclasses.fields(stage))
    assert list(inspect.signature(stage).parameters) == (["sample", "rng"] if random else ["sample"])
    if first is not None:
        again = copy(SAMPLE, *((np.random.default_rng(0),) if random else ()))
        assert {k: np.asarray(v).tobytes() for k, v in again.items()} == {
            k: np.asarray(v).tobytes() for k, v in first.items()
        }


@pytest.mark.parametrize("shape", [(200, 3, 3), (12, 1000, 1), (8, 4, 4)])
def test_an_image_of_many_channels_may_be_small_or_a_signal(shape: tuple[int, int, int]) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    flipped = stages.random_flip("image", p=1.0)({"image": values}, np.random.default_rng(0))
    assert (flipped["image"] == values[..., ::-1]).all()
