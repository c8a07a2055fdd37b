"""Goes through a plan of faults: starts a driver, breaks what the plan says, goes on after each end of it.

seed -> plan -> driver -> faults -> driver again ... -> checks
"""

from __future__ import annotations

import contextlib
import os
import pprint
import random
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from faults_cluster import CHILD_PATH, Driver, Nodes, kill_all, list_left, processes_with
from faults_members import declared, lost_and_doubled
from kit.finished_runs import finished_hashes, read_state
from kit.leftovers import named_memory, new_named_memory

import ensemble
from ensemble.events import Epoch, to_dict
from ensemble.store import RunState, StoreError
from ensemble.store.event_log import read_batches

#: Member i is this wide in every plan, so that one undisturbed run tells the weights that it must end with.
WIDTHS = (1, 2, 1, 1, 1)
EPOCHS = 8

WORKERS = ("kill worker", "kill worker", "kill rank", "stop worker")
OTHERS = ("kill feeder", "stop feeder", "kill fork server", "kill driver", "end driver", "interrupt driver")
LOCAL = WORKERS + OTHERS
RAY = (*LOCAL, "kill agent", "kill node", "kill node")


class Fault(NamedTuple):
    """Something that goes wrong: a verb and whom it befalls.

    "end" is SIGTERM, "interrupt" SIGINT, "stop" SIGSTOP for some seconds. It is due a delay after all members have
    told of `at` epochs, at -1: after the driver's start; `which` is the share of those whom it may befall.
    """

    what: str
    at: int
    delay_s: float
    which: float
    seconds: float


class Plan(NamedTuple):
    """One run on so many nodes of Ray, 1 for local, and its faults.

    A ring of small capacity lets who stands still keep the others waiting, or be detached.
    """

    seed: int
    executor: str
    nodes: int
    widths: tuple[int, ...]
    sharing: str
    stall_policy: str
    capacity: int
    step_s: float
    faults: tuple[Fault, ...]


def draw(seed: int) -> Plan:
    """The plan of a seed; even ones are on this machine alone, odd ones on several nodes."""
    rng = random.Random(seed)
    executor = ("local", "ray")[seed % 2]
    nodes = rng.choice((2, 3)) if executor == "ray" else 1
    members = rng.choice((3, 4, 5))
    total = members * EPOCHS
    faults: list[Fault] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        what = rng.choice(RAY if executor == "ray" else LOCAL)
        if what == "kill node" and any(fault.what == what for fault in faults):
            what = "kill worker"
        early = what.endswith("driver") and rng.random() < 0.25
        at = -1 if early else rng.randrange(int(total * 0.8))
        delay_s = rng.uniform(0.0, 8.0) if early else rng.uniform(0.0, 0.3)
        faults.append(Fault(what, at, delay_s, rng.random(), rng.uniform(0.2, 1.5)))
    sharing = rng.choice(("node", "auto") if executor == "local" else ("single", "multi", "all", "node"))
    policy, capacity = rng.choice(("wait", "detach")), rng.choice((64, 256))
    in_order = tuple(sorted(faults, key=lambda fault: (fault.at, fault.delay_s)))
    return Plan(seed, executor, nodes, WIDTHS[:members], sharing, policy, capacity, 0.04, in_order)


LIMIT_S = 800.0
SIGNALS = {"kill": signal.SIGKILL, "end": signal.SIGTERM, "interrupt": signal.SIGINT}


class Failed(Exception):
    """A check that does not hold."""


def undisturbed(directory: Path) -> dict[str, str | None]:
    """The weights of all members where each prepares for itself and nothing goes wrong."""
    made = declared(directory / "account", WIDTHS, epochs=EPOCHS, step_s=0.0, sharing="independent")
    ensemble.submit(made, directory / "run", "local").wait()
    return finished_hashes(directory / "run")


