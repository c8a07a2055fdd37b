"""The plot of the pipelines study, after the figures of the SC18 paper.

Panels are over each of members, step, link, preparation workers and cores that was varied, with one value of the
others; bars where nothing was varied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ensemble.bench.charts import Panel, Scale, Series, series_of
from ensemble.bench.pipelines.config import EMULATED
from ensemble.bench.pipelines.rows import PipelineRow, cpu_per_1000, format_count, pairs
from ensemble.bench.results import group_by

TITLE = "Sharing one pipeline"
# Design -> its name in the plot, and the name's colour.
_NAMES = {
    "bare ring": "bare ring (the limit)",
    "node": "node: shared by its members",
    "independent": "a pipeline each",
    "loader": "a loader each",
    "dataloader": "a DataLoader each",
    "single": "single: one sends to all",
    "multi": "multi: each preparer sends",
    "all": "all: every node prepares a part",
    "auto": "auto",
}
_PALETTE = ["#8a94a3", "#2f7bc4", "#d97a2b", "#24a0b3", "#b14a8c", "#3c9d68", "#8a63c9", "#c9a227", "#222222"]
_COLOURS = dict(zip(_NAMES.values(), _PALETTE, strict=True))
# What panels are over -> the axis's title.
_AXES = {
    "members": "members",
    "step_ms": "step, ms",
    "link": "link",
    "prep_workers": "preparation workers",
    "cores": "cores",
}
_SCALES: dict[str, Scale] = {"design": "hidden", "link": "category", "members": "log"}
_Value = Callable[[PipelineRow], float | None]
_FIGURES: tuple[tuple[str, _Value], ...] = (
    ("Samples/s, all members", lambda row: row.samples_per_s),
    ("CPU-seconds per 1,000 consumed samples", cpu_per_1000),
    ("Memory of all processes, MB", lambda row: row.memory_mb),
    ("Energy, J per 1,000 consumed samples", lambda row: row.energy_j and row.energy_j / row.samples * 1000),
)


def panels(rows: Sequence[PipelineRow]) -> list[Panel]:
    """The panels over each axis that was varied."""
    varied = {x: list(dict.fromkeys(_x_value(row, x) for row in rows)) for x in _AXES}
    over = [x for x, values in varied.items() if len(values) > 1] or ["design"]
    found = []
    for x in over:
        # Of the other axes a panel shows the first value, but the most members.
        fixed = {y: max(values) if y == "members" else values[0] for y, values in varied.items() if y != x}
        chosen = [row for row in rows if all(_x_value(row, other) == value for other, value in fixed.items())]
        drawn = {}
        for title, value in _FIGURES if x == over[0] else _FIGURES[:2]:
            origin = f" ({chosen[0].energy_origin})" if title.startswith("Energy") else ""
            drawn[title + origin] = _draw_designs(chosen, x, value)
        if x != "design":
            drawn["Gain, times"] = _draw_ratios(chosen, x)
        if x == over[-1]:
            drawn["Bytes on the wire, times the least that must be sent"] = _draw_designs(chosen, x, _wire)
        at = _describe(chosen[0], [y for y in _AXES if y != x and (y in over or y in ("members", "step_ms"))])
        found += [
            Panel(
                title=title,
                at=at,
                x=_AXES.get(x, ""),
                x_scale=_SCALES.get(x, "linear"),
                bars=x == "design",
                log_y=x != "design" and ", times" not in title,
                series=series,
            )
            for title, series in drawn.items()
            if series
        ]
    return found


def _wire(row: PipelineRow) -> float | None:
    return row.wire_mb / row.bound_mb if row.wire_mb and row.bound_mb else None


def _x_value(row: PipelineRow, x: str) -> Any:
    if x == "step_ms" and row.step != EMULATED:
        return None  # measured: it differs a little from row to row
    return _NAMES[row.design] if x == "design" else getattr(row, x)


def _describe(row: PipelineRow, names: Sequence[str]) -> str:
    texts = {
        "members": format_count(row.members, "member"),
        "step_ms": f"{row.step_ms:g} ms emulated step" if row.step == EMULATED else row.step,
        "link": f"link {row.link}",
        "prep_workers": format_count(row.prep_workers, "preparation worker"),
        "cores": format_count(row.cores, "core"),
    }
    return ", ".join(texts[name] for name in names)


def _draw_designs(rows: Sequence[PipelineRow], x: str, value: _Value) -> list[Series]:
    """One figure of each design."""
    return series_of(rows, lambda row: _x_value(row, x), value, lambda row: _NAMES[row.design], _COLOURS)


def _draw_ratios(rows: Sequence[PipelineRow], x: str) -> list[Series]:
    """How many times the samples/s, and how many times less CPU, one of a pair has than the other."""
    gains: tuple[tuple[str, str, Callable[[tuple[PipelineRow, PipelineRow]], float]], ...] = (
        ("samples/s", "solid", lambda pair: pair[0].samples_per_s / pair[1].samples_per_s),
        ("less CPU", "dot", lambda pair: cpu_per_1000(pair[1]) / cpu_per_1000(pair[0])),
    )
    drawn = []
    for (one, other), chosen in group_by(pairs(rows), lambda pair: (pair[0].design, pair[1].design)).items():
        xs, colour = [_x_value(row, x) for row, _ in chosen], _COLOURS[_NAMES[other]]
        for gained, dash, gain in gains:
            name, ys = f"{one} against {other}: {gained}", [gain(pair) for pair in chosen]
            drawn.append(Series(name=name, xs=xs, ys=ys, colour=colour, dash=dash))
    return drawn


def notes(rows: Sequence[PipelineRow]) -> list[str]:
    """What all rows have in common, for the line below the title."""
    first = rows[0]
    step = f"{first.step}, {first.step_ms:.3g} ms"
    step = "emulated accelerator, a timed wait that uses no CPU" if first.step == EMULATED else step
    found = [f"batch {first.batch_size}", f"step: {step}"]
    for name, field in (("preparation worker", "prep_workers"), ("core", "cores")):
        if len({getattr(row, field) for row in rows}) == 1:
            found.append(format_count(getattr(first, field), name))
    if first.nodes > 1:
        found.append(f"{first.nodes} nodes")
    if any(row.energy_origin == "estimated" for row in rows):
        found.append("energy is estimated from CPU time: no saving was measured")
    return found
