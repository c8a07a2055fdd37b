"""Figures that the page draws as they stand: JSON documents, and those of the combined model.

A figure has `id`, `title`, `reading` (how to read it), `absent` (why there is none, else None), `x` and `y`
(`title`, `range`, `kind`: "linear", "log", "category"), `series` (`draw_series`), `said` (in words) and `table`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.ranking import metric_of

if TYPE_CHECKING:
    from ensemble.combine.metrics import Array
    from ensemble.events import Epoch
    from ensemble.spec.task import Task

Document = dict[str, Any]

MOST_POINTS = 400  # in a scatter plot, of samples spaced evenly
MOST_EPOCHS = 200  # in a curve, about
#: Nominal coverage of central intervals.
NOMINAL = tuple(round(0.05 * k, 2) for k in range(1, 20))
#: Of the tasks that have a reliability curve: its axes, and how to read it.
RELIABILITY = {
    "classification": (
        "confidence",
        "accuracy",
        "How often a model is right, by how sure it is. On the diagonal it is calibrated, below it too sure; "
        "larger dots hold more samples.",
    ),
    "multilabel": (
        "predicted probability",
        "share of labels that are there",
        "How often a label is there, by the probability that a model gives it. On the diagonal it is calibrated; "
        "larger dots hold more labels.",
    ),
}


def draw_series(
    of: str | int,
    points: Iterable[Sequence[Any]],
    *,
    shape: str | None = "dot",
    line: bool = False,
    label: str | None = None,
) -> Document:
    """Returns a series.

    Args:
        of: "best", "combined", "reference", or the place of a run.
        points: [x, y], and what else is known of one: `text` of its tip, `size`, the `member` that it selects.
        shape: "dot", "bar", "ring", "cross" or None.
        line: whether the points are joined.
        label: in the legend; None: the model's name.
    """
    rounded = [[*(shorten(value) for value in point[:2]), *point[2:]] for point in points]
    return {"of": of, "label": label, "shape": shape, "line": line, "points": rounded}


def draw_curve(of: str | int, history: Sequence[Epoch], objective: str, label: str | None = None) -> Document:
    """Returns the objective after each epoch of a member; of long curves every k-th and the last one."""
    points = list[tuple[int, float]]()
    for epoch in (*history[: -1 : len(history) // MOST_EPOCHS + 1], *history[-1:]):
        if (value := metric_of(epoch, objective)) is not None:
            points.append((epoch.epoch + 1, value))
    return draw_series(of, points, shape=None if len(points) > 1 else "dot", line=True, label=label)


def draw_reference(points: Iterable[Sequence[float]]) -> Document:
    """Returns the line on which a right model would lie."""
    return draw_series("reference", points, shape=None, line=True)


def draw_axis(title: str, limits: Sequence[float] | None = None, kind: str = "linear") -> Document:
    return {"title": title, "range": limits, "kind": kind}


def draw_plot(id: str, title: str, reading: str, x: Document, y: Document, series: list[Document]) -> Document:
    words = {"id": id, "title": title, "reading": reading, "absent": None, "said": None, "table": None}
    return {**words, "x": x, "y": y, "series": series}


def shorten(value: Any) -> float | int | str:
    """Returns a value as it stands in a figure: numbers have six digits."""
    return value if isinstance(value, (str, int)) else float(f"{float(value):.6g}")


# -- the combined model -------------------------------------------------------------------------------------------


def plot_reliability(
    kind: str, curves: Mapping[str, Sequence[Sequence[float]]], names: Mapping[str, str]
) -> Iterator[Document]:
    """Yields the reliability curves of models; nothing where the task has none.

    Args:
        curves: [confidence, accuracy, samples] of each bin, by "best" and "combined".
        names: what the models are called.
    """
    if kind not in RELIABILITY or not curves:
        return
    x, y, reading = RELIABILITY[kind]
    samples = max(sum(many for *_, many in curve) for curve in curves.values()) or 1
    low = max(0.0, min(0.5, min(min(point[:2]) - 0.05 for curve in curves.values() for point in curve)))
    series, table = [draw_reference([(low, low), (1.0, 1.0)])], []
    for of, curve in curves.items():
        points = []
        for confidence, right, many in curve:
            figures = f"{x} {confidence:.3f}\n{y} {right:.3f}\n{text.count(int(many), 'sample')}"
            size = round(2.5 + 8 * math.sqrt(many / samples), 2)
            points.append((confidence, right, {"text": f"{names[of]}\n{figures}", "size": size}))
        series.append(draw_series(of, points, line=True, label=names[of]))
        table += [[names[of], f"{at:.3f}", f"{right:.3f}", text.number(many)] for at, right, many in curve]
    axes = draw_axis(x, [low, 1.0]), draw_axis(y, [low, 1.0])
    plot = draw_plot("calibration", "Calibration", reading, *axes, series)
    yield plot | {"table": {"head": ["model", x, y, "samples"], "rows": table}}


def plot_numbers(task: Task, models: Mapping[str, Array], target: Array) -> Iterator[Document]:
    """Yields the figures of a task that predicts numbers; nothing of another one.

    Args:
        models: values [n, ...] by "best" and "combined", as `ensemble.spec.task` lays them out.
        target: [n, ...]; positions whose target is missing take no part.
    """
    import numpy as np

    if task.kind not in ("regression", "gaussian", "quantiles"):
        return
    is_finite = np.isfinite(target.ravel())
    truth = target.ravel()[is_finite]
    if not len(truth):
        return
    rows = {}
    if task.kind != "regression":
        rows = {of: values.reshape(-1, values.shape[-1])[is_finite] for of, values in models.items()}
    if task.kind == "gaussian":
        yield _plot_coverage(rows, truth)
    elif task.kind == "quantiles":
        levels = {
            of: zip(task.levels, (truth[:, None] <= values).mean(axis=0), strict=True)
            for of, values in rows.items()
        }
        yield draw_plot(
            "levels",
            "Coverage by level",
            "How many true values lie at or below each quantile. On the diagonal it is calibrated.",
            draw_axis("level of the quantile", [0.0, 1.0]),
            draw_axis("share at or below it", [0.0, 1.0]),
            [_diagonal(0.0, 1.0), *(draw_series(of, points, line=True) for of, points in levels.items())],
        )
    points = {of: task.take_point(values).ravel()[is_finite] for of, values in models.items()}
    shown = np.unique(np.linspace(0, len(truth) - 1, MOST_POINTS).round().astype(int))
    series = [draw_series(of, zip(truth[shown], values[shown], strict=True)) for of, values in points.items()]
    reading = "A dot is a sample; on the diagonal the prediction is right."
    reading += f" {len(shown)} of {len(truth):,}, evenly chosen." if len(shown) < len(truth) else ""
    diagonal = _diagonal(float(truth[shown].min()), float(truth[shown].max()))
    axes = draw_axis("true value"), draw_axis("predicted value")
    yield draw_plot("predicted", "Predicted against true", reading, *axes, [diagonal, *series])


def _plot_coverage(rows: Mapping[str, Array], truth: Array) -> Document:
    """How often true values lie in the central intervals of normal distributions [n, 2]."""
    import numpy as np
    from scipy.special import ndtr  # type: ignore[import-untyped]

    series = []
    for of, values in rows.items():
        probabilities = ndtr((truth - values[:, 0]) / np.sqrt(values[:, 1].astype(np.float64)))
        width = np.abs(2 * probabilities - 1)  # of the central interval that just holds the true value
        observed = [(level, float(np.mean(width <= level))) for level in NOMINAL]
        series.append(draw_series(of, observed, line=True))
    return draw_plot(
        "coverage",
        "Coverage of predicted intervals",
        "How many true values lie in the central interval of each nominal coverage. On the diagonal it is "
        "calibrated, below it too sure.",
        draw_axis("nominal coverage", [0.0, 1.0]),
        draw_axis("observed coverage", [0.0, 1.0]),
        [_diagonal(0.0, 1.0), *series],
    )


def _diagonal(low: float, high: float) -> Document:
    return draw_reference([(low, low), (high, high)])
