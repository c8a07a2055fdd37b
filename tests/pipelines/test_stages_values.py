"""Stages on values and tables, and their twins in models."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from pipelines import Pipeline, sources, stages
from pipelines.errors import PipelineError
from pipelines.stages.records import as_record, from_record

VOCABULARY = ("the", "film", "don't", "is")


def test_words_become_their_position_plus_two_and_a_vocabulary_has_the_most_frequent_ones() -> None:
    sample = {"text": "The FILM isn't; don't-the größe!", "label": 1}
    result = stages.tokenize("text", VOCABULARY)(sample)
    assert result["text"].tolist() == [2, 3, 1, 4, 2, 1]
    assert result["text"].dtype == np.int64 and result["label"] == 1 and sample["text"].startswith("The FILM")
    assert stages.tokenize("t", VOCABULARY, unknown=9, lowercase=False)({"t": "The film"})["t"].tolist() == [9, 3]
    assert stages.tokenize("t", VOCABULARY)({"t": b"the film"})["t"].tolist() == [2, 3]
    empty = stages.tokenize("t", VOCABULARY)({"t": "..."})["t"]
    assert (empty.shape, empty.dtype) == ((0,), np.int64)
    texts = ["b b B a", "a c", "d"]
    assert stages.build_vocabulary(texts, 3) == ("b", "a", "c")
    assert stages.build_vocabulary(iter(texts), 100, lowercase=False) == ("a", "b", "B", "c", "d")


@given(st.lists(st.text(max_size=30), min_size=1, max_size=8))
def test_with_the_texts_own_vocabulary_no_word_is_unknown(texts: list[str]) -> None:
    if vocabulary := stages.build_vocabulary(texts, 1000):
        stage = stages.tokenize("t", vocabulary)
        assert all((stage({"t": text})["t"] >= 2).all() for text in texts)


@given(st.integers(0, 20), st.integers(1, 20), st.lists(st.integers(1, 3), max_size=2), st.data())
def test_pad_brings_any_axis_to_its_length(n: int, length: int, others: list[int], data: st.DataObject) -> None:
    value, side = data.draw(st.integers(-5, 5)), data.draw(st.sampled_from(["end", "start"]))
    truncate: Any = data.draw(st.sampled_from(["end", "start", None]))
    at = data.draw(st.integers(0, len(others)))
    axis = data.draw(st.sampled_from([at, at - len(others) - 1]))
    shape = [*others[:at], n, *others[at:]]
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    before = array.copy()
    stage = stages.pad("x", length, value, "n", mask="own", axis=axis, side=side, truncate=truncate)
    if n > length and truncate is None:
        with pytest.raises(PipelineError, match=rf"'x' has {n} entries, more than length={length}: .*truncate="):
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


def test_cast_converts() -> None:
    pairs: list[Any] = [(np.array([1.0, 2.0]), np.array([1, 2], "i4")), (7, np.float32(7)), (b"12", np.int64(12))]
    pairs += [("1.5", np.float32(1.5)), (b" 9007199254740993\n", np.int64(9007199254740993))]
    for value, expected in (*pairs, ([1, 0], np.array([True, False]))):
        result = stages.cast("x", str(expected.dtype))({"x": value, "y": 0})
        assert result["y"] == 0
        np.testing.assert_array_equal(np.asarray(result["x"]), np.asarray(expected), strict=True)


def test_fields_are_selected_dropped_and_renamed() -> None:
    sample = {"a": 1, "b": 2, "c": 3}
    assert list(stages.select("c", "a")(sample).items()) == [("c", 3), ("a", 1)]
    assert stages.drop("b")(sample) == {"a": 1, "c": 3}
    assert stages.rename(a="b", b="a")(sample) == {"b": 1, "a": 2, "c": 3} and list(sample) == ["a", "b", "c"]


SAMPLE = {"image": np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8), "text": "the film", "x": np.arange(4)}


def make_all() -> list[Any]:
    of_images = [stages.decode_jpeg("image", min_size=8), stages.decode_image("image", "GRAY")]
    of_images += [stages.resize("image", size=(4, 4)), stages.resize("image", shorter=256, interpolation="area")]
    of_images += [stages.center_crop("image", 4), stages.random_crop("image", size=8, padding=4)]
    of_images += [stages.random_resized_crop("image", 4), stages.random_flip("image")]
    of_images += [stages.scale("image", mean=[0.5, 0.4, 0.3], std=0.2)]
    of_values = [stages.tokenize("text", list(VOCABULARY)), stages.pad("x", 6, lengths="n"), stages.drop("x")]
    of_values += [stages.pad("x", 3, mask="m", axis=-1, side="start", truncate="end"), stages.rename(x="y")]
    return [*of_images, *of_values, stages.select("image", "x"), stages.cast("x", np.float32)]  # type: ignore[arg-type]


def is_plain(value: Any) -> bool:
    return (
        all(map(is_plain, value))
        if isinstance(value, tuple)
        else type(value) in (str, int, float, bool, type(None))
    )


@pytest.mark.parametrize(("stage", "other"), list(zip(make_all(), make_all(), strict=True)))
def test_a_stage_is_plain_values_that_are_the_same_after_pickle_and_json(stage: Any, other: Any) -> None:
    is_random = type(stage).__name__.startswith("Random")
    assert list(inspect.signature(stage).parameters) == (["sample", "rng"] if is_random else ["sample"])

    def apply(stage: Any) -> dict[str, bytes]:
        sample = stage(SAMPLE, *((np.random.default_rng(0),) if is_random else ()))
        return {name: np.asarray(value).tobytes() for name, value in sample.items()}

    first = None if "Decode" in type(stage).__name__ else apply(stage)  # which may derive things from its values
    copy = pickle.loads(cloudpickle.dumps(stage))
    assert copy == stage == other and hash(copy) == hash(stage)
    assert set(vars(copy)) == {f.name for f in dataclasses.fields(stage)}
    assert all(is_plain(getattr(stage, f.name)) for f in dataclasses.fields(stage))
    assert first is None or apply(copy) == first
    assert (as_record(stage) is None) == is_random and as_record(lambda sample: sample) is None
    for other in () if is_random else (stage, stages.pad("x", np.int64(9), value=np.float32(0.5), mask="m")):
        record = json.loads(json.dumps(as_record(other)))
        assert from_record(record) == other and record["stage"] in stages.__all__


@pytest.fixture
def homes(tmp_path: Path) -> Any:
    rows = "50,2,Paris,1,true,300 80.5,,Lyon,2,false,250 ,4,Paris,3,true,500 120,5,Nice,1,false,600"
    text = f"area,rooms,city,heating,sold,price {rows} 65,3,Lyon,2,true,280"
    (tmp_path / "homes.csv").write_text(text.replace(" ", "\n"))
    return sources.csv(str(tmp_path / "homes.csv"), missing="nan")


def test_missing_numbers_are_nan_and_no_part_of_mean_and_deviation(homes: Any) -> None:
    assert (homes.types["rooms"], homes.types["heating"], homes.types["area"]) == ("float64", "int64", "float64")
    assert np.isnan(homes[1]["rooms"]) and np.isnan(homes[2]["area"]) and homes[0]["rooms"] == 2.0
    assert stages.mean_std(homes, "rooms") == (pytest.approx(3.5), pytest.approx(np.std([2, 4, 5, 3])))


def test_unless_told_otherwise_numbers_are_imputed_and_scaled_and_texts_are_one_hot(homes: Any) -> None:
    table = stages.fit(homes, target="price")
    categories = ["city=Lyon", "city=Nice", "city=Paris", "sold=false", "sold=true"]
    assert table.names == ("area", "rooms", "heating", *categories)
    x = np.stack([table(homes[row])["x"] for row in range(5)])
    assert x.dtype == np.float32 and table.size == 8
    np.testing.assert_allclose(x[:, :3].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(x[:, :3].std(axis=0), 1, atol=1e-6)
    assert (x[:, 3:6].sum(axis=1) == 1).all()
    assert set(table(homes[0])) == {"price", "x"}, "the target stays, what was read does not"
    assert x[2, 0] == pytest.approx(table({**homes[2], "area": "72.75"})["x"][0]), "the median"
    same = from_record(json.loads(json.dumps(as_record(table))))
    assert same == table == pickle.loads(pickle.dumps(table))
    prints = [Pipeline(homes).map(s).fingerprint for s in (table, same, stages.fit(homes.take(4), target="price"))]
    assert prints[0] == prints[1] != prints[2]


def test_categories_are_the_same_however_they_were_read(homes: Any) -> None:
    table = stages.fit(homes, numbers=["area"], categories=["heating", "sold"])
    own = table(homes[1])["x"]
    for same in ({"heating": 2.0, "sold": "False"}, {"heating": "2", "sold": np.bool_(False)}):
        np.testing.assert_array_equal(table({**homes[1], **same})["x"], own)
    unknown = table({**homes[1], "heating": 9, "sold": None})["x"]
    assert not unknown[1:].any()


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=6, max_size=12),
    st.sets(st.integers(0, 4)),
    st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_numbers_are_made_as_by_scikit_learn(a: list[float], missing: set[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = {"a": np.array(a), "b": rng.normal(size=len(a)), "c": rng.choice(["x", "y", "z"], len(a))}
    columns["a"][list(missing)] = np.nan
    table = sources.arrays(**columns)
    pandas = pytest.importorskip("pandas")
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    transformer = ColumnTransformer([("n", numbers, ["b", "a"]), ("h", OneHotEncoder(), ["c"])])
    wanted = np.asarray(transformer.fit_transform(pandas.DataFrame(columns)), np.float64)
    stage = stages.fit(table, numbers=["b", "a"], categories=["c"])
    made = np.stack([stage(table[row])["x"] for row in range(len(a))])
    np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)


def test_a_column_means_the_same_whatever_type_a_file_gives_it(tmp_path: Path) -> None:
    """What was text for the sake of one value, or of a blank, may look like numbers in another file."""
    (tmp_path / "t.csv").write_text("own,size,n\ntrue,1.50,1\nfalse,XL,2\n,2.0,1\n")
    table = stages.fit(sources.csv(str(tmp_path / "t.csv"), missing="nan"), categories=["own", "size", "n"])
    assert table.names[:3] == ("own=false", "own=true", "own=missing") and table.texts == {"own", "size"}
    one = table({"own": np.bool_(True), "size": "1.50", "n": 1.0})["x"]
    np.testing.assert_array_equal(one, table({"own": "true", "size": "1.50", "n": "1"})["x"])
    missing = [table({"own": value, "size": "2.0", "n": 1})["x"] for value in (None, "", " ", float("nan"))]
    assert all((each == missing[0]).all() and each[2] == 1 for each in missing)


DTYPES = ("uint8", "uint16", "int16", "int64", "float32", "float64")


def images(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Images [b, C, H, W]; where there is room all values of uint8 are among them."""
    rng = np.random.default_rng(seed)
    if dtype == "uint8":
        return np.resize(np.arange(256, dtype=np.uint8), shape)
    if dtype.startswith("float"):
        return rng.random(shape).astype(dtype)
    return rng.integers(0, 30_000, shape).astype(dtype)


