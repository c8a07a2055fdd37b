"""The best value of the objective over the time of the run, as a figure of the form of `plots`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ensemble.reporting import text
from ensemble.reporting.dashboard.plots import draw_axis, draw_plot, draw_series

_UNITS = ((10_800.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
MOST = 200  # improvements in the figure: of more every k-th one, and the last
#: A member, the times at which its epochs ended, a figure of each.
Series = tuple[str, Sequence[float], Sequence[float | None]]
#: Time in Unix seconds, value, member.
Improvement = tuple[float, float, str]


def list_improvements(series: Iterable[Series], direction: str) -> list[Improvement]:
    """Returns the epochs of any member that were better than all before them, by time."""
    sign = 1 if direction == "min" else -1
    points = []
    for member, times, values in series:
        own = float("inf")  # only what improves on the member's own best can improve on all
        for t, value in zip(times, values, strict=True):
            if value is not None and sign * value < own:
                own = sign * value
                points.append((t, value, member))
    steps: list[Improvement] = []
    for point in sorted(points):
        if not steps or sign * point[1] < sign * steps[-1][1]:
            steps.append(point)
    return steps


def plot_progress(
    steps: list[Improvement], objective: str, begin: float | None, end: float | None
) -> dict[str, Any]:
    """Returns the figure.

    Args:
        steps: as `list_improvements` returns them.
        begin: of the run, in Unix seconds.
        end: of the run so far, in Unix seconds.
    """
    if not steps:
        axes = draw_axis("seconds since the start"), draw_axis("")
        return draw_plot("best", "Best of any epoch", "", *axes, []) | {"absent": "No epoch has ended yet."}
    at, best, member = steps[-1]
    begin = steps[0][0] if begin is None else begin
    end = max(end or 0.0, at)
    scale, unit = time_unit(end - begin)
    every = -(-len(steps) // MOST)
    points, rows = list[list[Any]](), list[list[Any]]()
    for t, value, name in [*steps[:-1:every], steps[-1]]:
        shown, after = text.visible(name), text.duration(t - begin)
        words = f"{shown}\n{objective} {text.score(value)}\nafter {after}"
        points.append([(t - begin) / scale, value, {"text": words, "member": name}])
        rows.append([shown, [after, t - begin], [text.score(value), value]])
    often = "set once" if len(steps) == 1 else f"bettered {len(steps) - 1} times"
    reading = f"{objective} {text.score(best)} of {member} after {text.duration(at - begin)}"
    last = (end - begin) / scale
    line = [point[:2] for point in points] + [[last, best]]
    series = [
        draw_series("best", line, shape=None, label="") | {"line": "steps", "still": True},
        draw_series("best", points),
    ]
    axes = draw_axis(f"{unit} since the start", [0.0, last]), draw_axis("")
    table = {"head": ["member", "after", objective], "rows": rows}
    further = {"said": f"{objective} {text.score(best)}", "table": table}
    return draw_plot("best", "Best of any epoch", f"{reading}; {often}.", *axes, series) | further


def time_unit(span_s: float) -> tuple[float, str]:
    """Returns the unit for an axis of so many seconds: its size in seconds, its name."""
    return next((size, word) for least, size, word in _UNITS if span_s >= least)
