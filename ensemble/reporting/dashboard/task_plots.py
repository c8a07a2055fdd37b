"""Figures of what models predict, by task: how well the combined model and the best member are calibrated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ensemble.reporting.dashboard.plots import Document, draw_axis, draw_plot, draw_reference, draw_series
from ensemble.spec.task import Task

Array = NDArray[Any]
#: The values of each model, by "best" and "combined", in this order.
Models = Mapping[str, Array]

MOST_POINTS = 400  # in a scatter plot, of samples spaced evenly
BINS = 10
RESIDUALS = (0.05, 0.5, 0.95)  # quantiles
MOST_LABELS = 60
#: Nominal coverage of central intervals.
NOMINAL = tuple(round(0.05 * k, 2) for k in range(1, 20))


def plot_task(task: Task, models: Models, target: Array, names: Sequence[str] | None = None) -> list[Document]:
    """Returns the figures of a task but for the reliability curve; none where the task has none.

    Args:
        models: values [n, ...] as `ensemble.spec.task` lays them out.
        target: [n, ...]; positions whose target is missing take no part.
        names: of labels; None: their numbers.
    """
    if not models:
        return []
    if task.kind == "multilabel":
        return _plot_labels(models, target, names or range(target.shape[1]))
    if task.kind not in ("regression", "gaussian", "quantiles"):
        return []
    truth = target.ravel()
    known = np.isfinite(truth)
    if not known.any():
        return []
    points = {of: task.take_point(values).ravel()[known] for of, values in models.items()}
    plots = [_plot_predicted(points, truth[known]), _plot_residuals(points, truth[known])]
    if task.kind == "regression":
        return plots
    rows = {of: values.reshape(-1, values.shape[-1])[known] for of, values in models.items()}
    if task.kind == "gaussian":
        return [_plot_coverage(rows, truth[known]), _plot_pit(rows, truth[known]), *plots]
    return [_plot_levels(task, rows, truth[known]), *plots]


def _plot_predicted(points: Mapping[str, Array], truth: Array) -> Document:
    shown = np.unique(np.linspace(0, len(truth) - 1, MOST_POINTS).round().astype(int))
    series = [draw_series(of, zip(truth[shown], values[shown], strict=True)) for of, values in points.items()]
    ends = [float(truth[shown].min()), float(truth[shown].max())]
    return draw_plot(
        id="predicted",
        title="Predicted against true",
        reading="A dot is a sample; on the diagonal the prediction is right."
        + (f" {len(shown)} of {len(truth):,}, evenly chosen." if len(shown) < len(truth) else ""),
        x=draw_axis("true value"),
        y=draw_axis("predicted value"),
        series=[draw_reference([(end, end) for end in ends]), *series],
    )


def _plot_residuals(points: Mapping[str, Array], truth: Array) -> Document:
    """Quantiles of the residuals within each tenth of the predictions."""
    series = []
    lowest, highest = np.inf, -np.inf
    for of, values in points.items():
        parts = [part for part in np.array_split(np.argsort(values, kind="stable"), BINS) if len(part)]
        middles = [float(values[part].mean()) for part in parts]
        lowest, highest = min(lowest, middles[0]), max(highest, middles[-1])
        found = np.array([np.quantile(truth[part] - values[part], RESIDUALS) for part in parts])
        for k, quantile in enumerate(RESIDUALS):
            line = zip(middles, found[:, k], strict=True)
            series.append(draw_series(of, line, line=True, name=f"{100 * quantile:g} %"))
    return draw_plot(
        id="residuals",
        title="Residuals by prediction",
        reading="True minus predicted in each tenth of the predictions: the median, and the quantiles between "
        "which 90 % lie. A median beside 0 is a bias there.",
        x=draw_axis("predicted value"),
        y=draw_axis("residual"),
        series=[draw_reference([(float(lowest), 0.0), (float(highest), 0.0)]), *series],
    )


def _plot_pit(rows: Mapping[str, Array], truth: Array) -> Document:
    series = []
    for of, values in rows.items():
        counts, edges = np.histogram(_transform(values, truth), bins=BINS, range=(0.0, 1.0))
        shares = counts / max(1, counts.sum())
        series.append(draw_series(of, zip(edges[:-1].round(2), shares, strict=True), shape="bar"))
    return draw_plot(
        id="pit",
        title="Where true values lie in the predicted distribution (PIT)",
        reading=f"Calibrated where each bar is {1 / BINS:g}. High at both ends: too sure; high in the middle: "
        "not sure enough; aslant: biased.",
        x=draw_axis("probability integral transform, from …", kind="category"),
        y=draw_axis("share of samples"),
        series=[draw_reference([(round(k / BINS, 2), 1 / BINS) for k in range(BINS)]), *series],
    )


def _plot_coverage(rows: Mapping[str, Array], truth: Array) -> Document:
    series = []
    for of, values in rows.items():
        width = np.abs(2 * _transform(values, truth) - 1)  # of the central interval that just holds the true value
        observed = [(level, float(np.mean(width <= level))) for level in NOMINAL]
        series.append(draw_series(of, observed, line=True))
    return draw_plot(
        id="coverage",
        title="Coverage of predicted intervals",
        reading="How many true values lie in the central interval of each nominal coverage. On the diagonal it "
        "is calibrated, below it too sure.",
        x=draw_axis("nominal coverage", [0.0, 1.0]),
        y=draw_axis("observed coverage", [0.0, 1.0]),
        series=[draw_reference([(0.0, 0.0), (1.0, 1.0)]), *series],
    )


def _plot_levels(task: Task, rows: Mapping[str, Array], truth: Array) -> Document:
    series = [
        draw_series(of, zip(task.levels, (truth[:, None] <= values).mean(axis=0), strict=True), line=True)
        for of, values in rows.items()
    ]
    return draw_plot(
        id="levels",
        title="Coverage by level",
        reading="How many true values lie at or below each quantile. On the diagonal it is calibrated.",
        x=draw_axis("level of the quantile", [0.0, 1.0]),
        y=draw_axis("share at or below it", [0.0, 1.0]),
        series=[draw_reference([(0.0, 0.0), (1.0, 1.0)]), *series],
    )


def _plot_labels(models: Models, target: Array, names: Sequence[str | int]) -> list[Document]:
    """F1 and ROC AUC of each label; of many those that most samples have."""
    share = np.array([(target[:, k] == 1).mean() for k in range(target.shape[1])])
    labels = sorted(np.argsort(-share, kind="stable")[:MOST_LABELS].tolist())
    left = target.shape[1] - len(labels)
    reading = "Each dot is a model's figure of one label (higher is better), at a threshold of 0.5."
    areas = "Each dot is a model's figure of one label (higher is better); none where all samples are alike."
    more = f" The {len(labels)} labels that most samples have; {left} more." if left else ""
    plots = []
    for id, title, text, measure in (
        ("label_f1", "F1 of each label", reading, _measure_f1),
        ("label_auc", "ROC AUC of each label", areas, _measure_auc),
    ):
        series = [
            draw_series(
                of, ((names[k], y) for k, y in _measure_labels(values, target, labels, measure)), shape="dot"
            )
            for of, values in models.items()
        ]
        axes = {"x": draw_axis("label", kind="category"), "y": draw_axis(title.split(" of ")[0], [0.0, 1.0])}
        plots.append(draw_plot(id, title, text + more, **axes, series=series))
    return plots


def _measure_labels(values: Array, target: Array, labels: list[int], measure: Any) -> Iterator[tuple[int, float]]:
    for label in labels:
        known = target[:, label] >= 0
        found = measure(target[known, label], values[known, label])
        if found is not None:
            yield label, found


def _measure_f1(truth: Array, values: Array) -> float | None:
    from sklearn.metrics import f1_score

    return float(f1_score(truth, values >= 0.5, zero_division=0.0)) if len(truth) else None


def _measure_auc(truth: Array, values: Array) -> float | None:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, values)) if len(np.unique(truth)) == 2 else None


def _transform(values: Array, truth: Array) -> Array:
    """The probability integral transform of true values under normal distributions [n, 2]: uniform if they are
    right (Dawid 1984).
    """
    from scipy.special import ndtr  # type: ignore[import-untyped]

    probabilities: Array = ndtr((truth - values[:, 0]) / np.sqrt(values[:, 1].astype(np.float64)))
    return probabilities