class Conductor:
    """One run of a plan, in a directory of its own; what was done, and which faults found whom they were for."""

    def __init__(self, plan: Plan, directory: Path, nodes: Nodes | None = None) -> None:
        self.plan, self.nodes = plan, nodes
        self.run_dir, self.account = directory / "run", directory / "account"
        self.tmp = Path("/tmp") / f"t{secrets.token_hex(4)}"
        self.said, self.hits, self.events = list[str](), list[str](), list[dict[str, Any]]()
        self._began, self._driver_began, self._hit = time.monotonic(), 0.0, False
        self._offset, self._epochs, self._faults = 0, 0, list(plan.faults)
        self._timed: list[tuple[float, Callable[[], None]]] = []
        self._driver: Driver | None = None
        self._finished: dict[str, int] = {}

    def run(self) -> RunState:
        memory = named_memory()
        self.tmp.mkdir(mode=0o700)
        try:
            self._start()
            while not self._over():
                self._wait()
            for _, what in self._timed:
                what()
            until = time.monotonic() + 120.0
            while left := self._list_left(memory):
                if time.monotonic() > until:
                    raise Failed(f"left behind: {left}")
                time.sleep(0.05)
            return read_state(self.run_dir)
        finally:
            kill_all([*self._mine(), *([psutil.Process(self._driver.process.pid)] if self._is_driving() else [])])
            shutil.rmtree(self.tmp, ignore_errors=True)

    def _say(self, what: str) -> None:
        self.said.append(f"{time.monotonic() - self._began:6.2f} s, {self._epochs:3d} epochs: {what}")

    def _is_driving(self) -> bool:
        return self._driver is not None and self._driver.process.poll() is None

    def _start(self) -> None:
        self._say("the driver starts")
        plain = ("executor", "widths", "step_s", "sharing", "stall_policy", "capacity")
        told = {"epochs": EPOCHS, **{name: getattr(self.plan, name) for name in plain}}
        environment = {**os.environ, "PYTHONPATH": CHILD_PATH} if self.nodes is None else self.nodes.environment
        here = {"FAULTS_RUN": str(self.tmp), "TMPDIR": str(self.tmp)}
        self._driver = Driver(self.run_dir, {**environment, **here}, **told)
        self._driver_began, self._hit = time.monotonic(), False

    def _over(self) -> bool:
        """Whether the run has come to its end; a driver that was hit is followed by another one."""
        assert self._driver is not None
        if self._is_driving():
            return False
        code, said = self._driver.end()
        self._read()
        self._say(f"the driver ended with {code}")
        if code == 0:
            return True
        if not self._hit:
            raise Failed(f"the driver ended with {code}: {said[-3000:]}")
        if (self.run_dir / "events.jsonl").exists():
            state = read_state(self.run_dir)
            self._finished |= {m.id: m.attempts for m in state.members.values() if m.state == "finished"}
        self._start()
        return False

    def _wait(self) -> None:
        if time.monotonic() - self._began > LIMIT_S:
            raise Failed(f"it goes on for ever; {self._epochs} epochs were told of")
        time.sleep(0.02)
        self._read()
        now = time.monotonic()
        while self._faults and (self._faults[0].at < 0 or self._epochs >= self._faults[0].at):
            fault = self._faults.pop(0)
            begin = self._driver_began if fault.at < 0 else now
            self._later(begin + fault.delay_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        while self._timed and self._timed[0][0] <= now:
            self._timed.pop(0)[1]()

    def _later(self, at: float, what: Callable[[], None]) -> None:
        self._timed.append((at, what))
        self._timed.sort(key=lambda timed: timed[0])

    def _read(self) -> None:
        with contextlib.suppress(StoreError):
            for new, offset in read_batches(self.run_dir / "events.jsonl", self._offset):
                self._offset = offset
                self.events += map(to_dict, new)
                self._epochs += sum(isinstance(event, Epoch) for event in new)

    def _strike(self, fault: Fault) -> None:
        verb, _, whom = fault.what.partition(" ")
        if whom == "node":
            self._kill_node(fault)
            return
        victims = sorted(self._victims(whom))
        if not victims:
            self._say(f"{fault.what}: there is none")
            return
        pid = victims[int(fault.which * len(victims))]
        try:
            if verb == "stop":
                os.kill(pid, signal.SIGSTOP)
                self._later(time.monotonic() + fault.seconds, lambda: self._go_on(pid))
            else:
                if whom == "driver":
                    self._hit = True
                os.kill(pid, SIGNALS[verb])
        except ProcessLookupError:
            self._say(f"{fault.what}: it has just ended")
            return
        self.hits.append(fault.what)
        self._say(f"{fault.what}: {pid}" + (f" for {fault.seconds:.2f} s" if verb == "stop" else ""))

    def _go_on(self, pid: int) -> None:
        if pid in {process.pid for process in self._mine()}:
            os.kill(pid, signal.SIGCONT)

    def _kill_node(self, fault: Fault) -> None:
        assert self.nodes is not None
        others = [number for number in sorted(self.nodes.alive) if number]  # the head has Ray's own state
        number = others[int(fault.which * len(others))]
        self._say(f"{fault.what}: {number}")
        self.nodes.kill(number)
        self.hits.append(fault.what)

    def _mine(self) -> list[psutil.Process]:
        here = processes_with("FAULTS_RUN", str(self.tmp))
        return here + (self.nodes.ours() if self.nodes is not None else [])

    def _victims(self, whom: str) -> list[int]:
        if whom == "driver":
            return [self._driver.process.pid] if self._driver is not None and self._is_driving() else []
        mine = self._mine()
        words = {"feeder": "pipelines.feeder.process", "agent": "ray::NodeAgent"}
        if whom in words:
            return [p.pid for p in mine if _runs(p, words[whom])]
        forks = {p.pid: p for p in mine if _runs(p, "ensemble.executors.forkserver")}
        servers = [pid for pid, p in forks.items() if _parent(p) not in forks]
        if whom == "fork server":
            return servers
        second = {e["pid"] for e in self.events if e["type"] == "usage" and e.get("rank") == 1}
        return [pid for pid in forks if pid not in servers and (whom != "rank" or pid in second)]

    def _list_left(self, memory: set[str]) -> list[str]:
        found = list_left(self._mine(), self.tmp)
        for number in self.nodes.alive if self.nodes else ():
            found += list_left([], self.nodes.tmp(number))  # type: ignore[union-attr]
        if self.nodes is None:  # Ray's nodes keep their object stores there
            found += [f"/dev/shm/{name}" for name in new_named_memory(memory, 0.0)]
        return found

    def check(self, state: RunState, expected: Mapping[str, str | None]) -> None:
        if state.ended is None or state.ended.type != "run_finished":
            raise Failed(f"the run ended with {state.ended}")
        wrong = []
        for number, width in enumerate(self.plan.widths):
            member = state.members[f"member-{number}"]
            lost, doubled = lost_and_doubled(self.account, member.id, width, EPOCHS)
            if member.state != "finished":
                wrong.append(f"{member.id} is {member.state}: {member.error}")
            if lost or doubled:
                wrong.append(f"{member.id} missed {lost} samples and trained on {doubled} twice")
            if member.weights_sha256 != expected[member.id]:
                wrong.append(f"{member.id} has other weights")
            if member.attempts != self._finished.get(member.id, member.attempts):
                wrong.append(f"{member.id} had finished and was trained again")
        if wrong:
            raise Failed("; ".join(wrong))


def _runs(process: psutil.Process, what: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(what in word for word in process.cmdline())
    return False


def _parent(process: psutil.Process) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(process.ppid())
    return None


def run_seed(seed: int, expected: Mapping[str, str | None], nodes: Nodes | None = None) -> None:
    """Run a seed's plan and check it; what went wrong is told with the plan and all that was done."""
    plan, directory = draw(seed), Path(tempfile.mkdtemp(prefix="faults-"))
    if nodes is not None:
        nodes.have(plan.nodes)
    conductor = Conductor(plan, directory, nodes)
    try:
        conductor.check(conductor.run(), expected)
        if not conductor.hits:
            raise Failed("nothing was hit")
    except Failed as failed:
        story = [pprint.pformat(plan, width=140), *conductor.said, f"see {directory}"]
        pytest.fail("\n".join([f"{failed}\n", *story]), pytrace=False)
    shutil.rmtree(directory)
