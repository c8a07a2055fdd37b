"""`python -m benchmarks.buys.chart`: draws the kept record of the study as one SVG, for the README.

Small multiples, one for each task: test NLL of the final model over CPU-seconds of work, a line for each method.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.buys.analysis import COLOURS
from ensemble.bench.results import group_by

STUDIES = Path(__file__).resolve().parents[2] / "docs" / "studies"
RECORD, CHART = STUDIES / "figures" / "what-it-buys.json", STUDIES / "what-it-buys.svg"
_WIDE, _HIGH, _ACROSS = 250, 190, 3
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 30, 36
_TICKS = 4
Row = Mapping[str, Any]


def draw(rows: Sequence[Row]) -> str:
    """The chart of a record's rows, those of the part "method"."""
    panels = group_by([row for row in rows if row.get("part") == "method"], lambda row: row["task"])
    down = -(-(len(panels) + 1) // _ACROSS)
    size = f'width="{_ACROSS * _WIDE}" height="{down * _HIGH}" viewBox="0 0 {_ACROSS * _WIDE} {down * _HIGH}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui,sans-serif" font-size="11">']
    parts += ['<rect width="100%" height="100%" fill="#ffffff"/>']
    for place, (task, own) in enumerate(panels.items()):
        parts += [_move(place, _draw_panel(task, own))]
    names = list(dict.fromkeys(row["method"] for own in panels.values() for row in own))
    parts += [_move(len(panels), _draw_legend(names)), "</svg>", ""]
    return "\n".join(parts)


def _move(place: int, drawn: Iterator[str]) -> str:
    x, y = place % _ACROSS * _WIDE, place // _ACROSS * _HIGH
    return "\n".join([f'<g transform="translate({x},{y})">', *drawn, "</g>"])


def _draw_panel(task: str, rows: Sequence[Row]) -> Iterator[str]:
    xs = [math.log(row["work_cpu_s"]) for row in rows]
    low, high = min(row["nll"] for row in rows), max(row["nll"] for row in rows)
    low, high = low - 0.08 * (high - low), high + 0.08 * (high - low) or 1.0

    def at(cpu_s: float, nll: float) -> tuple[float, float]:
        across = (math.log(cpu_s) - min(xs)) / ((max(xs) - min(xs)) or 1.0)
        up = (nll - low) / (high - low)
        return _LEFT + across * (_WIDE - _LEFT - _RIGHT), _HIGH - _BOTTOM - up * (_HIGH - _TOP - _BOTTOM)

    yield f'<text x="{_LEFT}" y="18" font-weight="bold" fill="#1c2733">{escape(task)}</text>'
    for tick in range(_TICKS):
        value = low + (high - low) * tick / (_TICKS - 1)
        _, y = at(math.exp(min(xs)), value)
        yield f'<line x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e8ee"/>'
        yield f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end" fill="#5b6875">{value:.3g}</text>'
    for budget_s in dict.fromkeys(row["budget_s"] for row in rows):
        if min(xs) <= math.log(budget_s) <= max(xs):
            x, y = at(budget_s, low)
            yield f'<text x="{x:.1f}" y="{y + 14:.1f}" text-anchor="middle" fill="#5b6875">{budget_s:g}</text>'
    middle, shown = (_LEFT + _WIDE - _RIGHT) / 2, "test NLL over CPU-seconds"
    yield f'<text x="{middle}" y="{_HIGH - 6}" text-anchor="middle" fill="#5b6875">{shown}</text>'
    for method, own in group_by(rows, lambda row: row["method"]).items():
        points = [at(row["work_cpu_s"], row["nll"]) for row in sorted(own, key=lambda row: row["work_cpu_s"])]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[method]
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points)


def _draw_legend(names: Sequence[str]) -> Iterator[str]:
    for number, name in enumerate(names):
        y = _TOP + 16 * number
        yield f'<line x1="{_LEFT}" x2="{_LEFT + 18}" y1="{y}" y2="{y}" stroke="{COLOURS[name]}" stroke-width="3"/>'
        yield f'<text x="{_LEFT + 25}" y="{y + 4}" fill="#1c2733">{escape(name)}</text>'


if __name__ == "__main__":
    CHART.write_text(draw(json.loads(RECORD.read_text(encoding="utf-8"))["rows"]), encoding="utf-8")
