"""The node and the controller of the overhead study: `python -m ensemble.bench.energy.metered_node CONFIG`.

One process, as under the local executor: it samples power and GPUs, reads a feeder's reports and the ranks' usage,
and thins, logs and accounts all of it, with the code of a run. Members do nothing but report, so what the process
uses of a core is the cost of the account. It writes that as JSON to standard output.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ensemble.bench.energy.child import end_with_parent
from ensemble.bench.energy.metered_ranks import EVERY_S
from ensemble.controller.actions import Log
from ensemble.controller.session_state import SessionState
from ensemble.executors.node_services import NodeServices
from ensemble.executors.process_pool import ProcessPool, dispatch
from ensemble.executors.spawn import ForkServer
from ensemble.schedule import Node
from ensemble.spec import Ensemble, Identity
from ensemble.store import EventLog, RunDir, RunState, RunStatus
from ensemble.train.job import Job
from pipelines import Pipeline, sources

NODE = "local"
#: Parts of the account, in the order of the table.
SAMPLE, FEEDER, RANKS = "node: power and GPUs", "node: feeder's reports", "ranks: usage events"
RECEIVE, LOG, ACCOUNT = (
    "executor: waiting for and decoding events",
    "controller: thinning and logging",
    "controller: account",
)
PARTS = (SAMPLE, FEEDER, RANKS, RECEIVE, LOG, ACCOUNT)

Event = dict[str, Any]
T = TypeVar("T")


class Spent:
    """CPU-seconds of this thread by part."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)

    def call(self, part: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function and count what it takes."""
        start_s = time.thread_time()
        try:
            return function(*arguments)
        finally:
            self.cpu_s[part] += time.thread_time() - start_s


class Figures:
    """What a controller does with the figures, on a log of its own.

    Args:
        began: when the run has begun, in seconds of the monotonic clock.
        events: the first of the run's log.
    """

    def __init__(self, folder: Path, began: float, events: Sequence[Event]) -> None:
        folder.mkdir()
        self._log = EventLog(RunDir(folder).events)
        self._status = RunStatus(RunDir(folder))
        self._state = SessionState(RunState())
        self._state.set_time(began, self._log.read_clock())
        self.logged = 0
        self._log_all(events)
        self._status.update()  # figures alone are left to be accounted
        self.logged = 0

    def handle(self, events: Sequence[Event]) -> None:
        """Log events as a session does, thinned, and what is due."""
        self._state.set_time(time.monotonic(), self._log.read_clock())
        self._log_all(events)

    def _log_all(self, events: Sequence[Event]) -> None:
        state = self._state
        for event in events:
            state.log(event["type"], **{key: event[key] for key in event if key != "type"})
        state.log_due()
        lines = [(each.event, each.line) for each in state.drain_actions() if isinstance(each, Log)]
        self._log.write(lines)
        self.logged += len(lines)

    def account(self) -> None:
        """Read the log back, and attribute the energy of each interval once, as a run does while its log grows."""
        self._status.update()
        self._status.account.sum_up()

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _train(member: Any) -> None:
    """What the members would run; nobody calls it."""


def declare(members: int) -> tuple[Ensemble, list[Identity]]:
    """A run of members that read one stream."""
    pipeline = Pipeline(sources.arrays(image=np.zeros((256, 16), np.float32)), seed=0)
    ensemble = Ensemble(
        name="overhead", recipe=_train, train=pipeline, members=[{}] * members, objective="accuracy"
    )
    return ensemble, [ensemble.identify(number) for number in range(members)]


def make_job(run_dir: Path, identity: Identity, gpu: str | None) -> Job:
    """Of the only rank of a member."""
    return Job(
        run_dir=str(run_dir),
        identity=identity,
        attempt=0,
        rank=0,
        rendezvous=None,
        interface=None,
        device="cpu" if gpu is None else "cuda:0",
        feeder=None,
        node=NODE,
        gpu=gpu,
    )


def first_events(node: Node, jobs: Sequence[Job]) -> Iterator[Event]:
    """The beginning of a log: the members on the node."""
    yield {"type": "run_started", "name": "overhead", "members": len(jobs), "epochs": 1}
    yield {"type": "node", **node.as_event()}
    for job in jobs:
        who = {"member": job.identity.member, "attempt": 0}
        yield {"type": "member", **job.identity.as_dict()}
        yield {"type": "placed", **who, "node": node.name, "devices": [job.gpu], "cohort": 0, "feeder": None}
        yield {"type": "started", **who, "epoch": 0}


def list_on_gpus(workers: ProcessPool) -> str:
    """The state of NVML's stand-in in which the workers are busy on their GPUs."""
    on = [(process.gpu, pid) for pid, process in workers.list_processes().items()]
    return "".join(f"{gpu} process {pid} 0.5\n{gpu} util {pid} 10\n" for gpu, pid in on)


class MeteredNode:
    """The loop of a local executor and a controller, in which every part is timed.

    Args:
        members: processes, one for each.
    """

    def __init__(self, members: int, folder: Path) -> None:
        self._folder = folder
        self._selector, self._queue = selectors.DefaultSelector(), list[Event]()
        ensemble, identities = declare(members)
        self._services = NodeServices(NODE, ensemble, self._selector, self._queue.append)
        self.node = self._services.describe()
        self._services.start_feeder(0, members, 64)
        self._feeder = set(self._selector.get_map())
        self._workers = ProcessPool(NODE, self._selector, self._queue.append, self._start_fork_server)
        self._workers.directory = self._services.directory
        self._services.attach(self._workers)
        gpus = self.node.gpu_ids or (None,)
        self._jobs = [make_job(folder, each, gpus[each.number % len(gpus)]) for each in identities]

    def _start_fork_server(self) -> ForkServer:
        return ForkServer(self._services.directory, "ensemble.bench.energy.metered_ranks")

    def run(self, seconds: float, ages: Mapping[str, float]) -> dict[str, Any]:
        """Measure for so many seconds at each age of the run.

        Args:
            ages: by name, seconds since the beginning of the run.

        Returns:
            Fields of `ensemble.bench.energy.overhead.Overhead`, and of each age the CPU-seconds a second by part.
        """
        try:
            for number, job in enumerate(self._jobs):
                until = time.monotonic() + EVERY_S / len(self._jobs)
                self._workers.launch([job], [job.gpu])
                while time.monotonic() < until or len(self._workers.list_pids()) <= number:
                    dispatch(self._selector, max(0.0, until - time.monotonic()))
            self._wait("feeder", 1)
            if "STAND_IN_STATE" in os.environ:
                Path(os.environ["STAND_IN_STATE"]).write_text(list_on_gpus(self._workers), encoding="utf-8")
            measured = {name: self._measure(seconds, age_s) for name, age_s in ages.items()}
            keys = ("cpu_s", "events_per_s", "logged_per_s")
            by_age = {key: {name: each[key] for name, each in measured.items()} for key in keys}
            return {**by_age, "gpus": len(self.node.gpu_ids), "source": self.node.power["source"]}
        finally:
            self._workers.close()
            self._services.close()

    def _wait(self, kind: str, count: int) -> list[Event]:
        """Wait for events of a kind.

        Raises:
            RuntimeError: a process of the study has ended.
        """
        while len(found := [event for event in self._queue if event["type"] == kind]) < count:
            dispatch(self._selector, None)
            for event in self._queue:
                if event["type"] in ("feeder_exited", "exited"):
                    raise RuntimeError(f"a process of the study has ended: {event}")
        return found

    def _measure(self, seconds: float, age_s: float) -> dict[str, Any]:
        """CPU-seconds by part and second, of a run of that age."""
        first = list(first_events(self.node, self._jobs))
        figures = Figures(self._folder / f"age-{age_s:g}", time.monotonic() - age_s, first)
        spent, handled = Spent(), 0
        for number, job in enumerate(self._jobs):
            share = number / len(self._jobs)
            self._workers.send(job.identity.member, "age", age_s=age_s, share=share)
        self._wait("aged", len(self._jobs))
        gc.collect()  # of what the process has imported and prepared
        self._services.sample()
        dispatch(self._selector, 0)  # what has arrived meanwhile
        self._queue.clear()
        began, before_s = time.monotonic(), time.thread_time()
        while (now := time.monotonic()) < began + seconds:
            spent.call(SAMPLE, self._services.sample)
            timeout_s = max(0.0, self._services.next_sample - now)
            for key, _ in self._selector.select(0 if self._queue else timeout_s):
                if key.fd in self._feeder:
                    spent.call(FEEDER, key.data)
                else:
                    key.data()
            handled += len(self._queue)
            spent.call(LOG, figures.handle, self._queue)
            self._queue.clear()
        all_s, wall_s = time.thread_time() - before_s, time.monotonic() - began
        spent.cpu_s[RECEIVE] = all_s - sum(spent.cpu_s.values())
        spent.call(ACCOUNT, figures.account)
        figures.close()
        for job in self._jobs:
            self._workers.send(job.identity.member, "meter")
        spent.cpu_s[RANKS] = sum(each["cpu_s"] for each in self._wait("metered", len(self._jobs)))
        return {
            "cpu_s": {part: spent.cpu_s[part] / wall_s for part in PARTS},
            "events_per_s": handled / wall_s,
            "logged_per_s": figures.logged / wall_s,
        }


def main() -> None:
    """Measure and print the result."""
    end_with_parent()
    config = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        node = MeteredNode(config["members"], Path(folder))
        print(json.dumps(node.run(config["seconds"], config["ages"])))


if __name__ == "__main__":
    main()
