"""Machines unlike others: containers with little memory or a small /dev/shm, file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.control_groups import make_control_group
from kit.event_dicts import fold, read_events
from kit.execute_members import an_ensemble
from kit.finished_runs import of_kind
from no_locks import make_environment

import ensemble
from ensemble import Resources, SpecError
from ensemble.cli.doctor import _file_locks

HERE = Path(__file__).parent
LIMIT_MIB = 1200
RING = """
import os
from pathlib import Path
from ensemble.cli.doctor import _shared_memory
from pipelines.samples.fields import Field
from pipelines.shm import ring

def make_ring(mib):
    return ring.create(ring.Layout({"x": Field((2**18,), "float32")}, mib), "ring")

"""


def execute(*command: object, within: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "support")])
    words = [*within, sys.executable, *map(str, command)]
    return subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_a_ring_beyond_the_limit_of_the_group_is_refused_by_its_size() -> None:
    with make_control_group(LIMIT_MIB) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        join = f"Path({str(group)!r}, 'cgroup.procs').write_text(str(os.getpid()))"
        done = execute("-c", f"{RING}{join}; make_ring({LIMIT_MIB + 1})")
    assert f"MemoryError: ring needs {LIMIT_MIB + 1} MiB of memory for {LIMIT_MIB + 1} samples" in done.stderr


@pytest.fixture
def small() -> list[str]:
    """What to put before a command for which /dev/shm is small."""
    unshare = shutil.which("unshare")
    command = [str(unshare), "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    return command


def test_a_ring_does_not_depend_on_the_size_of_dev_shm_and_the_doctor_knows_it(small: list[str]) -> None:
    done = execute("-c", RING + "made = make_ring(24); print(*_shared_memory())", within=small)
    assert done.returncode == 0, done.stderr
    assert "1 MiB, as containers have by default" in done.stdout


#: Of samples of a MiB.
WIDE = """
import sys
import ensemble
import numpy as np
from kit.execute_members import an_ensemble, samples

def widened(sample):
    return {**sample, "more": np.zeros(2**18, np.float32)}

if __name__ == "__main__":
    ensemble.submit(an_ensemble(train=samples(96, 0).map(widened), batch_size=4), sys.argv[1], "local").wait()
"""


@pytest.mark.more
def test_a_run_does_not_depend_on_the_size_of_dev_shm(small: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(WIDE)
    done = execute(tmp_path / "runs.py", tmp_path / "run", within=small)
    assert done.returncode == 0, done.stderr
    assert max(event["ring_bytes"] for event in of_kind(tmp_path / "run", "feeder")) > 16 * 2**20
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))


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
    with pytest.warns(UserWarning, match=r"this file system has no locks \(flock\); do not start a second"):
        ensemble.submit(an_ensemble(), where / "run", "inline").wait()
    check_trained(where / "run")
    wide = an_ensemble(resources=Resources(workers=2, cpus_per_worker=0.5, memory_gb=0.3))
    with (
        pytest.warns(UserWarning, match="has no locks"),
        pytest.raises(SpecError, match=r"is on a file system without locks \(flock\).*-o flock"),
    ):
        ensemble.submit(wide, where / "wide", "local").wait()
    assert not (where / "wide").exists(), "what is refused leaves nothing"
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
    assert "this file system has no locks (flock); do not start a second controller" in done.stderr
    assert "its file system has no locks (flock)" in done.stderr
    check_trained(where / "run")
    check_trained(tmp_path / "run")
