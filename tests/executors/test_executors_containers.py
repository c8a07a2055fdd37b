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
from kit.finished_runs import of_kind

HERE = Path(__file__).parent
MIB = 2**20
LIMIT = 1200 * MIB
# Joins the group, if one is given, and runs members whose samples have a MiB.
RUNS = f"""
import os, sys
from pathlib import Path
where, group = sys.argv[1:]
if group:
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
sys.path.insert(0, {str(HERE.parent / "support")!r})
import numpy as np
from kit.execute_members import an_ensemble, loss
import ensemble
from ensemble import Recipe
from pipelines import Pipeline, sources
import torch

class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(1, 3)
    def forward(self, x):
        return self.inner(x.mean(1, keepdim=True))

def widened(sample):
    return {{"x": np.full(2**18, sample["x"][0], np.float32), "label": sample["label"]}}

def samples(n):
    label = np.arange(n) % 3
    return Pipeline(sources.arrays(x=label[:, None].astype(np.float32), label=label), seed=0).map(widened)

if __name__ == "__main__":
    made = an_ensemble(
        recipe=Recipe(model=lambda params: Mean(), loss=loss, task="regression"),
        train=samples(96), valid=samples(6), batch_size=4
    )
    ensemble.submit(made, where, "local").wait()
"""


@pytest.fixture
def group() -> Iterator[Path]:
    with make_control_group(LIMIT // MIB) as made:
        if made is None:
            pytest.skip("no control group can be made here")
        yield made


@pytest.mark.more
def test_members_and_rings_together_are_offered_no_more_than_the_limit_of_the_group(
    group: Path, tmp_path: Path
) -> None:
    script = tmp_path / "runs.py"
    script.write_text(RUNS)
    command = [sys.executable, str(script), str(tmp_path / "run"), str(group)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [node] = of_kind(tmp_path / "run", "node")
    ring_bytes = max(event["ring_bytes"] for event in of_kind(tmp_path / "run", "feeder"))
    assert 0 < ring_bytes <= LIMIT / 16
    assert node["memory_gb"] * 2**30 + ring_bytes <= LIMIT < 1.1 * node["memory_gb"] * 2**30
    assert {event["state"] for event in of_kind(tmp_path / "run", "member") if "state" in event} <= {"finished"}
    assert len(of_kind(tmp_path / "run", "finished")) == 2


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
    """Run a program in a process of its own."""
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


@pytest.mark.more
def test_a_run_does_not_depend_on_the_size_of_dev_shm(small: list[str], tmp_path: Path) -> None:
    script = tmp_path / "runs.py"
    script.write_text(RUNS)
    command = [*small, sys.executable, str(script), str(tmp_path / "run"), ""]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(event["ring_bytes"] for event in of_kind(tmp_path / "run", "feeder")) > 16 * MIB
    assert all(event["private_batches"] == 0 for event in of_kind(tmp_path / "run", "epoch"))
