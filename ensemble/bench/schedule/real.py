"""Part real: members of uneven step times, trained by the real controller with real processes, in three arms.

- *ours*: all at once on one shared pipeline;
- *one after another*: each alone with the whole machine and a pipeline of its own;
- *all at once*: each prepares for itself.

The arms run in turn, so that what else the machine does falls on all of them. The figures are MLPerf HPC's
(`ensemble.reporting.sections.turnaround`). Each arm is also simulated, from what was measured of members alone:
their own time
and core-seconds for a sample in the arm that runs them alone, and what a sample costs to prepare.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.bench.schedule import workload
from ensemble.bench.schedule.policies import InCohorts
from ensemble.bench.schedule.simulate import Preparation, Simulated, Trainee, simulate
from ensemble.reporting.sections.turnaround import Turnaround, measure_instances, measure_turnaround
from ensemble.schedule import Node
from ensemble.spec import Ensemble, SpecError
from ensemble.store import MemberState, RunState, fold, read_events
from pipelines import Pipeline

OURS, IN_TURN, APART = "ours", "one after another", "all at once"
ARMS = (OURS, IN_TURN, APART)
_ORCHESTRATION = ("orchestrate", "ray")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one arm came to, medians over its runs.

    Attributes:
        members, cores, executor: what trained, and where.
        ttta_s: time to train all, from the first start to the last stop.
        models_per_minute, over_median: models in that time; that time over the median member's own.
        utilization: worker-seconds of training, as long as they take alone, over those that there were: a worker
            for each member for the whole time.
        cpu_s: of all of the run's processes, start-up included.  orchestration: share of the controller, of node
            agents and of Ray in what was used after start-up.
        simulated_s: `ttta_s` as the simulator has it.  error: by how much that is off, 0.1 for 10 % too long.
        runs: how many the figures are medians of.
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
class Alone:
    """What is measured of one member that runs alone.

    Attributes:
        own_s: seconds of a sample in which it did not wait for batches.  cpu_s: core-seconds of it.
        startup_s: core-seconds before its first batch.  latency_s: seconds from its placement to its first batch.
        after_s: seconds from its end until the next one is placed.
    """

    own_s: float
    cpu_s: float
    startup_s: float
    latency_s: float
    after_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the study does.

    Attributes:
        steps: milliseconds of a batch, of each member.
        epochs, samples, batch_size, pixels: of each member.
        data: directory with cifar10/; None makes photographs.
        executor: "local" or "ray".
    """

    steps: Sequence[float]
    epochs: int
    samples: int
    batch_size: int
    pixels: int
    data: str | None
    executor: str
    prep_workers: int
    repeats: int
    arms: Sequence[str] = ARMS


