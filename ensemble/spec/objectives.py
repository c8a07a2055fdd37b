"""Which way a metric is better: known of well-known names, of all others it must be said."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, Literal

from ensemble.spec.validation import SpecError, check_choice

Mode = Literal["max", "min"]

#: What members are ranked by where nobody says so.
USUAL = "accuracy"
#: What a Recipe without metrics of its own reports; accuracy only of classes.
ALWAYS_REPORTED = ("accuracy", "loss")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SMALL_IS_GOOD = _words(
    "loss error err error_rate nll nll_loss negative_log_likelihood log_loss logloss cross_entropy "
    "crossentropy ce bce xent mse rmse mae mape smape msle rmsle medae mean_squared_error "
    "root_mean_squared_error mean_absolute_error ece mce brier brier_score calibration_error perplexity "
    "ppl bpc bpb bits_per_character bits_per_byte deviance hinge huber kl kld kl_divergence wer cer ter "
    "fid kid lpips eer hamming regret crps pinball chamfer"
)
_LARGE_IS_GOOD = _words(
    "accuracy acc balanced_accuracy auc auroc roc_auc auprc pr_auc average_precision ap map precision "
    "recall sensitivity specificity f1 f1_score f1_macro f1_micro macro_f1 micro_f1 fbeta r2 r2_score "
    "explained_variance mcc matthews kappa cohen_kappa iou miou mean_iou jaccard dice bleu rouge meteor "
    "psnr ssim ndcg mrr hit_rate elbo log_likelihood likelihood pearson spearman kendall correlation "
    "reward"
)
_SPLITS = _words("valid val validation test eval dev train training")


class Implied(str):
    """A word that nobody declared but that follows from others: `dataclasses.replace` of those finds it anew."""


def direction(name: str) -> Mode | None:
    """Whether a metric of this name is to be large ("max") or small ("min"); None where the name does not say.

    Names are read in any case, with or without the split in front; `..._loss` and `..._accuracy` are known by
    their last word.

    >>> direction("val_loss"), direction("Top-5 accuracy"), direction("distance")
    ('min', 'max', None)
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    if len(words) > 1 and words[0] in _SPLITS:
        words = words[1:]
    known = "_".join(words)
    last = words[-1] if words else ""
    if known in _SMALL_IS_GOOD or last in ("loss", "error"):
        return "min"
    if known in _LARGE_IS_GOOD or last in ("accuracy", "acc"):
        return "max"
    return None


def settle(given: Any, recipe: Any) -> tuple[str, str]:
    """By what the members of an `Ensemble` are ranked, and which way, where it may not say so itself.

    Args:
        given: what has `objective` and `mode`: the ensemble.
        recipe: which may have them too; its mode is that of its own objective.

    Raises:
        SpecError: the metric's name does not say which way, and neither does anybody else.
    """
    objective, mode, of_recipe = given.objective, given.mode, getattr(recipe, "objective", None)
    if objective is None or isinstance(objective, Implied):
        objective = Implied(of_recipe or USUAL)
    if mode is None or isinstance(mode, Implied):
        mode = getattr(recipe, "mode", None) if of_recipe in (None, objective) else None
        mode = mode or direction(objective)
        if mode is None:
            raise SpecError(
                f"members are ranked by {objective!r}: say whether it is to be large or small, by mode='max' or "
                "mode='min' (known without it: accuracy, auc, f1, r2 ...; loss, nll, error, mse ...)"
            )
        mode = Implied(mode)
    return objective, mode


def check_ranking(where: str, given: Any) -> None:
    """Refuse an `objective` that is no name, or a `mode` that is none."""
    if given.objective is not None and (not isinstance(given.objective, str) or not given.objective.strip()):
        raise SpecError(f"{where}.objective must be the name of a metric, got {given.objective!r}")
    if given.mode is not None:
        check_choice(f"{where}.mode", given.mode, ("max", "min"))


def not_reported(objective: str, reported: Iterable[str], by: str = "it") -> str:
    """One line for an objective that is not among the metrics that were reported `by` somebody."""
    names = sorted(reported)
    close = difflib.get_close_matches(objective, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return (
        f"members are ranked by {objective!r}, which {by} did not report{hint} (reported: "
        f"{', '.join(names) or 'nothing'}); set Recipe.objective, metrics= or valid="
    )
