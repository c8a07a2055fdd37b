"""Compares runs: what differs in their declarations, their figures, and what they cost.

Where two runs predicted the same samples with the same targets, the difference of a figure has a 95 % interval by
the paired bootstrap, and one that holds 0 is within noise. Where samples, task or objective differ, that is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ensemble.events import NOT_COMBINED
from ensemble.reporting.comparison.result import Comparison, Rows
from ensemble.reporting.model_figures import list_figures, read_task
from ensemble.reporting.ranking import finite_or_none
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import describe_lost_controller
from ensemble.spec import SpecError
from ensemble.store import RunDir, RunState, read_events

if TYPE_CHECKING:
    from ensemble.combine.prediction_matrix import PredictionMatrix
    from ensemble.spec.task import Task

#: Of the identities of members, what is compared beside their hyperparameters.
OPTIONS = (
    "epochs", "batch_size", "precision", "optimizer", "schedule", "workers", "threads", "accumulate",
    "compression", "communicator", "weights", "early_stopping", "keep", "averaging", "compile", "mixup", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Declared:
    """A run that is compared."""

    run_dir: RunDir
    run: RunProjection

    @property
    def state(self) -> RunState:
        """Of the run."""
        return self.run.state

    @property
    def split(self) -> str:
        """The split that its figures are of."""
        return str((self.state.combined or NOT_COMBINED).split or "test")

    @property
    def task(self) -> Task:
        """What its members predict."""
        return read_task(self.state.combined)

    def as_row(self, name: str) -> dict[str, Any]:
        """Its row in a comparison (`Comparison.runs`)."""
        run, state = self.run, self.state
        return {
            "run": name,
            "run_dir": str(self.run_dir.path),
            "state": run.word,
            "members": len(state.members),
            "finished": run.counts["finished"],
            "objective": state.objective,
            "direction": state.direction,
            "best_member": run.best and run.best.id,
            "best": run.best_value,
            "combined": run.combined_value,
            "split": self.split if state.combined is not None else None,
            "cpu_s": run.used.cpu_s,
            "energy_j": run.used.energy_j,
            "energy_origin": run.used.origin,
            "wall_s": state.wall_s,
        }

    @cached_property
    def declaration(self) -> dict[str, Any]:
        """What was declared, by its name; of members the value that all have, else a list of their values."""
        state, header, members = self.state, self.state.header, list(self.state.members.values())
        data = header.data or {}
        params = dict.fromkeys(name for member in members for name in member.params)
        return {
            "name": state.name,
            "mode": state.mode,
            "members": state.declared,
            "objective": f"{state.objective}, {state.direction}",
            "executor": state.executor,
            **{f"params.{name}": _collect(member.params.get(name) for member in members) for name in params},
            **{name: _collect(member.identity.get(name) for member in members) for name in OPTIONS},
            **{f"data.{name}": data.get(name) for name in ("fingerprint", "samples", "drop_last", "fingerprints")},
            "code": header.code,
            "revision": header.revision,
            **{f"version.{name}": version for name, version in (header.versions or {}).items()},
            "combine": (state.combined or NOT_COMBINED).declared,
        }

    def read_metrics(self, model: str) -> dict[str, float]:
        """The figures of the "combined" model or the "best" member on the split that they are of."""
        metrics = (self.state.combined or NOT_COMBINED).metrics or {}
        figures = metrics.get({"combined": "ensemble"}.get(model, model)) or {}
        return {name: value for name, value in figures.items() if finite_or_none(value) is not None}

    def read_model(self, model: str, *, runs_code: bool = True) -> PredictionMatrix | str:
        """What a model predicted; or why that is not known.

        Args:
            runs_code: whether members may be combined by the function of the run's declaration.
        """
        from ensemble.combine import CombineError
        from ensemble.combine.prediction_matrix import PredictionMatrix, read_prediction_matrix
        from ensemble.combine.recorded import read_combined
        from ensemble.store import StoreError

        try:
            if model == "combined":
                load = None if runs_code else self._refuse_code
                one = read_combined(self.run_dir, self.state.as_finished(), self.split, load)
                return PredictionMatrix([model], [one.values], one.index, one.target, {}, one.task)
            best = (self.state.combined or NOT_COMBINED).best_member
            if best is None:
                return f"{self.run_dir.path} has measured no member on a test or validation split"
            matrix = read_prediction_matrix(self.run_dir, self.state.as_finished(), [best], self.split)
            return matrix if matrix.members else f"{self.run_dir.path}: {best}: {matrix.left_out[best]}"
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
    run_dir = RunDir(path)
    run = RunProjection.from_events(read_events(run_dir.events))  # a snapshot leaves out what is compared
    run.driver = describe_lost_controller(run_dir, run.state)
    return Declared(run_dir, run)


def list_differences(runs: Sequence[Declared]) -> list[dict[str, Any]]:
    """What differs between the declarations of runs: rows of `what` and `values`."""
    columns: list[Mapping[str, Any]] = [run.declaration for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [{"what": name, "values": [column.get(name) for column in columns]} for name in names]
    rows = [row for row in rows if any(value != row["values"][0] for value in row["values"])]
    # A run tells how it combines when it does.
    return [row for row in rows if row["what"] != "combine" or all(run.state.combined for run in runs)]


def _collect(values: Iterable[Any]) -> Any:
    """The different values of members: the one that all have, else a list of them."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    return different[0] if len(different) == 1 else different


