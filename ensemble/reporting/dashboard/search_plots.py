"""Figures of a search: what was pruned when, Pareto fronts, the objective over two hyperparameters.

They have the form of `plots`, and more: a series may have a `size`, `shape` "ring", "cross" or "cell" (up to the
corner `to` of its points) and the `state` of members whose colour it has; a point `aside`, by which it lies beside
its place, and `fill`, its place 0 … 1 on the scale of colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.reporting import text
from ensemble.reporting.dashboard.plots import Document, shorten
from ensemble.reporting.model_figures import describe_figure
from ensemble.reporting.ranking import finite_or_none, front_members

if TYPE_CHECKING:
    from ensemble.store import RunState

MOST_CONTOURS = 3  # pairs of the most important hyperparameters
CELLS = 24  # of a contour, along each axis
REACH = 0.15  # of an axis: beyond it from the nearest trial nothing is interpolated
FEWEST = 6  # trials of a contour
MOST_PASSED = 1000  # rings beside what was pruned
SPREADS = 4.0  # of the middle half, beyond which values are outliers
DECADES = 1.5  # from which on positive values lie on a logarithmic axis


@dataclass(frozen=True)
class Trial:
    """A member as the trial of a search.

    Attributes:
        epoch: how many it has finished.  value: the objective after the last of them.
        further: its values of the further objectives.  curve: the objective by number of finished epochs.
    """

    id: str
    number: int
    state: str
    epoch: int
    value: float | None
    params: Mapping[str, Any]
    further: Sequence[float | None] = ()
    curve: Mapping[int, float | None] = field(default_factory=dict)

    def mark(self, x: Any, y: float, *words: str, aside: bool = False) -> list[Any]:
        """A point of a plot; `aside`: it is moved a little, so that equal values do not hide each other."""
        more: Document = {"member": self.id, "text": "\n".join((text.visible(self.id), *words))}
        if aside:
            more["aside"] = round(self.number * 0.6180339887 % 1 - 0.5, 3)
        return [shorten(x), shorten(y), more]

    def describe(self) -> list[str]:
        """How far it came, with what."""
        words = [f"{self.state} after {text.count(self.epoch, 'epoch')}", text.hyperparameters(self.params)]
        return [*words, text.score(self.value)]


@dataclass(frozen=True)
class SearchInfo:
    """What the figures need to know of a search.

    Attributes:
        further: names of the objectives beyond the first.  origin: of costs among them.
        front: ids of the members on the Pareto front, in its order.
        important: names of hyperparameters, the most important first.
    """

    mode: str
    objective: str
    direction: str
    epochs: int | None
    further: Sequence[str]
    origin: str
    front: Sequence[str]
    important: Sequence[str]


def read_trials(state: RunState) -> list[Trial]:
    """The members of a run as trials."""
    return [
        Trial(
            member.id,
            member.number,
            member.state,
            member.epoch,
            finite_or_none(member.metrics.get(state.objective)),
            member.params,
            [finite_or_none(member.value_of(each)) for each in state.further_objectives],
            {epoch.epoch + 1: finite_or_none(epoch.metrics.get(state.objective)) for epoch in member.history},
        )
        for member in state.members.values()
    ]


def describe_search(state: RunState, important: Sequence[str], origin: str) -> SearchInfo:
    """What is known of the search of a run."""
    return SearchInfo(
        state.mode,
        state.objective,
        state.direction,
        state.epochs,
        [each.name for each in state.further_objectives],
        origin,
        [member.id for member in front_members(state)],
        important,
    )


def plot_search(trials: Sequence[Trial], info: SearchInfo) -> list[Document]:
    """Returns the figures; one that cannot be had says why in `absent`."""
    return [*_plot_pruning(trials, info), *_plot_fronts(trials, info), *_plot_contours(trials, info)]


def _plot_pruning(trials: Sequence[Trial], info: SearchInfo) -> Iterator[Document]:
    if info.mode != "search" or info.further:
        return
    pruned = [each for each in trials if each.state == "pruned"]
    rungs = sorted({each.epoch for each in pruned})
    counts = [
        f"{sum(p.epoch == rung for p in pruned)} of {sum(t.epoch >= rung for t in trials)} after epoch {rung}"
        for rung in rungs
    ]
    passed = [
        each.mark(rung, value, f"after epoch {rung}: {text.score(value)}", aside=True)
        for each in trials
        for rung in rungs
        if (each.epoch > rung or each.state == "finished") and (value := each.curve.get(rung)) is not None
    ]
    passed = (
        [passed[i * len(passed) // MOST_PASSED] for i in range(MOST_PASSED)]
        if len(passed) > MOST_PASSED
        else passed
    )
    crosses = [p.mark(p.epoch, p.value, *p.describe(), aside=True) for p in pruned if p.value is not None]
    most = max([info.epochs or 1, *rungs])
    yield {
        "id": "pruning",
        "title": "What was pruned when",
        "reading": f"Pruned: {', '.join(counts[:8])}{' …' if len(counts) > 8 else ''}. Crosses lie where trials "
        "were ended, rings are the values there of those that went on.",
        "absent": None if crosses else "No trial has been pruned.",
        "said": ", ".join(counts),
        "x": {"title": "finished epochs", "range": [0, most * 1.02], "kind": "linear", "whole": True},
        "y": _axis(text.visible(info.objective), [point[1] for point in (*passed, *crosses)]),
        "series": [
            {
                "of": "passed",
                "state": "finished",
                "label": "went on",
                "shape": "ring",
                "size": 3,
                "points": passed,
            },
            {"of": "pruned", "state": "pruned", "label": "pruned", "shape": "cross", "size": 4, "points": crosses},
        ],
    }


def _plot_fronts(trials: Sequence[Trial], info: SearchInfo) -> Iterator[Document]:
    """The front over each further objective."""
    if not info.further:
        return
    judged = [t for t in trials if t.state == "finished" and None not in (t.value, *t.further)]
    known = {each.id: each for each in judged}
    front = [known[id] for id in info.front if id in known]
    several = len(info.further) > 1
    beaten = (
        "Of those that stand out none is beaten in all objectives."
        if several
        else "Of those on the line none is beaten in both."
    )
    is_estimated = "energy_j" in info.further and "estimated" in info.origin
    titles = [_title(name, info.origin) for name in info.further]
    table = {
        "head": ["trial", *titles, text.visible(info.objective), ""],
        "rows": [
            [
                text.visible(each.id),
                *(
                    [_amount(name, value, info.origin), value]
                    for name, value in zip(info.further, each.further, strict=True)
                ),
                [text.score(each.value), each.value],
                "on the front" if each in front else "",
            ]
            for each in sorted(judged, key=lambda each: each.further[0] or 0.0)
        ],
    }
    for at, (name, title) in enumerate(zip(info.further, titles, strict=True)):

        def mark(each: Trial, at: int = at) -> list[Any]:
            parts = zip(titles, info.further, each.further, strict=True)
            more = (f"{words}: {_amount(name, value, info.origin)}" for words, name, value in parts)
            return each.mark(each.further[at], each.value or 0.0, *each.describe(), *more)

        values = [each.further[at] or 0.0 for each in judged]
        yield {
            "id": f"front {name}",
            "title": f"Pareto front, {title}" if several else "Pareto front",
            "reading": f"Each finished trial by two of its objectives. {beaten}"
            + (f" {text.ESTIMATED}" if is_estimated else ""),
            "absent": None if judged else "No trial has finished with all objectives yet.",
            "said": f"{len(front)} of {len(judged)} trials on the front",
            "table": table,
            "x": {"title": title, "range": None, "kind": _kind(values)},
            "y": _axis(text.visible(info.objective), [each.value or 0.0 for each in judged]),
            "series": [
                {
                    "of": "others",
                    "state": "finished",
                    "label": "other trials",
                    "shape": "dot",
                    "points": [mark(t) for t in judged if t not in front],
                },
                {
                    "of": "combined",
                    "label": "Pareto front",
                    "shape": "dot",
                    "size": 4.5,
                    "line": not several and "steps",
                    "points": [mark(t) for t in front],
                },
            ],
        }


def _plot_contours(trials: Sequence[Trial], info: SearchInfo) -> Iterator[Document]:
    """The objective over pairs of the most important hyperparameters that are numbers."""
    judged = [each for each in trials if each.state == "finished" and each.value is not None]
    objective = text.visible(info.objective)
    names = [name for name in info.important if _is_number_in(judged, name)][:MOST_CONTOURS]
    for a, b in combinations(names, 2):
        having = [
            each
            for each in judged
            if finite_or_none(each.params.get(a)) is not None and finite_or_none(each.params.get(b)) is not None
        ]
        axes = [[float(each.params[name]) for each in having] for name in (a, b)]
        kinds = [_kind(values) for values in axes]
        values = np.array([each.value for each in having], dtype=float)
        cells = _interpolate(axes, kinds, values)
        low, high = plain_range(values.tolist())
        sign = 1 if info.direction == "max" else -1

        def place(value: float, low: float = low, high: float = high, sign: int = sign) -> float:
            share = min(1.0, max(0.0, (value - low) / ((high - low) or 1.0)))
            return round(share if sign > 0 else 1 - share, 3)

        points = [[x, y, {"to": to, "fill": place(value)}] for x, y, to, value in cells]
        marks = [
            each.mark(each.params[a], each.params[b], *_describe_pair(each, (a, b)), text.score(each.value))
            for each in having
        ]
        for mark, value in zip(marks, values, strict=True):
            mark[2]["fill"] = place(float(value))
        yield {
            "id": f"contour {a} {b}",
            "title": f"{objective} over {text.visible(a)} and {text.visible(b)}",
            "reading": f"Dots are finished trials, coloured from the worst to the best {objective}. The ground "
            "between them is an interpolation (linear), only near trials: other hyperparameters differ, too.",
            "absent": None if cells else f"It needs {FEWEST} finished trials that differ in both.",
            "said": f"{len(having)} trials",
            "x": {"title": text.visible(a), "range": None, "kind": kinds[0]},
            "y": {"title": text.visible(b), "range": None, "kind": kinds[1]},
            "series": [
                {"of": "ground", "label": "", "shape": "cell", "still": True, "points": points},
                {"of": "trials", "label": "", "shape": "dot", "size": 4, "points": marks},
            ],
        }


def _interpolate(
    axes: Sequence[Sequence[float]], kinds: Sequence[str], values: np.ndarray[Any, Any]
) -> list[tuple[Any, Any, list[Any], float]]:
    """Cells near trials: lower corner, upper corner, value; none where the trials span no area."""
    from scipy.interpolate import LinearNDInterpolator  # type: ignore[import-untyped]
    from scipy.spatial import QhullError, cKDTree  # type: ignore[import-untyped]

    plain = [
        np.log(axis) if kind == "log" else np.array(axis, dtype=float)
        for axis, kind in zip(axes, kinds, strict=True)
    ]
    lows, spans = (
        [axis.min() if len(axis) else 0.0 for axis in plain],
        [float(np.ptp(axis)) if len(axis) else 0.0 for axis in plain],
    )
    if len(values) < FEWEST or not all(spans):
        return []
    unit = np.stack([(axis - low) / span for axis, low, span in zip(plain, lows, spans, strict=True)], axis=1)
    places, which = np.unique(unit.round(9), axis=0, return_inverse=True)
    means = np.bincount(which.ravel(), weights=values) / np.bincount(which.ravel())
    try:
        surface = LinearNDInterpolator(places, means)
    except QhullError:
        return []  # on one line
    edges = np.linspace(0.0, 1.0, CELLS + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    grid = np.stack(np.meshgrid(middles, middles, indexing="ij"), axis=-1).reshape(-1, 2)
    found, away = surface(grid), cKDTree(places).query(grid)[0]
    corners = [low + span * edges for low, span in zip(lows, spans, strict=True)]
    across, up = (np.exp(axis) if kind == "log" else axis for axis, kind in zip(corners, kinds, strict=True))
    cells = []
    for k in np.flatnonzero(np.isfinite(found) & (away < REACH)):
        i, j = divmod(int(k), CELLS)
        cells.append(
            (shorten(across[i]), shorten(up[j]), [shorten(across[i + 1]), shorten(up[j + 1])], float(found[k]))
        )
    return cells


def _describe_pair(trial: Trial, names: Sequence[str]) -> list[str]:
    return [text.hyperparameters({name: trial.params[name] for name in names})]


def _is_number_in(trials: Sequence[Trial], name: str) -> bool:
    values = [each.params.get(name) for each in trials if name in each.params]
    return len(set(map(repr, values))) > 2 and all(finite_or_none(value) is not None for value in values)


def _kind(values: Sequence[float]) -> str:
    """Of an axis: "log" where positive values span decades and lie more evenly by their logarithm."""
    if not values or min(values) <= 0 or math.log10(max(values) / min(values)) < DECADES:
        return "linear"
    low, middle, high = min(values), sorted(values)[len(values) // 2], max(values)
    even, by_log = (middle - low) / (high - low), math.log(middle / low) / math.log(high / low)
    return "log" if abs(by_log - 0.5) < abs(even - 0.5) else "linear"


def plain_range(values: Sequence[float]) -> tuple[float, float]:
    """Smallest and largest value that is worth showing: outliers far beyond the middle half are left out."""
    if not values:
        return 0.0, 1.0
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    reach = SPREADS * (high - low)
    kept = [v for v in ordered if low - reach <= v <= high + reach] if reach and len(ordered) >= 8 else ordered
    return kept[0], kept[-1]


def _axis(title: str, values: Sequence[float]) -> Document:
    low, high = plain_range(values)
    room = 0.06 * (high - low) or abs(low) * 0.05 or 1.0
    return {"title": title, "range": [low - room, high + room], "kind": "linear"}


def _title(name: str, origin: str) -> str:
    """What an objective beyond the first is called."""
    if name == "energy_j":
        return f"joules ({origin})"
    return "CPU-seconds (measured)" if name == "cpu_s" else text.visible(describe_figure(name).title)


def _amount(name: str, value: float | None, origin: str) -> str:
    if name == "energy_j":
        return f"{text.joules(value)} ({origin})"
    return text.cpu(value) if name == "cpu_s" else text.score(value)
