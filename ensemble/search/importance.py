"""How much of the objective's variance each hyperparameter explains, by Optuna's fANOVA (Hutter et al. 2014).

PED-ANOVA is faster, but judges by the best tenth of the trials: 32 are too few. A forest's time grows with the
square of the trials, so at most `MOST_TRIALS` are used. Members of a fixed list are judged as trials are.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.search._compat import silence_optuna
from ensemble.spec import SpecError

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

    from ensemble.store.state import RunState

FEWEST_TRIALS = 5
MOST_TRIALS = 128
TREES = 32
RESAMPLES = 8  # with a share of the trees each: the spread costs as much as the importances
DECADES = 1.5
"""Positive values over more decades are judged by their logarithm, where that spreads them more evenly."""

Trial = tuple[Mapping[str, Any], float]


class NoImportancesError(SpecError):
    """The importances cannot be computed; the message says why in one line."""


def compute_importances(state: RunState) -> tuple[dict[str, float], str, dict[str, tuple[float, float]]]:
    """The importance of each hyperparameter that differs between the finished members of a run.

    Pruned members are left out: their last value is of an earlier epoch.

    Returns:
        Shares by name, largest first; they add up to 1. How they were found, in words. The lowest and the highest
        share of each over resamples of the trials (bootstrap), of smaller forests.
    """
    trials = _finished_trials(state)
    if len(trials) < FEWEST_TRIALS:
        raise NoImportancesError(
            f"The importances need {FEWEST_TRIALS} finished members with {state.objective}; "
            f"there are {len(trials)}."
        )
    if len({value for _, value in trials}) == 1:
        raise NoImportancesError(f"All finished members have the same {state.objective}.")
    names = list(dict.fromkeys(name for params, _ in trials for name in params))
    varied = [name for name in names if len({repr(params.get(name)) for params, _ in trials}) > 1]
    judged = [name for name in varied if all(name in params for params, _ in trials)]
    if not judged:
        raise NoImportancesError("No hyperparameter that all finished members have differs between them.")
    used = [trials[i * len(trials) // MOST_TRIALS] for i in range(MOST_TRIALS)]
    used = trials if len(trials) <= MOST_TRIALS else used
    shares = _explain_variance(used, judged)
    words = _describe(len(used), len(trials), judged, [name for name in varied if name not in judged])
    return shares, words, _resample(used, judged)


def _resample(trials: Sequence[Trial], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """The lowest and the highest share of each hyperparameter over resamples of the trials; none if all fail."""
    draw = random.Random(0)
    resampled: list[dict[str, float]] = []
    for _ in range(RESAMPLES):
        chosen = draw.choices(trials, k=len(trials))
        if len({value for _, value in chosen}) > 1 and all(
            len({repr(p[name]) for p, _ in chosen}) > 1 for name in names
        ):
            resampled.append(_explain_variance(chosen, names, TREES // RESAMPLES))
    return {
        name: (min(shares[name] for shares in resampled), max(shares[name] for shares in resampled))
        for name in names
        if resampled
    }


def _finished_trials(state: RunState) -> list[Trial]:
    """Hyperparameters and last value of the objective of the finished members, by number."""
    members = sorted(state.members.values(), key=lambda member: member.number)
    values = (
        (m.params, _finite_or_none(m.metrics.get(state.objective))) for m in members if m.state == "finished"
    )
    return [(params, value) for params, value in values if value is not None]


def _finite_or_none(value: Any) -> float | None:
    """The number as a float; None where it is none, NaN, infinite or too large."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _explain_variance(trials: Sequence[Trial], names: Sequence[str], trees: int = TREES) -> dict[str, float]:
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    columns = {name: _make_column([params[name] for params, _ in trials]) for name in names}
    distributions = {name: distribution for name, (distribution, _) in columns.items()}
    study = _make_study(distributions, [values for _, values in columns.values()], [value for _, value in trials])
    importances = get_param_importances(study, evaluator=FanovaImportanceEvaluator(n_trees=trees, seed=0))
    shares = {name: float(importances.get(name, 0.0)) for name in names}
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def _make_study(
    distributions: Mapping[str, BaseDistribution], columns: Sequence[Sequence[Any]], values: Sequence[float]
) -> optuna.Study:
    import optuna

    with silence_optuna():
        study = optuna.create_study()  # in memory; the direction does not matter to the variance
    rows = zip(*columns, strict=True)
    study.add_trials(
        [
            optuna.trial.create_trial(
                params=dict(zip(distributions, row, strict=True)), distributions=dict(distributions), value=value
            )
            for row, value in zip(rows, values, strict=True)
        ]
    )
    return study


def _make_column(values: Sequence[Any]) -> tuple[BaseDistribution, list[Any]]:
    """The distribution of one hyperparameter and its values in it: numbers over their range, all else by name."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    numbers = [v for v in map(_finite_or_none, values) if v is not None]
    if len(numbers) == len(values):
        if min(numbers) > 0 and math.log10(max(numbers)) - math.log10(min(numbers)) > DECADES:
            numbers = min(numbers, [math.log10(v) for v in numbers], key=_unevenness)
        return FloatDistribution(min(numbers), max(numbers)), numbers
    names = [repr(v) for v in values]
    return CategoricalDistribution(sorted(set(names))), names


def _unevenness(numbers: Sequence[float]) -> float:
    """How far the median lies from the middle of the range: 0 to 0.5 of it."""
    low, high = min(numbers), max(numbers)
    return abs((sorted(numbers)[len(numbers) // 2] - low) / (high - low) - 0.5)


def _describe(used: int, finished: int, judged: Sequence[str], left_out: Sequence[str]) -> str:
    over = (
        f"{used} of {finished:,} finished members, evenly spread"
        if used < finished
        else f"{used} finished members"
    )
    words = f"Share of the variance that a random forest explains by each (fANOVA of Optuna), over {over}."
    if used < 4 * len(judged):
        words += " These are few: take it as a hint."
    if left_out:
        words += f" Not judged, because not all members have it: {', '.join(left_out)}."
    return words
