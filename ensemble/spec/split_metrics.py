"""Metrics of a whole split that are no means over its samples, by name, and how they are computed.

They are computed by scikit-learn from predictions as `ensemble.spec.task` lays them out. The positions of samples
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

from ensemble.spec.task import LABELS, NUMBERS, Kind, Task, find_known
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

KNOWN: dict[str, SplitMetric] = {
    **dict.fromkeys(
        (
            "roc_auc",
            "roc_auc_macro",
            "average_precision",
            "average_precision_macro",
            "f1",
            "f1_macro",
            "f1_micro",
            "precision",
            "precision_macro",
            "recall",
            "recall_macro",
            "jaccard",
            "jaccard_macro",
        ),
        SplitMetric("max", LABELS),
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

EPSILON = 1e-12
"""Smallest probability whose logarithm is taken: a class declared impossible costs 27.6 nats, not infinity."""


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
    asked = {name: fields[name] for name in list_fields(metric)}
    if isinstance(metric, str) or not asked:
        return metric
    bound = functools.partial(metric, **asked)
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
            _find(where, metric, task)
        elif not callable(metric):
            raise SpecError(f"{where}: {metric!r} is neither a name nor a function f(values, target)")
        names.append(name_of(metric))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SpecError(f"{where}: two metrics are called {twice!r}")


def _find(where: str, name: str, task: Task | None) -> SplitMetric:
    if name in OTHER_NAMES:
        raise SpecError(f"{where} has no metric {name!r}; it is called {OTHER_NAMES[name]!r} here")
    if name not in KNOWN:
        raise SpecError(unknown_name(f"{where} has no metric", name, list(KNOWN)))
    known = KNOWN[name]
    if task is not None and task.kind not in known.kinds:
        fitting = [other for other, metric in KNOWN.items() if task.kind in metric.kinds]
        have = f"known ones are {', '.join(fitting)}" if fitting else "give functions f(values, target)"
        raise SpecError(f"{where}: {name!r} has no meaning for {task.kind}; {have}")
    return known


def compute(
    metrics: Iterable[SplitMetricLike], values: Array, target: Array | None, task: Task
) -> dict[str, float]:
    """Metrics of the predictions on a whole split.

    Args:
        metrics: names of `KNOWN`, and functions.
        values: float [n, ...], laid out by the task.
        target: [n, ...]; may be None for functions of a free task.

    Returns:
        The metrics by name, without those that these samples leave undefined: the AUC of one class, the
        correlation with a constant, anything of predictions that are not finite.

    Raises:
        SpecError: a name is unknown, has no meaning for the task, or there is no target; a function failed, or
            returned no number.
    """
    import numpy as np

    found: dict[str, float] = {}
    for metric in metrics:
        if isinstance(metric, str):
            _find("split_metrics", metric, task)
            if target is None:
                raise SpecError(f"split_metrics: {metric!r} needs a target, and the samples have none")
            value = _compute(metric, np.asarray(values), np.asarray(target), task)
        else:
            value = _call(metric, values, target)
        if np.isfinite(value):
            found[name_of(metric)] = float(value)
    return found


def measure_reported(reported: Iterable[str], task: Task, values: Array, target: Array) -> dict[str, float]:
    """Those of the metrics with names that mean the same to everybody, computed from predictions of the task;
    none that is not defined for them.
    """
    found = {}
    for name in {"accuracy", "rmse", "mae", "mse", "nll", "auroc"}.intersection(reported):
        known = OTHER_NAMES.get(name, name)
        if name == "accuracy" and task.kind == "classification" and values.shape[:-1] == target.shape:
            takes_part = find_known(target)
            found[name] = float((values.argmax(axis=-1) == target)[takes_part].mean())
        elif known in KNOWN and task.kind in KNOWN[known].kinds:
            found[name] = _compute(known, values, target, task)
    return {name: value for name, value in found.items() if value == value}


def _call(metric: Callable[..., float], values: Array, target: Array | None) -> float:
    """What a function of the user gives.

    Raises:
        SpecError: it failed, or gave no number; the message names it.
    """
    import numpy as np

    where = f"split_metrics: {name_of(metric)!r}"
    try:
        found = metric(values, target)
    except Exception as error:  # whatever a user's function raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpecError(f"{where} failed for values {list(np.shape(values))}: {why}") from error
    given = np.asarray(found)
    if given.size != 1 or given.dtype.kind not in "biuf":
        shown = f"an array of shape {list(given.shape)}" if given.size != 1 else f"a {type(found).__name__}"
        raise SpecError(f"{where} must return a number, got {shown}")
    return float(given.reshape(()))


def _compute(name: str, values: Array, target: Array, task: Task) -> float:
    """A known metric; NaN where it is not defined."""
    import numpy as np

    if task.kind == "multilabel":
        return _of_labels(name, values, target)
    of_classes, of_densities = task.kind == "classification", name in ("nll", "crps")
    whole = of_classes or of_densities  # else the points alone
    rows = values.reshape(-1, values.shape[-1]) if whole else task.take_point(values).reshape(-1)
    known = find_known(target, of_labels=of_classes).reshape(-1)
    rows, truth = rows[known], target.reshape(-1)[known]
    if not len(truth) or not np.isfinite(rows).all():
        return float("nan")
    if of_classes:
        return _of_classes(name, rows, truth.astype("int64"))
    if of_densities:
        return _of_densities(name, rows.astype("float64"), truth.astype("float64"))
    return _of_numbers(name, rows.astype("float64"), truth.astype("float64"))


def _of_classes(name: str, p: Array, t: Array) -> float:
    """A metric of probabilities [n, C] and classes [n]."""
    import numpy as np
    from sklearn import metrics

    if name in ("nll", "brier"):
        true = p[np.arange(len(t)), t].astype("float64")
        if name == "nll":
            return _mean_surprise(true)
        return float(np.mean(np.einsum("nc,nc->n", p, p, dtype="float64") - 2 * true + 1))
    classes, predicted = p.shape[1], p.argmax(axis=1)
    base = name.removesuffix("_macro").removesuffix("_micro")
    if base in ("roc_auc", "average_precision"):
        columns = [1] if classes == 2 and not name.endswith("_macro") else range(classes)
        return _mean_defined(_rank(base, p[:, c], t == c) for c in columns)
    if base in ("f1", "precision", "recall", "jaccard"):
        average = "micro" if name == "f1_micro" else "binary"
        if name.endswith("_macro") or (average == "binary" and classes > 2):
            average = "macro"
        score = getattr(metrics, f"{base}_score")
        labels = None if average == "binary" else np.arange(classes)
        return float(score(t, predicted, labels=labels, average=average, zero_division=0))
    if name == "top5_accuracy":
        return 1.0 if classes <= 5 else float(metrics.top_k_accuracy_score(t, p, k=5, labels=np.arange(classes)))
    scores = {
        "balanced_accuracy": _balanced_accuracy,
        "matthews": metrics.matthews_corrcoef,
        "cohen_kappa": metrics.cohen_kappa_score,
    }
    return float(scores[name](t, predicted))


def _mean_surprise(true: Array) -> float:
    """The mean of -log of the probabilities [n] that were given to what is true, in nats."""
    import numpy as np

    return float(-np.log(np.maximum(true, EPSILON)).mean())


def _of_densities(name: str, values: Array, t: Array) -> float:
    """The NLL or the CRPS (Gneiting and Raftery 2007, eq. 21) of means and variances [n, 2] for numbers [n]."""
    import numpy as np
    from scipy import stats  # type: ignore[import-untyped]

    mean, deviation = values[:, 0], np.sqrt(values[:, 1])
    if name == "nll":
        return float(-stats.norm.logpdf(t, mean, deviation).mean())
    z = (mean - t) / deviation
    score = z * (2 * stats.norm.cdf(z) - 1) + 2 * stats.norm.pdf(z) - 1 / np.sqrt(np.pi)
    return float((deviation * score).mean())


def _balanced_accuracy(t: Array, predicted: Array) -> float:
    """The mean recall of the classes that occur; scikit-learn's, which warns of predicted classes that do not."""
    import numpy as np

    return float(np.mean([np.mean(predicted[t == c] == c) for c in np.unique(t)]))