def check_twin(stage: Any, batch: dict[str, np.ndarray[Any, Any]]) -> None:
    """The twin gives for the batch what the stage gives for each of its samples, bit for bit."""
    count = len(next(iter(batch.values())))
    wanted = [stage({name: value[i] for name, value in batch.items()}) for i in range(count)]
    found = stage.as_module()({name: torch.from_numpy(value) for name, value in batch.items()})
    assert list(found) == list(wanted[0])
    for name, value in found.items():
        whole = np.stack([sample[name] for sample in wanted])
        assert (value.numpy().dtype, value.numpy().shape) == (whole.dtype, whole.shape)
        assert value.numpy().tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64", "bool"])
@pytest.mark.parametrize("to", ["float16", "float32", "float64"])
def test_the_twin_of_scale_rounds_as_it_does(dtype: str, to: str) -> None:
    stage = stages.scale("image", mean=(0.491, 0.482, 0.447), std=(0.247, 0.244, 0.262), dtype=to)
    check_twin(stage, {"image": images(dtype, (3, 3, 17, 19))})
    check_twin(stages.scale("image", 0.1307, 0.3081, to), {"image": images(dtype, (2, 5, 8, 8))})
    large = np.ascontiguousarray(images(dtype, (2, 96, 128, 3))).transpose(0, 3, 1, 2)  # which OpenCV parts
    check_twin(stages.scale("image", 0.3, 0.7, to), {"image": large})


