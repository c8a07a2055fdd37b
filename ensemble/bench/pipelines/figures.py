"""The plot of the pipelines study, after the figures of the SC18 paper.

Panels are over each of members, step, link, preparation workers and cores that was varied, with one value of the
others; bars where nothing was varied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ensemble.bench.charts import Panel, Scale, Series
from ensemble.bench.pipelines.config import EMULATED
from ensemble.bench.pipelines.rows import Row, cpu_per_1000, format_count, pairs
from ensemble.bench.results import group_by

TITLE = "Sharing one pipeline"
# Design -> its colour, and its name.
_LOOKS = {
    "bare ring": ("#8a94a3", "bare ring (the limit)"),
    "node": ("#2f7bc4", "node: shared by its members"),
    "independent": ("#d97a2b", "a pipeline each"),
    "dataloader": ("#b14a8c", "a DataLoader each"),
    "single": ("#3c9d68", "single: one sends to all"),
    "multi": ("#8a63c9", "multi: each preparer sends"),
    "all": ("#c9a227", "all: every node prepares a part"),
    "auto": ("#222222", "auto"),
}
# What panels are over -> the axis's title.
_AXES = {
    "members": "members",
    "step_ms": "step, ms",
    "link": "link",
    "prep_workers": "preparation workers",
    "cores": "cores",
}
_SCALES: dict[str, Scale] = {"design": "hidden", "link": "category", "members": "log"}
_Value = Callable[[Row], float | None]
_FIGURES: tuple[tuple[str, _Value], ...] = (
    ("Samples/s, all members", lambda row: row.samples_per_s),
    ("CPU-seconds per 1,000 consumed samples", cpu_per_1000),
    ("Memory of all processes, MB", lambda row: row.memory_mb),
    ("Energy, J per 1,000 consumed samples", lambda row: row.energy_j and row.energy_j / row.samples * 1000),
)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """The panels over each axis that was varied."""
    varied = {x: list(dict.fromkeys(_x_value(row, x) for row in rows)) for x in _AXES}
    over = [x for x, values in varied.items() if len(values) > 1] or ["design"]
    found = []
    for x in over:
        # Of the other axes a panel shows the first value, but the most members.
        fixed = {y: max(values) if y == "members" else values[0] for y, values in varied.items() if y != x}
        chosen = [row for row in rows if all(_x_value(row, other) == value for other, value in fixed.items())]
        at = _describe(chosen[0], [y for y in _AXES if y != x and (y in over or y in ("members", "step_ms"))])

        def add(title: str, series: Iterator[Series], *, ratio: bool = False, x: str = x, at: str = at) -> None:
            bars = x == "design"
            if drawn := [each for each in series if each.ys]:
                scale = _SCALES.get(x, "linear")
                axis, log_y = _AXES.get(x, ""), not (bars or ratio)
                found.append(
                    Panel(title=title, at=at, x=axis, x_scale=scale, bars=bars, log_y=log_y, series=drawn)
                )

        for title, value in _FIGURES if x == over[0] else _FIGURES[:2]:
            origin = f" ({chosen[0].energy_origin})" if title.startswith("Energy") else ""
            add(title + origin, _designs(chosen, x, value))
        if x != "design":
            add("One shared pipeline against none, times", _ratios(chosen, x), ratio=True)
        if x == over[-1]:
            add("Bytes on the wire, times the least that must be sent", _designs(chosen, x, _wire), ratio=True)
    return found


def _wire(row: Row) -> float | None:
    return row.wire_mb / row.bound_mb if row.wire_mb and row.bound_mb else None


def _x_value(row: Row, x: str) -> Any:
    if x == "step_ms" and row.step != EMULATED:
        return None  # measured: it differs a little from row to row
    return _LOOKS[row.design][1] if x == "design" else getattr(row, x)


def _describe(row: Row, names: Sequence[str]) -> str:
    texts = {
        "members": format_count(row.members, "member"),
        "step_ms": f"{row.step_ms:g} ms emulated step" if row.step == EMULATED else row.step,
        "link": f"link {row.link}",
        "prep_workers": format_count(row.prep_workers, "preparation worker"),
        "cores": format_count(row.cores, "core"),
    }
    return ", ".join(texts[name] for name in names)


def _designs(rows: Sequence[Row], x: str, value: _Value) -> Iterator[Series]:
    """One figure of each design."""
    for design, own in group_by(rows, lambda row: row.design).items():
        points = [(_x_value(row, x), y) for row in own if (y := value(row)) is not None]
        colour, name = _LOOKS[design]
        yield Series(name=name, xs=[at for at, _ in points], ys=[y for _, y in points], colour=colour)


def _ratios(rows: Sequence[Row], x: str) -> Iterator[Series]:
    """How many times the samples/s, and how many times less CPU, a shared pipeline has than members alone."""
    gains: tuple[tuple[str, str, Callable[[Row, Row], float]], ...] = (
        ("samples/s", "solid", lambda shared, alone: shared.samples_per_s / alone.samples_per_s),
        ("less CPU", "dot", lambda shared, alone: cpu_per_1000(alone) / cpu_per_1000(shared)),
    )
    for design, own in group_by(pairs(rows), lambda pair: pair[1].design).items():
        colour, label = _LOOKS[design]
        for gained, dash, gain in gains:
            xs, ys = [_x_value(shared, x) for shared, _ in own], [gain(*pair) for pair in own]
            yield Series(name=f"against {label}: {gained}", xs=xs, ys=ys, colour=colour, dash=dash)


def notes(rows: Sequence[Row]) -> list[str]:
    """What all rows have in common, for the line below the title."""
    first = rows[0]
    step = f"{first.step}, {first.step_ms:.3g} ms"
    step = "emulated accelerator, a timed wait that uses no CPU" if first.step == EMULATED else step
    found = [f"batch {first.batch_size}", f"step: {step}"]
    for name, values in (
        ("preparation worker", [row.prep_workers for row in rows]),
        ("core", [row.cores for row in rows]),
    ):
        if len(set(values)) == 1:
            found.append(format_count(values[0], name))
    if first.nodes > 1:
        found.append(f"{first.nodes} nodes")
    if any(row.energy_origin == "estimated" for row in rows):
        found.append("energy is estimated from CPU time: no saving was measured")
    return found
