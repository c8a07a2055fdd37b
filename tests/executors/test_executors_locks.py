"""Runs on a file system without locks, as Lustre is where it was not mounted with `-o flock`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from event_dicts import fold, read_events
from no_locks import make_environment

HERE = Path(__file__).parent
RUNS = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
from execute_members import an_ensemble, bad, keyed
import ensemble
from ensemble.cli.doctor import _file_locks

def run(where, executor, workers=1, **more):
    resources = ensemble.Resources(workers=workers, cpus_per_worker=0.5, memory_gb=0.3)
    try:
        ensemble.submit(an_ensemble(resources=resources, **more), where, executor).wait()
    except ensemble.SpecError as error:
        print(f"refused: {{error}}", file=sys.stderr)

def look(where):
    os.chdir(where)
    print(*_file_locks())

"""


@pytest.fixture
def without(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A directory where files cannot be locked, and the environment in which that is so."""
    where = tmp_path / "lustre"
    where.mkdir()
    return where, {**os.environ, **make_environment(tmp_path, where)}


def run(environment: dict[str, str], program: str) -> subprocess.CompletedProcess[str]:
    environment = {**environment, "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, "-c", RUNS + program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def check_trained(run_dir: Path) -> None:
    state = fold(read_events(run_dir / "events.jsonl"))
    assert {member.state for member in state.members.values()} == {"finished"}


def test_what_needs_locks_is_refused_there_before_anything_starts_and_what_needs_none_says_so(
    without: tuple[Path, dict[str, str]],
) -> None:
    """Members of one worker train there, those of several do not. The doctor looks."""
    where, environment = without
    runs = f"run({str(where / 'run')!r}, 'inline'); run({str(where / 'wide')!r}, 'local', workers=2)"
    done = run(environment, f"{runs}; look({str(where)!r}); look({str(where.parent)!r})")
    assert "this file system has no locks (flock); start no second controller" in done.stderr
    check_trained(where / "run")
    [refused] = [line for line in done.stderr.splitlines() if line.startswith("refused: ")]
    assert "is on a file system without locks (flock)" in refused and "-o flock" in refused
    assert {event["type"] for event in read_events(where / "wide" / "events.jsonl")} == {"code_saved"}
    there, elsewhere = done.stdout.splitlines()[-2:]
    assert "-o flock" in there and "'available': True" in elsewhere


@pytest.mark.more
def test_processes_train_there_and_several_workers_elsewhere_and_a_cache_there_is_refused(
    without: tuple[Path, dict[str, str]],
) -> None:
    where, environment = without
    cached = f"cache='disk', cache_dir={str(where / 'cache')!r}, train=keyed(bad, 'skip')"
    run(environment, f"run({str(where / 'run')!r}, 'local')")
    done = run(environment, f"run({str(where.parent / 'run')!r}, 'local', workers=2, {cached})")
    assert "its file system has no locks (flock)" in done.stderr
    check_trained(where / "run")
    check_trained(where.parent / "run")
