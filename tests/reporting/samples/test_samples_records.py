"""The record that is shown is that of the sample whose prediction is shown, or none is, whatever a source does."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import known_runs
import psutil
import pytest
from known_runs import MAKERS, RECORDS, SHIFTS, declare, read_number, target_of
from leftovers import wait_until

from ensemble.reporting.samples.document import Query, list_samples
from ensemble.reporting.samples.ranking import Ranking, rank_samples
from ensemble.reporting.samples.reader import MOST_SAMPLES, RecordReader, Records
from ensemble.spec.sample_weights import Folds
from ensemble.store import RunDir, RunState, fold, read_events

#: Limits below which reading a good record never comes, on whatever machine.
SLOW = {"load_s": 600.0, "record_s": 600.0, "request_s": 600.0}


def open_run(path: Path) -> tuple[RunDir, RunState, Ranking]:
    run_dir = RunDir(path)
    state = fold(read_events(run_dir.events))
    ranking = rank_samples(run_dir, state)
    assert ranking is not None
    return run_dir, state, ranking


Page = tuple[list[dict[str, Any]], Records]


@contextlib.contextmanager
def reading(path: Path, **limits: float) -> Iterator[Callable[..., Page]]:
    """Yields what returns the rows of a page of the list and their records, all read by one child."""
    run_dir, state, ranking = open_run(path)
    reader = RecordReader(**{**SLOW, **limits})

    def read_page(page: int = 0) -> Page:
        rows = list_samples(ranking, state, Query(page=page))["rows"]
        return rows, reader.read(run_dir, state, ranking, [row["index"] for row in rows])

    try:
        yield read_page
    finally:
        reader.close()


def read(path: Path, **limits: float) -> Page:
    with reading(path, **limits) as read_page:
        return read_page()


def check_rows(rows: list[dict[str, Any]], found: Records) -> None:
    """Each record has the number that its members predicted, and the target that is said."""
    assert found.missing is None and len(found.records) == len(rows) > 0
    for row in rows:
        fields = found.records[str(row["index"])]["fields"]
        number = read_number(fields)
        said = sorted(float(prediction) for _, prediction, _ in row["members"])
        assert said == [number + shift for shift in SHIFTS]
        assert float(row["target"]) == pytest.approx(target_of(int(number)), rel=1e-3)


@pytest.mark.parametrize(
    "kind", ["image", *(pytest.param(each, marks=pytest.mark.more) for each in MAKERS if each != "image")]
)
def test_the_record_is_that_of_the_prediction(kind: str, tmp_path: Path) -> None:
    path = known_runs.run(tmp_path / "run", declare(MAKERS[kind](tmp_path / kind)))
    with reading(path) as read_page:
        (rows, found), (rest, more) = read_page(), read_page(1)
    check_rows(rows, found)
    check_rows(rest, more)
    assert found.note == ""  # fingerprints prove it
    wrong = [number for number in range(RECORDS) if number % 7 == 0]
    first = [read_number(found.records[str(row["index"])]["fields"]) for row in rows]
    few = [number for number in first if number in wrong]
    assert few == sorted(few, reverse=True) == first[: len(few)]  # the worst first, and before all others
    assert {row["index"] for row in rows}.isdisjoint(row["index"] for row in rest)
    assert len(rows) == MOST_SAMPLES and len(rows) + len(rest) == RECORDS - round(RECORDS * 0.4)


@pytest.mark.more
@pytest.mark.skipif("ENSEMBLE_DATA" not in os.environ, reason="ENSEMBLE_DATA does not name the folder of photos/")
def test_photographs_are_those_of_their_predictions(tmp_path: Path) -> None:
    archive = Path(os.environ["ENSEMBLE_DATA"], "photos", "photos.tar")
    rows, found = read(known_runs.run(tmp_path / "run", known_runs.declare_photos(archive)))
    assert found.missing is None and len(rows) == MOST_SAMPLES
    for row in rows:
        fields = found.records[str(row["index"])]["fields"]
        (key,) = (each["text"] for each in fields if each["name"] == "key")
        assert float(row["target"]) == zlib.crc32(key.encode()) % 1000
        assert float(row["members"][-1][1]) == pytest.approx(read_number(fields), abs=1.0)


@pytest.mark.more
def test_out_of_fold_each_sample_is_the_training_record_that_was_left_out(tmp_path: Path) -> None:
    source = MAKERS["table"](tmp_path / "table")
    members = [{"shift": 0.0, "lr": 1e-12} for _ in range(3)]
    declared = declare(source, members=members, valid=None, out_of_fold=True, weights=Folds(3))
    rows, found = read(known_runs.run(tmp_path / "run", declared))
    assert found.missing is None
    for row in rows:
        number = read_number(found.records[str(row["index"])]["fields"])
        assert float(row["prediction"]) == pytest.approx(number, abs=1e-6)
        assert float(row["target"]) == pytest.approx(target_of(int(number)), rel=1e-3)


def test_other_data_are_never_shown_in_the_place_of_those_of_the_run(tmp_path: Path) -> None:
    path = known_runs.run(tmp_path / "run", declare(MAKERS["table"](tmp_path / "table")))
    file = tmp_path / "table" / "table.csv"
    head, *lines = file.read_text().splitlines()
    with reading(path) as read_page:
        check_rows(*read_page())  # what it has opened for these does not serve the next
        file.write_text("\n".join([head, *reversed(lines)]) + "\n")  # the same size
        _, found = read_page()
        assert all("was changed" in each["error"] for each in found.records.values()) and len(found.records) == 24
        file.unlink()
        _, found = read_page()
        assert all("table.csv" in each["error"] for each in found.records.values())


@pytest.mark.more
def test_a_source_that_nothing_identifies_is_compared_by_targets(tmp_path: Path) -> None:
    path = known_runs.run(tmp_path / "run", declare(known_runs.write_lines(tmp_path / "lines")))
    file = tmp_path / "lines" / "lines.txt"
    with reading(path) as read_page:
        rows, found = read_page()
        check_rows(rows, found)
        assert "only their targets are compared" in found.note
        numbers = file.read_text().split()
        file.write_text(" ".join(numbers[1:] + numbers[:1]))
        _, found = read_page()
    assert all("the data have changed" in each["error"] for each in found.records.values())


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a source that does what its trap says."""
    folder = tmp_path_factory.mktemp("trapped")
    return known_runs.run(folder / "run", declare(known_runs.write_lines(folder / "lines")))


