"""What the pipelines study shows: its table, its findings, and its plot after the figures of the SC18 paper.

Panels are over each of members, step, link, preparation workers and cores that was varied, with one value of the
others; bars where nothing was varied.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ensemble.bench.charts import Panel, Scale, Series
from ensemble.bench.pipelines.config import EMULATED
from ensemble.bench.pipelines.expected import claims, configuration, faster, less_cpu, pairs
from ensemble.bench.pipelines.study import PipelineRow, describe, format_count
from ensemble.bench.results import Outcome, group_by, outcome_of, series_of, show_claims

# Columns that every table has, also where no row has a value.
_ALWAYS = ("energy_j", "memory_mb")
# Cores that other processes may use without a warning.
_QUIET = 0.1
# Fields that no table has: the same in all rows, or too long.
_UNSHOWN = ("read_ms", "queue_course")
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
    "step": "step",
    "link": "link",
    "prep_workers": "preparation workers",
    "preparers": "preparing nodes",
    "cores": "cores",
}
_SCALES: dict[str, Scale] = {"design": "hidden", "link": "category", "step": "category", "members": "log"}
_Value = Callable[[PipelineRow], float | None]


def _compare_wire(row: PipelineRow) -> float | None:
    return row.wire_mb / row.bound_mb if row.wire_mb and row.bound_mb else None


_FIGURES: tuple[tuple[str, _Value], ...] = (
    ("Samples/s, all members", lambda row: row.samples_per_s),
    ("CPU-seconds per 1,000 consumed samples", lambda row: row.cpu_per_1000),
    ("Memory of all processes, MB", lambda row: row.memory_mb),
    ("Energy, J per 1,000 consumed samples", lambda row: row.energy_j and row.energy_j / row.samples * 1000),
    ("Share of the time in which some member waited for samples", lambda row: row.member_waiting),
    ("Share of the time in which the queues were full", lambda row: row.queue_full),
    ("Bytes on the wire, times the least that must be sent", _compare_wire),
)


def make_outcome(rows: Sequence[PipelineRow]) -> Outcome:
    """What the study prints, writes and draws."""
    names = [field.name for field in dataclasses.fields(PipelineRow) if field.name not in _UNSHOWN]
    names.insert(names.index("energy_j"), "watts")
    columns = [n for n in names if n in _ALWAYS or any(getattr(row, n) is not None for row in rows)]
    found = outcome_of(rows, columns=" ".join(columns), findings=findings(rows), panels=panels(rows))
    kept = [{**row, "watts": each.watts} for row, each in zip(found.rows, rows, strict=True)]
    first = Outcome(tables=[], rows=[], title="Sharing one pipeline", notes=notes(rows))
    return first + show_claims(claims(rows)) + dataclasses.replace(found, rows=kept)


def findings(rows: Sequence[PipelineRow]) -> Iterator[str]:
    """Each row against those that it is to be compared with, a line each, and warnings about load and energy."""
    for row, other in pairs(rows):
        yield (
            f"{describe(row)}: {faster((row, other)):.3g} x the samples/s of {other.design}, "
            f"1/{less_cpu((row, other)):.3g} of the CPU-seconds per sample"
        )
    yield from limits(rows)
    yield from load_warnings(rows)
    if any(row.energy_origin == "estimated" for row in rows):
        yield "energy is estimated from the machine's CPU time: it repeats CPU-seconds, and no saving was measured"


def limits(rows: Sequence[PipelineRow]) -> Iterator[str]:
    """What limits each design, as its queues show it."""
    for (design, limit), found in group_by(rows, lambda row: (row.design, row.limit)).items():
        if limit is not None:
            waiting, full = (
                [100 * getattr(row, name) for row in found] for name in ("member_waiting", "queue_full")
            )
            yield (
                f"{design}: {limit} limit{'s' * (limit == 'preparation')} in {format_count(len(found), 'case')}: "
                f"some member waits {min(waiting):.0f} to {max(waiting):.0f} % of the time, queues are full "
                f"{min(full):.0f} to {max(full):.0f} %"
            )


def load_warnings(rows: Sequence[PipelineRow]) -> Iterator[str]:
    """A warning where other processes kept cores of the machine busy."""
    busy = max(row.others_cpu_s / row.wall_s for row in rows)
    if busy > _QUIET:
        yield (
            f"other processes used up to {busy:.2g} cores meanwhile: speed and energy are not those of a quiet "
            "machine; CPU-seconds are of this study's processes alone"
        )


def panels(rows: Sequence[PipelineRow]) -> list[Panel]:
    """The panels over each axis that was varied."""
    each = {x: dict.fromkeys(_x_value(row, x) for row in rows) for x in _AXES}
    varied = {x: [value for value in values if value is not None] or [None] for x, values in each.items()}
    over = [x for x, values in varied.items() if len(values) > 1] or ["design"]
    found = []
    for x in over:
        # Of the other axes a panel shows the first value, but the most members.
        fixed = {y: max(values) if y == "members" else values[0] for y, values in varied.items() if y != x}
        chosen = [row for row in rows if all(_x_value(row, y) in (None, value) for y, value in fixed.items())]
        chosen = [row for row in chosen if _x_value(row, x) is not None] or chosen
        at = _describe(chosen[0], [y for y in _AXES if y != x and (y in over or y in ("members", "step_ms"))])
        for title, value in _FIGURES if x == over[0] else _FIGURES[:2]:
            series = series_of(chosen, functools.partial(_x_value, x=x), value, _name_design, _COLOURS)
            origin = f" ({chosen[0].energy_origin})" if title.startswith("Energy") else ""
            is_log = x != "design" and not title.startswith(("Bytes", "Share"))
            look: dict[str, Any] = {"x_scale": _SCALES.get(x, "linear"), "bars": x == "design", "log_y": is_log}
            if series:
                found.append(Panel(title=title + origin, at=at, x=_AXES.get(x, ""), series=series, **look))
    return [*found, *_draw_course(rows)]


def _draw_course(rows: Sequence[PipelineRow]) -> Iterator[Panel]:
    """How full the queues were over the run, of the rows that ran as the last one did."""
    alike = [row for row in rows if row.queue_course and configuration(row) == configuration(rows[-1])]
    drawn = []
    for name, row in {_name_design(row): row for row in alike}.items():
        xs, ys = zip(*row.queue_course, strict=True)
        drawn.append(Series(name=name, xs=xs, ys=ys, colour=_COLOURS[name], points=False))
    if drawn:
        at = f"{_describe(rows[-1], ('members', 'step_ms'))}, the mean of all rings"
        yield Panel(title="How full the queues are", at=at, x="seconds after the start", y="share", series=drawn)


def _name_design(row: PipelineRow) -> str:
    return _NAMES[row.design]


def _x_value(row: PipelineRow, x: str) -> Any:
    if x == "step_ms" and row.step != EMULATED:
        return None  # measured: it differs a little from row to row
    return _NAMES[row.design] if x == "design" else getattr(row, x)


def _describe(row: PipelineRow, names: Sequence[str]) -> str:
    texts = {
        "step_ms": f"{row.step_ms:g} ms emulated step" if row.step == EMULATED else row.step,
        "step": row.step,
        "preparers": format_count(row.preparers or row.nodes, "preparing node"),
        "link": f"link {row.link}",
        **{
            name: format_count(getattr(row, name), _AXES[name][:-1])
            for name in ("members", "prep_workers", "cores")
        },
    }
    return ", ".join(texts[name] for name in names)


def notes(rows: Sequence[PipelineRow]) -> list[str]:
    """What all rows have in common, for the line below the title."""
    first = rows[0]
    step = "emulated accelerator, a timed wait that uses no CPU"
    step = step if first.step == EMULATED else f"{first.step}, {first.step_ms:.3g} ms"
    step = step if len({row.step for row in rows}) == 1 else "each as it says"
    found = [f"batch {first.batch_size}", f"step: {step}"]
    for field in ("prep_workers", "cores"):
        if len({getattr(row, field) for row in rows}) == 1:
            found.append(format_count(getattr(first, field), _AXES[field][:-1]))
    if first.nodes > 1:
        found.append(f"{first.nodes} nodes")
    if any(row.energy_origin == "estimated" for row in rows):
        found.append("energy is estimated from CPU time: no saving was measured")
    return found
