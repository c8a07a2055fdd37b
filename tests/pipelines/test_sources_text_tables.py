"""The Arrow files that csv() and jsonl() make: made once, for whom, of what content, and what happens to them."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import Pipeline, SampleError, sources
from pipelines.errors import PipelineError
from pipelines.sources._kept_files import find_folder


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENSEMBLE_SOURCES_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept" / "ray-ensemble" / "sources"


def tables(kept: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in kept.glob("*.arrow")}


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


TEXTS: dict[str, tuple[str | bytes, str, list[Any]]] = {
    "leading zeros at the end": ("x\n" + "1\n" * 9000 + "010\n", "str", [*["1"] * 9000, "010"]),
    "20 digits": ("x\n12345678901234567890\n1\n", "str", ["12345678901234567890", "1"]),
    "19 digits": ("x\n9223372036854775807\n-5\n", "int64", [9223372036854775807, -5]),
    "a day": ("x\n2024-02-30\n2024-01-01\n", "str", ["2024-02-30", "2024-01-01"]),
    "0 and 1": ("x\n0\n1\n", "int64", [0, 1]),
    "yes and no": ("x\nTrue\nfalse\n", "bool", [True, False]),
    "blanks at booleans": ('x\ntrue\nFALSE\n" True "\n', "str", ["true", "FALSE", " True "]),
    "blanks": ("x\n5 \n 6\t\n", "int64", [5, 6]),
    "numbers": ("x\n1\n2.5\n1e3\n", "float64", [1.0, 2.5, 1000.0]),
    "texts with quotes and breaks": ('x,y\n"a, ""b""\r\nc",1\r\n\r\nNA,2', "str", ['a, "b"\r\nc', "NA"]),
    "all missing": ("x,y\n,1\nNA,2\n", "str", ["", "NA"]),
    "texts that look missing": ("x\nNA\nnull\na\n", "str", ["NA", "null", "a"]),
    "line breaks in quotes": ('x\n"a\nb"\n"c\r\nd"\n', "str", ["a\nb", "c\r\nd"]),
    "quotes in quotes": ('x\n"a ""b"""\n', "str", ['a "b"']),
    "a byte order mark": (b'\xef\xbb\xbf"x"\n1\n', "int64", [1]),
    "UTF-8": ("x\n\u00e9\U0001f600\n", "str", ["\u00e9\U0001f600"]),
    "a long value": ("x\n" + "a" * 300_000 + "\nb\n", "str", ["a" * 300_000, "b"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_column_of_a_csv_has_the_type_that_loses_nothing(name: str, tmp_path: Path) -> None:
    content, kind, values = TEXTS[name]
    source = sources.csv(write(tmp_path / "a.csv", content), ["x"])
    assert source.types == {"x": kind}
    assert [record["x"] for record in source] == values == source.column("x").tolist()
    assert kind == "str" or source[0]["x"].dtype == kind


LINES: dict[str, tuple[list[str], str, list[Any]]] = {
    "texts of digits": (['{"x": "007"}', '{"x": "1"}'], "text", ["007", "1"]),
    "a day": (['{"x": "2024-01-01"}', '{"x": "soon"}'], "text", ["2024-01-01", "soon"]),
    "19 digits": (['{"x": 9223372036854775807}'], "int64", [9223372036854775807]),
    "integers and others": (['{"x": 1}', '{"x": 0.5}'], "float64", [1.0, 0.5]),
    "booleans": (['{"x": true}', '{"x": false}'], "bool", [True, False]),
    "texts in lists": (['{"x": ["a", ""]}', '{"x": []}'], "list of text", [["a", ""], []]),
    "dicts in lists": (['{"x": [{"a": 1}]}', '{"x": []}'], "list of {a: int64}", [[{"a": 1}], []]),
    "dicts": (['{"x": {"p": 1}}', '{"x": {"p": 0.5}}'], "{p: float64}", [{"p": 1.0}, {"p": 0.5}]),
    "ragged": (['{"x": []}', '{"x": [1, 2.5]}'], "float64[?]", [np.zeros(0), np.array([1, 2.5])]),
    "matrices": (['{"x": [[1, 2], [3, 4]]}', '{"x": [[1]]}'], "int64[?, ?]", [np.array([[1, 2], [3, 4]]), [[1]]]),
    "no number": (['{"x": NaN}', '{"x": -Infinity}'], "float64", [float("nan"), -np.inf]),
    "UTF-8": (['{"x": "\u00e9"}', '{"x": "\\ud83d\\ude00"}'], "text", ["\u00e9", "\U0001f600"]),
}


@pytest.mark.parametrize("name", LINES)
def test_a_field_of_json_lines_has_the_type_that_loses_nothing(name: str, tmp_path: Path) -> None:
    lines, kind, values = LINES[name]
    source = sources.jsonl(write(tmp_path / "a.jsonl", "\ufeff" + "\r\n".join(lines)))
    assert source.types == {"x": kind}
    np.testing.assert_equal([record["x"] for record in source], values)
    assert "text" in kind or "{" in kind or source[0]["x"].dtype == kind.split("[")[0]


def test_the_identity_is_of_content_and_types_and_what_it_was_before_there_were_arrow_files(
    tmp_path: Path,
) -> None:
    table = sources.csv(write(tmp_path / "a.csv", "x,y\n1,a\n"))
    identity = {"source": ["ours", "pipelines.sources.csv", 1], "files": [[8, table.files[0].digest]]}
    identity |= {"columns": [["x", "int64"], ["y", "str"]], "form": [",", '"', ["x", "y"]]}
    assert table.identity() == identity
    path = write(tmp_path / "a.jsonl", '{"x": [[1]], "y": {"z": "a"}, "w": 1}\n')
    lines = sources.jsonl(path, {"x": "float32", "w": "int8"})
    assert lines.identity()["columns"] == [["x", "float32"], ["w", "int8"]]
    undeclared = sources.jsonl(tmp_path / "a.jsonl").identity()["columns"]
    assert undeclared == [["x", "int64[?, ?]"], ["y", "{z: text}"], ["w", "int64"]]
    texts = write(tmp_path / "c.csv", "x,y\na,b\n")
    whole = sources.csv(texts, names=["x", "y"])
    assert len(whole) == 2 and Pipeline(whole).fingerprint != Pipeline(sources.csv(texts)).fingerprint


def test_a_file_is_converted_once_for_all_processes_and_anew_when_it_has_changed(
    tmp_path: Path, kept: Path
) -> None:
    path = write(tmp_path / "a.csv", "x\n" + "".join(f"{i}\n" for i in range(200)))
    source = sources.csv(path)
    (made,) = tables(kept).items()
    batches = list(Pipeline(source, seed=0).loader(20, epochs=1, workers=1))
    assert sorted(np.concatenate([batch["x"].numpy() for batch in batches]).tolist()) == list(range(200))
    code = "import sys; from pipelines import sources; print(sources.csv(sys.argv[1])[7])"
    other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "7" in other.stdout and tables(kept) == dict([made])
    write(path, "x\n" + "".join(f"{i + 1}\n" for i in range(200)))
    assert sources.csv(path)[7] == {"x": 8} and len(tables(kept)) == 2
    with pytest.raises(SampleError, match="was changed"):
        pickle.loads(pickle.dumps(source))[7]


@pytest.mark.parametrize("whole_bytes", [0, 1 << 30])
def test_a_change_that_keeps_size_and_time_is_seen(
    whole_bytes: int, tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.sources._files.WHOLE_BYTES", whole_bytes)
    middle, path = b"1234567890123\n" * 5000, tmp_path / "a.csv"
    for value in (3, 4):
        os.utime(write(path, b"x\n" + middle + b"%d\n" % value + middle), ns=(1, 1))
        assert sources.csv(path)[5000] == {"x": value}


def test_a_table_of_older_rules_for_types_is_not_read(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.csv", "x\n1234567890123456\nNA\n")
    with monkeypatch.context() as older:
        older.setattr("pipelines.sources._text_table._FORMAT", 1)
        older.setattr("pipelines.sources._csv._TypeFinder.choose", lambda *_: "float64")
        assert sources.csv(path, missing="nan").types == {"x": "float64"}
    assert sources.csv(path, missing="nan").types == {"x": "str"} and len(tables(kept)) == 2


def test_what_was_removed_or_left_unfinished_is_made_again(tmp_path: Path, kept: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"x": 1}\n{"x": 2}\n')
    source = sources.jsonl(path)
    sent = pickle.dumps(source)
    ((name, _),) = tables(kept).items()
    shutil.move(kept / name, kept / f"{name}~1")
    os.truncate(kept / f"{name}~1", 100)
    assert pickle.loads(sent)[1] == {"x": 2} and source[1] == {"x": 2} and list(tables(kept)) == [name]
    assert not list(kept.glob("*~*")), "neither an unfinished file nor a lock"
    shutil.rmtree(kept)
    assert pickle.loads(sent)[1] == {"x": 2}


def test_an_arrow_file_that_is_damaged_anywhere_is_made_again(
    tmp_path: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.csv", "x,y\n" + "".join(f"{n},t{n}\n" for n in range(2000)))
    source = sources.csv(path)
    sent, expected = pickle.dumps(source), list(source)
    ((name, _),) = tables(kept).items()
    whole = (kept / name).read_bytes()

    def read(content: bytes) -> None:
        caplog.clear()
        (kept / name).write_bytes(content)
        opened = sources.csv(path) if len(content) < 200 else pickle.loads(sent)
        assert list(opened) == expected and (kept / name).read_bytes() == whole
        assert f"{name} is damaged: it is removed, and made again" in caplog.text

    for place in [*range(0, len(whole), len(whole) // 40), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[place] ^= 1
        read(bytes(damaged))
    for size in (5, 100, len(whole) - 1):
        read(whole[:size])


def test_two_that_hold_no_common_lock_make_whole_files(kept: Path) -> None:
    folder = find_folder()

    def make_in_halves(path: str) -> None:
        with open(path, "wb") as file:
            file.write(b"first")
            file.flush()
            (lock,) = (each for each in kept.iterdir() if "lock" in each.name)
            lock.unlink()  # as another machine may that sees the folder of a file server late
            with folder.open("table", "x", 1, 10, lambda part: write(Path(part), b"second")) as other:
                assert other.read() == b"second"
            file.write(b" half")

    with folder.open("table", "x", 1, 10, make_in_halves) as whole:
        assert whole.read() == b"first half"
    (made,) = kept.iterdir()
    assert made.read_bytes() == b"first half"


def test_a_full_disk_is_said_with_the_folder(tmp_path: Path, kept: Path) -> None:
    path = write(tmp_path / "a.csv", "x\n" + "abcdefg\n" * 100_000)
    code = """import resource, signal, sys; from pipelines import sources
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
sources.csv(sys.argv[1], {'x': 'str'})"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "PipelineError" in ended.stderr and "cannot write" in ended.stderr
    assert "ENSEMBLE_SOURCES_DIR" in ended.stderr and not list(kept.glob("[0-9a-f]*"))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_is_converted_in_a_part_of_its_size(kind: str, tmp_path: Path, kept: Path) -> None:
    text = "t" * 2000
    with open(tmp_path / "a", "w") as file:
        file.write("x,y\n" if kind == "csv" else "")
        file.write((f"1,{text}\n" if kind == "csv" else f'{{"x": 1, "y": "{text}"}}\n') * 30_000)
    code = (
        "import resource, sys; from pipelines import sources; import pyarrow, xxhash\n"
        "open('small', 'w').write('x,y\\n1,a\\n' if sys.argv[1] == 'csv' else '{\"x\": 1, \"y\": \"a\"}\\n')\n"
        "make = getattr(sources, sys.argv[1]); make('small')[0]\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak(); source = make('a'); print(peak() - before, len(source))"
    )
    command = [sys.executable, "-c", code, kind]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    grown_kib, rows = map(int, ended.stdout.split())
    assert rows == 30_000 and grown_kib < 40 << 10, f"{grown_kib >> 10} MiB for a file of 57 MiB"


def test_an_empty_file_beside_others_has_no_rows(tmp_path: Path) -> None:
    for name, text in (("a", '{"x": 1}\n'), ("b", "\n\n"), ("c", '{"x": 2}\n')):
        write(tmp_path / f"{name}.jsonl", text)
    source = sources.jsonl(str(tmp_path / "*.jsonl"))
    assert [record["x"] for record in source] == [1, 2] and source.where(1) == f"{tmp_path}/c.jsonl:record 1"
    write(tmp_path / "a.csv", "x\n")
    write(tmp_path / "b.csv", "x\n5\n")
    assert list(sources.csv([tmp_path / "a.csv", tmp_path / "b.csv"])) == [{"x": 5}]


def test_without_a_home_nothing_is_made_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "ENSEMBLE_SOURCES_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id without a name
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match="set HOME or ENSEMBLE_SOURCES_DIR"):
        sources.csv(write(tmp_path / "a.csv", "x\n1\n"))
    assert os.listdir(tmp_path) == ["a.csv"]
