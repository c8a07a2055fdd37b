"""Attributed joules of members beside the true ones, on nodes whose power is known.

The nodes are synthetic (`benchmarks.energy.synthetic`); their members are processes, the meter and the ledger are
those of a run. The stand-in for NVIDIA's library must be found when a process starts, so each run on GPUs is a
process of its own, which prints its rows as JSON: `python -m benchmarks.energy.attribution KIND SECONDS`. It is
accounted for in several ways: as it was, and as if the driver did not report the utilization of processes, or the
members not the time for which they kept their GPU busy.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.energy.beds import Measured, ProcessorBed, SyntheticGpuBed, measure
from benchmarks.energy.member import Member
from benchmarks.energy.synthetic import DRIVER, IDLE, LINEAR, OTHER, Load
from ensemble.bench.charts import PREDICTED, Panel, bar_panel
from ensemble.bench.energy import nvml_stand_in
from ensemble.bench.launch.child import end_with_parent, run_child
from ensemble.bench.results import Outcome, Report, group_by, median_rows, outcome_of, series_of_fields
from ensemble.events import make_event, settle
from ensemble.meter import Ledger, ledger
from ensemble.meter.origin import to_ticks
from pipelines.ipc.child_processes import child_environment

PROCESSORS, UNLIKE_WORK, WHOLE, MIG = "processors", "processors, unlike work", "GPU", "MIG"
#: Cores of the synthetic node: members reserve half of it.
_CPUS = 8.0
#: A busy member keeps half a core busy, so that two cores have room for all members and for other load.
_FULL = 0.5
BUSY, HALF, RESTING = ("busy-0", "busy-1"), "half", "resting"
#: Equally busy members; one half as busy; one at rest.
MEMBERS = (
    *(Member(name=name, duty=_FULL) for name in BUSY),
    Member(name=HALF, duty=_FULL / 2),
    Member(name=RESTING, duty=0.0),
)
#: Equally busy, with work that draws more (such as vector instructions) and less (such as waiting for memory).
UNLIKE = (
    Member(name="dense", duty=_FULL, intensity=1.5),
    Member(name="sparse", duty=_FULL, intensity=0.5),
)
#: A member that keeps its GPU busy keeps a quarter of a core busy: two cores have room for all of them.
_FULL_GPU = 0.25
#: name, duty, number of its GPU, share of it, intensity. The first GPU's members differ in how long they compute,
#: the second's in what their kernels draw.
_ON_GPUS = (
    ("busy", 1.0, 0, 1 / 3, 1.0),
    (HALF, 0.5, 0, 1 / 3, 1.0),
    (RESTING, 0.0, 0, 1 / 3, 1.0),
    ("dense", 1.0, 1, 1 / 2, 1.0),
    ("sparse", 1.0, 1, 1 / 2, 0.4),
)
_INSTANCE = 2 / 7  # the stand-in gives each of three instances two of a GPU's seven slices
_STAND_IN = {WHOLE: "H100:80,H100:80", MIG: "H100:80:3"}
_LONGEST_S = 60.0  # for all processes to start and end


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


#: The rows of a run, and whether the ledger's sums were exact.
Run = tuple[list[AttributionRow], bool]


def measure_processors(seconds: float, members: Sequence[Member] = MEMBERS) -> Measured:
    """Run members for that long on a synthetic node of linear power."""
    with ProcessorBed(LINEAR, _CPUS, members) as bed:
        return measure(bed, members, seconds)


def run_processors(scenario: str, members: Sequence[Member], seconds: float) -> Run:
    """One run on the processors."""
    measured = measure_processors(seconds, members)
    return compare(scenario, measured), is_exact(read_ledger(measured.events), measured.events)


def run_gpus(kind: str, seconds: float) -> Run:
    """One run on GPUs, in a process that finds the stand-in.

    Args:
        kind: `WHOLE` or `MIG`.

    Raises:
        RuntimeError: there is no C compiler to build the stand-in, or the process has failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        stand_in = {"STAND_IN_GPUS": _STAND_IN[kind], "STAND_IN_STATE": str(Path(folder, "state"))}
        environment = {**child_environment(), **nvml_stand_in.build(Path(folder)), **stand_in}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        limit_s = _LONGEST_S + seconds
        found = json.loads(run_child(__name__, kind, str(seconds), environment=environment, timeout_s=limit_s))
    return [AttributionRow(**row) for row in found["rows"]], found["exact"]


def main() -> int:
    """One run on the stand-in's GPUs; prints its rows."""
    end_with_parent()
    kind, seconds = sys.argv[1], float(sys.argv[2])
    per_cpu_s, whole = 1 / _FULL_GPU, kind == WHOLE
    members, loads = [], {}
    for name, duty, gpu, share, intensity in _ON_GPUS if whole else _ON_GPUS[:3]:
        gpu_share = share if whole else 1.0
        members.append(Member(name=name, duty=duty * _FULL_GPU, gpu_share=gpu_share, gpu_s=per_cpu_s))
        instance = None if whole else _INSTANCE
        loads[name] = Load(
            gpu=gpu, share=instance or share, per_cpu_s=per_cpu_s, intensity=intensity, instance=instance
        )
    with SyntheticGpuBed(members, loads, Path(os.environ["STAND_IN_STATE"])) as bed:
        measured = measure(bed, bed.members, seconds)
    rows, exact = [], True
    for method, events in _list_accounts(kind, measured.events):
        compared = compare(f"{kind}, {method}", Measured(measured.truth, events))
        rows += [row for row in compared if row.name in loads]
        exact &= is_exact(read_ledger(events), events)
    print(json.dumps({"rows": [asdict(row) for row in rows], "exact": exact}))
    return 0


