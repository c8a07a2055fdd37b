"""Part throughput: the reports that the real controller records in a second.

Its log, state, decisions and Optuna study are those of any run. Only the processes are missing: an executor in
memory delivers the members' messages, one JSON line an event.
"""

from __future__ import annotations

import collections
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import Report, median_row
from ensemble.events import Epoch
from ensemble.executors import EventHandler
from ensemble.schedule.needs import Node
from ensemble.spec import Ensemble, Recipe, Resources, Search, loguniform, uniform
from pipelines.ipc.child_processes import child_environment

if TYPE_CHECKING:
    from ensemble.meter import CpuClock
    from ensemble.store import RunDir
    from ensemble.train.job import Job

LIST, SEARCH = "list", "search"
MODES = (LIST, SEARCH)
ROUND = 256  # events that are delivered together, at most


@dataclass(frozen=True, kw_only=True)
class ThroughputRow:
    """One mode, medians over its runs.

    Attributes:
        mode: "list", or "search" (TPE and hyperband, each report answered before the trial goes on).
        members: that report at the same time.  round: the most events that are delivered together.
        reports: `epoch` events, each with its metrics.  events: all that were logged.
        wall_s: from the first member's start to the last one's end.  cpu_s: of the controller meanwhile.
        reports_per_s: of that time.  per_cpu_s: reports for each CPU-second: those that a controller with a core
            of its own would record in a second, disks aside.
        answer_ms: the median time from a report's delivery to its answer; None in list mode, in which nothing is
            answered.
        status_s, report_s: CPU-seconds of `ensemble status` and of `ensemble report` on the run afterwards.
        runs: of which the figures are medians.
    """

    mode: str
    members: int
    round: int
    reports: int
    events: int
    wall_s: float
    cpu_s: float
    reports_per_s: float
    per_cpu_s: float
    answer_ms: float | None
    status_s: float
    report_s: float
    runs: int = 1


