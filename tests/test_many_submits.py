"""A process that submits one run after the other, such as a notebook open for days, keeps nothing of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.leftovers import named_memory

import ensemble
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources
from pipelines.ipc.child_processes import child_environment

torch = pytest.importorskip("torch")


def model(params: dict[str, Any]) -> Any:
    return torch.nn.Linear(4, 3)


def loss(model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch["x"][:, :4]), batch["label"], reduction="none")


def submit_one(path: Path, executor: str, width: int) -> list[weakref.ref[Any]]:
    """Train an ensemble with arrays of its own; returns references to it and to the handle of its run."""
    x = np.random.default_rng(0).normal(size=(24, width)).astype(np.float32)
    train = Pipeline(sources.arrays(x=x, label=np.arange(24) % 3), seed=0)
    usual: dict[str, Any] = {"members": [{"lr": 0.1}], "epochs": 1, "batch_size": 8}
    declared = Ensemble(name="again", recipe=Recipe(model=model, loss=loss), train=train, **usual)
    run = ensemble.submit(declared, path, executor=executor)
    assert run.wait().stopped is None
    return [weakref.ref(declared), weakref.ref(run)]


def count_held() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "shared memory": Path("/proc/self/maps").read_text().count("memfd:") + len(named_memory()),
        "children": len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
        "temporary files": len(os.listdir(tempfile.gettempdir())),
    }


def read_memory() -> int:
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def submit_many(folder: Path, runs: int, local_every: int, width: int, *, is_alone: bool) -> None:
    """Check that runs leave nothing once libraries are loaded, nor descriptors where nothing else runs here."""
    held, memory = {}, list[int]()
    for number in range(runs):
        is_local = local_every > 0 and number % local_every == 0
        gc.disable()  # nothing waits for a collection of circles, which is rare
        try:
            left = submit_one(folder / f"run-{number}", "local" if is_local else "inline", width)
            if number < 2:
                gc.collect()  # torch's imports leave frames in circles
            assert [each() for each in left] == [None, None], f"run {number} is kept in memory"
        finally:
            gc.enable()
        if number == 1:
            held = count_held()
        if number % 20 == 1:
            memory.append(read_memory())
    if not is_alone:
        return
    assert (now := count_held()) == held, f"{now}, and it was {held} after two runs"
    grown = (read_memory() - memory[0]) / (runs - 2)
    assert grown < 24 * width * 4 / 4, f"{grown:,.0f} bytes a run, a quarter of its arrays or more: {memory}"


def test_runs_that_have_ended_leave_nothing_in_the_process_that_submitted_them(tmp_path: Path) -> None:
    submit_many(tmp_path, runs=4, local_every=0, width=1000, is_alone=False)


@pytest.mark.slow
def test_sixty_submits_leave_nothing_in_a_process(tmp_path: Path) -> None:
    """In a process of its own, whose first run is the one that imports the libraries."""
    command = [sys.executable, __file__, str(tmp_path), "60"]
    with tempfile.TemporaryDirectory() as temporary:
        environment = {**child_environment(), "PYTHONSAFEPATH": "1", "TMPDIR": temporary}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


if __name__ == "__main__":
    submit_many(Path(sys.argv[1]), int(sys.argv[2]), local_every=20, width=100_000, is_alone=True)
