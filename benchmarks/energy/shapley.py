"""Ways to share a node's energy between members, beside the Shapley value as ground truth.

Each coalition of members runs by itself for a window on the same node, synthetic or a real GPU. All ways share the
same joules: what the node used beyond its idle energy while all members ran. Nobody causes idle energy, so that
how it is shared is a rule (by reservation) and not a matter of measurement.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.energy.attribution import judge_errors
from benchmarks.energy.beds import Bed, ProcessorBed, measure
from benchmarks.energy.member import Member
from benchmarks.energy.synthetic import CONCAVE, DRIVER, OTHER
from ensemble.bench.charts import PREDICTED, Panel, bar_panel
from ensemble.bench.results import Outcome, Report, group_by, median_rows, series_of, tabulate
from ensemble.events import make_event, settle
from ensemble.meter import ledger

Coalition = frozenset[str]
OURS, DECLARED, EVEN = "ours", "share x time", "even"
SPLITS = (OURS, DECLARED, EVEN)
_COLOURS = {OURS: "#2f7bc4", DECLARED: "#d97a2b", EVEN: "#6aa84f", "Shapley value": "#8a94a3"}


def open_synthetic_bed() -> ProcessorBed:
    """A synthetic node of concave power, of which members reserve all four cores."""
    duties = {"busy": (1.0, 2.0), "half": (0.5, 1.0), "light": (0.1, 1.0)}
    members = [Member(name=name, duty=CONCAVE.core_s * duty, cpus=cpus) for name, (duty, cpus) in duties.items()]
    return ProcessorBed(CONCAVE, 4.0, members)


def list_coalitions(players: Iterable[str]) -> list[Coalition]:
    """All coalitions of the players, the empty one first, smaller ones before larger ones."""
    players = list(players)
    sizes = range(len(players) + 1)
    return [frozenset(chosen) for size in sizes for chosen in itertools.combinations(players, size)]


def shapley_values(values: Mapping[Coalition, float]) -> dict[str, float]:
    """What each player of a game is worth: the mean of what it adds, over all orders in which they may come.

        phi(i) = sum over S without i of |S|! (n - |S| - 1)! / n! (v(S + i) - v(S))

    It is the only split of v(all) - v(none) that gives equal players equal parts and players that add nothing
    nothing, and that adds up over games (L. S. Shapley, A Value for n-Person Games, 1953).

    Args:
        values: of all coalitions of the players, the empty one as well.
    """
    players = max(values, key=len)
    n = len(players)
    weights = [math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n) for size in range(n)]
    return {
        player: math.fsum(
            weights[len(others)] * (values[others | {player}] - value)
            for others, value in values.items()
            if player not in others
        )
        for player in players
    }


@dataclass(frozen=True)
class Window:
    """One coalition's window.

    Attributes:
        watts: mean power of the node, without what others than the members used; `seconds`: for which.
        attributed_j: joules beyond idle energy that the ledger attributes to each member.
    """

    members: tuple[str, ...]
    seconds: float
    watts: float
    attributed_j: Mapping[str, float]


@dataclass(frozen=True)
class CoalitionRow:
    """Mean power of a coalition's windows; `beyond_idle_w`: beyond that of the empty coalition."""

    coalition: str
    watts: float
    beyond_idle_w: float
    runs: int = 1


@dataclass(frozen=True)
class SplitRow:
    """Joules of one member by one split, beside its Shapley value."""

    split: str
    member: str
    shapley_j: float
    joules: float
    error_pct: float
    runs: int = 1


def measure_window(bed: Bed, members: Sequence[Member], seconds: float) -> Window:
    """Run a coalition for that long."""
    measured = measure(bed, members, seconds, bed.settle_s)
    powers = [event for event in measured.events if event["type"] == "power"]
    others_j = measured.truth.dynamic_j[OTHER] + measured.truth.dynamic_j[DRIVER]
    taken_s = sum(power["interval_s"] for power in powers)
    totals = ledger(settle(make_event(**event)) for event in measured.events).by_member()
    return Window(
        members=tuple(member.name for member in members),
        seconds=taken_s,
        watts=(sum(power["energy_j"] for power in powers) - others_j) / taken_s,
        attributed_j={name: (total.energy_j or 0.0) - (total.idle_j or 0.0) for name, total in totals.items()},
    )


def split_energy(windows: Sequence[Window], members: Sequence[Member]) -> list[SplitRow]:
    """All splits of the energy of the window of all members.

    Args:
        windows: one of each coalition.
    """
    together = max(windows, key=lambda window: len(window.members))
    truth = shapley_values({frozenset(each.members): each.watts * together.seconds for each in windows})
    weights: dict[str, Mapping[str, float]] = {
        OURS: together.attributed_j,
        DECLARED: {member.name: member.gpu_share or member.cpus for member in members},
        EVEN: {member.name: 1.0 for member in members},
    }
    rows = []
    for split, of in weights.items():
        for member in members:
            joules = sum(truth.values()) * of[member.name] / sum(of[each.name] for each in members)
            error_pct = 100 * (joules / truth[member.name] - 1)
            rows.append(SplitRow(split, member.name, truth[member.name], joules, error_pct))
    return rows


def study(bed: Bed, seconds: float, repeats: int, report: Report) -> Outcome:
    """Measure all coalitions, and compare the splits with the Shapley values: medians over repeats."""
    coalitions, splits = list[CoalitionRow](), list[SplitRow]()
    for number in range(repeats):
        windows = []
        for coalition in list_coalitions(member.name for member in bed.members):
            members = [member for member in bed.members if member.name in coalition]
            name = " + ".join(member.name for member in members) or "nobody"
            report(f"shapley: {name}, {seconds:g} s, {number + 1} of {repeats}")
            time.sleep(bed.cool_s)
            windows.append(measure_window(bed, members, seconds))
            coalitions.append(CoalitionRow(name, windows[-1].watts, windows[-1].watts - windows[0].watts))
        splits += split_energy(windows, bed.members)
    by_coalition, by_split = median_rows(coalitions, "coalition"), median_rows(splits, "split", "member")
    return Outcome(
        tables=[
            ("Coalitions", tabulate(by_coalition)),
            ("Joules beyond idle, beside the Shapley value", tabulate(by_split)),
        ],
        rows=[{"bed": bed.name, **vars(row)} for row in (*by_coalition, *by_split)],
        findings=list(judge_errors("shapley", group_by(by_split, lambda row: row.split), "member")),
        title="Splits of energy",
        notes=["Shapley value: from the energy of all coalitions"],
        panels=[_panel(bed.name, by_split)],
    )


def _panel(bed: str, rows: Sequence[SplitRow]) -> Panel:
    ours = [row for row in rows if row.split == OURS]
    series = series_of(ours, "member", "shapley_j", lambda row: "Shapley value", _COLOURS, dash=PREDICTED)
    series += series_of(rows, "member", "joules", "split", _COLOURS)
    return bar_panel("Joules beyond idle", series, y="joules", at=f"{bed}, three members")
