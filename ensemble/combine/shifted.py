"""Measures how well uncertainty tells samples of another distribution from those like the training data.

Each part of the uncertainty (`ensemble.combine.uncertainty`) is a score of a sample, higher for what is further
from the training data: total entropy or variance, the epistemic part, disagreement. A detector says *shifted*
above some threshold; these figures are of all thresholds, with the shifted samples as the positives (Hendrycks
and Gimpel 2017; Hendrycks, Mazeika and Dietterich 2019):

- **AUROC**: the probability that a shifted sample scores higher than another one, ties counting half. 0.5: no
  use.
- **AUPR**: average precision. It depends on how many shifted samples there are; of no use is their share.
- **FPR95**: the fraction of the others above the threshold that at least 95 % of the shifted reach. Lower is
  better.

Where shifted samples have targets, how good the model is on them is measured beside that: the task's figures, and
how they change (Ovadia et al. 2019, "Can you trust your model's uncertainty?").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ensemble.combine.metrics import Array
from ensemble.combine.tasks import TaskMath
from ensemble.spec.split_metrics import SplitMetricLike

RECALL = 0.95
"""The fraction of the shifted samples that FPR95 detects at least."""


def measure_shift(inside: Mapping[str, Array], shifted: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """How well each part that both splits have tells them apart.

    Args:
        inside: part to its value for each of n samples like the training data, float64 [n]; NaN is left out.
        shifted: the same for the k shifted samples, float64 [k].

    Returns:
        Part to `auroc`, `aupr`, `fpr95`. Parts without a value for one of the splits are left out.
    """
    found = {}
    for name in inside:
        if name in shifted:
            here, there = (one[~np.isnan(one)] for one in (inside[name], shifted[name]))
            if len(here) and len(there):
                found[name] = _measure_score(here, there)
    return found


def measure_change(
    task_math: TaskMath,
    usual: Mapping[str, Mapping[str, float]],
    shifted: Mapping[str, Array],
    target: Array,
    more: Sequence[SplitMetricLike] = (),
) -> dict[str, dict[str, float]]:
    """The figures of models on shifted samples, and how much they differ from those on the usual ones.

    Args:
        usual: model to its figures on samples like the training data.
        shifted: model to what it predicts for the shifted samples, as the task lays it out.
        target: of the shifted samples.
        more: metrics of the whole split.

    Returns:
        Figure to `MODEL`, its value on the shifted samples, and `MODEL_change`, that value less the usual one, of
        each model. A figure that one of the splits does not have is left out.

    Raises:
        CombineError: the target is none of the task.
    """
    found: dict[str, dict[str, float]] = {}
    for of, values in shifted.items():
        task_math.check_target(values, target)
        for name, value in task_math.measure(values, target, more).items():
            if name in usual[of]:
                found.setdefault(name, {}).update({of: value, f"{of}_change": value - usual[of][name]})
    return found


def _measure_score(inside: Array, shifted: Array) -> dict[str, float]:
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    score = np.concatenate([inside, shifted])
    is_shifted = np.repeat([0, 1], [len(inside), len(shifted)])
    false_positives, recall, _ = roc_curve(is_shifted, score, drop_intermediate=False)
    return {
        "auroc": float(roc_auc_score(is_shifted, score)),
        "aupr": float(average_precision_score(is_shifted, score)),
        "fpr95": float(false_positives[recall >= RECALL].min()),
    }
