"""Figures of a search: trials in order, the objective over each hyperparameter, what was pruned, Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.dashboard.plots import Document, draw_axis, draw_plot, draw_series, shorten
from ensemble.reporting.model_figures import describe_figure
from ensemble.reporting.ranking import (
    cost_origin,
    finite_or_none,
    front_members,
    judged_members,
    metric,
    metric_of,
)

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState

MOST_SLICES = 9  # hyperparameters, the most important first
MOST_VALUES = 12  # of a hyperparameter, most of them drawn twice, that are categories: `choice(8, 16, 32)`
MOST_PASSED = 1000  # rings beside what was pruned
SPREADS = 4.0  # of the middle half, beyond which values are outliers
DECADES = 1.5  # from which on positive values lie on a logarithmic axis
#: How members are drawn: their state, its word, the shape of their marks.
PHASES = (("finished", "finished", "dot"), ("running", "still running", "ring"), ("pruned", "pruned", "cross"))


def plot_search(state: RunState, important: Sequence[str]) -> list[Document]:
    """Returns the figures; one that cannot be had says why in `absent`.

    Args:
        important: names of hyperparameters, the most important first.
    """
    plots = [_plot_history(state), *(_plot_slice(state, name) for name in important[:MOST_SLICES])]
    if state.further_objectives:
        return [*plots, *_plot_fronts(state)]
    return [*plots, _plot_pruning(state)] if state.mode == "search" else plots


def _mark(member: MemberState, x: Any, y: float, *words: str, aside: bool = False) -> list[Any]:
    """A point of a figure; `aside`: it is moved a little, so that equal values do not hide each other."""
    more: Document = {"member": member.id, "text": "\n".join((text.visible(member.id), *words))}
    if aside:
        more["aside"] = round(member.number * 0.6180339887 % 1 - 0.5, 3)
    return [shorten(x), shorten(y), more]


def _describe(state: RunState, member: MemberState) -> list[str]:
    words = [f"{member.state} after {text.count(member.epoch, 'epoch')}", text.hyperparameters(member.params)]
    return [*words, text.score(metric(member, state.objective))]


def _draw_phases(
    state: RunState, points: Sequence[tuple[MemberState, Any, float]], *, aside: bool
) -> list[Document]:
    """A series for each phase of members, of points (member, x, y)."""
    series = []
    for phase, word, shape in PHASES:
        marks = [
            _mark(member, x, y, *_describe(state, member), aside=aside)
            for member, x, y in points
            if member.state == phase
        ]
        if marks:
            series.append(draw_series(phase, marks, shape=shape, label=word) | {"state": phase})
    return series


def _plot_history(state: RunState) -> Document:
    points = [
        (member, member.number, value)
        for member in state.members.values()
        if (value := metric(member, state.objective)) is not None
    ]
    best = list[tuple[int, float]]()
    better = max if state.direction == "max" else min
    for member, number, value in points:
        if member.state == "finished":
            best.append((number, better(best[-1][1], value) if best else value))
    line = draw_series(
        "combined", [*best, (points[-1][1], best[-1][1])] if best else [], shape=None, label="best so far"
    )
    reading = "The objective of each member, and the best that was known after each finished one."
    axes = draw_axis("trial") | {"whole": True}, _axis(state, [value for *_, value in points])
    series = [*_draw_phases(state, points, aside=False), line | {"line": "steps", "still": True}]
    plot = draw_plot("history", "Trials in order", reading, *axes, series)
    summary = f"{len(points)} trials" + (f", best {text.score(best[-1][1])}" if best else "")
    return plot | {"said": summary, "absent": None if points else "No trial has reported the objective yet."}


def _plot_slice(state: RunState, name: str) -> Document:
    points = [
        (member, member.params[name], value)
        for member in state.members.values()
        if member.params.get(name) is not None and (value := metric(member, state.objective)) is not None
    ]
    numbers = [finite_or_none(x) for _, x, _ in points]
    finite = [number for number in numbers if number is not None]
    is_choice = len({*finite}) <= MOST_VALUES and 2 * len({*finite}) <= len(points)
    kind = _choose_kind(finite) if len(finite) == len(points) and not is_choice else "category"
    if len(finite) < len(points):
        points = [(member, x if isinstance(x, str) else text.value(x), y) for member, x, y in points]
    shown = text.visible(name)
    axes = draw_axis(shown, kind=kind), _axis(state, [value for *_, value in points])
    series = _draw_phases(state, points, aside=kind == "category")
    plot = draw_plot(f"slice {name}", f"{text.visible(state.objective)} over {shown}", "", *axes, series)
    return plot | {"said": f"{len(points)} trials", "absent": None if points else "No trial with a value used it."}


def _plot_pruning(state: RunState) -> Document:
    members = state.members.values()
    pruned = [member for member in members if member.state == "pruned"]
    rungs = sorted({member.epoch for member in pruned})
    counts = [
        f"{sum(p.epoch == rung for p in pruned)} of {sum(t.epoch >= rung for t in members)} after epoch {rung}"
        for rung in rungs
    ]
    passed = []
    for member in members:
        values = {epoch.epoch + 1: metric_of(epoch, state.objective) for epoch in member.history}
        for rung in rungs:
            if (member.epoch > rung or member.state == "finished") and (value := values.get(rung)) is not None:
                words = f"after epoch {rung}: {text.score(value)}"
                passed.append(_mark(member, rung, value, words, aside=True))
    passed = passed[:: -(-len(passed) // MOST_PASSED) or 1]
    crosses = [
        _mark(member, member.epoch, value, *_describe(state, member), aside=True)
        for member in pruned
        if (value := metric(member, state.objective)) is not None
    ]
    reading = (
        f"Pruned: {', '.join(counts[:8])}{' …' if len(counts) > 8 else ''}. Crosses are trials that were pruned, "
        "rings are the values of the others at that epoch."
    )
    most = max([state.epochs or 1, *rungs])
    series = [
        draw_series("passed", passed, shape="ring", label="went on") | {"state": "finished", "size": 3},
        draw_series("pruned", crosses, shape="cross", label="pruned") | {"state": "pruned", "size": 4},
    ]
    axes = (
        draw_axis("finished epochs", [0, most * 1.02]),
        _axis(state, [point[1] for point in (*passed, *crosses)]),
    )
    plot = draw_plot("pruning", "What was pruned when", reading, *axes, series)
    return plot | {"said": ", ".join(counts), "absent": None if crosses else "No trial has been pruned."}


def _plot_fronts(state: RunState) -> Iterator[Document]:
    further, origin = state.further_objectives, cost_origin(state)
    judged, front = judged_members(state), {member.id for member in front_members(state)}
    titles = [_title(objective.name, origin) for objective in further]
    several = len(further) > 1
    beaten = (
        "No other trial is better in all objectives than one that stands out."
        if several
        else "No other trial is better in both than one on the line."
    )
    names = [objective.name for objective in further]
    estimated = f" {text.ESTIMATED}" if "energy_j" in names and "estimated" in origin else ""
    rows: list[list[Any]] = [
        [
            text.visible(member.id),
            *([_amount(name, value, origin), value] for name, value in zip(names, values[1:], strict=True)),
            [text.score(values[0]), values[0]],
            "on the front" if member.id in front else "",
        ]
        for member, values in sorted(judged, key=lambda pair: pair[1][1:2])
    ]
    table = {"head": ["trial", *titles, text.visible(state.objective), ""], "rows": rows}
    for at, (name, title) in enumerate(zip(names, titles, strict=True), start=1):
        marks: dict[bool, list[Any]] = {True: [], False: []}
        for member, values in sorted(judged, key=lambda pair, at=at: pair[1][at]):  # type: ignore[misc]
            costs = (
                f"{what}: {_amount(key, v, origin)}"
                for what, key, v in zip(titles, names, values[1:], strict=True)
            )
            point = _mark(member, values[at], values[0], *_describe(state, member), *costs)
            marks[member.id in front].append(point)
        series = [
            draw_series("others", marks[False], label="other trials") | {"state": "finished"},
            draw_series("combined", marks[True], label="Pareto front")
            | {"size": 4.5, "line": False if several else "steps"},
        ]
        axes = (
            draw_axis(title, kind=_choose_kind([values[at] for _, values in judged])),
            _axis(state, [values[0] for _, values in judged]),
        )
        reading = f"Each finished trial by two of its objectives. {beaten}{estimated}"
        heading = f"Pareto front, {title}" if several else "Pareto front"
        yield draw_plot(f"front {name}", heading, reading, *axes, series) | {
            "absent": None if judged else "No trial has finished with all objectives yet.",
            "said": f"{len(marks[True])} of {len(judged)} trials on the front",
            "table": table,
        }


def _choose_kind(values: Sequence[float]) -> str:
    """Of an axis: "log" where positive values span decades and lie more evenly by their logarithm."""
    if not values or min(values) <= 0 or math.log10(max(values) / min(values)) < DECADES:
        return "linear"
    low, middle, high = min(values), sorted(values)[len(values) // 2], max(values)
    even, by_log = (middle - low) / (high - low), math.log(middle / low) / math.log(high / low)
    return "log" if abs(by_log - 0.5) < abs(even - 0.5) else "linear"


def _axis(state: RunState, values: Sequence[float]) -> Document:
    """The axis of the objective; outliers far beyond the middle half are left out."""
    kept = sorted(values)
    if len(kept) >= 8:
        low, high = kept[len(kept) // 4], kept[3 * len(kept) // 4]
        reach = SPREADS * (high - low)
        kept = [value for value in kept if low - reach <= value <= high + reach] if reach else kept
    title = text.visible(state.objective)
    if not kept:
        return draw_axis(title)
    room = 0.06 * (kept[-1] - kept[0]) or abs(kept[0]) * 0.05 or 1.0
    return draw_axis(title, [kept[0] - room, kept[-1] + room])


def _title(name: str, origin: str) -> str:
    if name == "energy_j":
        return f"joules ({origin})"
    return "CPU-seconds (measured)" if name == "cpu_s" else text.visible(describe_figure(name).title)


def _amount(name: str, value: float | None, origin: str) -> str:
    if name == "energy_j":
        return f"{text.joules(value)} ({origin})"
    return text.cpu(value) if name == "cpu_s" else text.score(value)
