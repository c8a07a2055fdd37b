"""Measures cells: one method on one task with one seed and budget, in a process with one thread.

The cells of all methods on one task with one seed and budget, a *block*, run side by side. What has finished is a
line of a JSONL file; a later call goes on with what is not in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.launch.ranks import RanksError
from benchmarks.results import Report, group_by
from benchmarks.what_it_buys.plain import used_cpu_s
from benchmarks.what_it_buys.tasks import TABLES, TASKS, read_pool, split

if TYPE_CHECKING:
    from benchmarks.what_it_buys.tasks import Task

PLAIN = "optuna"
#: In the order in which they are measured.
METHODS = (PLAIN, "gain", "metric", "random", "pbt", "deep")
#: TPE draws its first ten trials at random. The smallest budget has no more: there these are random search.
LEARNING = ("gain", "metric")
#: So many times as long as the budget of the others the plain script searches: its trace has what it was before.
LONGER = 1.5
_WARM_UP_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measurement.

    Attributes:
        task, method, seed: see `TASKS` and `METHODS`.
        budget_s: CPU-seconds of work for each method of its block; the plain script had `LONGER` times as many.
        work_cpu_s: that it took, without imports and reading data.
        cpu_s: of the process, as its parent was told, user and system time; imports are not in it, either.
        wall_s: seconds.
        nll, accuracy: of the final model on the test split: nats, a fraction. Ours are calibrated, as they are
            unless one asks otherwise; the plain script's model is as it is.
        raw_nll, scaled_nll: without, and with a temperature fitted to the validation split.
        best_nll, best_accuracy: of the best single model by validation NLL, treated alike.
        trained: models trained to their end; `combined`: of them in the final model, where that is known.
        trace: of the plain script, see `benchmarks.what_it_buys.plain.search`.
        error: why it failed; "" where it did not.
    """

    task: str
    method: str
    seed: int
    budget_s: float
    work_cpu_s: float | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    nll: float | None = None
    accuracy: float | None = None
    raw_nll: float | None = None
    scaled_nll: float | None = None
    best_nll: float | None = None
    best_accuracy: float | None = None
    trained: int = 0
    combined: int | None = None
    trace: Sequence[Sequence[float]] = ()
    error: str = ""

    @property
    def key(self) -> tuple[str, str, int, float]:
        """What tells it from the others."""
        return self.task, self.method, self.seed, self.budget_s


def plan(tasks: Sequence[str], methods: Sequence[str], seeds: int, large_seeds: int, scale: float) -> list[Cell]:
    """The cells in their order: seed by seed, small budgets first, the dearest, of images and texts, after all.

    Args:
        large_seeds: of the largest budget of the tasks of images and texts.
        scale: of all budgets.
    """
    cells, dear = list[Cell](), list[Cell]()
    for seed, place in ((seed, place) for seed in range(seeds) for place in (0, 1)):
        for task in (TASKS[name] for name in TASKS if name in tasks):
            is_dear, left_out = place == 1 and task.name not in TABLES, LEARNING if place == 0 else ()
            if is_dear and seed >= large_seeds:
                continue
            block = [name for name in METHODS if name in methods and name not in left_out]
            where: dict[str, Any] = {
                "task": task.name,
                "seed": seed,
                "budget_s": round(scale * task.budgets[place], 3),
            }
            (dear if is_dear else cells).extend(Cell(method=name, **where) for name in block)
    return [*cells, *dear]


