"""Runs on a file system without locks, as Lustre is where it was not mounted with `-o flock`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from no_locks import make_environment

from ensemble.store import fold, read_events

HERE = Path(__file__).parent
RUNS = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from execute_members import an_ensemble, bad, keyed
import ensemble
workers, where, cache = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
resources = ensemble.Resources(workers=workers, cpus_per_worker=0.5, memory_gb=0.3)
more = {{"cache": "disk", "cache_dir": cache[0], "train": keyed(bad, "skip")}} if cache else {{}}
try:
    ensemble.submit(an_ensemble(resources=resources, **more), where, "local").wait()
except ensemble.SpecError as error:
    sys.exit(f"refused: {{error}}")
"""


@pytest.fixture
def without(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A directory where files cannot be locked, and the environment in which that is so."""
    where = tmp_path / "lustre"
    where.mkdir()
    return where, {**os.environ, **make_environment(tmp_path, where)}


def run(environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", RUNS, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


def test_members_of_one_worker_train_there_and_the_lack_of_locks_is_said(
    without: tuple[Path, dict[str, str]],
) -> None:
    where, environment = without
    done = run(environment, 1, where / "run")
    assert done.returncode == 0, done.stderr
    assert "this file system has no locks (flock); start no second controller" in done.stderr
    state = fold(read_events(where / "run" / "events.jsonl"))
    assert {member.state for member in state.members.values()} == {"finished"}


def test_members_of_several_workers_are_refused_there_before_anything_starts(
    without: tuple[Path, dict[str, str]],
) -> None:
    where, environment = without
    done = run(environment, 2, where / "run")
    assert done.returncode == 1 and "refused: " in done.stderr
    assert "is on a file system without locks (flock)" in done.stderr and "-o flock" in done.stderr
    assert not read_events(where / "run" / "events.jsonl")
    elsewhere = run(environment, 2, where.parent / "run")
    assert elsewhere.returncode == 0, elsewhere.stderr


def test_a_cache_there_is_refused(without: tuple[Path, dict[str, str]]) -> None:
    where, environment = without
    done = run(environment, 1, where.parent / "run", where / "cache")
    assert "its file system has no locks (fcntl)" in done.stderr


def test_the_doctor_looks_for_locks_in_the_directory_where_it_is_called(
    without: tuple[Path, dict[str, str]],
) -> None:
    where, environment = without
    asks = "from ensemble.cli.doctor import _file_locks; print(*_file_locks())"
    environment["PYTHONPATH"] = str(HERE.parents[1])
    for directory, word in ((where, "-o flock"), (where.parent, "'available': True")):
        command = [sys.executable, "-c", asks]
        done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
        assert word in done.stdout, done.stderr
