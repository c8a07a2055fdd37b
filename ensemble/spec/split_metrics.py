"""Names of metrics of a whole split that are no means over its samples (`ensemble.combine.split_metrics`).

Predictions are laid out as in `ensemble.spec.task`. The positions of samples
(steps, pixels, several targets) count like samples of their own; those whose target takes no part are left out.
Functions of the user get values and targets whole, as predictions are saved: int64 of classes and labels, float64
of numbers.

- Of classes: with two classes, `f1`, `jaccard`, `precision`, `recall`, `roc_auc` and `average_precision` are of
  the second class; with more, and of labels, the mean over the classes or labels (`..._macro`). A class counts as
  predicted where it is the most probable, a label where its probability is 0.5 or more.
- Of numbers: a Gaussian predicts its mean, quantiles predict the one nearest to the median.
- Proper scores: `nll` in nats; `brier` summed over the classes (0 to 2), of a label its squared error; `crps` in
  units of the target. The figures of the same names of a combined model are computed alike.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ensemble.spec.task import LABELS, NUMBERS, Kind, Task
from ensemble.spec.validation import SpecError, unknown_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: A name of `KNOWN`, or `f(values [n, ...], target [n, ...]) -> float`, reported under the function's name;
#: further arguments without a default are fields of the batch, `f(values, target, user)`.
SplitMetricLike = str | Callable[..., float]


@dataclass(frozen=True)
class SplitMetric:
    """What is known of a metric by its name.

    Attributes:
        mode: whether it is better when large or small.
        kinds: the tasks of whose predictions it can be computed.
    """

    mode: Literal["max", "min"]
    kinds: tuple[Kind, ...]


_CLASSES: tuple[Kind, ...] = ("classification",)
_DENSITIES: tuple[Kind, ...] = ("gaussian",)

#: With two classes, these are of the second one alone.
OF_ONE_CLASS = frozenset(("average_precision", "f1", "jaccard", "precision", "recall"))
_OF_LABELS = ("roc_auc", "average_precision", "f1", "precision", "recall", "jaccard")

KNOWN: dict[str, SplitMetric] = {
    **dict.fromkeys(
        (*_OF_LABELS, *(f"{name}_macro" for name in _OF_LABELS), "f1_micro"), SplitMetric("max", LABELS)
    ),
    **dict.fromkeys(
        ("balanced_accuracy", "matthews", "cohen_kappa", "top5_accuracy"), SplitMetric("max", _CLASSES)
    ),
    **dict.fromkeys(("r2", "explained_variance", "pearson", "spearman"), SplitMetric("max", NUMBERS)),
    **dict.fromkeys(("mse", "rmse", "mae", "medae", "mape"), SplitMetric("min", NUMBERS)),
    "nll": SplitMetric("min", (*LABELS, *_DENSITIES)),
    "brier": SplitMetric("min", LABELS),
    "crps": SplitMetric("min", _DENSITIES),
}

#: What others call a metric of `KNOWN`.
OTHER_NAMES = {
    **dict.fromkeys(("auc", "auroc", "roc_auc_score"), "roc_auc"),
    **dict.fromkeys(("ap", "auprc", "pr_auc"), "average_precision"),
    **dict.fromkeys(("mcc", "matthews_corrcoef"), "matthews"),
    **dict.fromkeys(("kappa", "cohen_kappa_score"), "cohen_kappa"),
    **dict.fromkeys(("iou", "jaccard_score"), "jaccard"),
    **dict.fromkeys(("miou", "mean_iou"), "jaccard_macro"),
    **dict.fromkeys(("log_loss", "logloss", "negative_log_likelihood"), "nll"),
    "brier_score": "brier",
    "f1_score": "f1",
    "macro_f1": "f1_macro",
    "micro_f1": "f1_micro",
    "r2_score": "r2",
}


def name_of(metric: SplitMetricLike) -> str:
    """The name under which a metric is reported."""
    return metric if isinstance(metric, str) else str(getattr(metric, "__name__", type(metric).__name__))


def list_fields(metric: SplitMetricLike) -> list[str]:
    """The fields of the batch that a function asks for: arguments after the first two, without a default."""
    try:
        parameters = list(inspect.signature(metric).parameters.values()) if callable(metric) else []
    except ValueError:  # of a builtin it is not known
        return []
    fields = (one for one in parameters[2:] if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))
    return [one.name for one in fields if one.default is one.empty]


def list_asked(metrics: Iterable[SplitMetricLike]) -> list[str]:
    """The fields that any of the metrics asks for."""
    return list(dict.fromkeys(name for metric in metrics for name in list_fields(metric)))


def bind_fields(metric: SplitMetricLike, fields: Mapping[str, Array]) -> SplitMetricLike:
    """The function of values and target alone, with the fields [n, ...] that it asks for."""
    own = {name: fields[name] for name in list_fields(metric)}
    if isinstance(metric, str) or not own:
        return metric
    bound = functools.partial(metric, **own)
    bound.__name__ = name_of(metric)  # type: ignore[attr-defined]
    return bound


def check_split_metrics(where: str, metrics: Iterable[Any], task: Task | None) -> None:
    """Raise SpecError for what is neither a function nor the name of a metric that has a meaning for the task.

    Args:
        where: the name of the option, for error messages.
        task: None where it is not known yet.
    """
    names: list[str] = []
    for metric in metrics:
        if isinstance(metric, str):
            check_metric(where, metric, task)
        elif not callable(metric):
            raise SpecError(f"{where}: {metric!r} is neither a name nor a function f(values, target)")
        names.append(name_of(metric))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"{where}: two metrics are called {twice!r}")


def check_metric(where: str, name: str, task: Task | None) -> None:
    """Raise SpecError for a name that is no metric, or one that has no meaning for the task."""
    if name in OTHER_NAMES:
        raise SpecError(f"{where} has no metric {name!r}; it is called {OTHER_NAMES[name]!r} here")
    if name not in KNOWN:
        raise SpecError(unknown_name(f"{where} has no metric", name, list(KNOWN)))
    if task is not None and task.kind not in KNOWN[name].kinds:
        fitting = [other for other, metric in KNOWN.items() if task.kind in metric.kinds]
        have = f"known ones are {', '.join(fitting)}" if fitting else "give functions f(values, target)"
        raise SpecError(f"{where}: {name!r} has no meaning for {task.kind}; {have}")