def _list_accounts(kind: str, events: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Sequence[dict[str, Any]]]]:
    """The log by method: as it is, and with less and less known of the GPUs."""
    if kind == WHOLE:
        yield "SM utilization", events
    blind = [
        {**event, "parts": [_without(part, "activity") for part in event["parts"]]} if "parts" in event else event
        for event in events
    ]
    yield "busy time", blind
    yield "share", [_without(event, "gpu_busy_s") for event in blind]


def _without(fields: Mapping[str, object], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def compare(scenario: str, measured: Measured) -> list[AttributionRow]:
    """The true joules of each member and role beside those that the ledger attributes."""
    found, truth = read_ledger(measured.events), measured.truth
    attributed = {name: total.energy_j or 0.0 for name, total in found.by_member().items()}
    for name, roles in ((DRIVER, ("startup", DRIVER)), (OTHER, (OTHER,)), (IDLE, (IDLE,))):
        alone = [row for row in found.rows if row.member is None and row.role in roles]
        attributed[name] = sum(row.energy_j or 0.0 for row in alone)
    return [
        AttributionRow(
            scenario=scenario,
            name=name,
            cpu_s=truth.cpu_s[name],
            idle_j=truth.idle_j[name],
            true_j=(true_j := truth.joules_of(name)),
            attributed_j=joules,
            error_pct=100 * (joules / true_j - 1) if true_j else 0.0,
        )
        for name, joules in attributed.items()
    ]


def read_ledger(events: Sequence[dict[str, Any]]) -> Ledger:
    """The account of events that are dicts."""
    return ledger(settle(make_event(**event)) for event in events)


def is_exact(found: Ledger, events: Sequence[dict[str, Any]]) -> bool:
    """Whether the ledger's rows add up to the joules of all power events, in whole ticks."""
    parts = [part for event in events if event["type"] == "power" for part in event["parts"]]
    shared = sum(to_ticks(row.energy_j) for row in found.rows if row.energy_j is not None)
    return shared == sum(to_ticks(part["energy_j"]) for part in parts)


# --- all scenarios, and what follows ---------------------------------------------------------------------------


def study(seconds: float, repeats: int, report: Report) -> Outcome:
    """All scenarios, the medians of that many runs."""
    scenarios: dict[str, Callable[[float], Run]] = {
        "processors and memory": functools.partial(run_processors, PROCESSORS, MEMBERS),
        "unlike work on processors": functools.partial(run_processors, UNLIKE_WORK, UNLIKE),
        "GPUs": functools.partial(run_gpus, WHOLE),
        "a GPU in MIG mode": functools.partial(run_gpus, MIG),
    }
    runs, exact, left_out = list[AttributionRow](), list[bool](), dict[str, str]()
    for number in range(repeats):
        for name, run in scenarios.items():
            report(f"attribution: {name}, {seconds:g} s, {number + 1} of {repeats}")
            try:
                rows, is_sum_exact = run(seconds)
            except RuntimeError as error:
                left_out[name] = str(error)
                continue
            runs += rows
            exact.append(is_sum_exact)
    medians = median_rows(runs, "scenario", "name")
    add_up = f"do NOT add up in {exact.count(False)}" if False in exact else "add up, to the tick, in all"
    return outcome_of(
        medians,
        "Attributed joules beside the true ones",
        findings=[
            *(f"attribution: {name} are left out: {why}" for name, why in left_out.items()),
            f"attribution: the rows {add_up} of {len(exact)} runs to what the meter counted",
            *judge_errors("attribution", _of_members(medians), "name"),
            *_judge_ratios(medians),
        ],
        title="Attributed energy",
        notes=["attribution: a synthetic node of known power, real processes, meter and ledger"],
        panels=_panels(medians),
    )


def _of_members(rows: Sequence[AttributionRow]) -> dict[str, list[AttributionRow]]:
    members = [row for row in rows if row.name not in (DRIVER, OTHER, IDLE)]
    return group_by(members, lambda row: row.scenario)


def judge_errors(study: str, groups: Mapping[str, Sequence[Any]], name: str) -> Iterator[str]:
    """The errors of each group of rows, a line each; `name` is the field that says whose a row is."""
    for group, rows in groups.items():
        worst = max(rows, key=lambda row: abs(row.error_pct))
        middle = statistics.median(abs(row.error_pct) for row in rows)
        whose = getattr(worst, name)
        yield f"{study}: {group}: median error {middle:.1f} %, worst {worst.error_pct:+.1f} % ({whose})"


def _judge_ratios(rows: Sequence[AttributionRow]) -> Iterator[str]:
    """The ratios of members that are equal, half as busy, or at rest, beyond idle energy."""
    first, *others = (row for row in rows if row.scenario == PROCESSORS and row.name in (*BUSY, HALF, RESTING))
    for row in others:
        attributed = (row.attributed_j - row.idle_j) / (first.attributed_j - first.idle_j)
        true = (row.true_j - row.idle_j) / (first.true_j - first.idle_j)
        yield (
            f"attribution: {PROCESSORS}: beyond idle {row.name} has {attributed:.3f} of the joules of "
            f"{first.name}, in truth {true:.3f}"
        )


def _panels(rows: Sequence[AttributionRow]) -> Iterator[Panel]:
    fields, colours = (
        {"true": "true_j", "attributed": "attributed_j"},
        {"true": "#8a94a3", "attributed": "#2f7bc4"},
    )
    for scenario, found in _of_members(rows).items():
        both = series_of_fields(found, "name", fields, colours, {"true": PREDICTED})
        yield bar_panel(scenario, both, y="joules", at="synthetic, true and attributed joules")


if __name__ == "__main__":
    sys.exit(main())
