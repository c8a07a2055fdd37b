"""Part real: members of uneven step times, trained by the real controller with real processes, in three arms.

- *ours*: all at once on one shared pipeline;
- *one after another*: each alone with the whole machine and a pipeline of its own;
- *all at once*: each prepares for itself.

The arms run in turn, so that what else the machine does falls on all of them. The figures are MLPerf HPC's
(`ensemble.reporting.sections.turnaround`). Each arm is also simulated from the members' own time and core-seconds
for a sample in the arm that runs them alone, and from a sample's cost of preparation.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.schedule import workload
from benchmarks.schedule.policies import InCohorts
from benchmarks.schedule.simulate import Preparation, Simulated, Trainee, simulate
from ensemble.bench.results import Report
from ensemble.meter import Ledger, ledger
from ensemble.reporting.sections.turnaround import Turnaround, measure_instances, measure_turnaround
from ensemble.schedule import Node
from ensemble.spec import Ensemble, SpecError
from ensemble.store import MemberState, RunState, fold, read_events
from pipelines import Pipeline

OURS, IN_TURN, APART = "ours", "one after another", "all at once"
ARMS = (OURS, IN_TURN, APART)
_ORCHESTRATION = ("orchestrate", "ray")


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm, medians over its runs.

    Attributes:
        members, cores, executor: of the runs.
        ttta_s: time to train all, from the first start to the last stop.
        models_per_minute, over_median: models in that time; that time over the median member's own.
        utilization: worker-seconds of training, as long as they take alone, over those that there were: a worker
            for each member for the whole time.
        cpu_s: of all of the run's processes, start-up included.  orchestration: share of the controller, of node
            agents and of Ray in what was used after start-up.
        simulated_s: the simulator's `ttta_s`.  error: its relative error, 0.1 for 10 % too long.
        runs: of which the figures are medians.
    """

    arm: str
    members: int
    cores: int
    executor: str
    ttta_s: float
    models_per_minute: float
    over_median: float
    utilization: float
    cpu_s: float
    orchestration: float
    simulated_s: float
    error: float
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class SoloMember:
    """Measurements of one member that runs alone.

    Attributes:
        own_s: seconds of a sample without waiting for batches.  cpu_s: core-seconds of it.
        startup_s: core-seconds before its first batch.  latency_s: seconds from its placement to its first batch.
        after_s: seconds from its end until the next one is placed.
    """

    own_s: float
    cpu_s: float
    startup_s: float
    latency_s: float
    after_s: float


@dataclass(frozen=True, kw_only=True)
class RealPlan:
    """The members and runs of the study.

    Attributes:
        steps: milliseconds of a batch, of each member.
        epochs, samples, batch_size: of each member.
        data: directory with cifar10/; None makes photographs.
        executor: "local" or "ray".
    """

    steps: Sequence[float]
    epochs: int
    samples: int
    batch_size: int
    data: str | None
    executor: str
    repeats: int


class RanArm(NamedTuple):
    """What happened in a run of an arm, and what it used."""

    state: RunState
    used: Ledger


def study(plan: RealPlan, report: Report) -> list[ArmRow]:
    """Run the arms in turn, `repeats` times, and simulate each; returns their medians."""
    train = workload.make_pipeline(plan.samples, plan.data)
    prep_s = measure_preparation_s(train)
    report(f"a sample takes {1000 * prep_s:.2f} ms of a core to prepare")
    cores = len(os.sched_getaffinity(0))
    runs: dict[str, list[RanArm]] = {arm: [] for arm in ARMS}
    for number in range(plan.repeats):
        for arm in ARMS:
            runs[arm].append(run := _train(plan, arm, train, cores))
            found = _turnaround(run.state)
            figures = f"{found.ttta_s:.1f} s, {found.over_median:.2f} x median"
            report(f"{arm}, run {number + 1} of {plan.repeats}: {figures}")
    alone = _median_alone([measure_solo_members(run, plan.samples) for run in runs[IN_TURN]])
    return [_make_row(plan, arm, runs[arm], alone, prep_s, cores) for arm in ARMS]


def measure_preparation_s(train: Pipeline) -> float:
    """Core-seconds to prepare a sample, of an epoch in this process after one to warm up."""
    for epoch in range(2):
        start, count = time.process_time(), 0
        for batch in train.loader(32, range(epoch, epoch + 1)):
            count += len(batch["index"])
    return (time.process_time() - start) / count


def _train(plan: RealPlan, arm: str, train: Pipeline, cores: int) -> RanArm:
    import ensemble as api

    declared = _declare(plan, arm, train, cores)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        run_dir = Path(directory) / "run"
        result = api.submit(declared, run_dir, executor=plan.executor).wait()
        events = read_events(run_dir / "events.jsonl")
    ended = {row["state"] for row in result.members}
    if ended != {"finished"}:
        raise SpecError(f"{arm}: members ended as {', '.join(sorted(ended))}; see `--executor local` first")
    return RanArm(fold(events), ledger(events))


def _declare(plan: RealPlan, arm: str, train: Pipeline, cores: int) -> Ensemble:
    return workload.declare(
        "schedule",
        train,
        plan.steps,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        cores=cores,
        at_once=arm != IN_TURN,
        sharing="independent" if arm == APART else "node",
    )


def _turnaround(state: RunState) -> Turnaround:
    found = measure_turnaround(state)
    assert found is not None
    return found


# --- measurements ----------------------------------------------------------------------------------------------


