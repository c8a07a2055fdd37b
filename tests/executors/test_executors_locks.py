"""Runs on a file system without locks, as Lustre is where it was not mounted with `-o flock`."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble
from no_locks import make_environment

import ensemble
from ensemble import Resources, SpecError
from ensemble.cli.doctor import _file_locks

HERE = Path(__file__).parent
RUNS = """
import ensemble
from kit.execute_members import an_ensemble, bad, keyed

def run(where, workers=1, **more):
    resources = ensemble.Resources(workers=workers, cpus_per_worker=0.5, memory_gb=0.3)
    ensemble.submit(an_ensemble(resources=resources, **more), where, "local").wait()

"""


def check_trained(run_dir: Path) -> None:
    state = fold(read_events(run_dir / "events.jsonl"))
    assert {member.state for member in state.members.values()} == {"finished"}


def test_what_needs_locks_is_refused_there_before_anything_starts_and_what_needs_none_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Members of one worker train there, those of several do not. The doctor looks."""
    where, flock = tmp_path / "lustre", fcntl.flock
    where.mkdir()

    def refuse(file: Any, operation: int) -> None:
        descriptor = file if isinstance(file, int) else file.fileno()
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(where)):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"this file system has no locks \(flock\); start no second controller"):
        ensemble.submit(an_ensemble(), where / "run", "inline").wait()
    check_trained(where / "run")
    wide = an_ensemble(resources=Resources(workers=2, cpus_per_worker=0.5, memory_gb=0.3))
    with (
        pytest.warns(UserWarning, match="has no locks"),
        pytest.raises(SpecError, match=r"is on a file system without locks \(flock\).*-o flock"),
    ):
        ensemble.submit(wide, where / "wide", "local").wait()
    assert {event["type"] for event in read_events(where / "wide" / "events.jsonl")} == {"code_saved"}
    for folder, is_available in ((where, False), (tmp_path, True)):
        monkeypatch.chdir(folder)
        (row,) = _file_locks()
        assert row["available"] == is_available and ("-o flock" in str(row)) != is_available


@pytest.mark.more
def test_processes_train_there_and_several_workers_elsewhere_and_a_cache_there_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "lustre"
    where.mkdir()
    paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "support")])
    environment = {**os.environ, **make_environment(tmp_path, where), "PYTHONPATH": paths}
    cached = f"cache='disk', cache_dir={str(where / 'cache')!r}, train=keyed(bad, 'skip')"
    program = f"run({str(where / 'run')!r}); run({str(tmp_path / 'run')!r}, 2, {cached})"
    command = [sys.executable, "-c", RUNS + program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "this file system has no locks (flock); start no second controller" in done.stderr
    assert "its file system has no locks (flock)" in done.stderr
    check_trained(where / "run")
    check_trained(tmp_path / "run")
