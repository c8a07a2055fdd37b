"""Reads a run for a comparison: how it was declared, what it reached and when, what its models predicted.

All of it but the predictions is one record of JSON values, made of the whole log. A run that has ended keeps its
record beside the log (`summary.json`), so that fifty of them are compared without reading fifty logs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED, Combined, Epoch, RunStarted
from ensemble.reporting.comparison.record import MOST_BEST, MOST_POINTS, MOST_VALUES, CombinedForm
from ensemble.reporting.model_figures import compare, describe_figure
from ensemble.reporting.ranking import finite_or_none, rank_members, rounded
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import SILENT_S, describe_lost_controller
from ensemble.spec.out_of_fold import is_out_of_fold
from ensemble.spec.task import CLASSIFICATION, Task
from ensemble.store import MemberState, RunDir, RunState, StoreError, apply_event, read_events
from ensemble.store.digests import digest_bytes

if TYPE_CHECKING:
    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.events import Event

#: Of the identities of members, what is compared beside their hyperparameters.
OPTIONS = (
    "epochs", "batch_size", "precision", "optimizer", "schedule", "workers", "threads", "accumulate",
    "compression", "communicator", "weights", "early_stopping", "keep", "averaging", "compile", "mixup", "seed",
)  # fmt: skip
#: Of the `combined` event, what says how the members were combined, and how good that is.
COMBINED = tuple(CombinedForm.__annotations__)
RECORD_VERSION = 1

Record = dict[str, Any]


@dataclass(frozen=True)
class Declared:
    """A run that is compared.

    Attributes:
        record: see `make_record`.
        state: of the run, as far as the record has it.
    """

    run_dir: RunDir
    record: Record
    state: RunState

    @classmethod
    def from_record(cls, run_dir: RunDir, record: Record) -> Declared:
        """A run of which there is a record: its state has what its combined model and its best member take.

        Raises:
            LookupError: it is of another version, or members were evaluated out of fold, which takes the log.
            ArithmeticError, AttributeError, TypeError, ValueError: what it says cannot be compared.
        """
        if record["v"] != RECORD_VERSION or any(is_out_of_fold(each[2]) for each in record["members"].values()):
            raise LookupError("this takes the log")
        combined, standing = record["combined"], record["standing"]
        state = RunState(header=RunStarted(data=record["data"]))
        state.objective, state.direction = standing["objective"], standing["direction"]
        state.combined = None if combined is None else Combined(**combined)
        for name, (number, predictions, weights) in record["members"].items():
            state.members[name] = MemberState(
                name, number, {"weights": weights}, "finished", predictions=predictions
            )
        return cls(run_dir, record, state).check()

    def check(self) -> Declared:
        """Returns it, if it can be compared: somebody else may have written the files that it was read from.

        Raises:
            ArithmeticError, AttributeError, LookupError, TypeError, ValueError: it cannot.
        """
        from ensemble.train.data_identity import describe_moves, is_identified, why_unsure

        ranking, data = (self.state.objective, self.state.direction), self.state.header.data
        describe_figure(self.state.objective, self.task, ranking)
        compare(self.state.combined, ranking)
        if is_identified(data):
            why_unsure(data, data)
            describe_moves(data, data)
        return self

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
        return {"run": name, "run_dir": str(self.run_dir.path), **self.record["standing"]}

    def find_best_value(self) -> float | None:
        """The best value of the objective that any member has reported."""
        return self.record["reached"][-1][1] if self.record["reached"] else None

    def measure_time_to(self, quality: float) -> float | None:
        """Seconds at work until the end of the first epoch with such a value of the objective; None: never."""
        is_max = self.state.direction == "max"
        reached = self.record["reached"]
        return next((s for s, value in reached if (value >= quality if is_max else value <= quality)), None)

    def read_metrics(self, model: str) -> dict[str, float]:
        """The figures of the "combined" model or the "best" member on the split that they are of."""
        metrics = (self.state.combined or NOT_COMBINED).metrics or {}
        found = metrics.get({"combined": "ensemble"}.get(model, model)) or {}
        return {name: value for name, value in found.items() if finite_or_none(value) is not None}

    def read_model(self, model: str, *, runs_code: bool = True) -> PredictionMatrix | str:
        """What a model predicted; or why that is not known.

        Args:
            runs_code: whether members may be combined by the function of the run's declaration.
        """
        from ensemble.combine import CombineError
        from ensemble.combine.prediction_matrix import PredictionMatrix, read_prediction_matrix
        from ensemble.combine.recorded import read_combined

        try:
            if model == "combined":
                load = None if runs_code else self._refuse_code
                one = read_combined(self.run_dir, self.state, self.split, load)
                return PredictionMatrix([model], [one.values], one.index, one.target, {}, one.task)
            best = (self.state.combined or NOT_COMBINED).best_member
            if best is None:
                return f"{self.run_dir.path} has measured no member on a test or validation split"
            found = read_prediction_matrix(self.run_dir, self.state, [best], self.split)
            return found if found.members else f"{self.run_dir.path}: {best}: {found.left_out[best]}"
        except (CombineError, StoreError) as error:
            return str(error)

    def _refuse_code(self) -> None:
        from ensemble.combine import CombineError

        raise CombineError(
            f"{self.run_dir.path} was combined by a function of yours, which `ensemble compare` calls"
        )


def read_declared(path: str | os.PathLike[str]) -> Declared:
    """Read a run.

    Raises:
        StoreError: there is none.
    """
    from ensemble.meter import ledger

    run_dir = RunDir(path)
    events = read_events(run_dir.events)
    state, reached = follow_objective(events)
    driver = describe_lost_controller(run_dir, state, silent_s=SILENT_S)
    return Declared(run_dir, make_record(RunProjection(state, ledger(events), driver), reached), state)


def follow_objective(events: Iterable[Event]) -> tuple[RunState, list[tuple[float, float]]]:
    """The fold of events, and each value of the objective that was better than all before it, after the seconds at
    work at which it was reported.
    """
    state, reached = RunState(), list[tuple[float, float]]()
    for event in events:
        apply_event(state, event)
        if isinstance(event, Epoch):
            value = finite_or_none((event.metrics or {}).get(state.objective))
            sign = 1 if state.direction == "max" else -1
            if value is not None and (not reached or sign * value > sign * reached[-1][1]):
                reached.append((state.wall_s, value))
    return state, reached


def make_record(run: RunProjection, reached: Sequence[tuple[float, float]]) -> Record:
    """Makes what a comparison says of a run, as JSON values.

    Args:
        reached: see `follow_objective`.

    Returns:
        - `standing`: its row in a comparison but for its name.  `reached`: as given.
        - `best`: the members that are best: id, value of the objective, hyperparameters.
        - `curves`: by "best" the objective after each epoch of the best member, [epochs, value]; by "quartiles"
          that of all members that came so far, [epochs, lower quartile, median, upper quartile].
        - `declaration`: see `list_differences`.  `data`: what identifies the training data.
        - `combined`: `COMBINED` of that event, None where there is none; `members`: number, digests of the
          predictions and declared weights of each member that takes part in it.
    """
    state, best = run.state, run.best
    combined = state.combined
    shown = combined or NOT_COMBINED
    used = dict.fromkeys([*shown.weights, *(shown.candidates or ()), shown.best_member])
    return {
        "v": RECORD_VERSION,
        "standing": {
            "state": run.word,
            "members": len(state.members),
            "finished": run.counts["finished"],
            "objective": state.objective,
            "direction": state.direction,
            "best_member": best.id if best is not None else None,
            "best": run.best_value,
            "combined": run.combined_value,
            "split": str(shown.split or "test") if combined else None,
            "cpu_s": run.used.cpu_s,
            "energy_j": run.used.energy_j,
            "energy_origin": run.used.origin,
            "wall_s": state.wall_s,
        },
        "reached": [list(each) for each in reached],
        "best": [
            [member.id, finite_or_none(member.metrics.get(state.objective)), member.params]
            for member in rank_members(state)[:MOST_BEST]
        ],
        "curves": {
            "best": [] if best is None else _list_values(best, state.objective),
            "quartiles": _quartiles(state),
        },
        "declaration": _describe(state),
        "data": state.header.data,
        "combined": None if combined is None else {name: getattr(combined, name) for name in COMBINED},
        "members": {
            name: [member.number, member.predictions, member.identity.get("weights")]
            for name in used
            if name is not None and (member := state.members.get(name)) is not None
        },
    }


def limit_record(record: Record) -> Record:
    """The record with long lists of declared values cut: it says how many they are, and tells lists apart."""
    declaration = record["declaration"] | {
        name: [*value[:MOST_VALUES], f"{len(value)} values, {digest_bytes(json.dumps(value).encode())[:12]}"]
        for name, value in record["declaration"].items()
        if isinstance(value, list) and len(value) > MOST_VALUES
    }
    return record | {"declaration": declaration}


def _list_values(member: MemberState, objective: str) -> list[list[Any]]:
    points = [
        [k, rounded(epoch.metrics.get(objective))] for k, epoch in enumerate(member.history, 1) if epoch.metrics
    ]
    return _thin([point for point in points if point[1] is not None])


def _quartiles(state: RunState) -> list[list[Any]]:
    import numpy as np

    values: dict[int, list[float]] = {}
    for member in state.members.values():
        for k, epoch in enumerate(member.history, 1):
            value = finite_or_none((epoch.metrics or {}).get(state.objective))
            if value is not None:
                values.setdefault(k, []).append(value)
    return [
        [k, *map(rounded, np.quantile(values[k], (0.25, 0.5, 0.75)))]
        for (k,) in _thin([[k] for k in sorted(values)])
    ]


def _thin(points: list[list[Any]]) -> list[list[Any]]:
    """Every so many points, and the last."""
    every = -(-len(points) // MOST_POINTS) or 1
    return [point for i, point in enumerate(points) if i % every == 0 or i == len(points) - 1]


def list_differences(runs: Sequence[Declared]) -> list[dict[str, Any]]:
    """What differs between the declarations of runs: rows of `what` and `values`."""
    columns: list[Mapping[str, Any]] = [run.record["declaration"] for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [{"what": name, "values": [column.get(name) for column in columns]} for name in names]
    rows = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    # A run tells how it combines when it does.
    return [row for row in rows if row["what"] != "combine" or all(run.state.combined for run in runs)]


def _describe(state: RunState) -> dict[str, Any]:
    header, members = state.header, list(state.members.values())
    data = header.data or {}
    found: dict[str, Any] = {
        "name": state.name,
        "mode": state.mode,
        "members": state.declared,
        "objective": f"{state.objective}, {state.direction}",
        "executor": state.executor,
    }
    params = dict.fromkeys(name for member in members for name in member.params)
    found |= {f"params.{name}": _collect(member.params.get(name) for member in members) for name in params}
    found |= {name: _collect(member.identity.get(name) for member in members) for name in OPTIONS}
    found |= {f"data.{name}": data.get(name) for name in ("fingerprint", "samples", "drop_last")}
    found["data.fingerprints"] = data.get("fingerprints")
    found |= {"code": header.code, "revision": header.revision}
    found |= {f"version.{name}": version for name, version in (header.versions or {}).items()}
    combined = state.combined or NOT_COMBINED
    found["combine"] = combined.declared
    return found


def _collect(values: Any) -> Any:
    """The different values of members: the one that all have, else a list of them."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different
