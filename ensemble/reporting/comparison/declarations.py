"""Reads a run for a comparison: how it was declared, what it reached and when, what its models predicted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, Epoch
from ensemble.reporting.ranking import finite_or_none
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import SILENT_S, describe_lost_controller
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store import RunDir, RunState, StoreError, apply_event, read_events

if TYPE_CHECKING:
    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.meter import Ledger

#: Of the identities of members, what is compared beside their hyperparameters.
OPTIONS = (
    "epochs", "batch_size", "precision", "optimizer", "schedule", "workers", "threads", "accumulate",
    "compression", "communicator", "weights", "early_stopping", "keep", "averaging", "compile", "mixup", "seed",
)  # fmt: skip
MOST_VALUES = 6  # of a hyperparameter, that are listed


@dataclass(frozen=True)
class Declared:
    """A run that is compared.

    Attributes:
        reached: (seconds at work, value of the objective) of each epoch, in the order of the log.
    """

    run_dir: RunDir
    state: RunState
    ledger: Ledger
    reached: list[tuple[float, float]]

    @property
    def split(self) -> str:
        """The split that its figures are of."""
        return str((self.state.combined or NOT_COMBINED).split or "test")

    @property
    def task(self) -> Task:
        """What its members predict."""
        record = (self.state.combined or NOT_COMBINED).task
        return Task.from_record(record) if record else CLASSIFICATION

    def as_row(self, name: str) -> dict[str, Any]:
        """Its row in a comparison."""
        driver = describe_lost_controller(self.run_dir, self.state, silent_s=SILENT_S)
        state, run = self.state, RunProjection(self.state, self.ledger, driver)
        return {
            "run": name,
            "run_dir": str(self.run_dir.path),
            "state": run.word,
            "members": len(state.members),
            "finished": run.counts["finished"],
            "objective": state.objective,
            "direction": state.direction,
            "best_member": run.best.id if run.best is not None else None,
            "best": run.best_value,
            "combined": run.combined_value,
            "split": self.split if state.combined else None,
            "cpu_s": run.used.cpu_s,
            "energy_j": run.used.energy_j,
            "energy_origin": run.used.origin,
            "wall_s": state.wall_s,
        }

    def find_best_value(self) -> float | None:
        """The best value of the objective that any member has reported."""
        values = [value for _, value in self.reached]
        return (max(values) if self.state.direction == "max" else min(values)) if values else None

    def measure_time_to(self, quality: float) -> float | None:
        """Seconds at work until the end of the first epoch with such a value of the objective; None: never."""
        is_max = self.state.direction == "max"
        return next((s for s, value in self.reached if (value >= quality if is_max else value <= quality)), None)

    def read_metrics(self, model: str) -> dict[str, float]:
        """The figures of the "combined" model or the "best" member on the split that they are of."""
        metrics = (self.state.combined or NOT_COMBINED).metrics or {}
        found = metrics.get({"combined": "ensemble"}.get(model, model)) or {}
        return {name: value for name, value in found.items() if finite_or_none(value) is not None}

    def read_model(self, model: str) -> PredictionMatrix | str:
        """What a model predicted; or why that is not known."""
        from ensemble.combine import CombineError
        from ensemble.combine.prediction_matrix import PredictionMatrix, read_prediction_matrix
        from ensemble.combine.recorded import read_combined

        try:
            if model == "combined":
                one = read_combined(self.run_dir, self.state, self.split)
                return PredictionMatrix([model], [one.values], one.index, one.target, {}, one.task)
            best = (self.state.combined or NOT_COMBINED).best_member
            if best is None:
                return f"{self.run_dir.path} has measured no member on a test or validation split"
            found = read_prediction_matrix(self.run_dir, self.state, [best], self.split)
            return found if found.members else f"{self.run_dir.path}: {best}: {found.left_out[best]}"
        except (CombineError, StoreError) as error:
            return str(error)


def read_declared(path: str | os.PathLike[str]) -> Declared:
    """Read a run.

    Raises:
        StoreError: there is none.
    """
    from ensemble.meter import ledger

    run_dir, state = RunDir(path), RunState()
    events = read_events(run_dir.events)
    reached: list[tuple[float, float]] = []
    for event in events:
        apply_event(state, event)
        if isinstance(event, Epoch):
            value = finite_or_none((event.metrics or {}).get(state.objective))
            reached += [] if value is None else [(state.wall_s, value)]
    return Declared(run_dir, state, ledger(events), reached)


def list_differences(runs: Sequence[Declared]) -> list[dict[str, Any]]:
    """What differs between the declarations of runs: rows of `what` and `values`."""
    columns = [_describe(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [{"what": name, "values": [column.get(name) for column in columns]} for name in names]
    rows = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    # A run tells how it combines when it does.
    return [row for row in rows if row["what"] != "combine" or all(run.state.combined for run in runs)]


def _describe(run: Declared) -> dict[str, Any]:
    header, members = run.state.header, list(run.state.members.values())
    data = header.data or {}
    found: dict[str, Any] = {
        "name": run.state.name,
        "mode": run.state.mode,
        "members": run.state.declared,
        "objective": f"{run.state.objective}, {run.state.direction}",
        "executor": run.state.executor,
    }
    params = dict.fromkeys(name for member in members for name in member.params)
    found |= {f"params.{name}": _collect(member.params.get(name) for member in members) for name in params}
    found |= {name: _collect(member.identity.get(name) for member in members) for name in OPTIONS}
    found |= {f"data.{name}": data.get(name) for name in ("fingerprint", "samples", "drop_last")}
    found["data.fingerprints"] = data.get("fingerprints")
    found |= {"code": header.code, "revision": header.revision}
    found |= {f"version.{name}": version for name, version in (header.versions or {}).items()}
    combined = run.state.combined or NOT_COMBINED
    found["combine"] = combined.declared
    return found


def _collect(values: Any) -> Any:
    """The different values of members: the one that all have, else a list of them."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different
