"""Runs in containers: a control group with a limit of memory, and Docker's small /dev/shm. Both are real.

What members and rings are offered together in a group with a limit: test_executors_host_memory.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kit.control_groups import make_control_group
from kit.finished_runs import of_kind

HERE = Path(__file__).parent
LIMIT_MIB = 1200
#: A run whose samples have a MiB.
RUNS = """
import sys
import ensemble
import numpy as np
from kit.execute_members import an_ensemble, samples

def widened(sample):
    return {**sample, "more": np.zeros(2**18, np.float32)}

if __name__ == "__main__":
    ensemble.submit(an_ensemble(train=samples(96, 0).map(widened), batch_size=4), sys.argv[1], "local").wait()
"""
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


@pytest.mark.more
def test_a_run_does_not_depend_on_the_size_of_dev_shm(small: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs.py").write_text(RUNS)
    done = execute(tmp_path / "runs.py", tmp_path / "run", within=small)
    assert done.returncode == 0, done.stderr
    assert max(event["ring_bytes"] for event in of_kind(tmp_path / "run", "feeder")) > 16 * 2**20
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