@given(mean=st.floats(-3, 1), std=st.floats(1e-3, 10), size=st.integers(5, 13), dtype=st.sampled_from(DTYPES))
def test_twins_of_scale_and_center_crop_are_bitwise_equal(mean: float, std: float, size: int, dtype: str) -> None:
    check_twin(stages.scale("image", mean, std), {"image": images("float32", (1, 2, 5, 7), size)})
    check_twin(stages.center_crop("image", (4, 5)), {"image": images(dtype, (2, 3, 17 - size, size))})


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "int8"])
def test_the_twin_of_cast_rounds_as_it_does_and_others_say_that_they_have_none(dtype: str) -> None:
    values = np.array([[0, 1, 3], [2**24, 2**53, 7]]).astype(dtype)
    for to in ("float32", "float64"):
        check_twin(stages.cast("x", to), {"x": values, "y": values})
    none: list[Any] = [stages.random_flip("image"), stages.resize("image", 4), stages.decode_jpeg("image")]
    none += [stages.cast("x", to) for to in ("uint8", "int64", "bool", "float16")]  # which torch may do otherwise
    for stage in (*none, Halved("image", (0.0,), (1.0,), "float32")):
        assert stage.as_module() is None


def test_the_twins_of_select_drop_and_rename_keep_the_same_fields() -> None:
    batch = {"c": torch.ones(2)}  # others may lack the fields
    for stage, kept in ((stages.select("b", "a"), {}), (stages.drop("b"), batch), (stages.rename(a="z"), batch)):
        check_twin(stage, {"a": np.arange(3.0), "b": np.arange(6).reshape(3, 2), "c": np.ones(3, bool)})
        assert stage.as_module()(batch) == kept


class Halved(type(stages.scale("image"))):  # type: ignore[misc]
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, self.field: super().__call__(sample)[self.field] / 2}
