"""Part real: members of uneven step times, trained by the real controller with real processes, in three arms.

- *ours*: all at once on one shared pipeline;
- *one after another*: each alone with the whole machine and a pipeline of its own;
- *all at once*: each prepares for itself.

The arms run in turn, so that what else the machine does falls on all of them. The figures are MLPerf HPC's
(`ensemble.reporting.sections.time_to_solution`). Each arm is also simulated from the members' own time and
core-seconds for a sample in the arm that runs them alone, and from a sample's cost of preparation.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.schedule import workload
from benchmarks.schedule.policies import in_cohorts, one_by_one
from benchmarks.schedule.simulate import Preparation, Trainee, simulate
from ensemble.bench.results import Report, median_row
from ensemble.meter import Ledger, ledger
from ensemble.reporting.sections.time_to_solution import TimeToSolution, measure_time_to_solution
from ensemble.schedule import Node
from ensemble.spec import Ensemble, SpecError
from ensemble.store import RunState, fold, read_events
from pipelines import Pipeline

OURS, IN_TURN, APART = "ours", "one after another", "all at once"
ARMS = (OURS, IN_TURN, APART)


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
    """Measurements of one member that runs alone, medians over `runs`.

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
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The members and runs of the study.

    Attributes:
        steps_ms: milliseconds of a batch, of each member.
        epochs, samples, batch_size: of each member.
        executor: "local" or "ray".
    """

    steps_ms: Sequence[float]
    epochs: int
    samples: int
    executor: str
    batch_size: int = 32

    def declare(self, arm: str, train: Pipeline, cores: int) -> Ensemble:
        """The ensemble of an arm; members that train at once share the cores equally."""
        return workload.declare(
            train,
            self.steps_ms,
            epochs=self.epochs,
            batch_size=self.batch_size,
            cores=cores if arm == IN_TURN else cores / len(self.steps_ms),
            sharing="independent" if arm == APART else "node",
        )


class Run(NamedTuple):
    """What happened in a run of an arm, and what it used."""

    state: RunState
    time_to_solution: TimeToSolution
    used: Ledger


def study(plan: Plan, repeats: int, report: Report) -> list[ArmRow]:
    """Run the arms in turn, `repeats` times, and simulate each; returns their medians."""
    train = workload.make_pipeline(plan.samples)
    prep_s = measure_preparation_s(train)
    report(f"a sample takes {1000 * prep_s:.2f} ms of a core to prepare")
    cores = len(os.sched_getaffinity(0))
    declared = {arm: plan.declare(arm, train, cores) for arm in ARMS}
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for number in range(repeats):
        for arm, ensemble in declared.items():
            runs[arm].append(run := _train(ensemble, plan.executor))
            figures = f"{run.time_to_solution.ttta_s:.1f} s, {run.time_to_solution.over_median:.2f} x median"
            report(f"{arm}, run {number + 1} of {repeats}: {figures}")
    measured = [measure_solo_members(run, plan.samples) for run in runs[IN_TURN]]
    alone = {member: median_row([each[member] for each in measured]) for member in measured[0]}
    rows = []
    for arm, ensemble in declared.items():
        simulated_s = simulate_arm(arm, ensemble, alone, prep_s, cores, plan.samples)
        rows.append(median_row([_make_row(plan, arm, run, alone, simulated_s, cores) for run in runs[arm]]))
    return rows


def measure_preparation_s(train: Pipeline) -> float:
    """Core-seconds to prepare a sample, of an epoch in this process after one to warm up."""
    for epoch in range(2):
        start, count = time.process_time(), 0
        for batch in train.loader(32, range(epoch, epoch + 1)):
            count += len(batch["index"])
    return (time.process_time() - start) / count


def _train(declared: Ensemble, executor: str) -> Run:
    import ensemble as api

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        run_dir = Path(directory) / "run"
        api.submit(declared, run_dir, executor=executor).wait()
        events = read_events(run_dir / "events.jsonl")
    state = fold(events)
    for member in state.members.values():
        if member.state != "finished":
            raise SpecError(f"{member.id} ended as {member.state}: {member.error or 'no reason is in the log'}")
    time_to_solution = measure_time_to_solution(state)
    assert time_to_solution is not None
    return Run(state, time_to_solution, ledger(events))


def measure_solo_members(run: Run, samples: int) -> dict[str, SoloMember]:
    """Measure each member of a run in which one ran at a time."""
    members = run.state.members.values()
    placed = sorted(member.spans[0].placed for member in members)
    used = {(row.member, row.role): row.cpu_s for row in run.used.rows}
    measured = {}
    for member in members:
        span = member.spans[0]
        assert span.started is not None and span.ended is not None
        taken = samples * len(member.history)
        waited_s = sum(event.waited_s or 0.0 for event in member.history)
        following = [at for at in placed if at >= span.ended]
        measured[member.id] = SoloMember(
            own_s=(span.ended - span.started - waited_s) / taken,
            cpu_s=used.get((member.id, "train"), 0.0) / taken,
            startup_s=used.get((member.id, "startup"), 0.0),
            latency_s=span.started - span.placed,
            after_s=following[0] - span.ended if following else 0.0,
        )
    return measured


def _make_row(
    plan: Plan, arm: str, run: Run, alone: Mapping[str, SoloMember], simulated_s: float, cores: int
) -> ArmRow:
    work_s = plan.epochs * plan.samples * sum(one.own_s for one in alone.values())
    ttta_s = run.time_to_solution.ttta_s
    used = {role: cpu_s for role, cpu_s in run.used.cpu_by_role().items() if role != "startup"}
    return ArmRow(
        arm=arm,
        members=len(alone),
        cores=cores,
        executor=plan.executor,
        ttta_s=ttta_s,
        models_per_minute=run.time_to_solution.per_minute,
        over_median=run.time_to_solution.over_median,
        utilization=work_s / (len(alone) * ttta_s),
        cpu_s=run.used.run.cpu_s,
        orchestration=(used.get("orchestrate", 0.0) + used.get("ray", 0.0)) / sum(used.values()),
        simulated_s=simulated_s,
        error=simulated_s / ttta_s - 1,
    )


def simulate_arm(
    arm: str, declared: Ensemble, alone: Mapping[str, SoloMember], prep_s: float, cores: int, samples: int
) -> float:
    """TTTa of an arm on a virtual clock, with members as measured alone and the same decisions, seconds."""
    trainees = [
        Trainee(
            identity=(identity := declared.identify(number)),
            samples_per_s={1: 1 / one.own_s},
            epochs=identity.epochs,
            cpu_s=min(one.cpu_s, one.own_s),
            startup_s=one.startup_s,
        )
        for number, one in enumerate(alone[f"member-{number}"] for number in range(len(alone)))
    ]
    latencies = [one.latency_s for one in alone.values()]
    # A feeder starts beside its first member and takes longer.
    feeder = Preparation(cpu_s=prep_s, workers=workload.PREP_WORKERS, startup_s=statistics.median(latencies))
    node, policy = Node("local", float(cores), (), 1e6, "local"), one_by_one if arm == APART else in_cohorts
    found = simulate(trainees, [node], policy, feeder, samples=samples, devices="cpu")
    between_s = sum(one.after_s for one in alone.values()) if arm == IN_TURN else 0.0
    # The first member of a run starts later: all are forked from a process that starts then.
    first_s = max(0.0, latencies[0] - statistics.median(latencies[1:] or latencies))
    return found.makespan_s + between_s + first_s
