"""What was expected of the schedule study: its findings beside others' figures, and its panels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.schedule.fleet import FleetRow
from benchmarks.schedule.real import IN_TURN, OURS, ArmRow
from benchmarks.schedule.throughput import ThroughputRow
from ensemble.bench.charts import PREDICTED, Panel, bar_panel
from ensemble.bench.results import (
    Claim,
    Outcome,
    group_by,
    outcome_of,
    series_of,
    series_of_fields,
    show_claims,
)

# Guan, Mokadam, Shen, Lim and Patton, "FLEET: Flexible Efficient Ensemble Training", MLSys 2020.
_FLEET = "Guan et al., MLSys 2020 (FLEET)"
# Field of a row -> what is compared, the least and the most of FLEET.
_FLEET_OVER = {
    "over_default": ("default training", 1.12, 1.92),
    "over_equal": ("one pipeline for all, each of one worker", 1.23, 1.97),
}
# Figures of Ray Tune, its loggers on and off, from its users' reports (github.com/ray-project/ray).
_RAY_TUNE = "Ray Tune: 50 to 100 results/s with its loggers, 500 without"
_OURS, _EQUAL, _DEFAULT = "#2f7bc4", "#d97a2b", "#8a94a3"


def show_arms(rows: Sequence[ArmRow]) -> Outcome:
    """What the part 'real' prints, writes and draws."""
    found, drawn, notes = judge_arms(rows), arm_panels(rows), ["real: measured on this machine"]
    return outcome_of(rows, "Members of uneven steps", part="real", findings=found, notes=notes, panels=drawn)


def show_fleets(rows: Sequence[FleetRow]) -> Outcome:
    """What the part 'simulated' prints, writes and draws."""
    notes = ["simulated: the scheduler's decisions on a virtual clock"]
    found, drawn = judge_fleets(rows), fleet_panels(rows)
    shown = outcome_of(rows, "On a virtual clock", part="simulated", findings=found, notes=notes, panels=drawn)
    return show_claims(list(fleet_claims(rows))) + shown


def fleet_claims(rows: Sequence[FleetRow]) -> Iterator[Claim]:
    """FLEET's speed-ups beside those of as many members, over all costs of preparation and numbers of streams."""
    found = [row for row in rows if row.members == rows[0].members]
    for name, (other, low, high) in _FLEET_OVER.items():
        medians = sorted((getattr(row, name).median, row.prep_ms, row.streams) for row in found)
        (least, prep_ms, streams), most = medians[0], medians[-1][0]
        yield Claim(
            paper=_FLEET,
            claim=f"unequal networks are trained sooner than by {other}",
            published=f"{low} to {high} times",
            measured=f"simulated: up to {most:.3g} times, {rows[0].members} members",
            ratio=most / high,
            spread=f"{least:.3g} to {most:.3g}",
            loses="" if least >= low else f"{least:.3g} times, {prep_ms:g} ms a sample, {streams} streams",
        )


def show_modes(rows: Sequence[ThroughputRow]) -> Outcome:
    """What the part 'throughput' prints, writes and draws."""
    found, drawn = judge_modes(rows), mode_panels(rows)
    return outcome_of(rows, "The controller", part="throughput", findings=found, panels=drawn)


def judge_arms(rows: Sequence[ArmRow]) -> Iterator[str]:
    """Ours against the other arms, and the simulator's errors."""
    for row in rows:
        if row.arm != OURS:
            yield f"ours trains all in 1/{row.ttta_s / rows[0].ttta_s:.3g} of the time of {row.arm}"
        yield f"the simulator is {100 * abs(row.error):.0f}% off for {row.arm}"


def judge_fleets(rows: Sequence[FleetRow]) -> Iterator[str]:
    """Speed-ups beside the paper's, and whether planning is quick."""
    for row in rows:
        yield (
            f"{row.members} members on {row.nodes * row.devices} devices, {row.prep_ms:g} ms a sample, "
            f"{row.streams} streams: {row.over_default} x over default, {row.over_equal} x over equal widths; "
            f"planned in {row.plan_s:.2g} s at most"
        )


def judge_modes(rows: Sequence[ThroughputRow]) -> Iterator[str]:
    """The rate of each mode, beside what Ray Tune's users report."""
    for row in rows:
        answered = "" if row.answer_ms is None else f", answered after {row.answer_ms:.3g} ms (median)"
        yield (
            f"{row.mode}: {row.reports_per_s:,.0f} reports/s, all recorded, {row.per_cpu_s:,.0f} for each "
            f"CPU-second{answered}; {_RAY_TUNE}"
        )


def arm_panels(rows: Sequence[ArmRow]) -> Iterator[Panel]:
    """TTTa of each arm beside the simulator's, and over the median member."""
    at = f"{rows[0].members} members, {rows[0].cores} cores, executor {rows[0].executor}"
    fields, colours = {"measured": "ttta_s", "simulated": "simulated_s"}, {"measured": _OURS, "simulated": _OURS}
    both = series_of_fields(rows, "arm", fields, colours, {"simulated": PREDICTED})
    yield bar_panel("Time to train all", both, at=at, y="seconds")
    colours = {row.arm: _EQUAL for row in rows} | {OURS: _OURS, IN_TURN: _DEFAULT}
    yield bar_panel(
        "Time to train all over the median member", series_of(rows, "arm", "over_median", "arm", colours), at=at
    )


def fleet_panels(rows: Sequence[FleetRow]) -> Iterator[Panel]:
    """Speed-ups by the cost of preparation, and by the number of streams."""
    for members, found in group_by(rows, lambda row: row.members).items():
        first = found[0]
        at = f"{members} members, {first.nodes} nodes of {first.devices} devices"
        by_cost = [row for row in found if row.streams == first.streams]
        yield _speedups(
            f"{at}, {first.streams} streams", "core-milliseconds to prepare a sample", by_cost, "prep_ms"
        )
        by_streams = sorted((row for row in found if row.prep_ms == first.prep_ms), key=lambda row: row.streams)
        if len(by_streams) > 1:
            yield _speedups(f"{at}, {first.prep_ms:g} ms a sample", "streams at one time", by_streams, "streams")


def _speedups(at: str, x: str, rows: Sequence[FleetRow], name: str) -> Panel:
    colours = {"over default": _DEFAULT, "over equal widths": _EQUAL}
    fields = {"over default": "over_default", "over equal widths": "over_equal"}
    drawn = series_of_fields(rows, name, fields, colours)
    return Panel(title="Simulated speed-up", at=at, x=x, y="times", series=drawn)


def mode_panels(rows: Sequence[ThroughputRow]) -> Iterator[Panel]:
    """Reports a second in each mode."""
    bars = series_of_fields(rows, "mode", {"measured": "reports_per_s"})
    at = f"{rows[0].members} members, up to {rows[0].round} events together"
    yield bar_panel("Reports that the controller records", bars, at=at, y="reports/s")
