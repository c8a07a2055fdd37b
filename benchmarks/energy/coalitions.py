"""Measures the energy of all coalitions of members: the ground truth of what each of them adds to a node's energy.

Each coalition runs by itself for a window on the same node, synthetic or a real GPU. A window's value is written
to a file at once, so that a study can be ended and continued.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.energy.members import NODE, Event, Member, MemberProcesses
from benchmarks.energy.shapley import list_coalitions
from benchmarks.energy.synthetic_node import CONCAVE, SyntheticNode
from benchmarks.energy.truth import OTHER
from ensemble.bench.pipelines.processes import process_clock_s
from ensemble.bench.results import Report
from ensemble.meter import PowerMeter, ledger
from ensemble.meter.power import Absent, open_rapl
from ensemble.spec import Energy, SpecError

DRIVER = "orchestrate"
MEMBERS = (
    Member(name="busy", duty=CONCAVE.core_s, cpus=2.0),
    Member(name="half", duty=CONCAVE.core_s / 2, cpus=1.0),
    Member(name="light", duty=CONCAVE.core_s / 10, cpus=1.0),
)
_SETTLE_S = 0.3
_FILE = "coalitions.jsonl"


@dataclass(frozen=True)
class Window:
    """One coalition's window.

    Attributes:
        bed: where it ran.
        energy_j: of the node, without what others than the members used; `seconds`: in which.
        attributed_j: joules beyond idle energy that the ledger attributes to each member.
    """

    bed: str
    repeat: int
    members: tuple[str, ...]
    seconds: float
    energy_j: float
    attributed_j: Mapping[str, float]

    @property
    def watts(self) -> float:
        """Its mean power."""
        return self.energy_j / self.seconds


class Bed(Protocol):
    """A node on which coalitions run.

    Attributes:
        name: in the file of windows.
        members: all of them.
        node: fields of its event.
        module: of the members' processes.
        cool_s: seconds to wait before each window.
        settle_s: seconds for which members work before a window begins.
    """

    name: str
    members: Sequence[Member]
    node: Event
    module: str
    cool_s: float
    settle_s: float

    def open_meter(self) -> PowerMeter:
        """A meter of the node."""

    def add(self, member: Member, pid: int) -> None:
        """A member's process was started."""

    def annotate(self, power: Event) -> None:
        """Adds to a `power` event what the agent of a node adds."""

    def read_other_j(self) -> float:
        """Joules that others than the members have used so far, as far as they are known."""


class SyntheticBed:
    """A synthetic node of concave power; see `Bed`."""

    name = "synthetic"
    module = "benchmarks.energy.busy"
    cool_s = 0.0
    settle_s = _SETTLE_S

    def __init__(self, root: Path, members: Sequence[Member] = MEMBERS) -> None:
        self.members = members
        self.node: Event = {"cpus": 4.0, "gpus": []}
        self._root = root
        self._node = SyntheticNode(root, CONCAVE, frozenset({DRIVER}))

    @classmethod
    @contextmanager
    def open(cls) -> Iterator[SyntheticBed]:
        """Lets the node's counters run while the context is open."""
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            bed = cls(Path(folder))
            with bed._node:
                bed._node.add(DRIVER, os.getpid(), process_clock_s(os.getpid()))
                yield bed

    def open_meter(self) -> PowerMeter:
        """See `Bed`."""
        rapl = open_rapl(self._root)
        assert not isinstance(rapl, Absent), rapl.reason
        return PowerMeter(NODE, [rapl], energy=Energy(idle_w=CONCAVE.idle_w))

    def add(self, member: Member, pid: int) -> None:
        """See `Bed`."""
        self._node.add(member.name, pid)

    def annotate(self, power: Event) -> None:
        """See `Bed`."""

    def read_other_j(self) -> float:
        """See `Bed`."""
        used = self._node.read().dynamic_j
        return used[OTHER] + used[DRIVER]


def measure_window(bed: Bed, members: Sequence[Member], seconds: float, repeat: int) -> Window:
    """Run a coalition for that long."""
    meter = bed.open_meter()
    with MemberProcesses(meter, bed.node, bed.add, bed.module, bed.annotate) as processes:
        processes.start(members)
        processes.tell("work")
        processes.watch(bed.settle_s)
        others_j = bed.read_other_j()
        processes.start_meter()
        processes.watch(seconds)
        others_j = bed.read_other_j() - others_j
        processes.finish()
    meter.close()
    powers = [event for event in processes.events if event["type"] == "power"]
    totals = ledger(processes.events).by_member()
    return Window(
        bed=bed.name,
        repeat=repeat,
        members=tuple(member.name for member in members),
        seconds=sum(power["interval_s"] for power in powers),
        energy_j=sum(power["energy_j"] for power in powers) - others_j,
        attributed_j={name: (total.energy_j or 0.0) - (total.idle_j or 0.0) for name, total in totals.items()},
    )


def measure_all(
    bed: Bed, seconds: float, repeats: int, run_dir: Path | None, most_s: float | None, report: Report
) -> list[Window]:
    """The windows of all coalitions, `repeats` of each; fewer where they would take longer than `most_s`.

    Args:
        run_dir: has the windows that were measured before, and gets those that are measured now.
        most_s: seconds for which to measure now.
    """
    began = time.monotonic()
    coalitions = list_coalitions(member.name for member in bed.members)
    kept = [] if run_dir is None else open_run_dir(run_dir)
    known = {(each.repeat, frozenset(each.members)): each for each in kept if each.bed == bed.name}
    for repeat in range(repeats):
        for coalition in coalitions:
            if (repeat, coalition) in known:
                continue
            left_s = None if most_s is None else most_s - (time.monotonic() - began)
            if left_s is not None and left_s < bed.cool_s + bed.settle_s + seconds:
                break
            members = [member for member in bed.members if member.name in coalition]
            shown = " + ".join(member.name for member in members) or "nobody"
            report(f"shapley: {shown}, {seconds:g} s, {repeat + 1} of {repeats}")
            time.sleep(bed.cool_s)
            window = known[repeat, coalition] = measure_window(bed, members, seconds, repeat)
            _append(run_dir, window)
    return [known[repeat, each] for repeat in range(repeats) for each in coalitions if (repeat, each) in known]


def open_run_dir(run_dir: Path) -> list[Window]:
    """Make a directory for windows where there is none; returns those that it has.

    Raises:
        SpecError: it cannot be made or written, or its file has other lines than windows.
    """
    file = run_dir / _FILE
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with file.open("a+", encoding="utf-8") as lines:
            lines.seek(0)
            found = [json.loads(line) for line in lines]
            return [Window(**{**each, "members": tuple(each["members"])}) for each in found]
    except OSError as error:
        raise SpecError(f"--run-dir: {error}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise SpecError(f"{file} has a line that is no window: {error}") from None


def _append(run_dir: Path | None, window: Window) -> None:
    if run_dir is not None:
        with (run_dir / _FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(window)) + "\n")
