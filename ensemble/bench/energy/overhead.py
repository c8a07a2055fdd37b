"""What the account costs: CPU time of everything that runs because of it, with 64 members on a node at 1 Hz.

The parts are those of a run (`ensemble.bench.energy.metered_node`): a node samples its power, the activity on its
GPUs and what others make of them; every rank reports its CPU time; the executor decodes the reports; the
controller thins and logs them, and attributes energy to members. Ranks are processes that report once a second and
do nothing else, which is more than training does: a rank reports at the end of an epoch.

Where a C compiler is found, the GPUs are those of a stand-in for NVIDIA's driver, with a process of each member on
one of them. Its calls cost what they cost here: a real driver's may cost more or less.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.bench.charts import Panel, Series, bar_panel
from ensemble.bench.energy import nvml_stand_in
from ensemble.bench.energy.child import run_child
from ensemble.bench.energy.metered_node import PARTS
from ensemble.bench.energy.parts import PartOutcome
from ensemble.bench.results import Report, Rows
from pipelines.child_processes import child_environment

#: Percent of a core that the account may use.
TARGET = 0.5
ALL = "in all"
#: Seconds since the beginning of the run: figures are thinned more and more with its age.
AGES_S = (0.0, 3600.0)
_AGES = dict(zip(AGES_S, ("at the beginning", "after an hour"), strict=True))
_GPUS, _GPU = 8, "H100:80"
_LONGEST_S = 120.0  # for all processes to start and end


@dataclass(frozen=True, kw_only=True)
class OverheadRow:
    """One part of the account, or all of them, at one age of the run.

    Attributes:
        what: the part.
        age: of the run.
        percent_of_core: CPU-seconds a second, in percent.
    """

    what: str
    age: str
    percent_of_core: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What was measured, and of what.

    Attributes:
        rows: of each age, its parts and `ALL`.
        members: processes that report.  gpus: of the stand-in; 0 without.
        source: of the node's power.
        events_per_s, logged_per_s: by age, what was handled and what of it was logged.
        status_s: by age, CPU-seconds of the rows of one `status` beyond reading the log: only if somebody asks.
    """

    rows: Sequence[OverheadRow]
    members: int
    gpus: int
    source: str
    events_per_s: dict[str, float]
    logged_per_s: dict[str, float]
    status_s: dict[str, float]


def measure(members: int = 64, seconds: float = 15.0) -> Overhead:
    """Run the account of that many members for `seconds` at each age of the run.

    Raises:
        RuntimeError: one of its processes has failed; the message is one line.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        config: dict[str, Any] = {"members": members, "seconds": seconds, "ages_s": AGES_S}
        environment = child_environment()
        try:
            environment |= nvml_stand_in.build(Path(folder))
        except RuntimeError:
            pass  # the driver's own GPUs, or none
        else:
            config["state"] = str(Path(folder) / "state")
            environment |= {"STAND_IN_GPUS": ",".join([_GPU] * _GPUS), "STAND_IN_STATE": config["state"]}
            environment["CUDA_VISIBLE_DEVICES"] = ""  # all of them
        found = json.loads(
            run_child(
                "ensemble.bench.energy.metered_node",
                json.dumps(config),
                environment=environment,
                timeout_s=_LONGEST_S + seconds * len(AGES_S),
            )
        )
    at = {_AGES[age["age_s"]]: age for age in found["ages"]}
    return Overhead(
        rows=[row for age, each in at.items() for row in _list_rows(age, each["cpu_s"])],
        members=members,
        gpus=found["gpus"],
        source=found["source"],
        events_per_s={age: each["events_per_s"] for age, each in at.items()},
        logged_per_s={age: each["logged_per_s"] for age, each in at.items()},
        status_s={age: each["status_s"] for age, each in at.items()},
    )


def _list_rows(age: str, cpu_s: dict[str, float]) -> Iterator[OverheadRow]:
    for what, value in {**cpu_s, ALL: sum(cpu_s.values())}.items():
        yield OverheadRow(what=what, age=age, percent_of_core=100 * value)


def study(members: int, seconds: float, report: Report) -> PartOutcome:
    """Measure at the beginning of a run and after an hour.

    Args:
        members: processes that report, on one node.
        seconds: for which each is measured.
    """
    report(f"overhead: {members} members, {' and '.join(_AGES.values())}, {seconds:g} s each")
    found = measure(members, seconds)
    return PartOutcome(
        tables=[(f"What the account of {members} members costs, percent of a core", table(found.rows))],
        rows=[vars(row) for row in found.rows],
        findings=list(findings(found)),
        notes=[f"overhead: {describe_load()}"],
        panels=[make_panel(found)],
    )


def table(rows: Sequence[OverheadRow]) -> Rows:
    """A row for each part, a column for each age."""
    ages = list(dict.fromkeys(row.age for row in rows))
    at = {(row.what, row.age): row.percent_of_core for row in rows}
    return [{"part": what, **{age: at[what, age] for age in ages}} for what in (*PARTS, ALL)]


def findings(found: Overhead) -> Iterator[str]:
    """Whether the target is met, and what the figures are of."""
    for row in found.rows:
        if row.what == ALL:
            met = "below" if row.percent_of_core < TARGET else "above"
            counts = (
                f"{found.events_per_s[row.age]:.3g} events/s, {found.logged_per_s[row.age]:.3g} of them logged"
            )
            yield (
                f"overhead, {row.age}: {row.percent_of_core:.2f} % of a core for {found.members} members at 1 Hz, "
                f"{met} {TARGET} % ({counts})"
            )
    once_ms = 1e3 * max(found.status_s.values())
    yield f"overhead: not in it: the rows of a status, {once_ms:.2g} ms each time that one is asked for"
    yield f"overhead: node power from {found.source}; {describe_load()}"
    if found.gpus:
        yield f"overhead: the {found.gpus} GPUs are those of a stand-in for the driver, whose calls cost otherwise"
    else:
        yield "overhead: without a GPU, and without a C compiler for a stand-in: activity on GPUs is not in it"


def make_panel(found: Overhead) -> Panel:
    """Bars of each part, by age."""
    ages = list(dict.fromkeys(row.age for row in found.rows))
    series = [
        Series(
            name=age,
            xs=[row.what for row in found.rows if row.age == age],
            ys=[row.percent_of_core for row in found.rows if row.age == age],
        )
        for age in ages
    ]
    return bar_panel(f"Cost of the account of {found.members} members, % of a core", series)


def describe_load() -> str:
    """Cores that this process may use, and the machine's load, for the reader of a figure."""
    return f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
