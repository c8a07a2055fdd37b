"""The stage for tables: against scikit-learn's own transform, what it reads, what it refuses."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    PowerTransformer,
    RobustScaler,
    StandardScaler,
)

from pipelines import Pipeline, PipelineError, sources, stages
from pipelines.stages.records import as_record, from_record

CSV = """area,rooms,city,heating,sold,price
50,2,Paris,1,true,300
80.5,,Lyon,2,false,250
,4,Paris,3,true,500
120,5,Nice,1,false,600
65,3,Lyon,2,true,280
"""


@pytest.fixture
def homes(tmp_path: Path) -> Any:
    (tmp_path / "homes.csv").write_text(CSV)
    return sources.csv(str(tmp_path / "homes.csv"), missing="nan")


def test_missing_numbers_are_nan_where_that_is_asked_for(homes: Any, tmp_path: Path) -> None:
    assert (homes.types["rooms"], homes.types["heating"], homes.types["area"]) == ("float64", "int64", "float64")
    assert np.isnan(homes[1]["rooms"]) and np.isnan(homes[2]["area"]) and homes[0]["rooms"] == 2.0
    with pytest.raises(PipelineError, match="column 'rooms' has no value"):
        sources.csv(str(tmp_path / "homes.csv"))[1]
    with pytest.raises(PipelineError, match="missing must be 'error' or 'nan', got 'drop'"):
        sources.csv(str(tmp_path / "homes.csv"), missing="drop")  # type: ignore[arg-type]


def test_unless_told_otherwise_numbers_are_imputed_and_scaled_and_texts_are_one_hot(homes: Any) -> None:
    table = stages.fit(homes, target="price")
    assert table.names == (
        "area",
        "rooms",
        "heating",
        "city=Lyon",
        "city=Nice",
        "city=Paris",
        "sold=false",
        "sold=true",
    )
    made = np.stack([table(homes[row])["x"] for row in range(5)])
    assert made.dtype == np.float32 and table.size == 8
    np.testing.assert_allclose(made[:, :3].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(made[:, :3].std(axis=0), 1, atol=1e-6)
    assert (made[:, 3:6].sum(axis=1) == 1).all()
    assert set(table(homes[0])) == {"price", "x"}, "the target stays, what was read does not"
    median = (np.median([50, 80.5, 120, 65]) - np.mean([50, 80.5, 72.75, 120, 65])) / made[:, 0].std()
    assert made[2, 0] == pytest.approx(table({**homes[2], "area": "72.75"})["x"][0]) and np.isfinite(median)


def test_categories_are_the_same_however_they_were_read(homes: Any) -> None:
    table = stages.fit(homes, numbers=["area"], categories=["heating", "sold"])
    own = table(homes[1])["x"]
    for same in ({"heating": 2.0, "sold": "False"}, {"heating": "2", "sold": np.bool_(False)}):
        np.testing.assert_array_equal(table({**homes[1], **same})["x"], own)
    unknown = table({**homes[1], "heating": 9, "sold": None})["x"]
    assert not unknown[1:].any()


FEW = st.floats(-100, 100, width=32)
STEPS = {
    "standard": StandardScaler(),
    "min_max": MinMaxScaler((-1, 1)),
    "robust": RobustScaler(),
    "max_abs": MaxAbsScaler(),
    "imputed": make_pipeline(SimpleImputer(strategy="mean", add_indicator=True), StandardScaler()),
    "as_is": "passthrough",
}


@given(
    a=st.lists(FEW, min_size=6, max_size=12),
    missing=st.sets(st.integers(0, 4)),
    step=st.sampled_from(sorted(STEPS)),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_numbers_are_made_as_by_the_transformer(a: list[float], missing: set[int], step: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = {"a": np.array(a), "b": rng.normal(size=len(a)), "c": rng.choice(["x", "y", "z"], len(a))}
    if step == "imputed":
        columns["a"][list(missing)] = np.nan
    table = sources.arrays(**columns)
    pandas = pytest.importorskip("pandas")
    transformer = ColumnTransformer(
        [
            ("n", STEPS[step], ["b", "a"]),
            ("o", OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1), ["c"]),
            ("h", OneHotEncoder(), ["c"]),
        ][: 3 if seed % 2 else 1]
    )
    frame = pandas.DataFrame(columns)
    fitted = transformer.fit(frame)
    wanted = np.asarray(fitted.transform(frame), np.float64)
    for given_ in (transformer, fitted):
        stage = stages.fit(table, given_)
        made = np.stack([stage(table[row])["x"] for row in range(len(a))])
        np.testing.assert_allclose(made, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("transformer", "said"),
    [
        (StandardScaler(), "a transformer is a ColumnTransformer, got StandardScaler"),
        (ColumnTransformer([("n", PowerTransformer(), ["area"])]), "the step PowerTransformer is not known here"),
        (
            ColumnTransformer([("n", OneHotEncoder(drop="first"), ["city"])]),
            "drop=, min_frequency=, max_categories=",
        ),
        (ColumnTransformer([("n", StandardScaler(), [0])]), "must have its columns by name"),
        (ColumnTransformer([("n", StandardScaler(), ["area", "price"])]), "'price' is a target, and no input"),
        (ColumnTransformer([("n", MinMaxScaler(clip=True), ["rooms"])]), "clip=True"),
        (
            ColumnTransformer([("n", StandardScaler(), ["city"])]),
            "column 'city' holds 'Paris', which is no number",
        ),
        (
            ColumnTransformer([("n", StandardScaler(), ["rooms"])], remainder="passthrough"),
            "give all columns by name",
        ),
    ],
)
def test_what_cannot_be_told_in_plain_values_is_refused(homes: Any, transformer: Any, said: str) -> None:
    with pytest.raises(PipelineError, match=said):
        stages.fit(homes, transformer, target="price")


def test_it_is_plain_values_and_part_of_the_fingerprint(homes: Any) -> None:
    table = stages.fit(homes, target="price")
    record = json.loads(json.dumps(as_record(table)))
    assert from_record(record) == table and pickle.loads(pickle.dumps(table)) == table
    other = stages.fit(homes.take(4), target="price")
    one, same, another = (Pipeline(homes).map(each).fingerprint for each in (table, from_record(record), other))
    assert one == same != another


def test_an_unknown_category_is_an_error_where_that_is_asked_for(homes: Any) -> None:
    table = stages.fit(homes, ColumnTransformer([("c", OneHotEncoder(handle_unknown="error"), ["city"])]))
    with pytest.raises(PipelineError, match="column 'city' holds 'Rome', which the training records do not have"):
        table({**homes[0], "city": "Rome"})


def test_a_column_without_any_value_and_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b\n,1\n,2\n")
    source = sources.csv(str(tmp_path / "t.csv"), {"a": "float64", "b": "int64"}, missing="nan")
    with pytest.raises(PipelineError, match="'a' has no value at all"):
        stages.fit(source, numbers=["a", "b"])
    with pytest.raises(PipelineError, match="'c'"):
        stages.fit(source, numbers=["c"])


def test_mean_and_deviation_are_of_what_is_known(homes: Any) -> None:
    mean, deviation = stages.mean_std(homes, "rooms")
    assert (mean, deviation) == (pytest.approx(3.5), pytest.approx(np.std([2, 4, 5, 3])))
    for wrong in ("city", "nothing"):
        with pytest.raises(PipelineError):
            stages.mean_std(homes, wrong)


def test_a_column_means_the_same_whatever_type_a_file_gives_it(tmp_path: Path) -> None:
    """What was text for the sake of one value, or of a blank, may look like numbers in another file."""
    (tmp_path / "t.csv").write_text("own,size,n\ntrue,1.50,1\nfalse,XL,2\n,2.0,1\n")
    table = stages.fit(sources.csv(str(tmp_path / "t.csv"), missing="nan"), categories=["own", "size", "n"])
    assert table.names[:3] == ("own=false", "own=true", "own=missing") and table.texts == {"own", "size"}
    one = table({"own": np.bool_(True), "size": "1.50", "n": 1.0})["x"]
    np.testing.assert_array_equal(one, table({"own": "true", "size": "1.50", "n": "1"})["x"])
    missing = [table({"own": value, "size": "2.0", "n": 1})["x"] for value in (None, "", " ", float("nan"))]
    assert all((each == missing[0]).all() and each[2] == 1 for each in missing)


def test_a_missing_number_that_nothing_imputes_and_a_name_that_is_taken_are_refused(homes: Any) -> None:
    table = stages.fit(homes.take(1), ColumnTransformer([("n", MaxAbsScaler(), ["area"])]))
    with pytest.raises(PipelineError, match="area has no value, and none is imputed"):
        table({**homes[0], "area": "NA"})
    for taken in ("price", "city"):
        with pytest.raises(PipelineError, match=f"have a field '{taken}' already"):
            stages.fit(homes, target="price", numbers=["area"], to=taken)
