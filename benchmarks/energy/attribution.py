"""Attributed joules of members beside the true ones, on a node whose power is known.

The node is synthetic (`benchmarks.energy.synthetic_node`); its members are processes, the meter and the ledger
are those of a run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.energy.members import NODE, Event, Member, MemberProcesses
from benchmarks.energy.synthetic_node import LINEAR, SyntheticNode
from benchmarks.energy.truth import IDLE, OTHER, Truth
from ensemble.bench.pipelines.processes import process_clock_s
from ensemble.meter import Ledger, PowerMeter, ledger
from ensemble.meter.origin import to_ticks
from ensemble.meter.power import Absent, open_rapl
from ensemble.spec import Energy

DRIVER = "orchestrate"
#: Cores of the synthetic node: members reserve half of it.
CPUS = 8.0
#: A busy member keeps half a core busy, so that two cores have room for all members and for other load.
FULL = 0.5
BUSY = ("busy-0", "busy-1")
HALF, RESTING = "half", "resting"
MEMBERS = (
    *(Member(name=name, duty=FULL) for name in BUSY),
    Member(name=HALF, duty=FULL / 2),
    Member(name=RESTING, duty=0.0),
)
#: Equally busy, with work that draws more (such as vector instructions) and less (such as waiting for memory).
UNLIKE = (
    Member(name="dense", duty=FULL, intensity=1.5),
    Member(name="sparse", duty=FULL, intensity=0.5),
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


def measure(seconds: float, members: Sequence[Member] = MEMBERS) -> Measured:
    """Run members for that long on a synthetic node of linear power."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        node = SyntheticNode(Path(folder), LINEAR, frozenset({DRIVER}))
        rapl = open_rapl(Path(folder))
        assert not isinstance(rapl, Absent), rapl.reason
        meter = PowerMeter(NODE, [rapl], energy=Energy(idle_w=LINEAR.idle_w))

        def add(member: Member, pid: int) -> None:
            node.add(member.name, pid, share=member.cpus / CPUS, intensity=member.intensity)

        with node, MemberProcesses(meter, {"cpus": CPUS, "gpus": []}, add) as processes:
            node.add(DRIVER, os.getpid(), process_clock_s(os.getpid()))
            before = node.read()
            processes.start_meter()
            processes.start(members)
            processes.tell("work")
            processes.watch(seconds)
            processes.tell("rest")
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
