"""What a dry run says a run will cost is what the run costs: CPU-seconds, of whole processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "integrations"
NEEDS = {"Transformers": "transformers", "MONAI": "monai", "pytorch-forecasting": "pytorch_forecasting"}
PORTS = "import programs; declared = programs.PROGRAMS[{name!r}][1](programs.MEMBERS)"
#: Four members of which one has room at a time, so that samples are prepared four times; models are built slowly.
WAVES = """
import time
import numpy as np, torch
from ensemble import Ensemble, Member, Recipe, Resources
from pipelines import Pipeline, sources

def busy(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass

def prepare(sample):
    busy(0.01)
    return sample

def build(params):
    busy(1.0)
    return torch.nn.Linear(4, 3)

x = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
pipe = Pipeline(sources.arrays(x=x, label=(x[:, 0] > 0).astype(np.int64)), seed=0).map(prepare)
alone = Resources(cpus_per_worker=CORES)
members = [Member({"lr": 0.1}) for _ in range(4)]
declared = Ensemble(
    name="waves", recipe=Recipe(model=build, loss="cross_entropy"), train=pipe, valid=pipe, members=members,
    epochs=2, batch_size=20, resources=alone,
)
"""
MEASURE = """
import os, resource, sys
import ensemble
if __name__ == "__main__":
    if sys.argv[1] == "said":
        print(ensemble.dry_run(declared, sys.argv[2], executor="local").run["cpu_s"])
    else:
        result = ensemble.submit(declared, sys.argv[2], "local").wait()
        assert [row["state"] for row in result.members] == ["finished"] * len(result.members)
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        print(sum(each.ru_utime + each.ru_stime for each in used))
"""


def ask(program: Path, what: str) -> float:
    """CPU-seconds that a program says, or uses."""
    command = [sys.executable, "-W", "ignore", str(program), what, str(program.parent / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("waves", marks=pytest.mark.more),
        pytest.param("Transformers", marks=pytest.mark.more),
        pytest.param("MONAI", marks=pytest.mark.slow),
        pytest.param("pytorch-forecasting", marks=pytest.mark.slow),
    ],
)
def test_a_dry_run_says_within_a_quarter_what_a_run_uses(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    declared = WAVES.replace("CORES", "len(__import__('os').sched_getaffinity(0))")
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys\nsys.path.append({str(PROGRAMS)!r})\n"
        f"{declared if name == 'waves' else PORTS.format(name=name)}\n{MEASURE}"
    )
    assert ask(program, "said") == pytest.approx(ask(program, "used"), rel=0.25)