@pytest.fixture
def set_trap(trapped: Path) -> Any:
    """Sets a trap at the third sample of the first page; returns its index there, and its rows."""
    trap = trapped.parent / "lines" / "trap"

    def set_(what: str) -> tuple[int, list[dict[str, Any]]]:
        _, state, ranking = open_run(trapped)
        rows = list_samples(ranking, state, Query())["rows"]
        declared = RunDir(trapped).load_ensemble()
        assert declared.valid is not None
        index = rows[2]["index"]
        trap.write_text(json.dumps({str(int(declared.valid.source.indices[index])): what}))
        return index, rows

    yield set_
    trap.unlink()


@pytest.mark.parametrize(
    ("what", "limits", "why"),
    [
        ("exit", {}, "ended (exit status 7)"),
        pytest.param("hang", {"record_s": 8.0}, "longer than 8 s", marks=pytest.mark.more),
        pytest.param("memory", {"memory_gb": 1.0}, "memory", marks=pytest.mark.more),
        pytest.param("shared", {"memory_gb": 1.0}, "more than 1 GiB", marks=pytest.mark.more),
    ],
)
def test_a_record_that_harms_its_reader_is_named_and_the_others_are_shown(
    trapped: Path, set_trap: Callable[[str], Any], what: str, limits: dict[str, float], why: str
) -> None:
    index, rows = set_trap(what)
    before = {each.pid for each in psutil.Process().children(recursive=True)}
    _, found = read(trapped, **limits)
    assert why in found.records[str(index)]["error"]
    shown = [row for row in rows if row["index"] != index]
    others = {each: record for each, record in found.records.items() if each != str(index)}
    check_rows(shown, Records(others))
    assert {each.pid for each in psutil.Process().children(recursive=True)} <= before


@pytest.mark.more
def test_what_a_source_prints_goes_nowhere(trapped: Path, set_trap: Callable[[str], Any], capfd: Any) -> None:
    _, rows = set_trap("print")
    check_rows(rows, read(trapped)[1])
    assert capfd.readouterr() == ("", "")


def test_a_declaration_that_others_may_write_is_not_run(trapped: Path) -> None:
    run_dir, state, ranking = open_run(trapped)
    reader = RecordReader(**SLOW)
    run_dir.ensemble_file.chmod(0o666)
    try:
        found = reader.read(run_dir, state, ranking, [0])
        assert found.records == {} and "can be written by everyone" in str(found.missing)
        assert reader.pid is None  # not even a process was started
    finally:
        run_dir.ensemble_file.chmod(0o600)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 4711)  # as another user, who is not root
        os.chown(run_dir.ensemble_file, 4712, -1) if os.getuid() == 0 else None
        try:
            if os.getuid() == 0:
                found = reader.read(run_dir, state, ranking, [0])
                assert "belongs to another user" in str(found.missing) and reader.pid is None
        finally:
            os.chown(run_dir.ensemble_file, os.getuid(), -1)


@pytest.mark.more
def test_the_reader_is_kept_for_the_next_page_and_ends_by_itself(trapped: Path) -> None:
    run_dir, state, ranking = open_run(trapped)
    reader = RecordReader(**SLOW, idle_s=600.0)
    assert reader.read(run_dir, state, ranking, [0]).missing is None
    pid = reader.pid
    assert reader.read(run_dir, state, ranking, [1]).missing is None and reader.pid == pid
    reader.close()
    assert pid is not None and not psutil.pid_exists(pid)
    short = RecordReader(**SLOW, idle_s=0.01)
    assert short.read(run_dir, state, ranking, [0]).missing is None
    wait_until(lambda: short.pid is None, "the reader has ended")
