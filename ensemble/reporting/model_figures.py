"""Names the figures by which models are judged: what people call each, in which direction it is better, its unit.

All that shows such figures (page, report, summary, metrics) takes their names and directions from here, so that a
reader never has to guess whether 0.3 of something is a gain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from ensemble.events import NOT_COMBINED, Combined
from ensemble.reporting import text
from ensemble.reporting.ranking import finite_or_none
from ensemble.spec.objectives import infer_mode
from ensemble.spec.task import CLASSIFICATION, Task

Better = Literal["higher", "lower", "nominal"]


@dataclass(frozen=True)
class Figure:
    """A figure of a model.

    Attributes:
        name: its standard name, the key in `metrics`.
        label: what people call it.
        better: in which direction it is better; "nominal": the nearer to `nominal`; None where nobody said.
        unit: "nats", "ms", "MB", "target" (that of what is predicted); empty for a pure number.
        nominal: the value that it should have.
    """

    name: str
    label: str
    better: Better | None
    unit: str = ""
    nominal: float | None = None

    @property
    def heading(self) -> str:
        """The label with an arrow in the better direction."""
        if self.nominal is not None:
            return f"{self.label} → {self.nominal:g}"
        return self.label + {"higher": " ↑", "lower": " ↓"}.get(self.better or "", "")

    @property
    def direction(self) -> str:
        """In which direction it is better, in words; empty where nobody said."""
        if self.better == "nominal":
            return f"{self.nominal:g} is right"
        return f"{self.better} is better" if self.better else ""

    @property
    def title(self) -> str:
        """The label and how to read it: "NLL in nats (lower is better)"."""
        unit = {"": "", "target": " in units of the target"}.get(self.unit, f" in {self.unit}")
        return self.label + unit + (f" ({self.direction})" if self.direction else "")

    def is_better(self, value: float, than: float) -> bool | None:
        """Whether a value is better than another; None where they are equal or no direction is known."""
        if self.better == "nominal" and self.nominal is not None:
            value, than = abs(value - self.nominal), abs(than - self.nominal)
        if self.better is None or value == than:
            return None
        return value > than if self.better == "higher" else value < than

    def as_record(self) -> dict[str, Any]:
        return dict(vars(self))

    def as_document(self) -> dict[str, Any]:
        """The figure as the page has it, with its names in words."""
        return {**vars(self), "title": self.title, "direction": self.direction}


#: The figures with standard names. `tests/reporting` holds their directions against those of objectives.
FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure("accuracy", "accuracy", "higher"),
        Figure("top5_accuracy", "top-5 accuracy", "higher"),
        Figure("balanced_accuracy", "balanced accuracy", "higher"),
        Figure("hamming_accuracy", "accuracy by label", "higher"),
        Figure("subset_accuracy", "accuracy of whole label sets", "higher"),
        Figure("nll", "NLL", "lower", "nats"),
        Figure("ece", "ECE", "lower"),
        Figure("brier", "Brier score", "lower"),
        Figure("f1", "F1", "higher"),
        Figure("f1_micro", "F1, micro", "higher"),
        Figure("f1_macro", "F1, macro", "higher"),
        Figure("roc_auc", "ROC AUC", "higher"),
        Figure("roc_auc_macro", "ROC AUC, macro", "higher"),
        Figure("average_precision", "average precision", "higher"),
        Figure("matthews", "Matthews correlation", "higher"),
        Figure("cohen_kappa", "Cohen's kappa", "higher"),
        Figure("rmse", "RMSE", "lower", "target"),
        Figure("mae", "MAE", "lower", "target"),
        Figure("medae", "median absolute error", "lower", "target"),
        Figure("r2", "R²", "higher"),
        Figure("explained_variance", "explained variance", "higher"),
        Figure("pearson", "Pearson correlation", "higher"),
        Figure("spearman", "Spearman correlation", "higher"),
        Figure("crps", "CRPS", "lower", "target"),
        Figure("calibration_error", "calibration error", "lower"),
        Figure("coverage_90", "coverage of 90 % intervals", "nominal", nominal=0.9),
        Figure("pinball", "pinball loss", "lower", "target"),
        Figure("coverage", "coverage", None),
        Figure("width", "width of intervals", "lower", "target"),
        Figure("crossing", "crossing quantiles", "lower"),
        Figure("loss", "loss", "lower"),
        Figure("latency_ms", "latency", "lower", "ms"),
        Figure("model_mb", "size", "lower", "MB"),
    )
}

#: The figures of each task, those that say most first.
HEADLINES: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy", "nll", "ece", "brier", "top5_accuracy"),
    "multilabel": ("f1_macro", "nll", "ece", "brier", "hamming_accuracy", "subset_accuracy"),
    "regression": ("rmse", "r2", "mae", "pearson"),
    "gaussian": ("rmse", "nll", "crps", "calibration_error", "coverage_90", "r2", "mae", "pearson"),
    "quantiles": ("pinball", "coverage", "width", "crossing"),
    "free": (),
}


#: The figure of each task that says most of a whole predicted distribution, by which to judge a combination.
JUDGED_BY = dict.fromkeys(("classification", "multilabel", "gaussian"), "nll") | {
    "regression": "rmse",
    "quantiles": "pinball",
}

#: The metric that ranks a run's members, and how: "max" or "min".
Ranking = tuple[str, str | None]


def describe_figure(name: str, task: Task = CLASSIFICATION, ranking: Ranking | None = None) -> Figure:
    """Returns what is known of a figure: what the run declares, those with standard names, else what the name
    implies.
    """
    if ranking is not None and ranking[0] == name and ranking[1] is not None:
        return replace(
            describe_figure(name, task), better="higher" if ranking[1] == "max" else "lower", nominal=None
        )
    if name == "coverage" and task.kind == "quantiles":
        return Figure(name, f"coverage of {_percent(task)} intervals", "nominal", nominal=_outermost(task))
    figure = FIGURES.get(name)
    if figure is not None:
        return figure
    mode = infer_mode(name)
    return Figure(name, name, None if mode is None else "higher" if mode == "max" else "lower")


def list_figures(
    names: Iterable[str], task: Task = CLASSIFICATION, ranking: Ranking | None = None
) -> list[Figure]:
    """Returns the figures of these names, those that say most about the task first."""
    distinct = list(dict.fromkeys(names))
    first = [name for name in HEADLINES[task.kind] if name in distinct]
    order = (*first, *(other for other in distinct if other not in first))
    return [describe_figure(name, task, ranking) for name in order]


def read_task(combined: Combined | None) -> Task:
    """Returns the task of a `combined` event; classification where nothing was combined."""
    record = combined.task if combined is not None else None
    return CLASSIFICATION if not record else Task.from_record(record)


@dataclass(frozen=True)
class ModelComparison:
    """A figure of the combined model beside that of its best member, on the same samples.

    Attributes:
        figure: what it is.  value: of the combined model.  best: of the best member, None where not known.
        interval: of `value`, at 95 % (bootstrap); None where there is none.  best_interval: that of `best`.
        is_noise: whether the difference to the best member lies within its own interval; None where not known.
        difference: interval of `value` less `best`, at 95 % (paired bootstrap); None where there is none.
    """

    figure: Figure
    value: float
    best: float | None
    interval: tuple[float, float] | None
    is_noise: bool | None
    best_interval: tuple[float, float] | None = None
    difference: tuple[float, float] | None = None

    @property
    def is_better(self) -> bool | None:
        """Whether the combined model is better, as far as that can be told from noise; None where it cannot."""
        if self.best is None or self.is_noise:
            return None
        return self.figure.is_better(self.value, self.best)

    @property
    def tone(self) -> str:
        """Whether that is "good" or "bad"; empty where it cannot be told."""
        return {None: "", True: "good", False: "bad"}[self.is_better]

    def describe_difference(self) -> str:
        """`+0.0123 to the best member's 0.9100`, with "within noise" where that is all it is."""
        words = f"{text.gain(self.value, self.best)} to the best member's {text.score(self.best)}"
        return f"{words}, within noise" if self.is_noise else words


def compare(combined: Combined | None, ranking: Ranking | None = None) -> list[ModelComparison]:
    """Returns the figures of the combined model, those that say most first; none where nothing was combined.

    Args:
        combined: the `combined` event.
        ranking: of the run's members.
    """
    combined = combined or NOT_COMBINED
    metrics = combined.metrics or {}
    ours, best = metrics.get("ensemble") or {}, metrics.get("best") or {}
    intervals, noise = combined.intervals or {}, combined.noise
    comparisons = []
    for figure in list_figures(ours, read_task(combined), ranking):
        value = finite_or_none(ours[figure.name])
        if value is None:
            continue
        comparisons.append(
            ModelComparison(
                figure,
                value,
                finite_or_none(best.get(figure.name)),
                _find_interval(intervals, "ensemble", figure.name),
                None if noise is None else figure.name in noise,
                _find_interval(intervals, "best", figure.name),
                _find_interval(intervals, "difference", figure.name),
            )
        )
    return comparisons


def _find_interval(intervals: Mapping[str, Any], of: str, name: str) -> tuple[float, float] | None:
    ends = (intervals.get(of) or {}).get(name)
    return None if not ends else (float(ends[0]), float(ends[1]))


def _outermost(task: Task) -> float:
    return round(task.levels[-1] - task.levels[0], 6)


def _percent(task: Task) -> str:
    return f"{100 * _outermost(task):g} %"
