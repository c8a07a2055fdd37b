"""stages.fit(): what each column of a table becomes and is said to be, and what has to be declared."""

from __future__ import annotations

import datetime
import decimal
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import SampleError, sources, stages
from pipelines.errors import PipelineError
from pipelines.sources._classes import list_classes

ROWS = 60


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    def make(column: Callable[[int], str], name: str = "a", **options: Any) -> Any:
        rows = "".join(f"{column(row)}\t{row % 7 / 2}\t{row % 2}\n" for row in range(ROWS))
        (tmp_path / "t.csv").write_text(f"\ufeff{name}\tb\ty\n{rows}", encoding="utf-8")
        return sources.csv(str(tmp_path / "t.csv"), delimiter="\t", **options)

    return make


REFUSED: dict[str, tuple[Callable[[int], str], str, list[str]]] = {
    "ids": (lambda row: f"user-{row}", "a", ["user-0", "user-1"]),
    "tickets": (lambda row: f"T {row % 45}", "a", ["T 0"]),
    "an index": (lambda row: str(row), "", ["0, 1, 2"]),
    "a shuffled index": (lambda row: str(row * 7 % ROWS), "Unnamed: 0", ["0, 7, 14"]),
    "counted rows": (lambda row: str(row + 1001), "key", ["1001"]),
    "large integers": (lambda row: str(2**60 + row * row), "a", ["2**53"]),
    "a question mark": (lambda row: "?" if row == 40 else f"{row / 8}", "a", ["record 41", "'?'"]),
    "per cent": (lambda row: f"{row}%", "a", ["record 1", "'0%'"]),
    "money": (lambda row: f"${row}.50", "a", ["'$0.50'"]),
    "thousands": (lambda row: "1,234.50" if row == 9 else f"{row}.5", "a", ["'1,234.50'", "thousands="]),
    "a decimal comma": (lambda row: f"{row % 5},5", "a", ["'0,5'", "decimal="]),
    "pluses": (lambda row: f"+{row % 5}.5", "a", ["'+0.5'"]),
    "words among numbers": (lambda row: "unknown" if row % 3 else f"{row}.5", "a", ["'unknown'"]),
    "dates": (lambda row: f"2024-01-{row % 5 + 1:02}", "a", ["2024-01-01", "dates"]),
    "European dates": (lambda row: f"{row % 5 + 1}.12.2024", "a", ["dates"]),
    "nothing": (lambda row: "", "a", ["no value"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_column_of_which_it_cannot_be_seen_what_it_is_is_refused_with_the_ways_out(
    name: str, make: Callable[..., Any]
) -> None:
    column, called, words = REFUSED[name]
    source = make(column, called)
    with pytest.raises(PipelineError) as refused:
        stages.fit(source, target="y")
    assert all(word in str(refused.value) for word in [*words, repr(called), "drop=", "categories=", "numbers="])
    assert stages.fit(source, target="y", drop=called).names == ("b",)
    declared = stages.fit(source, target="y", categories=called, drop=[])
    assert declared.names[0] == "b" and set(declared(source[0])) == {"x", "y"}


SEEN: dict[str, tuple[Callable[[int], str], str]] = {
    "zip codes": (lambda row: f"0{row % 5}123", "category, 5 numbers"),
    "yes and no": (lambda row: "yes" if row % 3 else "no", "category, 2 numbers"),
    "booleans": (lambda row: "true" if row % 3 else "false", "category, 2 numbers"),
    "numbers": (lambda row: f"{row % 9}.5", "number"),
    "a constant": (lambda row: "1", "number, constant"),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_each_column_became_is_printed_once_and_shown(
    name: str, make: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    column, kind = SEEN[name]
    table = stages.fit(make(column), target="y")
    printed = capsys.readouterr().out
    assert printed.count("columns of the table") == 1 and printed == f"{table}\n" == f"{table!r}\n"
    rows = {line.split()[0]: line for line in printed.splitlines()[2:]}
    assert kind in rows["a"] and "target" in rows["y"] and rows["b"].split() == ["b", "number", "7", "0"]
    assert str(pickle.loads(pickle.dumps(table))) == str(table)
    assert "no target=" in str(stages.fit(make(column)))


def test_the_record_that_spoils_a_column_is_named_wherever_it_lies(make: Callable[..., Any]) -> None:
    train, _ = make(lambda row: "?" if row == 59 else f"{row / 8}").split(0.5, by=np.arange(ROWS))
    with pytest.raises(PipelineError, match=r"record 60 has '\?'"):
        stages.fit(train, target="y")


def test_columns_that_are_named_are_all_unless_others_are_dropped(make: Callable[..., Any]) -> None:
    source = make(lambda row: str(row % 3))
    assert stages.fit(source, categories=["a"]).names == ("a=0", "a=1", "a=2")
    assert stages.fit(source, categories="a", drop=["y"]).names == ("b", "a=0", "a=1", "a=2")
    with pytest.raises(PipelineError, match="'a' is dropped"):
        stages.fit(source, categories="a", drop="a")
    with pytest.raises(PipelineError, match="no column 'c'"):
        stages.fit(source, drop="c")


def test_dates_are_times_where_they_are_declared_as_numbers_and_a_split_is_by_them(
    make: Callable[..., Any],
) -> None:
    source = make(lambda row: f"2024-01-{row % 28 + 1:02}")
    table = stages.fit(source, numbers="a")
    made = np.array([table(source[row])["x"][0] for row in range(28)])
    np.testing.assert_allclose(np.diff(made), np.diff(made)[0], rtol=1e-3)
    first, second = source.split(0.5, by="a")
    assert max(first.column("a")) <= min(second.column("a"))
    with pytest.raises(PipelineError, match=r"by=.*'soon'"):
        make(lambda row: "soon").split(0.5, by="a")


MARKS: list[tuple[dict[str, Any], list[str], list[float]]] = [
    ({"thousands": ","}, ["1,234.50", "12,345", "7", "-1,000,000"], [1234.5, 12345, 7, -1e6]),
    ({"decimal": ","}, ["1234,50", ",5", "1e3", "-2"], [1234.5, 0.5, 1000, -2]),
    ({"decimal": ",", "thousands": "."}, ["1.234,50", "12.345", "0,5", ""], [1234.5, 12345, 0.5, np.nan]),
    ({"thousands": ","}, ["1,234", "12", "3", "4"], [1234, 12, 3, 4]),
]


@pytest.mark.parametrize(("options", "texts", "numbers"), MARKS)
def test_numbers_are_read_with_their_marks(
    options: dict[str, Any], texts: list[str], numbers: list[float], make: Callable[..., Any]
) -> None:
    source = make(lambda row: texts[row % 4], missing="nan", **options)
    np.testing.assert_array_equal(source.column("a")[:4], numbers)
    assert source.types["a"] == (
        "int64"
        if all(number == int(number) for number in numbers if number == number) and not np.isnan(numbers).any()
        else "float64"
    )
    assert source.identity() != make(lambda row: texts[row % 4], missing="nan").identity()


def test_marks_that_a_number_cannot_have_are_refused(make: Callable[..., Any]) -> None:
    assert make(lambda row: "1,23", thousands=",").types["a"] == "str", "groups have three digits"
    for options in ({"thousands": ","}, {"decimal": ","}):
        text = "1,23" if "thousands" in options else "1.5"
        with pytest.raises(PipelineError, match="record 3: column 'a'"):
            make(lambda row, text=text: text if row == 2 else "7", columns={"a": "float32"}, **options)
    for wrong in ({"decimal": ",", "thousands": ","}, {"decimal": ""}, {"thousands": "00"}, {"decimal": "5"}):
        with pytest.raises(PipelineError, match=r"decimal|thousands"):
            make(lambda row: "1", **wrong)


def write_nulls(folder: Path) -> Path:
    def lacking(values: list[Any]) -> list[Any]:
        return [None if row == 3 else value for row, value in enumerate(values)]

    columns = {
        "whole": lacking([row % 5 for row in range(ROWS)]),
        "real": lacking([row / 4 for row in range(ROWS)]),
        "price": lacking([decimal.Decimal(row % 9) / 4 for row in range(ROWS)]),
        "sold": lacking([row % 3 == 0 for row in range(ROWS)]),
        "city": pa.array(lacking(["Lyon", "Nice"] * (ROWS // 2))).dictionary_encode(),
        "day": lacking([datetime.datetime(2024, 1, row % 28 + 1) for row in range(ROWS)]),
        "y": [row % 2 for row in range(ROWS)],
    }
    pq.write_table(pa.table(columns), folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet"


def test_nulls_of_parquet_are_missing_values_as_those_of_csv(tmp_path: Path) -> None:
    path = write_nulls(tmp_path)
    with pytest.raises(SampleError, match=r"null.*missing="):
        stages.fit(sources.parquet(path), target="y", drop="day")
    source = sources.parquet(path, missing="nan")
    assert [source[3][name] for name in ("city", "sold", "day")] == 3 * [""] and np.isnan(source[3]["whole"])
    assert source.column("y").dtype == np.int64, "a column without a null stays what it is"
    with pytest.raises(PipelineError, match="'day' holds dates"):
        stages.fit(source, target="y")
    table = stages.fit(source, target="y", numbers="day", drop=[])
    categories = ("sold=false", "sold=true", "sold=missing", "city=Lyon", "city=Nice", "city=missing")
    assert table.names == ("day", "whole", "real", "price", *categories)
    assert np.isfinite(table(source[3])["x"]).all()
    assert source.identity() != sources.parquet(path).identity()


def test_nulls_of_json_lines_are_missing_values(tmp_path: Path) -> None:
    rows = [f'{{"n": {row}, "t": "{"ab"[row % 2]}", "b": {str(row % 3 == 0).lower()}}}' for row in range(30)]
    rows[4] = '{"n": null, "b": null}'
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    with pytest.raises(SampleError, match=r"null.*missing="):
        sources.jsonl(tmp_path / "t.jsonl")[4]
    source = sources.jsonl(tmp_path / "t.jsonl", missing="nan")
    assert np.isnan(source[4].pop("n")) and source[4]["t"] == source[4]["b"] == "" and source[3]["b"] == "true"
    assert stages.fit(source).names == ("n", "t=a", "t=b", "t=missing", "b=false", "b=true", "b=missing")


def test_decimals_of_parquet_are_numbers(tmp_path: Path) -> None:
    values = {"p": [decimal.Decimal("1.25")], "n": [decimal.Decimal(7)]}
    pq.write_table(pa.table(values), tmp_path / "t.parquet")
    record = sources.parquet(tmp_path / "t.parquet")[0]
    assert record == {"p": 1.25, "n": 7} and (record["p"].dtype, record["n"].dtype) == (np.float64, np.int64)


def test_an_item_that_is_none_is_said_to_be_none() -> None:
    class Lacks:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return None

    with pytest.raises(SampleError, match=r"sample 2 .*None"):
        sources.dataset(Lacks())[2]


def test_an_empty_text_is_no_class(make: Callable[..., Any]) -> None:
    source = make(lambda row: "" if row == 8 else "ab"[row % 2])
    with pytest.raises(PipelineError, match=r"record 9: the text in 'a' is empty, and the classes are 'a', 'b'"):
        list_classes(source, "a")