def measure_solo_members(run: RanArm, samples: int) -> dict[str, SoloMember]:
    """Measure each member of a run in which one ran at a time."""
    members = run.state.members.values()
    placed = sorted(member.spans[0].placed for member in members)
    used = {(row.member, row.role): row.cpu_s for row in run.used.rows}
    return {each.id: _measure_solo(each, used, samples, placed) for each in members}


def _measure_solo(
    member: MemberState, used: Mapping[tuple[str | None, str], float], samples: int, placed: Sequence[float]
) -> SoloMember:
    span = member.spans[0]
    assert span.started is not None and span.ended is not None
    taken = samples * len(member.history)
    waited_s = sum(event["waited_s"] for event in member.history)
    following = [at for at in placed if at >= span.ended]
    return SoloMember(
        own_s=(span.ended - span.started - waited_s) / taken,
        cpu_s=used.get((member.id, "train"), 0.0) / taken,
        startup_s=used.get((member.id, "startup"), 0.0),
        latency_s=span.started - span.placed,
        after_s=following[0] - span.ended if following else 0.0,
    )


def _median_alone(runs: Sequence[Mapping[str, SoloMember]]) -> dict[str, SoloMember]:
    names = [field.name for field in dataclasses.fields(SoloMember)]
    return {
        member: SoloMember(
            **{name: statistics.median(getattr(run[member], name) for run in runs) for name in names}
        )
        for member in runs[0]
    }


def _make_row(
    plan: RealPlan, arm: str, runs: Sequence[RanArm], alone: Mapping[str, SoloMember], prep_s: float, cores: int
) -> ArmRow:
    found = [_turnaround(run.state) for run in runs]
    ttta_s = statistics.median(one.ttta_s for one in found)
    work_s = plan.epochs * plan.samples * sum(one.own_s for one in alone.values())
    simulated = _simulate_arm_s(plan, arm, alone, prep_s, cores)
    return ArmRow(
        arm=arm,
        members=len(plan.steps),
        cores=cores,
        executor=plan.executor,
        ttta_s=ttta_s,
        models_per_minute=60 * len(plan.steps) / ttta_s,
        over_median=statistics.median(one.over_median for one in found),
        utilization=work_s / (len(plan.steps) * ttta_s),
        cpu_s=statistics.median(run.used.run.cpu_s for run in runs),
        orchestration=statistics.median(_orchestration_share(run.used) for run in runs),
        simulated_s=simulated,
        error=simulated / ttta_s - 1,
        runs=len(runs),
    )


def _orchestration_share(used_by: Ledger) -> float:
    """Share of the controller, node agents and Ray in the CPU time that was not spent on starting."""
    used = {role: cpu_s for role, cpu_s in used_by.cpu_by_role().items() if role != "startup"}
    return sum(used.get(role, 0.0) for role in _ORCHESTRATION) / sum(used.values())


# --- simulation ------------------------------------------------------------------------------------------------


def _simulate_arm_s(plan: RealPlan, arm: str, alone: Mapping[str, SoloMember], prep_s: float, cores: int) -> float:
    """TTTa of an arm on a virtual clock, with members as measured alone and the same decisions."""
    train = workload.make_pipeline(1, plan.data) if plan.data is None else None
    declared = _declare(plan, arm, train or workload.make_pipeline(plan.samples, plan.data), cores)
    trainees = [_make_trainee(declared, number, alone[f"member-{number}"]) for number in range(len(plan.steps))]
    # A feeder starts beside its first member and takes longer.
    feeder_s = statistics.median(one.latency_s for one in alone.values())
    preparation = Preparation(
        cpu_s=prep_s,
        workers=workload.PREP_WORKERS,
        alone=0,
        spread=False,
        startup_s=0.0 if arm == APART else feeder_s,
    )
    node = Node("local", float(cores), (), 1e6, "local")
    policy = InCohorts(shared=arm != APART)
    found = simulate(trainees, [node], policy, preparation, samples=plan.samples, devices="cpu")
    return _simulated_ttta_s(found, arm, alone) + _first_start_s(alone)


def _first_start_s(alone: Mapping[str, SoloMember]) -> float:
    """By how much the first member of a run starts later: all are forked from a process that starts then."""
    latencies = [one.latency_s for one in alone.values()]
    return max(0.0, latencies[0] - statistics.median(latencies[1:] or latencies))


def _make_trainee(declared: Ensemble, number: int, alone: SoloMember) -> Trainee:
    identity = declared.identify(number)
    rate = {1: 1 / alone.own_s}
    return Trainee(
        identity=identity,
        samples_per_s=rate,
        epochs=identity.epochs,
        cpu_s=min(alone.cpu_s, alone.own_s),
        startup_s=alone.startup_s,
    )


def _simulated_ttta_s(found: Simulated, arm: str, alone: Mapping[str, SoloMember]) -> float:
    """The makespan of a simulation, with the measured time between two members that follow one another."""
    instances = measure_instances(found.spans.values())
    assert instances is not None
    between_s = sum(one.after_s for one in alone.values()) if arm == IN_TURN else 0.0
    return instances.ttta_s + between_s


def findings(rows: Sequence[ArmRow]) -> Iterator[str]:
    """Ours against the other arms, and the simulator's errors."""
    by_arm = {row.arm: row for row in rows}
    ours = by_arm.get(OURS)
    for arm, row in by_arm.items():
        if ours is not None and arm != OURS:
            yield f"ours trains all in 1/{row.ttta_s / ours.ttta_s:.3g} of the time of {arm}"
        yield f"the simulator is {100 * abs(row.error):.0f}% off for {arm}"
