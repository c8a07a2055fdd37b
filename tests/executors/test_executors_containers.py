"""Runs in containers: a control group with a limit of memory, and Docker's small /dev/shm. Both are real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kit.control_groups import make_control_group

HERE = Path(__file__).parent
MIB = 2**20
LIMIT = 1200 * MIB


@pytest.fixture
def group() -> Iterator[Path]:
    with make_control_group(LIMIT // MIB) as made:
        if made is None:
            pytest.skip("no control group can be made here")
        yield made


def test_a_ring_beyond_the_limit_of_the_group_is_refused_by_its_size(group: Path) -> None:
    needed = LIMIT // MIB + 1
    done = run_alone(f"Path({str(group)!r}, 'cgroup.procs').write_text(str(os.getpid())); make_ring({needed})")
    assert f"MemoryError: ring needs {needed} MiB of memory for {needed} samples" in done.stderr


RING = """
import os
from pathlib import Path
from ensemble.cli.doctor import _shared_memory
from pipelines.samples.fields import Field
from pipelines.shm import ring

def make_ring(mib):
    return ring.create(ring.Layout({"x": Field((2**18,), "float32")}, mib), "ring")

"""


def run_alone(program: str, within: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    command = [*within, sys.executable, "-c", RING + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def small() -> list[str]:
    """What to put before a command for which /dev/shm is small."""
    unshare = shutil.which("unshare")
    command = [str(unshare), "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
    if unshare is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    return command


def test_a_ring_does_not_depend_on_the_size_of_dev_shm_and_the_doctor_knows_it(small: list[str]) -> None:
    done = run_alone("made = make_ring(24); print(*_shared_memory())", small)
    assert done.returncode == 0, done.stderr
    assert "1 MiB, as containers have by default" in done.stdout
