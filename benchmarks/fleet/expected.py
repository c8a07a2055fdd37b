"""What was expected of the fleet study: its findings beside others' figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.fleet.fleet import FleetRow
from benchmarks.fleet.real import OURS, ArmRow
from benchmarks.fleet.throughput import ThroughputRow
from benchmarks.results import Claim, Outcome, outcome_of, show_claims

# Guan, Mokadam, Shen, Lim and Patton, "FLEET: Flexible Efficient Ensemble Training", MLSys 2020.
_FLEET = "Guan et al., MLSys 2020 (FLEET)"
# Field of a row -> what is compared, the least and the most of FLEET.
_FLEET_OVER = {
    "over_default": ("default training", 1.12, 1.92),
    "over_equal": ("one pipeline for all, each of one worker", 1.23, 1.97),
}
# Figures of Ray Tune, its loggers on and off, from its users' reports (github.com/ray-project/ray).
_RAY_TUNE = "Ray Tune: 50 to 100 results/s with its loggers, 500 without"


def show_arms(rows: Sequence[ArmRow]) -> Outcome:
    """What the part 'real' prints and writes."""
    return outcome_of(rows, "Members of uneven steps", part="real", findings=judge_arms(rows))


def show_fleets(rows: Sequence[FleetRow]) -> Outcome:
    """What the part 'simulated' prints and writes."""
    shown = outcome_of(rows, "On a virtual clock", part="simulated", findings=judge_fleets(rows))
    return show_claims(list(fleet_claims(rows))) + shown


def fleet_claims(rows: Sequence[FleetRow]) -> Iterator[Claim]:
    """FLEET's speed-ups beside those of as many members, over all costs of preparation and numbers of streams."""
    alike = [row for row in rows if row.members == rows[0].members]
    for name, (other, low, high) in _FLEET_OVER.items():
        medians = sorted((getattr(row, name).median, row.prep_ms, row.streams) for row in alike)
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
    """What the part 'throughput' prints and writes."""
    return outcome_of(rows, "The controller", part="throughput", findings=judge_modes(rows))


def judge_arms(rows: Sequence[ArmRow]) -> Iterator[str]:
    """Ours against the other arms."""
    for row in rows:
        if row.arm != OURS:
            yield f"ours trains all in 1/{row.ttta_s / rows[0].ttta_s:.3g} of the time of {row.arm}"


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
