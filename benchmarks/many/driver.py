"""Drives one run of tiny members in a process of its own, and prints what it measured as JSON.

python -m benchmarks.many.driver FOLDER MEMBERS EPOCHS EXECUTOR
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

FEATURES, SAMPLES, CLASSES = 16, 256, 3
#: An executor without processes, on which so many members run at a time.
MEMORY, AT_ONCE = "memory", 4


def declare(members: int, epochs: int) -> Any:
    """An ensemble of so many linear models; each takes a core."""
    from ensemble.spec import Ensemble, Member, Recipe, Resources
    from pipelines import Pipeline, sources

    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)

    def draw(count: int) -> Any:
        label = rng.integers(0, CLASSES, count)
        x = centres[label] + rng.normal(size=(count, FEATURES)).astype(np.float32)
        return Pipeline(sources.arrays(x=x.astype(np.float32), label=label), seed=0)

    def model(lr: float) -> Any:
        import torch

        return torch.nn.Linear(FEATURES, CLASSES)

    def loss(network: Any, batch: Any) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(network(batch["x"]), batch["label"], reduction="none")

    return Ensemble(
        name="many",
        recipe=Recipe(model=model, loss=loss),
        members=[Member({"lr": 0.01 + 1e-6 * number}) for number in range(members)],
        train=draw(SAMPLES),
        valid=draw(128),
        epochs=epochs,
        batch_size=64,
        resources=Resources(cpus_per_worker=1, gpus_per_worker=0, memory_gb=0.25),
        combine="average",
        sharing="independent",
    )


def drive(folder: Path, members: int, epochs: int, executor: str) -> dict[str, Any]:
    """Train them; returns the CPU-seconds of this process, and the seconds of the run."""
    import ensemble as api

    declared = declare(members, epochs)
    began = time.process_time(), time.monotonic()
    if executor == MEMORY:
        _drive_without_processes(declared, folder)
    else:
        api.submit(declared, folder, executor=executor).wait()
    return {"cpu_s": time.process_time() - began[0], "wall_s": time.monotonic() - began[1]}


def _drive_without_processes(declared: Any, folder: Path) -> None:
    from benchmarks.schedule.throughput import InMemoryExecutor
    from ensemble.controller.controller import Controller
    from ensemble.store import EventLog, RunDir, fold

    run_dir = RunDir.create(folder, declared)
    controller = Controller(run_dir, declared, InMemoryExecutor(AT_ONCE), EventLog(run_dir.events), fold([]))
    controller.open()
    controller.run()


if __name__ == "__main__":
    where, members_text, epochs_text, executor_name = sys.argv[1:]
    print(json.dumps(drive(Path(where), int(members_text), int(epochs_text), executor_name)))
