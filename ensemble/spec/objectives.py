"""The metric that ranks members, and whether it is maximized or minimized: implied by well-known names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, Literal

from ensemble.spec.split_metrics import KNOWN, OTHER_NAMES
from ensemble.spec.task import Kind
from ensemble.spec.validation import SpecError, check_choice

Mode = Literal["max", "min"]

#: The metric that ranks members where none is declared.
DEFAULT_OBJECTIVE = "accuracy"
#: The same, of a Recipe whose declared task has other predictions than classes.
OTHER_OBJECTIVE = "loss"
#: What every Recipe reports beside the loss, by its task.
REPORTED: dict[Kind, tuple[str, ...]] = {
    "classification": ("accuracy",),
    "multilabel": ("hamming_accuracy", "subset_accuracy"),
    "regression": ("mae", "rmse"),
    "gaussian": ("mae", "rmse"),
    "quantiles": ("mae", "rmse"),
    "free": (),
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MINIMIZED = _names(
    "loss error err error_rate nll nll_loss negative_log_likelihood log_loss logloss cross_entropy "
    "crossentropy ce bce xent mse rmse mae mape smape msle rmsle medae mean_squared_error "
    "root_mean_squared_error mean_absolute_error ece mce brier brier_score calibration_error "
    "perplexity ppl bpc bpb bits_per_character bits_per_byte deviance hinge huber kl kld kl_divergence wer cer "
    "ter fid kid lpips eer hamming regret crps pinball crossing chamfer energy_j cpu_s latency_ms model_mb"
)
_MAXIMIZED = _names(
    "accuracy acc balanced_accuracy auc auroc roc_auc auprc pr_auc average_precision ap map precision "
    "recall sensitivity specificity f1 f1_score f1_macro f1_micro macro_f1 micro_f1 fbeta r2 r2_score "
    "explained_variance mcc matthews kappa cohen_kappa iou miou mean_iou jaccard dice bleu rouge meteor "
    "psnr ssim ndcg mrr hit_rate elbo log_likelihood likelihood pearson spearman kendall correlation "
    "reward"
)
_SPLITS = _names("valid val validation test eval dev train training")
#: Signs of what may be measured the other way round: words, as in scikit-learn's `neg_mean_squared_error`, and a
#: minus that joins no two words, as that of `top-5` does.
_NEGATIONS = _names("neg negative negated minus")
_SUBTRACTED = re.compile(r"^-|(^|[^a-z0-9-])((1|one)\s*-|-(?!\s))")
_AMOUNTS = _names("time seconds step steps epoch epochs iteration iterations samples")


class Implied(str):
    """A name that is not declared but inferred from other fields, and inferred again when those are replaced."""


def infer_mode(name: str) -> Mode | None:
    """Whether a metric of this name is maximized ("max") or minimized ("min"); None where the name does not imply
    it.

    Case and a leading name of a split are ignored; `..._loss` and `..._accuracy` are known by their last word. Of
    what is or may be negated (`neg_...`, `-...`, `1 - ...`), the mode has to be declared.

    >>> infer_mode("val_loss"), infer_mode("Top-5 accuracy"), infer_mode("neg_log_loss"), infer_mode("distance")
    ('min', 'max', None, None)
    """
    shown = name.lower().strip().replace("\N{MINUS SIGN}", "-")
    words = [word for word in re.split(r"[^a-z0-9]+", shown) if word]
    if len(words) > 1 and words[0] in _SPLITS:
        words = words[1:]
    if not words or _SUBTRACTED.search(shown):
        return None
    if mode := _find_mode("_".join(words)):
        return mode
    if words[0] in ("1", "one") or not _NEGATIONS.isdisjoint(words):
        return None
    if "to" in words[1:] and words[words.index("to") - 1] in _AMOUNTS:  # until something is reached
        return None
    if words[-1] in ("loss", "error"):
        return "min"
    return "max" if words[-1] in ("accuracy", "acc") else None


def _find_mode(name: str) -> Mode | None:
    """The mode of a well-known name, words joined by underscores."""
    if name in KNOWN:
        return KNOWN[name].mode
    return "min" if name in _MINIMIZED else "max" if name in _MAXIMIZED else None


def resolve_ranking(ensemble: Any, recipe: Any) -> tuple[str, str]:
    """The objective and the mode of an `Ensemble`, inferred where it does not declare them.

    Args:
        ensemble: the ensemble; its `objective` and `mode` may be None or `Implied`.
        recipe: may have both, too; its mode belongs to its own objective.

    Raises:
        SpecError: the metric's name does not imply the mode, and none is declared.
    """
    objective, mode, of_recipe = ensemble.objective, ensemble.mode, getattr(recipe, "objective", None)
    if objective is None or isinstance(objective, Implied):
        objective = Implied(of_recipe or _default_objective(recipe))
    if mode is None or isinstance(mode, Implied):
        mode = getattr(recipe, "mode", None) if of_recipe in (None, objective) else None
        mode = mode or infer_mode(objective)
        if mode is None:
            close = difflib.get_close_matches(
                objective.lower(), (*KNOWN, *_MAXIMIZED, *_MINIMIZED), n=1, cutoff=0.8
            )
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise SpecError(
                f"members are ranked by {objective!r}: say whether it is maximized or minimized, by mode='max' or "
                f"mode='min' (known without it: accuracy, auc, f1, r2 ...; loss, nll, error, mse ...).{meant}"
            )
        mode = Implied(mode)
    return objective, mode


def _default_objective(recipe: Any) -> str:
    task = getattr(recipe, "known_task", None)
    return DEFAULT_OBJECTIVE if task is None or task.kind == "classification" else OTHER_OBJECTIVE


def check_ranking(where: str, declared: Any) -> None:
    """Raise SpecError for an `objective` that is no name, or an unknown `mode`."""
    if declared.objective is not None and (
        not isinstance(declared.objective, str) or not declared.objective.strip()
    ):
        raise SpecError(f"{where}.objective must be the name of a metric, got {declared.objective!r}")
    if declared.mode is not None:
        check_choice(f"{where}.mode", declared.mode, ("max", "min"))


def check_direction(objective: str, mode: str) -> None:
    """Raise SpecError for a mode that ranks the worst member first, by what the metric's name is known for."""
    implied = infer_mode(objective)
    if implied not in (None, mode):
        is_max = implied == "max"
        raise SpecError(
            f"mode={mode!r} ranks the worst member first: {objective!r} is better where it is "
            f"{'higher' if is_max else 'lower'}; leave mode= out, or, if you mean that, report the metric under a "
            f"name that says so, such as '{objective}_to_{'minimize' if is_max else 'maximize'}'"
        )


def describe_missing_objective(objective: str, reported: Iterable[str], by: str = "it") -> str:
    """One line about an objective that is not among the reported metrics.

    Args:
        reported: names of the metrics that were reported.
        by: what reported them.
    """
    names = sorted(reported)
    other_name = OTHER_NAMES.get(objective.lower())
    close = [other_name] if other_name is not None else difflib.get_close_matches(objective, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return (
        f"members are ranked by {objective!r}, which {by} did not report{hint} (reported: "
        f"{', '.join(names) or 'nothing'}); set Recipe.objective, task=, metrics=, split_metrics= or valid="
    )