MODELS = {"combined": "the combined model", "best": "the best member"}


def compare(*run_dirs: str | os.PathLike[str]) -> Comparison:
    """Compare runs.

    Args:
        run_dirs: two or more run directories; figures are compared with those of the first.

    Returns:
        The comparison; `str()` of it is a text with tables.

    Raises:
        SpecError: fewer than two runs are given, or one twice.
        StoreError: there is no run.
    """
    if len(run_dirs) < 2:
        raise SpecError("compare() takes two run directories or more")
    runs = [read_declared(path) for path in run_dirs]
    paths = [run.run_dir.path.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise SpecError(f"compare() is given the run {runs[0].run_dir.path} twice")
    names = [run.run_dir.path.name for run in runs]
    names = names if len(set(names)) == len(names) else [str(run.run_dir.path) for run in runs]
    return compare_runs(runs, names)


def compare_runs(runs: Sequence[Declared], names: Sequence[str], *, runs_code: bool = True) -> Comparison:
    """Compare runs that were read.

    Args:
        names: what they are called; each once.
        runs_code: see `Declared.read_model`.
    """
    notes = explain_differences(runs, names)
    figures: Rows = []
    for model, what in MODELS.items():
        predictions = [run.read_model(model, runs_code=runs_code) for run in runs]
        differences: list[Mapping[str, Any]] = []
        for run, name, theirs in zip(runs[1:], names[1:], predictions[1:], strict=True):
            difference = find_differences(runs[0], predictions[0], run, theirs)
            if isinstance(difference, str):
                notes.append(f"{what} of {name} is not compared with that of {names[0]}: {difference}")
            differences.append({} if isinstance(difference, str) else difference)
        figures += make_rows(model, runs, differences)
    rows = [run.as_row(name) for run, name in zip(runs, names, strict=True)]
    return Comparison(rows, list_differences(runs), figures, list(dict.fromkeys(notes)))


def explain_differences(runs: Sequence[Declared], names: Sequence[str]) -> list[str]:
    """What forbids to compare the runs as equals."""
    from ensemble.train.data_identity import describe_difference, is_identified, why_unsure

    notes = []
    first = runs[0]
    for run, name in zip(runs[1:], names[1:], strict=True):
        ours, theirs = ((one.state.objective, one.state.direction) for one in (first, run))
        if ours != theirs:
            notes.append(
                f"{name} has another objective ({theirs[0]}, {theirs[1]}) than {names[0]} ({ours[0]}, {ours[1]}): "
                "best values are not comparable"
            )
        data, other = first.state.header.data, run.state.header.data
        if unknown := [who for who, what in ((names[0], data), (name, other)) if not is_identified(what)]:
            notes.append(
                f"whether {name} was trained with the data of {names[0]} is not known: the log of {unknown[0]} "
                "does not say with which data it began"
            )
            continue
        difference = describe_difference(_keep_training(data), _keep_training(other))
        if difference is not None:
            notes.append(f"{name} was trained with other data than {names[0]}: {difference}")
        elif (why := why_unsure(data, other)) is not None:
            notes.append(f"whether {name} was trained with the data of {names[0]} is not known: {why}")
    return notes


def _keep_training(data: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies the training data, without validation and test data."""
    return {"samples": None, "drop_last": None, **data, "numbering": None, "splits": None}


def find_differences(
    first: Declared, ours: PredictionMatrix | str, second: Declared, theirs: PredictionMatrix | str
) -> dict[str, Any] | str:
    """The intervals of the second run's figures minus the first's, by figure, by the paired bootstrap; or why they
    cannot be compared. "" says that they were drawn.

    Args:
        ours, theirs: see `Declared.read_model`.
    """
    from ensemble.combine.bootstrap import draw_models
    from ensemble.combine.tasks import find_math

    if isinstance(ours, str) or isinstance(theirs, str):
        return ours if isinstance(ours, str) else str(theirs)
    if (why := explain_other_samples(first, ours, second, theirs)) is not None:
        return why
    drawn = []
    for matrix in (ours, theirs):
        assert matrix.target is not None
        statistics = find_math(matrix.task).statistics(matrix.values[0], matrix.target)
        drawn.append(draw_models({"": statistics}, len(matrix.target))[""])
    return {"": True, **drawn[1].subtract(drawn[0])}


def make_rows(model: str, runs: Sequence[Declared], differences: Sequence[Mapping[str, Any]]) -> Rows:
    """The figures of a model of several runs, each beside that of the first run: see `Comparison.figures`.

    Args:
        differences: of each run but the first, see `find_differences`; empty where it is not known.
    """
    state = runs[0].state
    metrics = [run.read_metrics(model) for run in runs]
    figure_names = list(dict.fromkeys(name for figures in metrics for name in figures))
    rows: Rows = []
    for figure in list_figures(figure_names, runs[0].task, (state.objective, state.direction)):
        values = [figures.get(figure.name) for figures in metrics]
        against = []
        for value, difference in zip(values[1:], differences, strict=True):
            interval = difference.get(figure.name) or None
            is_known = bool(difference) and value is not None and values[0] is not None
            against.append(
                {
                    "difference": value - values[0] if is_known else None,  # type: ignore[operator]
                    "interval": interval,
                    "within_noise": None if interval is None else bool(interval[0] <= 0 <= interval[1]),
                }
            )
        row = {"model": model, "metric": figure.name, "better": figure.better, "values": values}
        rows.append(row | {"against": against})
    return rows


def explain_other_samples(
    first: Declared, ours: PredictionMatrix, second: Declared, theirs: PredictionMatrix
) -> str | None:
    """Why predictions of two runs are not of the same samples; None where they are."""
    import numpy as np

    if first.split != second.split:
        return f"one has figures of the {first.split} split, the other of the {second.split} split"
    if ours.task != theirs.task:
        return f"they predict different tasks ({ours.task.kind} and {theirs.task.kind})"
    if not np.array_equal(ours.index, theirs.index):
        return f"they predicted other {first.split} samples ({len(ours.index)} and {len(theirs.index)})"
    if ours.values[0].shape != theirs.values[0].shape:
        shapes = [list(matrix.values[0].shape[1:]) for matrix in (ours, theirs)]
        return f"they predict values of different shapes, {shapes[0]} and {shapes[1]} a sample"
    if ours.target is None or theirs.target is None:
        return f"the {first.split} split has no targets"
    is_float = ours.target.dtype.kind == theirs.target.dtype.kind == "f"
    if not np.array_equal(ours.target, theirs.target, equal_nan=is_float):
        return f"the targets of their {first.split} samples differ"
    return None
