"""Orders the samples of the evaluated split by how wrong, unsure or disputed their predictions are.

Scores of all samples are computed once, some rows at a time: of a million samples they take 8 MB each. What is
predicted for the few that are shown is computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ensemble.reporting.evaluated import Evaluated, Predict, read_evaluated
from ensemble.spec.task import LABELS, find_known

if TYPE_CHECKING:
    from ensemble.combine.metrics import Array
    from ensemble.combine.sample_scores import SampleScores
    from ensemble.store import RunDir, RunState

Order = Literal["wrong", "unsure", "disagreement"]
Model = Literal["combined", "best"]
ORDERS: tuple[Order, ...] = get_args(Order)
MODELS: tuple[Model, ...] = get_args(Model)
_CHUNK = 2**22
"""Values of all members that are worked on at once: 32 MiB."""


@dataclass(frozen=True)
class Filter:
    """Which samples are listed: those with a position whose classes are these; None: any.

    Attributes:
        true, predicted: numbers of classes; of several labels, that the sample has, or is predicted to have.
    """

    true: int | None = None
    predicted: int | None = None


@dataclass(frozen=True)
class Ranking:
    """The samples of the evaluated split of one run, by their scores.

    Attributes:
        evaluated: the predictions.
        models: what predicts chosen rows, by model.
        weights: of the combined model.
        scores: of each model and order.
    """

    evaluated: Evaluated
    models: Mapping[Model, Predict]
    weights: Mapping[str, float]
    scores: dict[tuple[Model, Order], SampleScores] = field(default_factory=dict)

    def find(self, model: Model, order: Order, wanted: Filter) -> Array:
        """Rows of the samples, int64 [k], the largest score first; of equal ones those with the lower index."""
        scores = self.scores[model, order].values
        if scores is None:
            return np.empty(0, dtype=np.int64)
        is_listed = ~np.isnan(scores)
        if wanted != Filter():
            is_listed &= self._match(model, wanted)
        rows = np.flatnonzero(is_listed)
        return rows[np.argsort(-scores[rows], kind="stable")]

    def _match(self, model: Model, wanted: Filter) -> Array:
        """Which samples a filter lets through, bool [n]."""
        shown = self.evaluated.shown
        if shown.task.kind not in LABELS or shown.target is None:
            return np.ones(len(shown.index), dtype=bool)
        found = np.zeros(len(shown.index), dtype=bool)
        for rows in _cut(self.evaluated):
            found[rows] = _match_rows(shown.task.kind, shown.target[rows], self._decide(model, rows), wanted)
        return found

    def _decide(self, model: Model, rows: Any) -> Array:
        decided: Array = self.evaluated.shown.task.decide(np.asarray(self.models[model](rows)))
        return decided


def _match_rows(kind: str, target: Array, decided: Array, wanted: Filter) -> Array:
    listed: Array = find_known(target)
    if kind == "multilabel":
        listed = np.asarray(listed.any(axis=1))
        for number, has in ((wanted.true, target == 1), (wanted.predicted, decided)):
            if number is not None:
                listed = listed & (has[:, number] if number < has.shape[1] else False)
        return listed
    if wanted.true is not None:
        listed = listed & (target == wanted.true)
    if wanted.predicted is not None:
        listed = listed & (decided == wanted.predicted)
    return np.asarray(listed.reshape(len(listed), -1).any(axis=1))


def _cut(evaluated: Evaluated) -> list[slice]:
    """All rows in parts of which the members' values are at most `_CHUNK`."""
    shown = evaluated.shown
    of_a_row = max(1, int(np.prod(shown.values[0].shape[1:])) * (len(shown.members) + 2))
    step = max(1, _CHUNK // of_a_row)
    return [slice(start, start + step) for start in range(0, len(shown.index), step)]


def rank_samples(run_dir: RunDir, state: RunState) -> Ranking | None:
    """Computes the scores of all samples; None while no member has saved predictions with targets.

    Raises:
        DamagedError, CombineError: see `read_evaluated`.
    """
    evaluated = read_evaluated(run_dir, state)
    if evaluated is None:
        return None
    combined, weights = evaluated.find_combined(state)
    best = evaluated.rows_of[evaluated.best]
    models: dict[Model, Predict] = {} if combined is None else {"combined": combined}
    models["best"] = best.__getitem__
    ranking = Ranking(evaluated, models, weights)
    members, shares = _weigh_members(evaluated, weights)
    parts: dict[tuple[Model, Order], list[SampleScores]] = {}
    for rows in _cut(evaluated):
        for name, score in _score(ranking, members, shares, rows).items():
            parts.setdefault(name, []).append(score)
    ranking.scores.update({name: _join(scores) for name, scores in parts.items()})
    return ranking


def _weigh_members(evaluated: Evaluated, weights: Mapping[str, float]) -> tuple[list[Array], Array]:
    """The members whose disagreement counts: those of the combined model where it has several, else all alike."""
    distinct = evaluated.shown.select_configurations()
    values = dict(zip(distinct.members, distinct.values, strict=True))
    chosen = {member: weight for member, weight in weights.items() if weight > 0 and member in values}
    if len(chosen) < 2:
        chosen = dict.fromkeys(values, 1.0)
    return [values[member] for member in chosen], np.array(list(chosen.values()))


def _score(
    ranking: Ranking, members: list[Array], shares: Array, rows: slice
) -> dict[tuple[Model, Order], SampleScores]:
    from ensemble.combine.sample_scores import measure_disagreement, measure_doubt, measure_loss

    shown = ranking.evaluated.shown
    task, target = shown.task, None if shown.target is None else shown.target[rows]
    disagreement = measure_disagreement(task, [values[rows] for values in members], shares, target)
    found: dict[tuple[Model, Order], SampleScores] = {}
    for name, predict in ranking.models.items():
        values = np.asarray(predict(rows))
        found[name, "wrong"] = measure_loss(task, values, target)
        found[name, "unsure"] = measure_doubt(task, values, target)
        found[name, "disagreement"] = disagreement
    return found


def _join(scores: list[SampleScores]) -> SampleScores:
    from ensemble.combine.sample_scores import SampleScores

    first = scores[0]
    if first.values is None:
        return first
    return SampleScores(first.what, np.concatenate([each.values for each in scores if each.values is not None]))