def _of_labels(name: str, p: Array, t: Array) -> float:
    """A metric of the probabilities [n, L] of labels and targets [n, L], of those that take part."""
    import numpy as np
    from sklearn import metrics

    p, t = p.reshape(-1, p.shape[-1]), t.reshape(-1, t.shape[-1])
    known = find_known(t, of_labels=True)
    if not known.any() or not np.isfinite(p[known]).all():
        return float("nan")
    if name in ("nll", "brier"):
        true = np.where(t == 1, p, 1 - p)[known].astype("float64")
        return _mean_surprise(true) if name == "nll" else float(np.mean((1 - true) ** 2))
    base = name.removesuffix("_macro").removesuffix("_micro")
    if base in ("roc_auc", "average_precision"):
        return _mean_defined(_rank(base, p[known[:, i], i], t[known[:, i], i] == 1) for i in range(p.shape[1]))
    score: Any = getattr(metrics, f"{base}_score")
    predicted = p >= 0.5
    if name.endswith("_micro"):
        return float(score(t[known] == 1, predicted[known], zero_division=0))
    each = [
        score(t[known[:, i], i] == 1, predicted[known[:, i], i], zero_division=0)
        for i in range(p.shape[1])
        if known[:, i].any()
    ]
    return float(np.mean(each))


def _rank(name: str, score: Array, truth: Array) -> float:
    """ROC-AUC or average precision of scores [n] for bool [n]; NaN where only one of the two occurs."""
    from sklearn import metrics

    if truth.all() or not truth.any():
        return float("nan")
    compute_score = metrics.roc_auc_score if name == "roc_auc" else metrics.average_precision_score
    return float(compute_score(truth, score))


def _mean_defined(values: Iterable[float]) -> float:
    """The mean of the numbers that are not NaN; NaN without one."""
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")


def _of_numbers(name: str, p: Array, t: Array) -> float:
    """A metric of predicted and true numbers, float64 [n]."""
    import numpy as np
    from sklearn import metrics

    if name in ("pearson", "spearman"):
        from scipy import stats

        if len(t) < 2 or np.ptp(p) == 0 or np.ptp(t) == 0:
            return float("nan")
        return float((stats.pearsonr if name == "pearson" else stats.spearmanr)(p, t).statistic)
    if name in ("r2", "explained_variance") and np.ptp(t) == 0:
        return float("nan")
    scores = {
        "r2": metrics.r2_score,
        "explained_variance": metrics.explained_variance_score,
        "mse": metrics.mean_squared_error,
        "rmse": metrics.root_mean_squared_error,
        "mae": metrics.mean_absolute_error,
        "medae": metrics.median_absolute_error,
        "mape": metrics.mean_absolute_percentage_error,
    }
    return float(scores[name](t, p))
