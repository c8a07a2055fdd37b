"""Attributed joules of members beside the true ones, on a node whose power is known.

The node is synthetic (`ensemble.bench.energy.synthetic_node`); its members are processes, the meter and the ledger
are those of a run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble.bench.charts import PREDICTED, Panel, Series, bar_panel
from ensemble.bench.energy.members import NODE, Event, Member, MemberProcesses
from ensemble.bench.energy.parts import PartOutcome
from ensemble.bench.energy.synthetic_node import IDLE, LINEAR, OTHER, PowerModel, SyntheticNode, Truth
from ensemble.bench.pipelines.processes import process_clock_s
from ensemble.bench.results import Report, group_by, median_row, tabulate
from ensemble.meter import Ledger, PowerMeter, ledger
from ensemble.meter.origin import to_ticks
from ensemble.meter.power import Absent, open_rapl

DRIVER = "orchestrate"
#: Cores of the synthetic node: members reserve half of it.
CPUS = 8.0
#: A busy member keeps half a core busy, so that two cores have room for all members and for other load.
FULL = 0.5
BUSY = ("busy-0", "busy-1")
HALF, RESTING = "half", "resting"
_FIGURES = ("cpu_s", "idle_j", "true_j", "attributed_j", "error_pct")
MEMBERS = (
    *(Member(name=name, duty=FULL) for name in BUSY),
    Member(name=HALF, duty=FULL / 2),
    Member(name=RESTING, duty=0.0),
)


@dataclass(frozen=True)
class Measured:
    """What a run on a synthetic node truly used, and its event log."""

    truth: Truth
    events: Sequence[Event]


@dataclass(frozen=True)
class AttributionRow:
    """One member, or one role of what belongs to no member, in one scenario; `idle_j` is part of `true_j`."""

    scenario: str
    name: str
    cpu_s: float
    idle_j: float
    true_j: float
    attributed_j: float
    error_pct: float
    runs: int = 1


def measure(seconds: float, model: PowerModel = LINEAR, members: Sequence[Member] = MEMBERS) -> Measured:
    """Run members for that long on a synthetic node of that model."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        node = SyntheticNode(Path(folder), model, frozenset({DRIVER}))
        rapl = open_rapl(Path(folder))
        assert not isinstance(rapl, Absent), rapl.reason
        shares = {member.name: member.cpus / CPUS for member in members}
        with node:
            meter = PowerMeter(NODE, [rapl])
            node.add(DRIVER, os.getpid(), process_clock_s(os.getpid()))
            before = node.read()
            meter.start()
            start = lambda name, pid: node.add(name, pid, share=shares[name])  # noqa: E731
            with MemberProcesses(members, meter, CPUS, start) as processes:
                processes.tell("work", *shares)
                processes.watch(seconds)
                processes.tell("rest", *shares)
                truth = node.read().since(before)
                processes.finish()
            meter.close()
    return Measured(truth, processes.events)


def compare(scenario: str, measured: Measured) -> list[AttributionRow]:
    """The true joules of each member and role beside those that the ledger attributes."""
    found, truth = ledger(measured.events), measured.truth
    attributed = {name: total.energy_j or 0.0 for name, total in found.by_member().items()}
    alone = [row for row in found.rows if row.member is None]
    for name, roles in ((DRIVER, ("startup", DRIVER)), (OTHER, (OTHER,)), (IDLE, (IDLE,))):
        attributed[name] = sum(row.energy_j or 0.0 for row in alone if row.role in roles)
    return [
        AttributionRow(
            scenario,
            name,
            truth.cpu_s.get(name, 0.0),
            truth.idle_j.get(name, 0.0),
            true_j := truth.joules_of(name),
            joules,
            100 * (joules / true_j - 1) if true_j else 0.0,
        )
        for name, joules in attributed.items()
    ]


def is_exact(found: Ledger, events: Sequence[Event]) -> bool:
    """Whether the ledger's rows add up to the joules of all power events, in whole ticks."""
    parts = [part for event in events if event["type"] == "power" for part in event["parts"]]
    shared = sum(to_ticks(row.energy_j) for row in found.rows if row.energy_j is not None)
    return shared == sum(to_ticks(part["energy_j"]) for part in parts)


def study(seconds: float, repeats: int, report: Report) -> PartOutcome:
    """All scenarios, the medians of that many runs."""
    runs: list[AttributionRow] = []
    inexact = 0
    for number in range(repeats):
        report(f"attribution: processors and memory, {seconds:g} s, {number + 1} of {repeats}")
        measured = measure(seconds)
        runs += compare("processors", measured)
        inexact += not is_exact(ledger(measured.events), measured.events)
    rows = [median_row(found) for found in group_by(runs, lambda row: (row.scenario, row.name)).values()]
    table = [{**row, **{key: round(row[key], 2) for key in _FIGURES}} for row in tabulate(rows)]
    return PartOutcome(
        tables=[("Attributed joules beside the true ones", table)],
        rows=[vars(row) for row in rows],
        findings=[_judge_sums(repeats, inexact), *_judge_members(rows)],
        notes=["attribution: a synthetic node of known power, real processes, meter and ledger"],
        panels=[_panel(scenario, found) for scenario, found in group_by(rows, lambda row: row.scenario).items()],
    )


def _judge_sums(runs: int, inexact: int) -> str:
    """Whether the sums of all runs are exact."""
    if inexact:
        return f"attribution: in {inexact} of {runs} runs the rows do NOT add up to what the meter counted"
    return f"attribution: in all of {runs} runs the rows add up to what the meter counted, to the tick"


def _judge_members(rows: Sequence[AttributionRow]) -> Iterator[str]:
    """How far members' joules are from the truth, and the ratios of those who are equal, half or nothing."""
    for scenario, found in group_by(rows, lambda row: row.scenario).items():
        joules = {row.name: row.attributed_j - row.idle_j for row in found}
        true = {row.name: row.true_j - row.idle_j for row in found}
        errors = [abs(row.error_pct) for row in found if row.name in {member.name for member in MEMBERS}]
        yield (
            f"attribution, {scenario}: members' joules are within {max(errors):.2f} % of the truth, "
            f"half of them within {statistics.median(errors):.2f} %"
        )
        for name, other in ((BUSY[1], BUSY[0]), (HALF, BUSY[0]), (RESTING, BUSY[0])):
            yield (
                f"attribution, {scenario}: beyond idle power {name} has {joules[name] / joules[other]:.3f} "
                f"of the joules of {other}, in truth {true[name] / true[other]:.3f}"
            )


def _panel(scenario: str, rows: Sequence[AttributionRow]) -> Panel:
    members = {member.name for member in MEMBERS}
    shown = [row for row in rows if row.name in members]
    names = [row.name for row in shown]
    true = Series(name="true", xs=names, ys=[row.true_j for row in shown], colour="#8a94a3", dash=PREDICTED)
    attributed = Series(name="attributed", xs=names, ys=[row.attributed_j for row in shown], colour="#2f7bc4")
    return bar_panel(f"Attribution: {scenario}", [true, attributed], y="joules", at="a synthetic node")
