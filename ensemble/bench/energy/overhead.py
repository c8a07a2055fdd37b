"""What the account costs: CPU time of everything that runs because of it, with 64 members on a node at 1 Hz.

The parts are those of a run (`ensemble.bench.energy.metered_node`): a node samples its power, the activity on its
GPUs and what others make of them; every rank reports its CPU time; the executor decodes the reports; the
controller thins and logs them, and attributes energy to members. Ranks are processes that report once a second and
do nothing else, which is more than training does: a rank reports at the end of an epoch.

Where a C compiler is found, the GPUs are those of a stand-in for NVIDIA's driver, with a process of each member on
one of them. Its calls cost what they cost here: a real driver's may cost more or less.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.bench.charts import bar_panel
from ensemble.bench.energy import nvml_stand_in
from ensemble.bench.launch.child import run_child
from ensemble.bench.results import Outcome, Report, Rows, group_by, series_of
from pipelines.ipc.child_processes import child_environment

#: Percent of a core that the account may use.
TARGET = 0.5
ALL = "in all"
#: Seconds since the beginning of the run: figures are thinned more and more with its age.
AGES = {"at the beginning": 0.0, "after an hour": 3600.0}
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


def measure(members: int = 64, seconds: float = 15.0) -> tuple[list[OverheadRow], dict[str, Any]]:
    """Run the account of that many members for `seconds` at each age of the run.

    Returns:
        Of each age its parts and `ALL`; and what `metered_node.MeteredNode.run` returns.

    Raises:
        RuntimeError: one of its processes has failed; the message is one line.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        config = {"members": members, "seconds": seconds, "ages": AGES}
        environment = child_environment()
        with contextlib.suppress(RuntimeError):  # else the driver's own GPUs, or none
            environment |= nvml_stand_in.build(Path(folder))
            state = str(Path(folder) / "state")
            environment |= {"STAND_IN_GPUS": ",".join([_GPU] * _GPUS), "STAND_IN_STATE": state}
            environment["CUDA_VISIBLE_DEVICES"] = ""  # all of them
        limit_s = _LONGEST_S + seconds * len(AGES)
        node = "ensemble.bench.energy.metered_node"
        found = json.loads(run_child(node, json.dumps(config), environment=environment, timeout_s=limit_s))
    rows = [
        OverheadRow(what=what, age=age, percent_of_core=100 * value)
        for age, cost in found["cpu_s"].items()
        for what, value in (*cost.items(), (ALL, sum(cost.values())))
    ]
    return rows, found


def study(members: int, seconds: float, report: Report) -> Outcome:
    """Measure at the beginning of a run and after an hour; see `measure`."""
    report(f"overhead: {members} members, {' and '.join(AGES)}, {seconds:g} s each")
    rows, found = measure(members, seconds)
    bars = series_of(rows, "what", "percent_of_core", "age")
    load = f"overhead: {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
    return Outcome(
        tables=[(f"What the account of {members} members costs, percent of a core", table(rows))],
        rows=[{"part": "overhead", **vars(row)} for row in rows],
        findings=[*findings(rows, found, members), load],
        notes=[load],
        panels=[bar_panel(f"Cost of the account of {members} members, % of a core", bars)],
    )


def table(rows: Sequence[OverheadRow]) -> Rows:
    """A row for each part, a column for each age."""
    return [
        {"part": what, **{row.age: row.percent_of_core for row in own}}
        for what, own in group_by(rows, lambda row: row.what).items()
    ]


def findings(rows: Sequence[OverheadRow], found: Mapping[str, Any], members: int) -> Iterator[str]:
    """Whether the target is met, and what the figures are of."""
    for row in (row for row in rows if row.what == ALL):
        met = "below" if row.percent_of_core < TARGET else "above"
        counts = (
            f"{found['events_per_s'][row.age]:.3g} events/s, {found['logged_per_s'][row.age]:.3g} of them logged"
        )
        yield (
            f"overhead, {row.age}: {row.percent_of_core:.2f} % of a core for {members} members at 1 Hz, "
            f"{met} {TARGET} % ({counts})"
        )
    yield f"overhead: node power from {found['source']}"
    gpus = "without a GPU, and without a C compiler for a stand-in: activity on GPUs is not in it"
    if found["gpus"]:
        gpus = f"the {found['gpus']} GPUs are those of a stand-in for the driver, whose calls cost otherwise"
    yield f"overhead: {gpus}"
