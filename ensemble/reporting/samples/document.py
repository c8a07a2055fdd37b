"""The document `samples`: one page of the list of samples, with what is predicted for each, in words.

The records themselves are not in it (`ensemble.reporting.samples.reader`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.reporting import text
from ensemble.reporting.samples.ranking import MODELS, ORDERS, Filter, Model, Order, Ranking
from ensemble.spec.task import LABELS, Task, find_known

if TYPE_CHECKING:
    from ensemble.combine.metrics import Array
    from ensemble.store import RunState

ON_A_PAGE = 24
#: Members whose predictions are shown beside the combined one; classes that can be chosen from a list.
MOST_MEMBERS, MOST_CLASSES = 8, 200
MOST_NAMED = 6  # classes, labels, positions that a prediction lists
LEAST_SHARE = 0.005  # of a class that a prediction names beside the most probable one
TITLES: Mapping[Order, str] = {
    "wrong": "most wrong", "unsure": "most unsure", "disagreement": "most disagreement",
}  # fmt: skip
NOTHING = "No member has saved predictions with their true targets yet."
#: Keys of the document where there is nothing to list.
EMPTY: dict[str, Any] = {
    "split": "", "reading": "", "orders": [], "models": [], "classes": [], "rows": [], "page": 0, "pages": 0,
    "missing": None,
}  # fmt: skip


ANY = Filter()


@dataclass(frozen=True)
class Query:
    """Which page of which list is asked for."""

    order: Order = "wrong"
    model: Model = "combined"
    only: Filter = ANY
    page: int = 0

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Query:
        """A query from the parameters `order`, `of`, `true`, `predicted`, `page` of an address.

        Raises:
            ValueError: one of them is none of what it may be.
        """
        order = next((each for each in ORDERS if each == (given.get("order") or ORDERS[0])), None)
        model = next((each for each in MODELS if each == (given.get("of") or MODELS[0])), None)
        if order is None or model is None:
            raise ValueError(f"order= is one of {', '.join(ORDERS)}, of= one of {', '.join(MODELS)}")
        numbers: dict[str, int | None] = {}
        for name in ("true", "predicted", "page"):
            value = given.get(name) or None
            if value is not None and not (value.isascii() and value.isdigit() and len(value) < 10):
                raise ValueError(f"{name}= is a number")
            numbers[name] = None if value is None else int(value)
        only = Filter(numbers["true"], numbers["predicted"])
        return cls(order, model, only, numbers["page"] or 0)


def list_samples(ranking: Ranking | None, state: RunState, query: Query, size: int = ON_A_PAGE) -> dict[str, Any]:
    """One page of the list.

    Returns:
        - `split`, `reading` (what is listed, in words), `missing`: why nothing is; else None.
        - `orders`, `models`, `classes`: [name or number, title] of what can be chosen; and what was, by the names
          of `Query.parse`.
        - `page`, `pages`: from 0; how many there are.
        - `rows`: `index` of the sample in the source of the split, `score`, `target` and `prediction` in words,
          `right` (None where it is neither), `members`: [name, prediction, right].
        - `more`: which members are not among them.
    """
    if ranking is None:
        return EMPTY | {"missing": NOTHING}
    shown, best = ranking.evaluated.shown, ranking.evaluated.best
    names = ranking.evaluated.combined.classes or ()
    model: Model = query.model if query.model in ranking.models else "best"
    scores = ranking.scores[model, query.order]
    rows = ranking.find(model, query.order, query.only)
    pages = -(-len(rows) // size)
    page = min(query.page, max(pages - 1, 0))
    chosen = rows[page * size : (page + 1) * size]
    titles = {"combined": "combined model", "best": f"best member, {best}"}
    listed = _choose_members(ranking)
    missing = None
    if scores.missing is not None:
        missing = f"Samples cannot be ordered so: {scores.missing}."
    elif not len(rows):
        missing = "There is no such sample."
    return {
        "split": ranking.evaluated.split,
        "reading": _describe_list(ranking, state, query, model, len(rows)),
        "missing": missing,
        "orders": [[each, TITLES[each]] for each in ORDERS],
        "models": [[each, titles[each]] for each in MODELS if each in ranking.models],
        "classes": _list_classes(shown.task, shown.values[0], names),
        "order": query.order,
        "of": model,
        "true": query.only.true,
        "predicted": query.only.predicted,
        "page": page,
        "pages": pages,
        "rows": _describe_rows(ranking, model, query.order, chosen, listed, names),
        "more": _describe_rest(len(shown.members), len(listed)),
    }


def _choose_members(ranking: Ranking) -> list[str]:
    """Those that weigh most in the combined model first, then the best."""
    weights, members = ranking.weights, ranking.evaluated.shown.members  # ranked
    return sorted(members, key=lambda member: -weights.get(member, 0.0))[:MOST_MEMBERS]


def _describe_rest(members: int, listed: int) -> str:
    if members <= listed:
        return ""
    return f"Of {members} members the {listed} that weigh most in the combined model are shown, then the best."


def _describe_list(ranking: Ranking, state: RunState, query: Query, model: Model, found: int) -> str:
    shown, scores = ranking.evaluated.shown, ranking.scores[model, query.order]
    names = ranking.evaluated.combined.classes or ()
    split = "validation" if ranking.evaluated.split == "valid" else ranking.evaluated.split
    of = f"best member, {ranking.evaluated.best}" if model == "best" else "combined model"
    of += " of the members so far" if model == "combined" and state.combined is None else ""
    parts = [f"{text.number(len(shown.index))} samples of the {split} split, as the {of} predicts them"]
    only = [
        f"{what} {_name(names, number)}"
        for what, number in (("of class", query.only.true), ("predicted as", query.only.predicted))
        if number is not None
    ]
    parts.append(f"{text.number(found)} are {', '.join(only)}" if only else "")
    by = f"the largest {scores.what} first" if scores.values is not None else ""
    said = "; ".join(part for part in (*parts, by) if part) + "."
    if "combined" not in ranking.models:
        said += " The combined model is not determined by the saved predictions alone."
    return said


def _list_classes(task: Task, values: Array, names: Sequence[str]) -> list[list[Any]]:
    count = values.shape[-1] if task.kind in LABELS else 0
    return [[number, _name(names, number)] for number in range(count)] if count <= MOST_CLASSES else []


def _name(names: Sequence[str], number: int) -> str:
    return str(names[number]) if 0 <= number < len(names) else str(number)


def _describe_rows(
    ranking: Ranking, model: Model, order: Order, rows: Array, listed: Sequence[str], names: Sequence[str]
) -> list[dict[str, Any]]:
    if not len(rows):
        return []
    shown = ranking.evaluated.shown
    task, values_of = shown.task, ranking.evaluated.rows_of
    what, scores = ranking.scores[model, order].what, ranking.scores[model, order].values
    predicted = np.asarray(ranking.models[model](rows))
    assert scores is not None
    of_members = {member: np.asarray(values_of[member][rows]) for member in listed}
    found = []
    for at, row in enumerate(rows.tolist()):
        target = None if shown.target is None else shown.target[row]
        found.append({
            "index": int(shown.index[row]),
            "score": f"{what} {text.score(float(scores[row]))}",
            "target": describe_target(task, target, names),
            "prediction": describe_prediction(task, predicted[at], names),
            "right": _is_right(task, predicted[at], target),
            "members": [
                [member, describe_prediction(task, values[at], names), _is_right(task, values[at], target)]
                for member, values in of_members.items()
            ],
        })  # fmt: skip
    return found


def _is_right(task: Task, values: Array, target: Array | None) -> bool | None:
    """Whether classes or labels are predicted as they are; None of numbers, and where nothing is known."""
    if task.kind not in LABELS or target is None:
        return None
    known = find_known(np.asarray(target))
    same = np.asarray(task.decide(values)) == np.asarray(target)
    return bool(same[known].all()) if known.any() else None


def describe_prediction(task: Task, values: Array, names: Sequence[str]) -> str:
    """What is predicted for one sample, in a few words.

    Args:
        values: of the sample, [...] as the task lays them out.
    """
    values = np.asarray(values)
    if task.kind == "classification" and values.ndim == 1:
        order = np.argsort(-values, kind="stable")[:3]
        shown = [each for place, each in enumerate(order) if place == 0 or values[each] >= LEAST_SHARE]
        return ", ".join(_name_share(names, int(each), values[each]) for each in shown)
    if task.kind == "multilabel":
        order = np.argsort(-values, kind="stable")
        has = [each for each in order if values[each] >= 0.5]
        listed = has[:MOST_NAMED] or order[:1]
        said = ", ".join(_name_share(names, int(each), values[each]) for each in listed)
        return said + _and_more(len(has), len(listed)) if has else f"none (most: {said})"
    if task.kind == "classification":
        return _list_positions([_name(names, each) for each in values.argmax(-1).ravel().tolist()])
    if task.kind == "gaussian":
        pairs = values.reshape(-1, 2).tolist()[: MOST_NAMED + 1]
        count = values.size // 2
        moments = [f"{text.number(mean)} ± {text.number(variance**0.5)}" for mean, variance in pairs]
        return _list_positions(moments, count)
    if task.kind == "quantiles" and values.ndim == 1:
        levels = zip(task.levels, values.tolist(), strict=True)
        return ", ".join(f"{level:g}: {text.number(value)}" for level, value in levels)
    return _list_numbers(task.take_point(values) if task.kind == "quantiles" else values)


def describe_target(task: Task, target: Array | None, names: Sequence[str]) -> str:
    """What is true of one sample, in a few words."""
    if target is None:
        return text.ABSENT
    target = np.asarray(target)
    known = find_known(target)
    if not known.any():
        return "not known"
    if task.kind == "multilabel":
        has = np.flatnonzero(target == 1).tolist()
        said = ", ".join(_name(names, each) for each in has[:MOST_NAMED])
        return said + _and_more(len(has), MOST_NAMED) if has else "none"
    if task.kind == "classification":
        return _list_positions([_name(names, each) for each in target[known].ravel().tolist()])
    return _list_numbers(target)


def _list_numbers(values: Array) -> str:
    flat = np.asarray(values).ravel()
    return _list_positions([text.number(float(each), 4) for each in flat[: MOST_NAMED + 1]], flat.size)


def _list_positions(said: Sequence[str], count: int | None = None) -> str:
    return ", ".join(said[:MOST_NAMED]) + _and_more(len(said) if count is None else count, MOST_NAMED)


def _and_more(count: int, listed: int) -> str:
    return f" and {count - listed} more" if count > listed else ""


def _name_share(names: Sequence[str], number: int, share: float) -> str:
    return f"{_name(names, number)} ({100 * float(share):.{1 if 0.99 < share < 1 else 0}f} %)"
