"""The plot of the schedule study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.schedule import real
from benchmarks.schedule.fleet import FleetRow
from benchmarks.schedule.real import ArmRow
from benchmarks.schedule.throughput import ThroughputRow
from ensemble.bench.charts import PREDICTED, Panel, Series, bar_panel
from ensemble.bench.results import group_by

_ARMS = {real.OURS: "#2f7bc4", real.IN_TURN: "#8a94a3", real.APART: "#d97a2b"}
TITLE = "Scheduling"
NOTES = ("real: measured on this machine", "simulated: the scheduler's decisions on a virtual clock")
_DEFAULT, _EQUAL = "#8a94a3", "#d97a2b"


def real_panels(rows: Sequence[ArmRow]) -> Iterator[Panel]:
    """TTTa of each arm beside the simulator's, and utilization."""
    if not rows:
        return
    at = f"{rows[0].members} members, {rows[0].cores} cores, executor {rows[0].executor}"
    names = [row.arm for row in rows]
    colour = _ARMS[real.OURS]
    measured = Series(name="measured", xs=names, ys=[row.ttta_s for row in rows], colour=colour)
    simulated = [row.simulated_s for row in rows]
    predicted = Series(name="simulated", xs=names, ys=simulated, colour=colour, dash=PREDICTED)
    yield bar_panel("Time to train all", [measured, predicted], at=at, y="seconds")
    ratios = [Series(name=row.arm, xs=[row.arm], ys=[row.over_median], colour=_ARMS[row.arm]) for row in rows]
    yield bar_panel("Time to train all over the median member", ratios, at=at)


def fleet_panels(rows: Sequence[FleetRow]) -> Iterator[Panel]:
    """Speed-ups by the cost of preparation, and by the number of streams."""
    for members, found in group_by(rows, lambda row: row.members).items():
        first = found[0]
        at = f"{members} members, {first.nodes} nodes of {first.devices} devices"
        by_cost = [row for row in found if row.streams == first.streams]
        yield _speedups(
            f"{at}, {first.streams} streams", "core-milliseconds to prepare a sample", by_cost, "prep_ms"
        )
        by_streams = [row for row in found if row.prep_ms == first.prep_ms]
        if len(by_streams) > 1:
            yield _speedups(f"{at}, {first.prep_ms:g} ms a sample", "streams at one time", by_streams, "streams")


def _speedups(at: str, x: str, rows: Sequence[FleetRow], name: str) -> Panel:
    ordered = sorted(rows, key=lambda row: float(getattr(row, name)))
    over = {
        "over default": ([row.over_default for row in ordered], _DEFAULT),
        "over equal widths": ([row.over_equal for row in ordered], _EQUAL),
    }
    return Panel(
        title="Simulated speed-up",
        at=at,
        x=x,
        y="times",
        series=[
            Series(
                name=shown,
                xs=[getattr(row, name) for row in ordered],
                ys=[one.median for one in spreads],
                low=[one.low for one in spreads],
                high=[one.high for one in spreads],
                colour=colour,
            )
            for shown, (spreads, colour) in over.items()
        ],
    )


def throughput_panels(rows: Sequence[ThroughputRow]) -> Iterator[Panel]:
    """Reports a second in each mode."""
    if rows:
        yield bar_panel(
            "Reports that the controller records",
            [Series(name="measured", xs=[r.mode for r in rows], ys=[r.reports_per_s for r in rows])],
            at=f"{rows[0].members} members, up to {rows[0].round} events together",
            y="reports/s",
        )
