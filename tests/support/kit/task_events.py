"""Runs of each task that never were: their events, and members' predictions as a run saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ensemble.combine.tasks import find_math
from ensemble.spec import quantiles
from ensemble.spec.task import Task
from kit import run_events as runs

Event = dict[str, Any]

MEMBERS = 5
ROWS = 500
LABELS = 4
TASKS = {
    "multilabel": Task("multilabel"),
    "regression": Task("regression"),
    "gaussian": Task("gaussian"),
    "quantiles": quantiles(0.05, 0.25, 0.5, 0.75, 0.95),
    "free": Task("free"),
}
#: The objective of each, and its direction.
OBJECTIVES = {
    "multilabel": ("f1_macro", "max"),
    "regression": ("rmse", "min"),
    "gaussian": ("nll", "min"),
    "quantiles": ("pinball", "min"),
    "free": ("angle", "min"),
}


def predict(task: Task, number: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A member's values, index and target; members know the same truth, each with errors of its own."""
    truth, own = np.random.default_rng(0), np.random.default_rng(100 + number)
    index = np.arange(rows, dtype=np.int64)
    signal = truth.normal(0, 2, rows)
    noise = truth.normal(0, 0.5, rows)
    shared = truth.normal(0, 0.3, rows)
    if task.kind == "multilabel":
        strength = truth.normal(0, 2, (rows, LABELS)) - np.arange(LABELS)
        target = (strength + truth.normal(0, 1, strength.shape) > 0).astype(np.int64)
        logits = 1.5 * (strength + own.normal(0, 1, strength.shape))
        return (1 / (1 + np.exp(-logits))).astype(np.float32), index, target
    points = signal + shared + own.normal(0, 0.4, rows)
    target = signal + noise
    if task.kind == "gaussian":
        variance = (0.5 * np.exp(own.normal(0, 0.2, rows))) ** 2
        return np.stack([points, variance], axis=1).astype(np.float32), index, target
    if task.kind == "quantiles":
        from scipy.stats import norm

        return (points[:, None] + 0.5 * norm.ppf(task.levels)).astype(np.float32), index, target
    if task.kind == "free":
        return np.stack([np.cos(points), np.sin(points)], axis=1).astype(np.float32), index, target
    return points.astype(np.float32), index, target


def make_combined(task: Task, members: list[str]) -> Event:
    """The `combined` event that these members give when they are averaged."""
    alone = [predict(task, int(member[7:])) for member in members]
    target, task_math = alone[0][2], find_math(task)
    equal = np.full(len(members), 1 / len(members))
    if task.kind == "free":
        metrics = {"ensemble": {"angle": 0.21}, "best": {"angle": 0.34}, "mean": {"angle": 0.4}}
    else:
        each = [task_math.measure(values, target) for values, _, _ in alone]
        ours = task_math.measure(task_math.mix([values for values, _, _ in alone], equal), target)
        mean = {name: float(np.mean([one[name] for one in each])) for name in each[0]}
        metrics = {"ensemble": ours, "best": each[0], "mean": mean}
    intervals = {
        of: {name: [v - 0.02, v + 0.03] for name, v in metrics[of].items()} for of in ("ensemble", "best")
    }
    difference = {name: value - metrics["best"][name] for name, value in metrics["ensemble"].items()}
    how = {"method": "average" if task.kind != "free" else "function", "split": "test", "temperature": 1.0}
    how |= {"best_calibrated": None, "reliability": None, "reason": None, "note": None, "left_out": {}}
    how |= {"uncertainty": {"total": 0.4, "aleatoric": 0.25, "epistemic": 0.15}, "task": task.as_record()}
    covers = {"kind": "interval", "level": 0.9, "threshold": 0.9, "coverage": 0.894, "size": 1.91}
    return how | {
        "metrics": metrics,
        "members": members,
        "weights": dict.fromkeys(members, 1 / len(members)),
        "best_member": members[0],
        "calibration": {"method": None, "value": 1.0, "reason": "points have no spread to calibrate"},
        "intervals": {**intervals, "difference": {n: [d - 0.03, d + 0.03] for n, d in difference.items()}},
        "noise": [name for name, value in difference.items() if abs(value) <= 0.03],
        "conformal": {"absolute": covers},
    }


def task_run(kind: str) -> list[Event]:
    """A list of members of a task, all finished."""
    task, (objective, direction) = TASKS[kind], OBJECTIVES[kind]

    def convert(event: Event) -> Event:
        if event["type"] == "run_started":
            return event | {"objective": objective, "direction": direction}
        if event["type"] in ("epoch", "finished") and event.get("metrics"):
            error = 1 - event["metrics"]["accuracy"]
            value = 1 - error if direction == "max" else error
            return event | {"metrics": {"loss": event["metrics"]["loss"], objective: value}}
        if event["type"] == "combined":
            return {name: event[name] for name in ("v", "t", "type")} | make_combined(task, event["members"])
        return event

    return [convert(event) for event in runs.list_run(members=MEMBERS, epochs=3)]


def write_task_run(path: Path, kind: str, events: list[Event] | None = None) -> Path:
    """A run directory with the events of a task and its members' saved predictions."""
    from ensemble.store import RunDir
    from kit.kept_predictions import save_predictions

    runs.write_run(path, task_run(kind) if events is None else events)
    for number in range(MEMBERS):
        for split in ("valid", "test"):
            file = RunDir(path).predictions(f"member-{number}")
            file.parent.mkdir(parents=True, exist_ok=True)
            save_predictions(file, split, *predict(TASKS[kind], number), TASKS[kind])
    return path
