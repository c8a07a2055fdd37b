"""Part real: members of uneven step times, trained by the real controller with real processes, in three arms.

All at once on one shared pipeline (*ours*), each alone with the whole machine (*one after another*), and *all at
once*, each with a pipeline of its own.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet import workload
from benchmarks.results import Report, median_row
from ensemble.meter.ledger_view import ledger
from ensemble.spec import Ensemble, SpecError
from ensemble.store import fold, read_events
from pipelines import Pipeline

OURS, IN_TURN, APART = "ours", "one after another", "all at once"
ARMS = (OURS, IN_TURN, APART)


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm, medians over its runs.

    Attributes:
        members, cores, executor: of the runs.
        ttta_s: time to train all, from the first member's placement to the last one's end, as MLPerf HPC has it.
        over_median: that time over the median member's own.
        cpu_s: of all of the run's processes, start-up included.  orchestration: share of the controller, of node
            agents and of Ray in what was used after start-up.
        runs: of which the figures are medians.
    """

    arm: str
    members: int
    cores: int
    executor: str
    ttta_s: float
    over_median: float
    cpu_s: float
    orchestration: float
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


def study(plan: Plan, repeats: int, report: Report) -> list[ArmRow]:
    """Run the arms in turn, `repeats` times; returns their medians."""
    train = workload.make_pipeline(plan.samples)
    cores = len(os.sched_getaffinity(0))
    declared = {arm: plan.declare(arm, train, cores) for arm in ARMS}
    rows: dict[str, list[ArmRow]] = {arm: [] for arm in ARMS}
    for number in range(repeats):
        for arm, ensemble in declared.items():
            rows[arm].append(row := _train(arm, ensemble, plan.executor, cores))
            figures = f"{row.ttta_s:.1f} s, {row.over_median:.2f} x median"
            report(f"{arm}, run {number + 1} of {repeats}: {figures}")
    return [median_row(own) for own in rows.values()]


def _train(arm: str, declared: Ensemble, executor: str, cores: int) -> ArmRow:
    import ensemble as api

    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        run_dir = Path(directory) / "run"
        api.submit(declared, run_dir, executor=executor).wait()
        events = read_events(run_dir / "events.jsonl")
    spans = []
    for member in fold(events).members.values():
        span = member.spans[-1]
        if member.state != "finished" or span.ended is None:
            raise SpecError(f"{member.id} ended as {member.state}: {member.error or 'no reason is in the log'}")
        spans.append((span.placed, span.ended))
    ttta_s = max(ended for _, ended in spans) - min(placed for placed, _ in spans)
    account = ledger(events)
    used = {role: cpu_s for role, cpu_s in account.cpu_by_role().items() if role != "startup"}
    return ArmRow(
        arm=arm,
        members=len(spans),
        cores=cores,
        executor=executor,
        ttta_s=ttta_s,
        over_median=ttta_s / statistics.median(ended - placed for placed, ended in spans),
        cpu_s=account.run.cpu_s,
        orchestration=(used.get("orchestrate", 0.0) + used.get("ray", 0.0)) / sum(used.values()),
    )
