"""The node and the controller of the overhead study: `python -m ensemble.bench.energy.metered_node CONFIG`.

One process, as under the local executor: it samples power and GPUs, reads a feeder's reports and the ranks' usage,
and thins, logs and accounts all of it, with the code of a run. Members do nothing but report, so what the process
uses of a core is the cost of the account. It writes that as JSON to standard output.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import os
import selectors
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ensemble.bench.energy.metered_ranks import EVERY_S
from ensemble.bench.launch.child import end_with_parent
from ensemble.controller.actions import Log
from ensemble.controller.attempt_table import AttemptTable
from ensemble.controller.node_table import NodeTable
from ensemble.controller.session_state import SessionState
from ensemble.events import Report
from ensemble.executors.node_services import NodeServices
from ensemble.executors.process_pool import ProcessPool, dispatch
from ensemble.executors.spawn import ForkServer
from ensemble.schedule import Node
from ensemble.spec import Ensemble
from ensemble.store import EventLog, RunDir, RunState, RunStatus
from ensemble.train.job import Job
from pipelines import Pipeline, sources

NODE = "local"
#: Parts of the account, in the order of the table.
SAMPLE, FEEDER, RANKS = "node: power and GPUs", "node: feeder's reports", "ranks: usage events"
RECEIVE, LOG = "executor: waiting for and decoding events", "controller: thinning and logging"
ACCOUNT = "controller: account"
PARTS = (SAMPLE, FEEDER, RANKS, RECEIVE, LOG, ACCOUNT)


class Figures:
    """What a controller does with the figures, on a log of its own.

    Args:
        began: when the run has begun, in seconds of the monotonic clock.
        events: the first of the run's log.
    """

    def __init__(self, folder: Path, began: float, events: Iterable[Report]) -> None:
        folder.mkdir()
        self.log = EventLog(RunDir(folder).events)
        self._status = RunStatus(RunDir(folder))
        run = RunState()
        self._state = SessionState(run, NodeTable(run), AttemptTable(run))
        self._state.set_time(began, self.log.read_clock())
        self._log_all(events)
        self._status.update()  # figures alone are left to be accounted
        self.logged = 0

    def handle(self, events: Sequence[Report]) -> None:
        """Log events as a session does, thinned, and what is due."""
        self._state.set_time(time.monotonic(), self.log.read_clock())
        self.logged += self._log_all(events)

    def _log_all(self, events: Iterable[Report]) -> int:
        for event in events:
            self._state.log(event["type"], **{key: event[key] for key in event if key != "type"})
        self._state.log_due()
        lines = [(each.event, each.line) for each in self._state.drain_actions() if isinstance(each, Log)]
        self.log.write(lines)
        return len(lines)

    def account(self) -> None:
        """Read the log back, and attribute the energy of each interval once, as a run does while its log grows."""
        self._status.update()
        self._status.used.read()


def _train(member: Any) -> None:
    """What the members would run; nobody calls it."""


def first_events(node: Node, jobs: Sequence[Job]) -> Iterator[Report]:
    """The beginning of a log: the members on the node."""
    yield {"type": "run_started", "name": "overhead", "members": len(jobs), "epochs": 1}
    yield {"type": "node", **node.as_event()}
    for job in jobs:
        who = {"member": job.identity.member, "attempt": 0}
        yield {"type": "member", **job.identity.as_dict()}
        yield {"type": "placed", **who, "node": node.name, "devices": [job.gpu], "cohort": 0, "feeder": None}
        yield {"type": "started", **who, "epoch": 0}


class MeteredNode:
    """The loop of a local executor and a controller, in which every part is timed.

    Args:
        members: processes, one for each; they read one stream.
    """

    def __init__(self, members: int, folder: Path) -> None:
        self._folder = folder
        self._selector, self._queue = selectors.DefaultSelector(), list[Report]()
        pipeline = Pipeline(sources.arrays(image=np.zeros((256, 16), np.float32)), seed=0)
        declared: dict[str, Any] = {"train": pipeline, "members": [{}] * members, "objective": "accuracy"}
        ensemble = Ensemble(name="overhead", recipe=_train, **declared)
        self._services = NodeServices(NODE, ensemble, self._selector, self._queue.append)
        self.node = self._services.describe()
        self._services.start_feeder(0, members, 64)
        self._feeder = set(self._selector.get_map())
        start = functools.partial(ForkServer, self._services.directory, "ensemble.bench.energy.metered_ranks")
        self._workers = ProcessPool(NODE, self._selector, self._queue.append, start)
        self._workers.directory = self._services.directory
        self._services.attach(self._workers)
        gpus = itertools.cycle(self.node.gpu_ids or (None,))
        only: dict[str, Any] = {"attempt": 0, "rank": 0, "rendezvous": None, "interface": None, "feeder": None}
        self._jobs = [
            Job(
                run_dir=str(folder),
                identity=ensemble.identify(number),
                device="cpu" if gpu is None else "cuda:0",
                node=NODE,
                gpu=gpu,
                **only,
            )
            for number, gpu in zip(range(members), gpus, strict=False)
        ]

    def run(self, seconds: float, ages: Mapping[str, float]) -> dict[str, Any]:
        """Measure for so many seconds at each age of the run.

        Args:
            ages: by name, seconds since the beginning of the run.

        Returns:
            "gpus", "source", of the node's power, and by age "cpu_s", the CPU-seconds a second of each part,
            "events_per_s" and "logged_per_s", what was handled and what of it was logged.
        """
        try:
            for number, job in enumerate(self._jobs):
                until = time.monotonic() + EVERY_S / len(self._jobs)
                self._workers.launch([job], [job.gpu])
                while time.monotonic() < until or len(self._workers.list_pids()) <= number:
                    dispatch(self._selector, max(0.0, until - time.monotonic()))
            self._wait("feeder", 1)
            if "STAND_IN_STATE" in os.environ:  # of NVML's stand-in: the workers are busy on their GPUs
                on = [(process.gpu, pid) for pid, process in self._workers.list_processes().items()]
                busy = "".join(f"{gpu} process {pid} 0.5\n{gpu} util {pid} 10\n" for gpu, pid in on)
                Path(os.environ["STAND_IN_STATE"]).write_text(busy, encoding="utf-8")
            measured = {name: self._measure(seconds, age_s) for name, age_s in ages.items()}
            keys = ("cpu_s", "events_per_s", "logged_per_s")
            by_age = {key: {name: each[key] for name, each in measured.items()} for key in keys}
            return {**by_age, "gpus": len(self.node.gpu_ids), "source": self.node.power["source"]}
        finally:
            self._workers.close()
            self._services.close()

    def _wait(self, kind: str, count: int) -> list[Report]:
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
        first = first_events(self.node, self._jobs)
        figures = Figures(self._folder / f"age-{age_s:g}", time.monotonic() - age_s, first)
        spent, handled = dict.fromkeys(PARTS, 0.0), 0

        def count(part: str, function: Callable[..., object], *arguments: Any) -> None:
            start_s = time.thread_time()
            function(*arguments)
            spent[part] += time.thread_time() - start_s

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
            count(SAMPLE, self._services.sample)
            timeout_s = max(0.0, self._services.next_sample - now)
            for key, _ in self._selector.select(0 if self._queue else timeout_s):
                if key.fd in self._feeder:
                    count(FEEDER, key.data)
                else:
                    key.data()
            handled += len(self._queue)
            count(LOG, figures.handle, self._queue)
            self._queue.clear()
        all_s, wall_s = time.thread_time() - before_s, time.monotonic() - began
        spent[RECEIVE] = all_s - sum(spent.values())
        count(ACCOUNT, figures.account)
        figures.log.close()
        for job in self._jobs:
            self._workers.send(job.identity.member, "meter")
        spent[RANKS] = sum(each["cpu_s"] for each in self._wait("metered", len(self._jobs)))
        return {
            "cpu_s": {part: cpu_s / wall_s for part, cpu_s in spent.items()},
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