class InMemoryExecutor:
    """An executor without processes: each member sends a real one's messages, as soon as it may.

    An epoch is a `progress` event, the `epoch` with its metrics, `usage` and `checkpoint`; a member that awaits
    the pruner waits for its decision before it goes on. Nothing is shared, and nothing requested.
    """

    name = "memory"
    in_process = False
    clock: CpuClock | None = None
    cluster: Sequence[Node] | None = None

    def __init__(self, members: int) -> None:
        self._node = Node("memory", float(members), (), 1024.0, "memory")
        self._lines: collections.deque[bytes] = collections.deque()
        self._ready: collections.deque[str] = collections.deque()
        self._scripts: dict[str, Iterator[list[dict[str, Any]]]] = {}
        self._jobs: dict[str, Job] = {}
        self._delivered_s: dict[str, float] = {}
        self.answers_s: list[float] = []
        self.began_s = self.ended_s = 0.0
        self.began_cpu_s = self.ended_cpu_s = 0.0

    def open(self, run_dir: RunDir, ensemble: Ensemble, handle: EventHandler) -> list[Node]:
        """See `Executor`."""
        return [self._node]

    def _ignore(self, *_: Any, **__: Any) -> None:
        """See `Executor`: nothing is shared, asked for or held."""

    start_feeder = expect_readers = stop_feeder = request = kill = release = close = _ignore

    def launch(self, jobs: Sequence[Job], devices: Sequence[str | None]) -> None:
        """See `Executor`."""
        job = jobs[0]
        member = job.identity.member
        self._jobs[member], self._scripts[member] = job, _member_messages(job)
        self._ready.append(member)

    def events(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """See `Executor`; at most `ROUND` events, of the members in turn."""
        if not self.began_s:
            self.began_s, self.began_cpu_s = time.perf_counter(), time.process_time()
        while self._ready and len(self._lines) < ROUND:
            self._advance_member(self._ready.popleft())
        lines = [self._lines.popleft() for _ in range(min(ROUND, len(self._lines)))]
        events = [json.loads(line) for line in lines]
        ended_s = time.perf_counter()
        for event in events:
            if event["type"] == "epoch":
                self._delivered_s[event["member"]] = ended_s
        if not events and not self.ended_s:
            self.ended_s, self.ended_cpu_s = ended_s, time.process_time()
        return events

    def _advance_member(self, member: str) -> None:
        """Queue a member's next messages; one that awaits the pruner waits for an answer after an epoch."""
        messages = next(self._scripts[member], None)
        if messages is None:
            del self._scripts[member], self._jobs[member]
            return
        self._lines.extend(json.dumps(event).encode() for event in messages)
        if messages[-1]["type"] != "epoch" or not self._jobs[member].awaits_pruner:
            self._ready.append(member)

    def send(self, member: str, command: str, **fields: Any) -> None:
        """See `Executor`."""
        self.answers_s.append(time.perf_counter() - self._delivered_s.pop(member))
        if command == "prune":
            self._scripts[member] = _pruned_messages(self._jobs[member])
        self._ready.append(member)


def _message(job: Job, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "member": job.identity.member, "attempt": job.attempt, **fields}


def _usage_message(job: Job, cpu_s: float) -> dict[str, Any]:
    who = {"node": "memory", "role": "train", "member": job.identity.member, "rank": 0}
    return {"type": "usage", **who, "pid": 1000 + job.identity.number, "cpu_s": cpu_s, "origin": "measured"}


def _member_messages(job: Job) -> Iterator[list[dict[str, Any]]]:
    """A member's messages, in steps, with the fields of real ones."""
    own = job.identity
    yield [_message(job, "started", pid=1000 + own.number, epoch=0, step=0, startup_cpu_s=1.5, first_epoch=0)]
    best = 0.5 + (own.number * 7919 % 1000) / 2500
    for epoch in range(own.epochs):
        rate = 900.0 + own.number % 100
        far = {"epoch": epoch, "step": 50, "steps": 100, "samples_per_s": rate}
        metrics = {"loss": 1 - best + 1 / (epoch + 2), "accuracy": best - 0.3 / (epoch + 2)}
        whole = {"train_loss": 0.7, "lr": 0.05, "samples": 6400, "skipped_steps": 0, "loss_scale": 1.0}
        whole |= {"sent_bytes": 0, "wall_s": 7.1, "train_s": 6.9, "samples_per_s": rate, "sync_s": 0.0}
        whole |= {"shared_batches": 100, "private_batches": 0, "waited_s": 0.25}
        before = [_message(job, "progress", **far)]
        before += [_message(job, "epoch", epoch=epoch, step=100, metrics=metrics, **whole)]
        kept = {"path": f"{job.run_dir}/members/{own.member}/checkpoint.safetensors", "weights_sha256": "0" * 64}
        after = [
            _usage_message(job, 7.0 * (epoch + 1)),
            _message(job, "checkpoint", epoch=epoch + 1, step=0, **kept),
        ]
        if job.awaits_pruner:
            yield before
            yield after
        else:
            yield before + after
    last = {"epoch": own.epochs - 1, "metrics": {"accuracy": best}, "weights_sha256": "0" * 64}
    yield [_message(job, "finished", **last), _message(job, "exited", rank=0, outcome="finished", detail="")]


def _pruned_messages(job: Job) -> Iterator[list[dict[str, Any]]]:
    where = {"epoch": 0, "step": 0}
    yield [_message(job, "pruned", **where), _message(job, "exited", rank=0, outcome="pruned", detail="")]


def declare(mode: str, members: int, epochs: int) -> Ensemble:
    """An ensemble whose members are not trained."""
    import numpy as np

    from pipelines import Pipeline, sources

    space = {"lr": loguniform(1e-4, 1.0), "momentum": uniform(0.0, 0.99)}
    search = Search(space, trials=members, sampler="tpe", pruner="hyperband")
    listed = [{"lr": 0.1 / (1 + number)} for number in range(members)]
    return Ensemble(
        name=f"throughput-{mode}",
        recipe=Recipe(model=dict, loss=dict, task="classification"),
        train=Pipeline(sources.arrays(x=np.zeros((64, 2), np.float32))),
        epochs=epochs,
        sharing="independent",
        resources=Resources(cpus_per_worker=1.0, gpus_per_worker=0.0, memory_gb=0.01),
        members=listed if mode == LIST else None,
        search=search if mode == SEARCH else None,
    )


def measure(mode: str, members: int, epochs: int) -> ThroughputRow:
    """One run of the real controller."""
    from ensemble.controller.controller import Controller
    from ensemble.store import EventLog, RunDir, fold, read_events

    ensemble = declare(mode, members, epochs)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        run_dir = RunDir.create(Path(directory) / "run", ensemble)
        executor = InMemoryExecutor(members)
        controller = Controller(run_dir, ensemble, executor, EventLog(run_dir.events), fold([]))
        controller.open()
        controller.run()
        events = read_events(run_dir.events)
        status_s, report_s = (time_command(command, f"{directory}/run") for command in ("status", "report"))
    wall_s, cpu_s = executor.ended_s - executor.began_s, executor.ended_cpu_s - executor.began_cpu_s
    reports = sum(isinstance(event, Epoch) for event in events)
    return ThroughputRow(
        mode=mode,
        members=members,
        round=ROUND,
        reports=reports,
        events=len(events),
        wall_s=wall_s,
        cpu_s=cpu_s,
        reports_per_s=reports / wall_s,
        per_cpu_s=reports / cpu_s,
        answer_ms=1000 * statistics.median(executor.answers_s) if executor.answers_s else None,
        status_s=status_s,
        report_s=report_s,
    )


def time_command(command: str, run_dir: str) -> float:
    """CPU-seconds of a command that reads the run, the start of its process included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "ensemble.cli", command, run_dir]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=child_environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def study(members: int, epochs: int, repeats: int, report: Report) -> list[ThroughputRow]:
    """Medians of `repeats` runs in each mode, the modes in turn."""
    measured: dict[str, list[ThroughputRow]] = {mode: [] for mode in MODES}
    for number in range(repeats):
        for mode, rows in measured.items():
            rows.append(measure(mode, members, epochs))
            rate = f"{rows[-1].reports_per_s:,.0f} reports/s"
            report(f"throughput, {mode}, run {number + 1} of {repeats}: {rate}")
    return [median_row(rows) for rows in measured.values()]
