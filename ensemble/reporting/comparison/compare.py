"""`compare`: several runs side by side; what differs in their declarations, their figures, and what they cost.

A figure of two runs is compared on the same samples: where both predicted the same test samples with the same
targets, the difference has a 95 % interval by the paired bootstrap (`ensemble.combine.bootstrap`), and one that
holds 0 is within noise. Where the samples, the task or the objective differ, that is said, and nothing is compared
as if they were equal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ensemble.reporting.comparison.declarations import Declared, list_differences, read_declared
from ensemble.reporting.comparison.result import Comparison, Table
from ensemble.spec import SpecError
from ensemble.spec.validation import check_number

if TYPE_CHECKING:
    from ensemble.combine.bootstrap import DrawnFigures
    from ensemble.combine.metrics import Array
    from ensemble.combine.prediction_matrix import PredictionMatrix

MODELS = {"combined": "the combined model", "best": "the best member"}


def compare(*run_dirs: str | os.PathLike[str], quality: float | None = None) -> Comparison:
    """Compare runs.

    Args:
        run_dirs: two or more run directories; figures are compared with those of the first.
        quality: a value of the objective: how long each run took until a member reached it. Unless given, the best
            value that all of the runs have reached.

    Returns:
        The comparison; `str()` of it is a text with tables.

    Raises:
        SpecError: fewer than two runs are given, or one twice, or `quality` is no number.
        StoreError: there is no run.
    """
    if len(run_dirs) < 2:
        raise SpecError("compare() takes two run directories or more")
    if quality is not None:
        check_number("compare(quality=)", quality, low=-math.inf)
    runs = [read_declared(path) for path in run_dirs]
    paths = [run.run_dir.path.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise SpecError(f"compare() is given the run {runs[0].run_dir.path} twice")
    names = _name_runs(runs)
    notes = explain_differences(runs, names)
    is_ranked = len({(run.state.objective, run.state.direction) for run in runs}) == 1
    level = (_find_common_quality(runs) if quality is None else float(quality)) if is_ranked else None
    figures, more = _compare_figures(runs, names)
    rows = [
        run.as_row(name) | {"quality_s": None if level is None else run.measure_time_to(level)}
        for run, name in zip(runs, names, strict=True)
    ]
    return Comparison(rows, list_differences(runs), figures, level, [*notes, *more])


def _name_runs(runs: Sequence[Declared]) -> list[str]:
    names = [run.run_dir.path.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.run_dir.path) for run in runs]


def explain_differences(runs: Sequence[Declared], names: Sequence[str]) -> list[str]:
    """What forbids to compare the runs as equals."""
    from ensemble.train.data_identity import describe_difference, describe_moves, is_identified, why_unsure

    notes = []
    first = runs[0]
    for run, name in zip(runs[1:], names[1:], strict=True):
        ours, theirs = ((one.state.objective, one.state.direction) for one in (first, run))
        if ours != theirs:
            notes.append(
                f"{name} has another objective ({theirs[0]}, {theirs[1]}) than {names[0]} ({ours[0]}, {ours[1]}): "
                "best values and times to a quality are not comparable"
            )
        data, other = first.state.header.data, run.state.header.data
        if unknown := [who for who, what in ((names[0], data), (name, other)) if not is_identified(what)]:
            notes.append(
                f"whether {name} was trained with the data of {names[0]} is not known: the log of {unknown[0]} "
                "does not say with which data it began"
            )
            continue
        difference = describe_difference(_complete(data), _complete(other))
        if difference is not None:
            moved = f"; {moves}" if (moves := describe_moves(data, other)) else ""
            notes.append(f"{name} was trained with other data than {names[0]}: {difference}{moved}")
        elif (why := why_unsure(data, other)) is not None:
            notes.append(f"whether {name} was trained with the data of {names[0]} is not known: {why}")
    return notes


def _complete(data: dict[str, Any]) -> dict[str, Any]:
    return {
        "samples": None,
        "drop_last": None,
        **data,
        "numbering": None,
        "splits": None,
    }  # of validation and test data


def _find_common_quality(runs: Sequence[Declared]) -> float | None:
    """The best value of the objective that each of the runs has reached."""
    reached = [run.find_best_value() for run in runs]
    known = [value for value in reached if value is not None]
    if len(known) < len(reached):
        return None
    return min(known) if runs[0].state.direction == "max" else max(known)


def _compare_figures(runs: Sequence[Declared], names: Sequence[str]) -> tuple[Table, list[str]]:
    rows: Table = []
    notes: list[str] = []
    for model, what in MODELS.items():
        first = read_model(runs[0], model)
        differences: list[dict[str, Any]] = []
        for run, name in zip(runs[1:], names[1:], strict=True):
            found = find_differences(runs[0], first, run, read_model(run, model))
            if isinstance(found, str):
                notes.append(f"{what} of {name} is not compared with that of {names[0]}: {found}")
            differences.append({} if isinstance(found, str) else found)
        rows += make_rows(model, runs, differences)
    return rows, list(dict.fromkeys(notes))


class ComparedModel:
    """What a model of a run predicted, and its figures in each draw of the samples.

    Attributes:
        predictions: of one row.
    """

    def __init__(self, predictions: PredictionMatrix) -> None:
        self.predictions = predictions

    @cached_property
    def figures(self) -> DrawnFigures:
        """The figures, of predictions that have targets."""
        from ensemble.combine.bootstrap import draw_figures
        from ensemble.combine.tasks import find_math

        one = self.predictions
        assert one.target is not None
        return draw_figures(find_math(one.task).statistics(one.values[0], one.target), len(one.target))

    def list_arrays(self) -> list[Array]:
        """The arrays that it keeps, after `drop_values`."""
        drawn = [] if self.predictions.target is None else list(self.figures.drawn.values())
        return [each for each in (self.predictions.index, self.predictions.target, *drawn) if each is not None]

    def drop_values(self) -> None:
        """Draws the figures, and lets go of the predicted values, of which only their shape is needed then."""
        import numpy as np

        if self.predictions.target is not None:
            _ = self.figures
        values = [np.broadcast_to(np.float32(0), each.shape) for each in self.predictions.values]
        self.predictions = replace(self.predictions, values=values)


def read_model(run: Declared, model: str, *, runs_code: bool = True) -> ComparedModel | str:
    """Reads what the "combined" model or the "best" member of a run predicted; or why that is not known.

    Args:
        runs_code: see `Declared.read_model`.
    """
    found = run.read_model(model, runs_code=runs_code)
    return found if isinstance(found, str) else ComparedModel(found)


def find_differences(
    first: Declared, ours: ComparedModel | str, second: Declared, theirs: ComparedModel | str
) -> dict[str, Any] | str:
    """The intervals of the second run's figures minus the first's, by figure, by the paired bootstrap; or why they
    cannot be compared. "" says that they were drawn.

    Args:
        ours, theirs: see `read_model`.
    """
    for each in (ours, theirs):
        if isinstance(each, str):
            return each
    assert not isinstance(ours, str) and not isinstance(theirs, str)
    why = explain_other_samples(first, ours.predictions, second, theirs.predictions)
    return {"": True, **theirs.figures.subtract(ours.figures)} if why is None else why


def make_rows(model: str, runs: Sequence[Declared], differences: Sequence[Mapping[str, Any]]) -> Table:
    """The figures of a model of several runs, each beside that of the first run: see `Comparison.figures`.

    Args:
        differences: of each run but the first, see `find_differences`; empty where it is not known.
    """
    from ensemble.reporting.model_figures import list_figures

    state = runs[0].state
    metrics = [run.read_metrics(model) for run in runs]
    known = list(dict.fromkeys(name for each in metrics for name in each))
    rows: Table = []
    for figure in list_figures(known, runs[0].task, (state.objective, state.direction)):
        values = [each.get(figure.name) for each in metrics]
        against = []
        for value, found in zip(values[1:], differences, strict=True):
            own = found.get(figure.name)
            is_known = bool(found) and value is not None and values[0] is not None
            difference = value - values[0] if is_known else None  # type: ignore[operator]
            interval = own if own else None
            noise = None if interval is None else bool(interval[0] <= 0 <= interval[1])
            against.append({"difference": difference, "interval": interval, "within_noise": noise})
        rows.append(
            {
                "model": model,
                "metric": figure.name,
                "better": figure.as_record().get("better"),
                "values": values,
                "against": against,
            }
        )
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
        shapes = [list(each.values[0].shape[1:]) for each in (ours, theirs)]
        return f"they predict values of different shapes, {shapes[0]} and {shapes[1]} a sample"
    if ours.target is None or theirs.target is None:
        return f"the {first.split} split has no targets"
    is_float = ours.target.dtype.kind == theirs.target.dtype.kind == "f"
    if not np.array_equal(ours.target, theirs.target, equal_nan=is_float):
        return f"the targets of their {first.split} samples differ"
    return None
