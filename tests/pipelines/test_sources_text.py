"""csv() and jsonl(): rows of text files by index, with types that hold for all of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from pipelines import sources
from pipelines.errors import PipelineError, SampleError


@given(text=st.text('ab,"\n\r', max_size=30), size=st.integers(8, 40))
@examples(100)
def test_rows_and_lines_are_those_of_pythons_csv_however_small_the_blocks(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    path = write(tmp_path_factory.getbasetemp() / "blocks.csv", text)
    # A last row of its own is one only where no quote is open before it.
    *expected, last = [row for row in csv.reader(io.StringIO(f"{text}\nlast,row", newline="")) if row]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipelines.sources._text_table.BLOCK_BYTES", size)
        if not expected or last != ["last", "row"]:
            with pytest.raises(PipelineError, match=r"never closed|holds no record"):
                sources.csv(path, {"x": "str", "y": "str"}, names=("x", "y"))
            return
        source = sources.csv(path, {"x": "str", "y": "str"}, names=("x", "y"))
        assert len(source) == len(expected)
        for row, values in enumerate(expected):
            if len(values) == 2:
                assert list(source[row].values()) == values
            else:
                with pytest.raises(SampleError, match=rf"has {len(values)} values"):
                    source[row]


def write(path: Path, text: str) -> Path:
    path.write_text(text, newline="")
    return path


def test_a_columns_type_holds_all_of_its_values(tmp_path: Path) -> None:
    text = (
        "\ufeffid,x,flag,name,zip,big,mixed,none\r\n"
        '1,1.5,true,"a, ""b""\r\nc",007,12345678901234567890,1,\r\n\r\n'
        "2,nan,False,NA,010,1,2.5,NA\r\n-3, 1e3 ,true,é,1,1,7,\r\n"
    )
    source = sources.csv(
        write(tmp_path / "a.csv", text), columns=["id", "x", "flag", "name", "zip", "big", "mixed"]
    )
    numbers = {"id": "int64", "x": "float64", "flag": "bool", "mixed": "float64"}
    assert source.types == {**numbers, "name": "str", "zip": "str", "big": "str"}
    assert len(source) == 3
    first = source[0]
    assert (first["id"], first["id"].dtype, first["mixed"].dtype) == (1, np.int64, np.float64)
    assert (first["name"], first["zip"], first["big"]) == ('a, "b"\r\nc', "007", "12345678901234567890")
    assert first["flag"].dtype == bool and source[2]["x"] == 1000 and np.isnan(source[1]["x"])
    assert source[1]["name"] == "NA", "no number is missing among texts"


def test_a_type_that_changes_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.sources._text_table.BLOCK_BYTES", 1 << 16)
    rows = "".join(f"{i},{i % 3}\n" for i in range(30_000))
    path = write(tmp_path / "a.csv", f"x,y\n{rows}0.5,unknown\n")
    source = sources.csv(path)
    assert source.types == {"x": "float64", "y": "str"}
    assert source[0] == {"x": 0.0, "y": "0"} and isinstance(source[0]["x"], np.float64)
    declared = sources.csv(path, columns={"y": "int8", "x": "float32"})
    assert declared[7] == {"y": 1, "x": 7.0} and declared[7]["y"].dtype == np.int8
    with pytest.raises(
        SampleError, match=rf"sample 30000 \({path}, line 30002\): column 'y' is 'unknown', .* no int8"
    ):
        declared[30_000]


def test_rows_that_are_no_records_are_sample_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,x\n,y\n3\n4,z,9\n5,\xff\n6_0,u\n")
    source = sources.csv(path, columns={"a": "int64", "b": "str"})
    assert source[0] == {"a": 1, "b": "x"}
    for row, said in enumerate(("", "no value", "1 values, .* 2 columns", "3 values", "not UTF-8", "'6_0'")):
        if said:
            with pytest.raises(SampleError, match=rf"sample {row} \({path}, line {row + 2}\): .*{said}"):
                source[row]


def test_several_files_names_delimiters_and_quotes(tmp_path: Path) -> None:
    write(tmp_path / "b.tsv", '3\t"x\n4\ty')
    write(tmp_path / "a.tsv", "1\tu\n2\tv\n")
    source = sources.csv(str(tmp_path / "*.tsv"), names=("n", "t"), delimiter="\t", quote=None)
    assert list(source) == [{"n": 1, "t": "u"}, {"n": 2, "t": "v"}, {"n": 3, "t": '"x'}, {"n": 4, "t": "y"}]
    assert source.where(3) == f"{tmp_path}/b.tsv, line 2"
    with pytest.raises(
        PipelineError, match=r"b\.tsv, line 1: opens a quoted field that is never closed.*quote=None"
    ):
        sources.csv(tmp_path / "b.tsv", names=("n", "t"), delimiter="\t")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("a,a\n1,2\n", {}, "two columns are called 'a'"),
        ("a,b\n1,2\n", {"columns": ["c"]}, r"no column 'c' \(it has: a, b\)"),
        ("a,b\n1,2\n", {"columns": {"a": "complex64"}}, "type of column 'a' must be"),
        ("a,b\n1,2\n", {"columns": []}, "must name each column once"),
        ("a,b\n", {}, "holds no record"),
        ("", {}, "is empty"),
        ("a\n1\n", {"delimiter": "||"}, "delimiter must be one ASCII character"),
    ],
)
def test_files_and_arguments_without_a_clear_meaning_are_refused(
    tmp_path: Path, text: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(PipelineError, match=said):
        sources.csv(write(tmp_path / "a.csv", text), **options)


def test_another_header_and_a_compressed_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", "a,b\n1,2\n")
    write(tmp_path / "b.csv", "b,a\n1,2\n")
    with pytest.raises(PipelineError, match=r"b\.csv begins with b, a, but .*a\.csv with a, b"):
        sources.csv(str(tmp_path / "*.csv"))
    for kind in (sources.csv, sources.jsonl):
        (tmp_path / "c.gz").write_bytes(gzip.compress(b"a,b\n1,2\n"))
        with pytest.raises(PipelineError, match=r"c\.gz: is compressed with gzip.*decompress it"):
            kind(tmp_path / "c.gz")


def lines(path: Path, *rows: Any) -> Path:
    return write(path, "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def test_a_fields_type_holds_all_of_its_values(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "a.jsonl",
        {"a": 1, "t": "x", "v": [], "m": [[1, 2], [3, 4]], "n": {"p": 1, "q": "z"}, "l": ["a", "b"], "f": True},
        "",
        {"a": 2.5, "t": "é\n", "v": [1, 2.5], "m": [[1], [2]], "n": {"p": 0.5, "q": ""}, "l": [], "f": False},
    )
    source = sources.jsonl(path)
    assert source.types["a"] == "float64" and source.types["n"] == "{p: float64, q: text}" and len(source) == 2
    one, two = source
    assert (one["a"], one["a"].dtype, two["t"], one["f"].dtype) == (1.0, np.float64, "é\n", bool)
    assert one["v"].dtype == two["v"].dtype == np.float64 and (one["v"].shape, two["v"].tolist()) == (
        (0,),
        [1, 2.5],
    )
    assert one["m"].dtype == np.int64 and (one["m"].shape, two["m"].shape) == ((2, 2), (2, 1))
    assert one["n"]["p"].dtype == np.float64 and (two["n"]["q"], one["l"], two["l"]) == ("", ["a", "b"], [])


def test_a_field_of_two_kinds_is_refused_with_its_row_unless_it_is_declared(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"x": 1}, {"x": 2}, {"x": "three"})
    with pytest.raises(
        PipelineError, match=rf"{path}, line 3: field 'x' is int64 in some lines and text in others; dec"
    ):
        sources.jsonl(path)
    declared = sources.jsonl(path, {"x": "int16"})
    assert declared[1]["x"].dtype == np.int16
    with pytest.raises(SampleError, match=r"sample 2 \(.*line 3\): field 'x' is text, not int16: 'three'"):
        declared[2]
    assert [record["x"] for record in sources.jsonl(path, {"x": "any"})] == [1, 2, "three"]


def test_lines_that_are_no_records_are_sample_errors(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"x": 1}, "{bad", [1], {"y": 1}, {"x": None}, {"x": 300})
    source = sources.jsonl(path, {"x": "uint8"})
    assert source[0] == {"x": 1}
    for row, said in enumerate(
        ("", "no JSON: ", "no JSON object, but list", "no field 'x'", "'x' is null", "300, which")
    ):
        if said:
            with pytest.raises(SampleError, match=rf"sample {row} \({path}, line {row + 1}\): .*{said}"):
                source[row]
    assert sources.jsonl(path, ["x"])[0] == {"x": 1}, "bad lines are left out of the types"


def test_a_misspelt_key_is_the_error_of_its_line_alone(tmp_path: Path) -> None:
    rows: list[Any] = [{"text": f"t{row}", "label": row % 2, "at": {"x": row, "y": row}} for row in range(64)]
    rows[17] = {"text": "t17", "labl": 1, "at": {"x": 17, "y": 17}}
    rows[40]["at"] = {"x": 40, "z": 40}
    path = lines(tmp_path / "a.jsonl", *rows)
    with pytest.warns(UserWarning, match=rf"labl \(in 1 of 64 lines, .*{path}, line 18\), at.z \(in 1 of 64\)"):
        source = sources.jsonl(path)
    assert source.columns == ("text", "label", "at")
    wrong = {17: r"has no field 'label' \(it has: text, labl, at\)", 40: "field 'at' has no 'y'"}
    for row in range(64):
        if row in wrong:
            with pytest.raises(SampleError, match=wrong[row]):
                source[row]
        else:
            assert source[row] == rows[row]


def test_a_row_that_is_not_utf8_is_its_own_error_beside_one_of_too_many_values(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"x,y\n1,2\n\xff,1,2\n3,4\n\xfe,1\n5,6,7\n")
    source = sources.csv(path)
    assert (source.types, source[2]["y"]) == ({"x": "int64", "y": "int64"}, 4)
    for row, said in ((1, "not UTF-8"), (3, "not UTF-8"), (4, "has 3 values")):
        with pytest.raises(SampleError, match=rf"{path}, line {row + 2}\): .*{said}"):
            source[row]


def test_unknown_fields_and_types_are_named(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"x": 1, "y": 2})
    with pytest.raises(PipelineError, match=r"has a field 'z' \(it has: x, y\)"):
        sources.jsonl(path, ["z"])
    with pytest.raises(PipelineError, match="must be 'str', 'bool', 'any'"):
        sources.jsonl(path, {"x": "number"})
    with pytest.raises(PipelineError, match=r"field 'x' is 1\d+, an integer that an int64 does not hold"):
        sources.jsonl(lines(tmp_path / "b.jsonl", {"x": 10**30}))


# --- values that would be lost in silence ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "types"),
    [
        (["9007199254740993", "1.5"], "str"),  # a float64 has no such integer
        (["1.5", "9007199254740993"], "str"),
        (["9007199254740993", "NaN"], "str"),
        (["9007199254740992", "1.5"], "float64"),
        (["100000000000000000000", "1.5"], "float64"),  # this one it has
        (["9007199254740993", ""], "int64"),
        (["9223372036854775808", "1"], "str"),
        (["1", "  ", "2"], "int64"),  # blank: missing
        (["1", " NA ", "2"], "int64"),
    ],
)
def test_integers_keep_their_digits_and_blank_values_are_missing(
    tmp_path: Path, rows: list[str], types: str
) -> None:
    source = sources.csv(write(tmp_path / "a.csv", "x,y\n" + "".join(f"{row},0\n" for row in rows)))
    assert source.types["x"] == types
    for row, text in enumerate(rows):
        if types != "str" and text.strip() in ("", "NA"):
            with pytest.raises(SampleError, match=f"line {row + 2}.*column 'x' has no value"):
                source[row]
        else:
            assert str(source[row]["x"]) == text if types in ("str", "int64") else source[row]["x"] == float(text)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_header_that_another_delimiter_divides_is_refused(tmp_path: Path, delimiter: str) -> None:
    path = write(tmp_path / "a.csv", f"a{delimiter}b\n1{delimiter}2\n")
    with pytest.raises(PipelineError, match=r"the header is one column.* give delimiter="):
        sources.csv(path)
    assert sources.csv(path, delimiter=delimiter)[0] == {"a": 1, "b": 2}


def test_a_header_of_numbers_is_warned_of_and_numbered_columns_are_not(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "5.1,3.5\n4.9,3.0\n")
    with pytest.warns(UserWarning, match=r"the first row, 5\.1, 3\.5, is taken for a header; .*names="):
        assert len(sources.csv(path)) == 1
    assert len(sources.csv(path, names=["a", "b"])) == 2
    for text in (",0,1\n0,5,6\n", "0,1\n5,6\n", "label,1\n5,6\n"):
        assert len(sources.csv(write(tmp_path / "b.csv", text))) == 1


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_a_number_that_the_declared_type_does_not_hold_is_a_sample_error(tmp_path: Path, kind: str) -> None:
    table = sources.csv(write(tmp_path / "a.csv", "x\n1e39\n-inf\n"), columns={"x": kind})
    text = sources.jsonl(lines(tmp_path / "a.jsonl", {"x": 1e39}, '{"x": -Infinity}'), {"x": kind})
    lists = sources.jsonl(lines(tmp_path / "b.jsonl", {"x": [1.0, 1e39]}, {"x": [1.0]}), {"x": kind})
    for source, row in ((table, 0), (text, 0), (lists, 0)):
        with pytest.raises(SampleError, match=f"line {row + 1 + (source is table)}.*which is no {kind}"):
            source[row]
    assert table[1]["x"] == text[1]["x"] == -np.inf


def test_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a\n1\n")
    with open(path) as opened:
        for given in (opened, 5, [1], {"a": 1}):
            with pytest.raises(PipelineError, match=r"csv\(\): needs the path of a file, or several, got "):
                sources.csv(given)  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="delimiter and quote must differ"):
        sources.csv(path, delimiter='"')
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(PipelineError, match="is compressed with zip"):
        sources.csv(tmp_path / "a.zip")


def test_a_json_field_of_long_integers_and_other_numbers_is_refused_unless_declared(tmp_path: Path) -> None:
    long = 2**53 + 1
    for rows in (
        ({"x": long}, {"x": 1.5}),
        ({"x": 1.5}, {"x": long}),
        ({"x": [long, 1.5]},),
        ({"x": [[1.5], [long]]},),
    ):
        path = lines(tmp_path / "a.jsonl", *rows)
        with pytest.raises(
            PipelineError, match=r"a\.jsonl, line \d: field 'x' has integers of which a float64 loses"
        ):
            sources.jsonl(path)
        assert len(list(sources.jsonl(path, {"x": "float64"}))) == len(rows)
    assert sources.jsonl(lines(tmp_path / "a.jsonl", {"x": long}, {"x": 1}))[0]["x"] == long
    most = sources.jsonl(lines(tmp_path / "a.jsonl", {"x": [2**64 - 1, 1]}), {"x": "uint64"})[0]["x"]
    assert most.tolist() == [2**64 - 1, 1]


def test_arrays_of_a_json_field_have_as_many_axes_in_all_lines(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"line 2: field 'x\[\]' is int64 in some lines and a list in others"):
        sources.jsonl(lines(tmp_path / "a.jsonl", {"x": [1]}, {"x": [[1]]}))
    source = sources.jsonl(lines(tmp_path / "a.jsonl", {"x": []}, {"x": [[]]}, {"x": [[1, 2]]}))
    assert [record["x"].shape for record in source] == [(0, 0), (1, 0), (1, 2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1, 2]\n[3]\n", "line 1: is no JSON object, but list"),
        ('{\n "x": 1\n}\n', "line 1: is no JSON"),
        ("{}\n{}\n", "no line is a JSON object with a field"),
        ('{"x": ' + "[" * 5000 + "]" * 5000 + "}", "line 1: is no JSON: maximum recursion"),
        ('{"x": "é"}'.encode("latin1"), "line 1: is no JSON: 'utf-8' codec"),
    ],
    ids=["arrays", "one object in several lines", "without fields", "deep", "Latin-1"],
)
def test_a_file_without_a_json_object_in_a_line_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PipelineError, match=said):
        sources.jsonl(path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("block", [8, 16, 1 << 20])
def test_lines_are_counted_as_an_editor_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, block: int
) -> None:
    monkeypatch.setattr("pipelines.sources._text_table.BLOCK_BYTES", block)
    text = 'x,note|1,"two|lines"||2,plain|bad,"a||b"|4,|'.replace("|", end)
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    source = sources.csv(tmp_path / "a.csv", {"x": "int64", "note": "str"})
    for index, line in ((3, 9), (0, 2), (1, 5), (2, 6)):  # in any order
        assert source.where(index) == f"{tmp_path}/a.csv, line {line}"
        assert text.splitlines()[line - 1].startswith(("1,", "2,", "bad,", "4,")[index])
    with pytest.raises(SampleError, match=r"sample 2 \(.*a\.csv, line 6\): column 'x' is 'bad'"):
        source[2]
    (tmp_path / "a.csv").unlink()
    other = pickle.loads(pickle.dumps(source))
    assert other.where(1) == f"{tmp_path}/a.csv:row 1", "nothing can be counted in a file that is gone"


def test_lines_that_end_with_a_carriage_return_alone_and_blank_lines_have_their_rows(tmp_path: Path) -> None:
    source = sources.jsonl(write(tmp_path / "a.jsonl", '{"x": 1}\r{"x": 2}\r'))
    assert [record["x"] for record in source] == [1, 2]
    path = write(tmp_path / "b.jsonl", '{"x": 1}\n  \n{"x": "a"}\n')
    with pytest.raises(PipelineError, match=r"b\.jsonl, line 3: field 'x'"):
        sources.jsonl(path)
    with pytest.raises(SampleError, match=r"b\.jsonl, line 2\): is blank"):
        sources.jsonl(path, {"x": "any"})[1]


@pytest.mark.parametrize("digits", ["10" * 256, "1" * 5001])
@pytest.mark.parametrize("other", ["7", "0.5"])
def test_digits_that_no_number_holds_are_texts(tmp_path: Path, digits: str, other: str) -> None:
    source = sources.csv(write(tmp_path / "a.csv", f"x\n{other}\n{digits}\n"))
    assert source.types == {"x": "str"} and source[1] == {"x": digits}


def test_a_quoted_header_of_one_column_may_hold_delimiters(tmp_path: Path) -> None:
    for header in ("text, cleaned", "text; cleaned"):
        assert sources.csv(write(tmp_path / "a.csv", f'"{header}"\nabc\n'))[0] == {header: "abc"}
    with pytest.raises(PipelineError, match="give delimiter=';'"):
        sources.csv(write(tmp_path / "a.csv", '"a";"b"\n1;2\n'))


def test_a_long_json_integer_that_the_declared_type_does_not_hold_is_a_sample_error(tmp_path: Path) -> None:
    source = sources.jsonl(lines(tmp_path / "a.jsonl", {"a": 10**60}), {"a": "float32"})
    with pytest.raises(SampleError, match=r"line 1.*which is no float32"):
        source[0]
