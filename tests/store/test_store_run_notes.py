"""What people write about a run: kept whole and within bounds, whoever edits it at the same time."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ensemble.store import RunDir, StoreError, run_notes
from ensemble.store.run_notes import MOST_BYTES, RunNotes, edit_notes, read_notes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").write_text("")
    return RunDir(tmp_path / "run")


def test_an_edit_changes_the_fields_that_it_names_and_an_empty_one_removes_what_was_written(run: RunDir) -> None:
    edit_notes(run, {"name": " cnn, wide ", "tags": "night,cnn  night", "note": "two\nlines"})
    assert read_notes(run) == RunNotes("cnn, wide", ("night", "cnn"), "two\nlines")
    edit_notes(run, {"add": ["best"], "remove": ["night", "never"]})
    assert read_notes(run) == RunNotes("cnn, wide", ("cnn", "best"), "two\nlines")
    edit_notes(run, {"name": "", "tags": [], "note": " "})
    assert read_notes(run) == RunNotes()
    assert [path.name for path in run.path.iterdir()] == ["events.jsonl"], "and of the file nothing is left"


@pytest.mark.parametrize(
    "changes",
    [
        {"nmae": "x"},
        {"name": 5},
        {"name": "x" * 101},
        {"name": "two\nlines"},
        {"name": "\ud800"},
        {"note": "x" * 2001},
        {"tags": [""]},
        {"tags": ["two words"]},
        {"tags": ["a,b"]},
        {"tags": ["x" * 41]},
        {"tags": [5]},
        {"tags": {"a": 1}},
        {"add": [f"t{n}" for n in range(33)]},
    ],
)
def test_what_is_too_long_or_of_another_form_is_refused_and_changes_nothing(run: RunDir, changes: Any) -> None:
    edit_notes(run, {"tags": ["kept"]})
    with pytest.raises(StoreError) as refusal:
        edit_notes(run, changes)
    assert len(str(refusal.value)) < 200 and "\n" not in str(refusal.value)
    assert read_notes(run) == RunNotes("", ("kept",), "")


def test_a_file_that_somebody_else_wrote_is_read_as_nothing_where_it_is_none(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text(json.dumps({"v": 1, "name": "secret", "tags": [], "note": ""}))
    whole = {"v": 1, "name": "x", "tags": ["a"], "note": ""}
    for content in ("", "{", "[1]", "[" * 50_000, json.dumps(whole | {"v": 2}), json.dumps(whole | {"tags": [1]})):
        run.notes.write_text(content)
        assert read_notes(run) == RunNotes()
    run.notes.write_text(json.dumps(whole) + " " * MOST_BYTES)
    assert read_notes(run) == RunNotes()
    run.notes.unlink()
    run.notes.symlink_to(tmp_path / "elsewhere")
    assert read_notes(run) == RunNotes(), "nothing outside the directory is read"
    run.notes.unlink()
    os.mkfifo(run.notes)
    assert read_notes(run) == RunNotes(), "and nothing is waited for"


@pytest.mark.parametrize("change", [{"v": 2}, {"tags": ["two words"]}, {"name": ["x"]}])
def test_what_cannot_be_read_is_not_lost_by_an_edit(run: RunDir, change: dict[str, Any]) -> None:
    written = json.dumps({"v": 1, "name": "x", "tags": ["a"], "note": "long"} | change)
    run.notes.write_text(written)
    with pytest.raises(StoreError, match=r"notes\.json cannot be read \(.+\): mend or remove it"):
        edit_notes(run, {"name": "own"})
    assert run.notes.read_text() == written


def test_an_edit_waits_only_a_while_for_a_lock_that_anybody_who_can_read_can_take(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_notes, "WAIT_S", 0.05)
    descriptor = os.open(run.path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with pytest.raises(StoreError, match="locked"):
        edit_notes(run, {"name": "own"})
    os.close(descriptor)
    assert edit_notes(run, {"name": "own"}).name == "own"


def test_edits_at_the_same_time_lose_nothing_of_each_other(run: RunDir) -> None:
    code = """
import sys
from ensemble.store import RunDir, run_notes
from ensemble.store.run_notes import edit_notes
run_notes.WAIT_S = 60.0
for number in range(10):
    edit_notes(RunDir(sys.argv[1]), {"add": [f"{sys.argv[2]}{number}"]})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    editors = [
        subprocess.Popen([sys.executable, "-c", code, run.path, name], env=environment) for name in ("a", "b", "c")
    ]
    assert [editor.wait() for editor in editors] == [0, 0, 0]
    assert sorted(read_notes(run).tags) == sorted(f"{name}{number}" for name in "abc" for number in range(10))


def test_a_directory_that_cannot_be_written_to_says_so_and_one_without_a_run_as_well(
    run: RunDir, tmp_path: Path
) -> None:
    code = f"""
from ensemble.store import RunDir, StoreError
from ensemble.store.run_notes import edit_notes
try:
    edit_notes(RunDir({str(run.path)!r}), {{"name": "x"}})
except StoreError as error:
    print(error)
"""
    run.path.chmod(0o500)
    under = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []  # root may all
    command, environment = [*under, sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
    run.path.chmod(0o700)
    assert f"{run.path} cannot be written to" in said
    with pytest.raises(StoreError, match="there is no run"):
        edit_notes(RunDir(tmp_path), {"name": "x"})
