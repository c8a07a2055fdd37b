"""csv() and jsonl(): rows of text files by index, with types that hold for all of them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples

from pipelines import sources
from pipelines.errors import PipelineError, SampleError


@given(text=st.text('ab,"\n\r', max_size=30), size=st.integers(40, 80))
@examples(100)
def test_rows_and_lines_are_those_of_pythons_csv_however_small_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "blocks.csv", text)
    # A last row of its own is one only where no quote is open before it.
    *expected, last = [row for row in csv.reader(io.StringIO(f"{text}\nlast,row", newline="")) if row]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.sources._text_table.BLOCK_BYTES", size)
        if not expected or last != ["last", "row"] or any(len(row) != 2 for row in expected):
            with pytest.raises(PipelineError, match=r"never closed|holds no record|Expected 2 columns, got"):
                sources.csv(path, {"x": "str", "y": "str"}, names=("x", "y"))
            return
        source = sources.csv(path, {"x": "str", "y": "str"}, names=("x", "y"))
        assert [list(record.values()) for record in source] == expected


def write(path: Path, text: str) -> Path:
    path.write_text(text, newline="")
    return path


def test_a_type_that_changes_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sources._text_table.BLOCK_BYTES", 1 << 16)
    rows = "".join(f"{i},{i % 3}\n" for i in range(30_000))
    path = write(tmp_path / "a.csv", f"x,y\n{rows}0.5,unknown\n")
    source = sources.csv(path)
    assert source.types == {"x": "float64", "y": "str"}
    assert source[0] == {"x": 0.0, "y": "0"} and isinstance(source[0]["x"], np.float64)
    declared = sources.csv(path, columns={"y": "str", "x": "float32"})
    assert declared[7] == {"y": "1", "x": 7.0} and declared[7]["x"].dtype == np.float32


def test_several_files_names_delimiters_and_quotes(tmp_path: Path) -> None:
    write(tmp_path / "b.tsv", '3\t"x\n4\ty')
    write(tmp_path / "a.tsv", "1\tu\n2\tv\n")
    source = sources.csv(str(tmp_path / "*.tsv"), names=("n", "t"), delimiter="\t", quote=None)
    assert list(source) == [{"n": 1, "t": "u"}, {"n": 2, "t": "v"}, {"n": 3, "t": '"x'}, {"n": 4, "t": "y"}]
    assert source.where(3) == f"{tmp_path}/b.tsv:record 2"


def lines(path: Path, *rows: Any) -> Path:
    return write(path, "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


BIG = "9007199254740993"  # a float64 has not each of these integers
TEXTS = [[BIG, "1.5"], ["1.5", BIG], [BIG, "NaN"], ["9007199254740992", "1.5"], ["100000000000000000000", "1.5"]]
TEXTS += [["9223372036854775808", "1"], ["7", "10" * 256], ["7", "1" * 5001], ["0.5", "10" * 256]]
INTEGERS = [[BIG, ""], ["1", " ", "2"], ["1", " NA ", "2"]]


@pytest.mark.parametrize(("rows", "kind"), [*((t, "str") for t in TEXTS), *((i, "int64") for i in INTEGERS)])
def test_integers_keep_their_digits_and_blank_values_are_missing(
    tmp_path: Path, rows: list[str], kind: str
) -> None:
    source = sources.csv(write(tmp_path / "a.csv", "x,y\n" + "".join(f"{row},0\n" for row in rows)))
    assert source.types["x"] == kind
    for row, text in enumerate(rows):
        if kind == "int64" and text.strip() in ("", "NA"):
            with pytest.raises(SampleError, match=f"record {row + 1}.*column 'x' is null"):
                source[row]
        else:
            assert str(source[row]["x"]) == text


def test_a_header_of_numbers_is_warned_of_and_numbered_columns_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "5.1,3.5\n4.9,3.0\n")
    with pytest.warns(UserWarning, match=r"the first row, 5\.1, 3\.5, is taken for a header; .*names="):
        assert len(sources.csv(path)) == 1
    assert len(sources.csv(path, names=["a", "b"])) == 2
    for text in (",0,1\n0,5,6\n", "0,1\n5,6\n", "label,1\n5,6\n"):
        assert len(sources.csv(write(tmp_path / "b.csv", text))) == 1


def test_types_of_json_numbers_are_declared_for_single_ones_and_for_arrays(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl", {"x": 2**64 - 1, "v": [[1, 2.5]]}, '{"x": 1, "v": [[-Infinity, 9007199254740992.0]]}'
    )
    source = sources.jsonl(path, {"x": "uint64", "v": "float32"})
    assert (source[0]["x"], source[0]["x"].dtype) == (2**64 - 1, np.uint64)
    assert source[1]["v"].dtype == np.float32 and source[1]["v"].tolist() == [[-np.inf, 2.0**53]]


def test_a_list_that_begins_with_null_is_an_error_of_its_line_alone(tmp_path: Path) -> None:
    source = sources.jsonl(lines(tmp_path / "a.jsonl", {"x": [None, "a"], "y": 1}, {"x": ["b", "c"], "y": 2}))
    assert source[1] == {"x": ["b", "c"], "y": 2}
    with pytest.raises(SampleError, match=r"record 1.*column 'x' is null"):
        source[0]


def test_a_field_that_few_lines_have_is_left_out_and_one_that_a_line_lacks_is_its_error(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"t{row}", "label": row % 2} for row in range(64)]
    rows[17] = {"text": "t17", "labl": 1}
    path = lines(tmp_path / "a.jsonl", *rows)
    for _ in range(2):  # also of the Arrow file that is kept
        with pytest.warns(UserWarning, match=r"left out, .*: labl \(in 1 of 64 lines\)"):
            source = sources.jsonl(path)
    assert source.columns == ("text", "label") and len(source) == 64
    with pytest.raises(SampleError, match=r"sample 17 \(.*:record 18\): column 'label' is null"):
        source[17]
    with pytest.raises(SampleError, match="sample 17 "):
        source.column("label")
    assert [source[row] for row in range(64) if row != 17] == [rows[row] for row in range(64) if row != 17]
