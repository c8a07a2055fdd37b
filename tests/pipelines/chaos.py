"""Chaos: processes are killed and stopped at random, seeded points; then the ledger is checked.

    plan (from a seed) -> processes -> faults -> ledger -> checks

`python tests/pipelines/chaos.py SEED ...` runs seeds alone and prints each plan and how it ended. Without seeds
it reads them from its standard input, one a line, and answers each with a JSON line.

The ledger has, for each rank of each member, the batches along the lineage of its last life: a member that is
killed begins again at its last checkpoint, and what it had read after that counts no more.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pprint
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from chaos_checks import (
    Failed,
    Lineage,
    check_ledger,
    check_nothing_left,
    children,
    descendants,
    named_memory,
    open_descriptors,
)
from chaos_plan import BAD, Fault, Plan, draw
from chaos_processes import Child, consume, feed, record

LIMIT_S = 300.0
_SUBREAPER = 36  # linux/prctl.h: PR_SET_CHILD_SUBREAPER


class Run:
    """One run of a plan."""

    def __init__(self, plan: Plan, directory: Path, *, verbose: bool = False) -> None:
        self.plan = plan
        self.directory = directory
        self.read = 0
        self.detached = 0
        self.events: list[str] = []
        self._verbose = verbose
        self._began = time.monotonic()
        self._still = [record(batch) for batch in plan.still().loader(7, 1)]
        self._selector = selectors.DefaultSelector()
        self._faults = list(plan.faults)
        self._timed: list[tuple[float, Callable[[], None]]] = []
        self._feeders: dict[int, Child] = {}
        self._ready: set[Child] = set()
        self._alive: set[Child] = set()
        self.lineages = [Lineage(m, [[] for _ in range(m.world)]) for m in plan.members]

    # --- events -----------------------------------------------------------------------------------------

    def _say(self, what: str) -> None:
        self.events.append(f"{time.monotonic() - self._began:6.3f} s, {self.read:4d} batches: {what}")
        if self._verbose:
            print(self.events[-1], flush=True)

    def run(self) -> None:
        """Go through the plan; returns when every member has read what it was to read."""
        try:
            for stream in range(self.plan.feeders):
                self._later(0.3 if self.plan.late_feeder else 0.0, functools.partial(self._feed, stream))
            while not self.plan.late_feeder and len(self._ready) < self.plan.feeders:
                self._wait()
            while not all(lineage.done for lineage in self.lineages):
                self._join()
                self._faults_due()
                self._wait()
            for _, what in self._timed:
                what()  # whoever is stopped goes on; a feeder that was to come comes
            for stream, feeder in list(self._feeders.items()):
                self._end_feeder(stream, feeder)
        finally:
            for child in list(self._alive):
                self._bury(child)
            self._selector.close()

    def _join(self) -> None:
        busy = any(lineage.joined and not lineage.done for lineage in self.lineages)
        for lineage in self.lineages:
            if not lineage.joined and (lineage.member.join_at <= self.read or not busy):
                lineage.joined = busy = True
                self._start(lineage)

    def _faults_due(self) -> None:
        while self._faults and self._faults[0].at <= self.read:
            fault = self._faults.pop(0)
            self._later(fault.delay_s, functools.partial(self._strike, fault))

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timed.append((time.monotonic() + seconds, what))
        self._timed.sort(key=lambda timed: timed[0])

    def _wait(self) -> None:
        """Take what is said until something is to be done."""
        now = time.monotonic()
        if now - self._began > LIMIT_S:
            raise Failed(
                f"it goes on for ever: {[len(r) for li in self.lineages for r in li.ledger]} batches read"
            )
        patience = self._timed[0][0] - now if self._timed else 1.0
        for key, _ in self._selector.select(max(0.0, min(patience, 1.0))):
            key.data()
        while self._timed and self._timed[0][0] <= time.monotonic():
            self._timed.pop(0)[1]()

    def _fork(self, body: Any, hear: Callable[[Child], None]) -> Child:
        child = Child(body)
        self._alive.add(child)

        def listen() -> None:
            if child in self._alive:  # not buried with another's rank, a moment ago
                hear(child)

        self._selector.register(child.reading, selectors.EVENT_READ, listen)
        return child

    def _bury(self, child: Child) -> None:
        if child in self._alive:
            self._alive.discard(child)
            self._selector.unregister(child.reading)
            child.close()

    # --- members ----------------------------------------------------------------------------------------

    def _start(self, lineage: Lineage) -> None:
        member, every = lineage.member, lineage.member.checkpoint_every
        kept = min(map(len, lineage.ledger)) // every * every
        for each in lineage.ledger:
            del each[kept:]
        lineage.lives += 1
        lineage.complete.clear()
        known = range(*member.epochs) if not member.boundary else lineage.epochs
        self._say(f"{member.name} starts at its batch {kept} of {known}")

        def body(rank: int) -> Any:
            address, still = self._address(member.stream), self._still
            return lambda say, _: consume(self.plan, member, rank, known, kept, address, still, say)

        lineage.ranks = [
            self._fork(body(rank), functools.partial(self._from_rank, lineage, rank))
            for rank in range(member.world)
        ]

    def _from_rank(self, lineage: Lineage, rank: int, child: Child) -> None:
        for said in child.lines():
            if "batch" in said:
                lineage.ledger[rank].append(said["batch"])
                self.read += 1
            elif "epochs" in said:
                if lineage.epochs is None:
                    lineage.epochs = range(*said["epochs"])
            elif "stats" in said:
                lineage.complete.add(rank)
                lineage.shared += said["stats"]["shared_batches"]
            else:
                raise Failed(f"{lineage.member.name}, rank {rank}: {said['error']}")
        if not child.ended:
            return
        self._bury(child)
        if rank not in lineage.complete:
            # As a controller does: a member goes on as a whole, from what all of its ranks have.
            for other in lineage.ranks:
                self._bury(other)
            self._start(lineage)

    # --- feeders ----------------------------------------------------------------------------------------

    def _address(self, stream: int) -> str:
        return str(self.directory / f"stream-{stream}" / "socket")

    def _feed(self, stream: int) -> None:
        at_once = [m for m in self.plan.members if m.stream == stream and not m.join_at]
        expect = len(at_once) if self.plan.gate else 0
        address = self._address(stream)
        self._say(f"feeder {stream} starts")
        self._feeders[stream] = self._fork(
            lambda say, listening: feed(self.plan, address, expect, say, listening), self._from_feeder
        )

    def _from_feeder(self, child: Child) -> None:
        for said in child.lines():
            if "error" in said:
                raise Failed(f"a feeder: {said['error']}")
            self._ready.add(child)
        if child.ended:
            raise Failed("a feeder ended by itself")

    def _end_feeder(self, stream: int, feeder: Child) -> None:
        """Let it end properly, and look at its counts."""
        feeder.ask_to_end()
        said: list[dict[str, Any]] = []
        with selectors.DefaultSelector() as waiting:
            waiting.register(feeder.reading, selectors.EVENT_READ)
            while not feeder.ended:
                if not waiting.select(LIMIT_S):
                    raise Failed(f"feeder {stream} does not end")
                said += feeder.lines()
        stats = next((each["stats"] for each in said if "stats" in each), None)
        if stats is None:
            raise Failed(f"feeder {stream} ended with {said}")
        if stats["failure"] is not None:
            raise Failed(f"feeder {stream}: {stats['failure']}")
        known = set(map(str, BAD)) if self.plan.kind == "skip" else set()
        if not set(stats["bad"]) <= known:
            raise Failed(f"feeder {stream} could not prepare {stats['bad']}")
        self.detached += stats["detached"]
        self._bury(feeder)

    # --- faults -----------------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is None:
            return
        name = f"{fault.what} {fault.whom} ({fault.which})"
        try:
            if fault.what.startswith("stop"):
                self._say(f"{name} for {fault.seconds:.3f} s")
                os.kill(victim, signal.SIGSTOP)
                self._later(fault.seconds, functools.partial(self._go_on, victim))
                return
            self._say(name)
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return  # it has just ended by itself
        if fault.what == "kill feeder":
            self._bury(self._feeders.pop(fault.whom))
            self._later(fault.seconds, functools.partial(self._feed, fault.whom))

    def _victim(self, fault: Fault) -> int | None:
        """The process that is meant, if it lives; only ever one of our own descendants."""
        if fault.what.endswith("member"):
            ranks = [rank for rank in self.lineages[fault.whom].ranks if rank in self._alive]
            return ranks[fault.which % len(ranks)].pid if ranks else None
        feeder = self._feeders.get(fault.whom)
        if feeder is None or fault.what.endswith("feeder"):
            return feeder.pid if feeder else None
        workers = sorted(children(feeder.pid))
        return workers[fault.which % len(workers)] if workers else None

    def _go_on(self, pid: int) -> None:
        if pid in descendants():
            os.kill(pid, signal.SIGCONT)


def run_seed(seed: int, *, verbose: bool = False) -> dict[str, Any]:
    """Run a seed's plan and check it; what happened, as a JSON value, `error` None where all holds."""
    plan = draw(seed)
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    before = open_descriptors(), named_memory()
    (directory / "tmp").mkdir()
    tempfile.tempdir = str(directory / "tmp")
    began = time.monotonic()
    run = Run(plan, directory, verbose=verbose)
    error = None
    try:
        run.run()
        for lineage in run.lineages:
            check_ledger(plan, lineage)
        check_nothing_left(directory, before)
    except Failed as failed:
        error = str(failed)
    except Exception:
        error = traceback.format_exc()
    finally:
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        tempfile.tempdir = None
        shutil.rmtree(directory, ignore_errors=True)
    return {
        "seed": seed,
        "error": error,
        "seconds": round(time.monotonic() - began, 2),
        "batches": run.read,
        "shared": sum(lineage.shared for lineage in run.lineages),
        "detached": run.detached,
        "lives": sum(lineage.lives for lineage in run.lineages),
        "events": run.events,
        "plan": pprint.pformat(plan, width=140),
    }


def main(arguments: list[str]) -> int:
    """Run the seeds given, or those that are asked for on standard input."""
    import ctypes

    warnings.filterwarnings("ignore", message="left out")
    torch.set_num_threads(1)  # no thread is there that a fork would lose
    torch.zeros(1)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    if not arguments:
        for line in sys.stdin:
            print(json.dumps(run_seed(int(line))), flush=True)
        return 0
    failed = 0
    for seed in map(int, arguments):
        print(pprint.pformat(draw(seed), width=140))
        outcome = run_seed(seed, verbose=True)
        said = {key: value for key, value in outcome.items() if key not in ("plan", "events")}
        print(f"seed {seed}: {said}", flush=True)
        failed += outcome["error"] is not None
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
