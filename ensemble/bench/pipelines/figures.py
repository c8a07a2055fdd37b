"""The plot of the pipelines study: one self-contained HTML file, after the figures of the SC18 paper.

What is drawn (`panels`) is chosen by what was varied: panels over members, the step, the link, preparation workers
or cores, or bars where nothing was. Each shows one value of what it is not over, and says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.bench import charts
from ensemble.bench.pipelines.config import EMULATED
from ensemble.bench.pipelines.rows import Row, counted, cpu_per_1000, pairs

# Design -> its colour, and its name.
LOOKS = {
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
AXES = {
    "members": "members",
    "step_ms": "step, ms",
    "link": "link",
    "prep_workers": "preparation workers",
    "cores": "cores",
}

Value = Callable[[Row], float | None]


@dataclass(frozen=True)
class Line:
    """One line of a panel, or one bar: its colour is the design's."""

    design: str
    name: str
    dash: str
    xs: list[Any]
    ys: list[float]


@dataclass(frozen=True)
class Panel:
    """One diagram.

    Attributes:
        x: what it is over: one of `AXES`, or "design".
        at: what the rows have in common, for people.
        ratio: whether lines say how many times one figure is another.
    """

    title: str
    x: str
    at: str
    lines: list[Line]
    ratio: bool = False


FIGURES: tuple[tuple[str, Value], ...] = (
    ("Samples/s, all members", lambda row: row.samples_per_s),
    ("CPU-seconds per 1,000 consumed samples", cpu_per_1000),
    ("Memory of all processes, MB", lambda row: row.memory_mb),
    ("Energy, J per 1,000 consumed samples", lambda row: row.energy_j and row.energy_j / row.samples * 1000),
)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """What to draw of these rows."""
    varied = {x: list(dict.fromkeys(_at(row, x) for row in rows)) for x in AXES}
    over = [x for x, values in varied.items() if len(values) > 1] or ["design"]
    found = []
    for x in over:
        # Of what a panel is not over it shows the first value, but of members the most.
        fixed = {y: max(values) if y == "members" else values[0] for y, values in varied.items() if y != x}
        chosen = [row for row in rows if all(_at(row, other) == value for other, value in fixed.items())]
        said = _said(chosen[0], [y for y in AXES if y != x and (y in over or y in ("members", "step_ms"))])

        def add(title: str, lines: Iterator[Line], *, ratio: bool = False, x: str = x, said: str = said) -> None:
            if drawn := [line for line in lines if line.ys]:
                found.append(Panel(title, x, said, drawn, ratio))

        for title, value in FIGURES if x == over[0] else FIGURES[:2]:
            origin = f" ({chosen[0].energy_origin})" if title.startswith("Energy") else ""
            add(title + origin, _lines(chosen, x, value))
        if x != "design":
            add("One shared pipeline against none, times", _ratios(chosen, x), ratio=True)
        if x == over[-1]:
            add("Bytes on the wire, times the least that must be sent", _lines(chosen, x, _wire), ratio=True)
    return found


def _wire(row: Row) -> float | None:
    return row.wire_mb / row.bound_mb if row.wire_mb and row.bound_mb else None


def _at(row: Row, x: str) -> Any:
    if x == "step_ms" and row.step != EMULATED:
        return None  # measured: it differs a little from row to row
    return LOOKS[row.design][1] if x == "design" else getattr(row, x)


def _said(row: Row, names: Sequence[str]) -> str:
    said = {
        "members": counted(row.members, "member"),
        "step_ms": f"{row.step_ms:g} ms emulated step" if row.step == EMULATED else row.step,
        "link": f"link {row.link}",
        "prep_workers": counted(row.prep_workers, "preparation worker"),
        "cores": counted(row.cores, "core"),
    }
    return ", ".join(said[name] for name in names)


def _lines(rows: Sequence[Row], x: str, value: Value) -> Iterator[Line]:
    """Each design's own figure."""
    for design in dict.fromkeys(row.design for row in rows):
        points = [(_at(r, x), y) for r in rows if r.design == design and (y := value(r)) is not None]
        yield Line(design, LOOKS[design][1], "solid", [at for at, _ in points], [y for _, y in points])


def _ratios(rows: Sequence[Row], x: str) -> Iterator[Line]:
    """How many times the samples/s, and how many times less CPU, a shared pipeline has than members alone."""
    gains: tuple[tuple[str, str, Callable[[Row, Row], float]], ...] = (
        ("samples/s", "solid", lambda shared, alone: shared.samples_per_s / alone.samples_per_s),
        ("less CPU", "dot", lambda shared, alone: cpu_per_1000(alone) / cpu_per_1000(shared)),
    )
    both = list(pairs(rows))
    for design in dict.fromkeys(alone.design for _, alone in both):
        mine = [pair for pair in both if pair[1].design == design]
        for gained, dash, gain in gains:
            name = f"against {LOOKS[design][1]}: {gained}"
            yield Line(design, name, dash, [_at(pair[0], x) for pair in mine], [gain(*pair) for pair in mine])


# --- drawing -----------------------------------------------------------------------------------------------


def figure(rows: Sequence[Row]) -> Any:
    """The panels, two in a row."""
    first = rows[0]
    said = [f"batch {first.batch_size}", "step: emulated accelerator, a timed wait that uses no CPU"]
    said[1:] = said[1:] if first.step == EMULATED else [f"step: {first.step}, {first.step_ms:.3g} ms"]
    for name, values in (
        ("preparation worker", [r.prep_workers for r in rows]),
        ("core", [r.cores for r in rows]),
    ):
        if len(set(values)) == 1:
            said.append(counted(values[0], name))
    if first.nodes > 1:
        said.append(f"{first.nodes} nodes")
    if any(row.energy_origin == "estimated" for row in rows):
        said.append("energy is estimated from CPU time: no saving was measured")
    return charts.figure("Sharing one pipeline", said, [_chart(panel) for panel in panels(rows)])


def _chart(panel: Panel) -> charts.Panel:
    scales: dict[str, charts.Scale] = {"design": "untold", "link": "category", "members": "log"}
    bars = panel.x == "design"
    return charts.Panel(
        title=panel.title,
        at=panel.at,
        x=AXES.get(panel.x, ""),
        x_scale=scales.get(panel.x, "linear"),
        bars=bars,
        log_y=not (bars or panel.ratio),
        series=[
            charts.Series(name=line.name, xs=line.xs, ys=line.ys, colour=LOOKS[line.design][0], dash=line.dash)
            for line in panel.lines
        ],
    )


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Write the figure to a file that opens without a network."""
    charts.write(figure(rows), path)
