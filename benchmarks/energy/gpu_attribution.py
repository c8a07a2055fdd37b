"""Attributed joules of members on GPUs beside the true ones.

The stand-in for NVIDIA's library must be found when a process starts, so each run is a process of its own, which
prints its rows as JSON (`python -m benchmarks.energy.gpu_attribution KIND SECONDS`). One run is accounted for
in several ways: as it was, and as if the driver did not report the utilization of processes, or the members not
the time for which they kept their GPU busy.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.energy.attribution import AttributionRow, Measured, compare, is_exact
from benchmarks.energy.members import NODE, Event, Member, MemberProcesses
from benchmarks.energy.synthetic_gpus import IDLE_W, GpuLoad, SyntheticGpus
from benchmarks.energy.synthetic_node import LINEAR, SyntheticNode
from ensemble.bench.energy import nvml_stand_in
from ensemble.bench.energy.child import end_with_parent, run_child
from ensemble.meter import PowerMeter, ledger
from ensemble.meter.power import Absent, list_gpus, open_nvml
from ensemble.spec import Energy
from pipelines.child_processes import child_environment

WHOLE, MIG = "GPU", "MIG"
#: A member that keeps its GPU busy keeps a quarter of a core busy: two cores have room for all of them.
FULL = 0.25
_PER_CPU_S = 1 / FULL
#: name, duty, number of its GPU, share of it, intensity. The first GPU's members differ in how long they compute,
#: the second's in what their kernels draw.
_ON_GPUS = (
    ("busy", FULL, 0, 1 / 3, 1.0),
    ("half", FULL / 2, 0, 1 / 3, 1.0),
    ("resting", 0.0, 0, 1 / 3, 1.0),
    ("dense", FULL, 1, 1 / 2, 1.0),
    ("sparse", FULL, 1, 1 / 2, 0.4),
)
_LONGEST_S = 60.0  # for all processes to start and end
_ON_INSTANCES = _ON_GPUS[:3]
_INSTANCE = 2 / 7  # the stand-in gives each of three instances two of a GPU's seven slices


def run_with_stand_in(kind: str, seconds: float) -> tuple[list[AttributionRow], bool]:
    """One run in a process that finds the stand-in; returns the rows, and whether all sums were exact.

    Args:
        kind: `WHOLE` or `MIG`.

    Raises:
        RuntimeError: there is no C compiler to build the stand-in, or the process has failed.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        gpus = "H100:80,H100:80" if kind == WHOLE else "H100:80:3"
        stand_in = {"STAND_IN_GPUS": gpus, "STAND_IN_STATE": str(Path(folder, "state"))}
        environment = {**child_environment(), **nvml_stand_in.build(Path(folder)), **stand_in}
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        found = json.loads(
            run_child(__name__, kind, str(seconds), environment=environment, timeout_s=_LONGEST_S + seconds)
        )
    return [AttributionRow(**row) for row in found["rows"]], found["exact"]


def main() -> int:
    """One run; prints its rows."""
    end_with_parent()
    kind, seconds = sys.argv[1], float(sys.argv[2])
    measured = _measure(kind, seconds)
    rows, exact = [], True
    for method, events in _list_accounts(kind, measured.events):
        compared = compare(f"{kind}, {method}", Measured(measured.truth, events))
        rows += [row for row in compared if row.name in {name for name, *_ in _ON_GPUS}]
        exact &= is_exact(ledger(events), events)
    print(json.dumps({"rows": [asdict(row) for row in rows], "exact": exact}))
    return 0


def _measure(kind: str, seconds: float) -> Measured:
    from ensemble.executors.host import describe_host
    from ensemble.meter.gpu_activity import GpuActivity, RunProcess

    known = list_gpus()
    loads: dict[str, GpuLoad] = {}
    members = []
    for number, (name, duty, gpu, share, intensity) in enumerate(_ON_GPUS if kind == WHOLE else _ON_INSTANCES):
        instance = None if kind == WHOLE else _INSTANCE
        loads[name] = GpuLoad(
            gpu=gpu, share=instance or share, per_cpu_s=_PER_CPU_S, intensity=intensity, instance=instance
        )
        device = known[gpu if kind == WHOLE else number].id
        gpu_share = share if kind == WHOLE else 1.0
        members.append(Member(name=name, duty=duty, gpu=device, gpu_share=gpu_share, gpu_s=_PER_CPU_S))
    run: dict[int, RunProcess] = {}
    activity = GpuActivity(known)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        gpus = SyntheticGpus(Path(os.environ["STAND_IN_STATE"]), 2 if kind == WHOLE else 1)
        node = SyntheticNode(Path(folder), LINEAR, gpus=gpus)
        nvml = open_nvml()
        assert not isinstance(nvml, Absent), nvml.reason
        meter = PowerMeter(NODE, [nvml], energy=Energy(idle_w={"gpu": IDLE_W}))

        def add(member: Member, pid: int) -> None:
            node.add(member.name, pid)
            gpus.add(member.name, pid, loads[member.name])
            run[pid] = RunProcess("train", member.name, member.gpu)

        described = describe_host(NODE).as_event()
        with (
            node,
            MemberProcesses(
                meter, described, add, annotate=lambda power: activity.add_to(power, run)
            ) as processes,
        ):
            before = node.read_gpus()
            processes.start_meter()
            processes.start(members)
            processes.tell("work")
            processes.watch(seconds)
            processes.tell("rest")
            truth = node.read_gpus().since(before)
            processes.finish()
        meter.close()
        activity.close()
    return Measured(truth, processes.events)


def _list_accounts(kind: str, events: Sequence[Event]) -> Iterator[tuple[str, Sequence[Event]]]:
    """The log by method: as it is, and with less and less known of the GPUs."""
    without_activity = [_without_activity(event) for event in events]
    if kind == WHOLE:
        yield "SM utilization", events
    yield "busy time", without_activity
    yield "share", [_without(event, "gpu_busy_s") for event in without_activity]


def _without_activity(event: Event) -> Event:
    parts = event.get("parts")
    return event if parts is None else {**event, "parts": [_without(part, "activity") for part in parts]}


def _without(fields: Mapping[str, object], name: str) -> Event:
    return {key: value for key, value in fields.items() if key != name}


if __name__ == "__main__":
    sys.exit(main())