def study(plan: Plan, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Run the arms in turn, `repeats` times, simulate each, and return the medians in the order of the arms."""
    if IN_TURN not in plan.arms:
        raise SpecError(f"--arms needs {IN_TURN!r}: the simulator takes from it what members are alone")
    train = workload.pipeline(plan.samples, plan.pixels, plan.data)
    prep_s = preparation_s(train)
    say(f"a sample takes {1000 * prep_s:.2f} ms of a core to prepare")
    cores = len(os.sched_getaffinity(0))
    runs: dict[str, list[RunState]] = {arm: [] for arm in plan.arms}
    for number in range(plan.repeats):
        for arm in plan.arms:
            runs[arm].append(state := _train(plan, arm, train, cores))
            found = _figures(state)
            said = f"{found.ttta_s:.1f} s, {found.over_median:.2f} x median"
            say(f"{arm}, run {number + 1} of {plan.repeats}: {said}")
    alone = _median_alone([measured_alone(state, plan.samples) for state in runs[IN_TURN]])
    return [_row(plan, arm, runs[arm], alone, prep_s, cores) for arm in plan.arms]


def preparation_s(train: Pipeline) -> float:
    """Core-seconds to prepare a sample: of an epoch by this process, after one that loads what it needs."""
    for epoch in range(2):
        began, count = time.process_time(), 0
        for batch in train.loader(32, range(epoch, epoch + 1)):
            count += len(batch["index"])
    return (time.process_time() - began) / count


def _train(plan: Plan, arm: str, train: Pipeline, cores: int) -> RunState:
    import ensemble as api

    declared = _declared(plan, arm, train, cores)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        run_dir = Path(directory) / "run"
        result = api.submit(declared, run_dir, executor=plan.executor).wait()
        state = fold(read_events(run_dir / "events.jsonl"))
    ended = {row["state"] for row in result.members}
    if ended != {"finished"}:
        raise SpecError(f"{arm}: members ended as {', '.join(sorted(ended))}; see `--executor local` first")
    return state


def _declared(plan: Plan, arm: str, train: Pipeline, cores: int) -> Ensemble:
    return workload.declared(
        "schedule",
        train,
        plan.steps,
        epochs=plan.epochs,
        batch_size=plan.batch_size,
        cores=cores,
        at_once=arm != IN_TURN,
        sharing="independent" if arm == APART else "node",
        prep_workers=plan.prep_workers,
    )


def _figures(state: RunState) -> Turnaround:
    found = measure_turnaround(state)
    assert found is not None
    return found


# --- what was measured -----------------------------------------------------------------------------------------


def measured_alone(state: RunState, samples: int) -> dict[str, Alone]:
    """Of each member of a run in which one ran at a time."""
    placed = sorted(member.spans[0].placed for member in state.members.values())
    return {member.id: _alone(member, samples, placed) for member in state.members.values()}


def _alone(member: MemberState, samples: int, placed: Sequence[float]) -> Alone:
    span = member.spans[0]
    assert span.started is not None and span.ended is not None
    taken = samples * len(member.history)
    waited_s = sum(event["waited_s"] for event in member.history)
    following = [at for at in placed if at >= span.ended]
    return Alone(
        own_s=(span.ended - span.started - waited_s) / taken,
        cpu_s=member.cpu_s.get("train", 0.0) / taken,
        startup_s=member.cpu_s.get("startup", 0.0),
        latency_s=span.started - span.placed,
        after_s=following[0] - span.ended if following else 0.0,
    )


def _median_alone(runs: Sequence[Mapping[str, Alone]]) -> dict[str, Alone]:
    names = [field.name for field in dataclasses.fields(Alone)]
    return {
        member: Alone(**{name: statistics.median(getattr(run[member], name) for run in runs) for name in names})
        for member in runs[0]
    }


def _row(
    plan: Plan, arm: str, runs: Sequence[RunState], alone: Mapping[str, Alone], prep_s: float, cores: int
) -> Row:
    found = [_figures(state) for state in runs]
    ttta_s = statistics.median(one.ttta_s for one in found)
    work_s = plan.epochs * plan.samples * sum(one.own_s for one in alone.values())
    simulated = simulated_s(plan, arm, alone, prep_s, cores)
    return Row(
        arm=arm,
        members=len(plan.steps),
        cores=cores,
        executor=plan.executor,
        ttta_s=ttta_s,
        models_per_minute=60 * len(plan.steps) / ttta_s,
        over_median=statistics.median(one.over_median for one in found),
        utilization=work_s / (len(plan.steps) * ttta_s),
        cpu_s=statistics.median(sum(state.cpu_s.values()) for state in runs),
        orchestration=statistics.median(orchestration(state) for state in runs),
        simulated_s=simulated,
        error=simulated / ttta_s - 1,
        runs=len(runs),
    )


def orchestration(state: RunState) -> float:
    """Share of the controller, node agents and Ray in the CPU time that was not spent on starting."""
    used = {role: cpu_s for role, cpu_s in state.cpu_s.items() if role != "startup"}
    return sum(used.get(role, 0.0) for role in _ORCHESTRATION) / sum(used.values())


# --- what is simulated -----------------------------------------------------------------------------------------


def simulated_s(plan: Plan, arm: str, alone: Mapping[str, Alone], prep_s: float, cores: int) -> float:
    """TTTa of an arm on a virtual clock, with members as they are alone and the same decisions."""
    train = workload.pipeline(1, plan.pixels, plan.data) if plan.data is None else None
    declared = _declared(plan, arm, train or workload.pipeline(plan.samples, plan.pixels, plan.data), cores)
    trainees = [_trainee(declared, number, alone[f"member-{number}"]) for number in range(len(plan.steps))]
    # a feeder starts beside its first member, and takes longer than that one
    feeder_s = statistics.median(one.latency_s for one in alone.values())
    preparation = Preparation(
        cpu_s=prep_s, workers=plan.prep_workers, alone=0, spread=False, startup_s=0.0 if arm == APART else feeder_s
    )
    node = Node("local", float(cores), (), 1e6, "local")
    policy = InCohorts(shared=arm != APART)
    found = simulate(trainees, [node], policy, preparation, samples=plan.samples, devices="cpu")
    return _whole(found, arm, alone) + first_s(alone)


def first_s(alone: Mapping[str, Alone]) -> float:
    """What the first member of a run waits longer: all are forked from a process that starts then."""
    latencies = [one.latency_s for one in alone.values()]
    return max(0.0, latencies[0] - statistics.median(latencies[1:] or latencies))


def _trainee(declared: Ensemble, number: int, alone: Alone) -> Trainee:
    identity = declared.identify(number)
    rate = {1: 1 / alone.own_s}
    return Trainee(
        identity=identity,
        samples_per_s=rate,
        epochs=identity.epochs,
        cpu_s=min(alone.cpu_s, alone.own_s),
        startup_s=alone.startup_s,
    )


def _whole(found: Simulated, arm: str, alone: Mapping[str, Alone]) -> float:
    """Its makespan, with what passes between two members that follow one another."""
    instances = measure_instances(found.spans.values())
    assert instances is not None
    between_s = sum(one.after_s for one in alone.values()) if arm == IN_TURN else 0.0
    return instances.ttta_s + between_s


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """Ours against the others, and how far the simulator is off."""
    by_arm = {row.arm: row for row in rows}
    ours = by_arm.get(OURS)
    for arm, row in by_arm.items():
        if ours is not None and arm != OURS:
            yield f"ours trains all in 1/{row.ttta_s / ours.ttta_s:.3g} of the time of {arm}"
        yield f"the simulator is {100 * abs(row.error):.0f}% off for {arm}"


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for people."""
    return [dataclasses.asdict(row) for row in rows]