def read_cells(path: Path) -> list[Cell]:
    """The cells that have finished; a last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Cell(**json.loads(line)) for line in lines[:-1] if line]


def run_cells(planned: Iterable[Cell], path: Path, data: str | None, report: Report) -> list[Cell]:
    """Run the cells that are not in a file yet, and add each to it; returns those of the plan, in its order.

    Args:
        data: see `read_pool`.

    Raises:
        RanksError: their process failed, such as by data that cannot be read.
    """
    planned = list(planned)
    measured_keys = {cell.key for cell in read_cells(path)}
    unmeasured = [cell for cell in planned if cell.key not in measured_keys]
    if unmeasured:
        _cut_partial_line(path)
        arguments = {
            "cells": [dataclasses.asdict(cell) for cell in unmeasured],
            "path": str(path),
            "data": data,
        }
        command = [sys.executable, "-m", "benchmarks.what_it_buys.cells"]
        # A process of its own: to a run of a command of ours belongs all that its process has used.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
            assert runner.stdin is not None and runner.stdout is not None
            runner.stdin.write(json.dumps(arguments))
            runner.stdin.close()
            for line in runner.stdout:
                report(line.rstrip())
        if runner.returncode:
            raise RanksError(f"the process of the cells ended with {runner.returncode}; see above")
    measured = {cell.key: cell for cell in read_cells(path)}
    return [measured[cell.key] for cell in planned]


def _run_here(cells: Sequence[Cell], path: Path, data: str | None) -> None:
    """Run cells as children of this process, block by block, and add each to the file."""
    pools = {name: read_pool(TASKS[name], data) for name in dict.fromkeys(cell.task for cell in cells)}
    _warm_up()
    running: dict[int, tuple[Cell, float]] = {}
    blocks = group_by(cells, lambda cell: (cell.task, cell.seed, cell.budget_s))
    for (task, seed, budget_s), block in blocks.items():
        while len(running) > 1:  # one that lasts longer keeps nobody waiting
            _collect(running, path)
        print(f"{task}, seed {seed}, {budget_s:g} CPU-seconds: {len(block)} of {len(cells)} cells", flush=True)
        for cell in block:
            running[_fork(cell, pools[task], path)] = (cell, time.monotonic())
    while running:
        _collect(running, path)


def _cut_partial_line(path: Path) -> None:
    """Remove what a killed process has left of a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    whole = path.read_bytes()
    os.truncate(path, whole.rfind(b"\n") + 1)


def _warm_up() -> None:
    """Import all that a cell needs, and what is imported where it is used: children have it from the start."""
    import sklearn.ensemble  # noqa: F401  # for the report of a run
    import torch

    torch.set_num_threads(1)
    task = TASKS["wine"]
    for method in (PLAIN, "metric"):
        measure(Cell(task=task.name, method=method, seed=0, budget_s=_WARM_UP_S), task, read_pool(task, None))


def _fork(cell: Cell, pool: tuple[np.ndarray, np.ndarray], path: Path) -> int:
    """Start a cell's process; it leaves its outcome in a file beside `path`."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:  # the child, which must not return
        most_s = int(10 * cell.budget_s) + 60
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        try:
            measured = measure(cell, TASKS[cell.task], pool)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__}: {' '.join(str(error).split())} ({where.filename}:{where.lineno})"
            measured = dataclasses.replace(cell, error=reason)
        _outcome_file(path, os.getpid()).write_text(json.dumps(dataclasses.asdict(measured)), encoding="utf-8")
    finally:
        os._exit(0)


def _outcome_file(path: Path, pid: int) -> Path:
    return path.with_name(f"{path.name}.{pid}")


def _collect(running: dict[int, tuple[Cell, float]], path: Path) -> None:
    """Wait for one of the cells, and add it to the file."""
    pid, status, usage = os.wait4(-1, 0)
    if pid not in running:
        return
    cell, began = running.pop(pid)
    outcome = _outcome_file(path, pid)
    if outcome.exists():
        measured = Cell(**json.loads(outcome.read_text(encoding="utf-8")))
        outcome.unlink()
    else:
        measured = dataclasses.replace(cell, error=f"its process ended with {os.waitstatus_to_exitcode(status)}")
    wall_s = time.monotonic() - began
    measured = dataclasses.replace(measured, cpu_s=usage.ru_utime + usage.ru_stime, wall_s=wall_s)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(measured)) + "\n")
    if measured.error:
        print(f"{' '.join(map(str, cell.key))} failed: {measured.error}", flush=True)


def measure(cell: Cell, task: Task, pool: tuple[np.ndarray, np.ndarray]) -> Cell:
    """Run a cell in this process."""
    from benchmarks.what_it_buys import ours, plain

    arrays = split(task, pool, cell.seed)
    began = used_cpu_s()
    figures: dict[str, Any]
    if cell.method == PLAIN:
        figures = plain.search(task, arrays, cell.seed, LONGER * cell.budget_s)
        figures["work_cpu_s"] = used_cpu_s() - began
    else:
        figures = ours.search(cell.method, task, arrays, cell.seed, cell.budget_s)
        figures["work_cpu_s"] = figures.pop("ended_s") - began
    return dataclasses.replace(cell, **figures)


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    made = [Cell(**each) for each in asked.pop("cells")]
    _run_here(made, Path(asked.pop("path")), **asked)
