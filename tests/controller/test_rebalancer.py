"""Who reads which feeder while members move, and members that return wider, against a simulated executor."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from kit.event_dicts import fold, read_events
from test_controller import Simulated, an_ensemble

from ensemble import Member
from ensemble.controller.changes import check_same
from ensemble.controller.controller import Controller
from ensemble.store import EventLog, RunDir, StoreError


class Obedient(Simulated):
    """Its members say little by themselves: they do what they are told."""

    def launch(self, jobs: Any, devices: Any) -> None:
        super().launch(jobs, devices)
        self.scripts[jobs[0].identity.member] = self.scripts[jobs[0].identity.member][:1]

    def send(self, member: str, command: str, **fields: Any) -> None:
        self.told.append((member, command))
        base = {"member": member, "attempt": self.jobs[member].attempt}
        if command in ("alone", "join"):
            where = {"cohort": fields.get("cohort"), "feeder": fields.get("feeder")}
            self.scripts[member].append({"type": "moved", **base, **where, "epoch": 1, "shared": True})
        else:
            said = {"stop_after_epoch": "stopped", "cancel": "cancelled"}.get(command, "finished")
            self.scripts[member].append({"type": said, **base, "epoch": 1, "step": 0, "metrics": {"accuracy": 1}})
            ranks = range(self.jobs[member].identity.workers)
            self.scripts[member] += [{"type": "exited", "rank": r, "outcome": said, **base} for r in ranks]


def begun(path: Path, executor: Simulated, **options: Any) -> Controller:
    run_dir = RunDir.create(path, an_ensemble(**options))
    controller = Controller(run_dir, an_ensemble(**options), executor, EventLog(run_dir.events), fold([]))
    controller.open()
    controller.handle([])
    turns(controller, executor)
    return controller


def turns(controller: Controller, executor: Simulated) -> None:
    """Perform what was asked, then go on until nobody has anything to say."""
    controller.handle([])
    while any(executor.scripts.values()):
        controller.handle(executor.events(0.0))


def finish(controller: Controller, executor: Simulated) -> dict[str, str]:
    for member in list(executor.jobs):
        executor.send(member, "finish")
    controller.run()
    events = read_events(controller.run_dir.events)
    return {member.id: member.state for member in fold(events).members.values()}


def test_feeders_run_as_long_as_somebody_reads_them_or_will(tmp_path: Path) -> None:
    executor = Obedient(4)
    controller = begun(tmp_path / "run", executor, sharing="node", members=[{}, {}, {}])
    session = controller.session
    commands, feeders, state, node = session.commands, session.feeders, session.state, session.state.nodes.held[0]
    assert state.live.count_readers() == {("sim", 0): 3} and executor.feeders == {0: 3}
    identities = [controller.ensemble.identify(number) for number in range(3)]
    key = feeders.assign_late(identities[:2], 1, node)
    assert key is not None and feeders.is_starting(key)
    assert commands.join("member-0", key, None) and commands.join("member-1", key, None)
    assert state.live.count_readers() == {("sim", 0): 3, ("sim", 1): 2}
    assert not commands.join("member-0", key, None)
    turns(controller, executor)
    address = feeders.address(key)
    assert address is not None and executor.feeders == {0: 3, 1: 2}, "its gate waits for those who come"
    assert state.live.count_readers() == {("sim", 0): 1, ("sim", 1): 2} and executor.feeders_stopped == []
    assert feeders.assign_late(identities[2:], 1, node) == key
    assert commands.join("member-2", key, address)
    turns(controller, executor)
    assert executor.feeders_stopped == [0] and feeders.running == {("sim", 1)}
    for member in ("member-0", "member-1", "member-2"):
        assert commands.alone(member) and not commands.alone(member)
    assert commands.join("member-2", key, address), "it has thought better of it"
    turns(controller, executor)
    assert executor.feeders_stopped == [0] and state.live.list_feeders_read() == [("sim", 1)]
    assert controller.state.members["member-0"].cohort is None
    assert set(finish(controller, executor).values()) == {"finished"}
    assert not commands.alone("member-0"), "nobody is there any more"


def test_a_member_that_fails_alone_returns_alone(tmp_path: Path) -> None:
    executor = Obedient(4)
    controller = begun(tmp_path / "run", executor, sharing="node", members=[{}, {}])
    assert controller.session.commands.alone("member-0")
    turns(controller, executor)
    failed = {"member": "member-0", "attempt": 0}
    executor.scripts["member-0"] += [
        {"type": "failed", **failed, "error": "it broke", "reason": "error", "retry": True},
        {"type": "exited", **failed, "rank": 0, "outcome": "failed"},
    ]
    turns(controller, executor)
    until = time.monotonic() + 300
    while "member-0" not in executor.jobs:
        assert time.monotonic() < until, "it is not placed again"
        controller.handle([])  # one that has failed rests for a moment
        time.sleep(0.01)
    turns(controller, executor)
    assert executor.jobs["member-0"].feeder is None
    assert controller.session.state.live.count_readers() == {("sim", 0): 1}
    assert set(finish(controller, executor).values()) == {"finished"}


def test_a_widened_member_returns_with_its_new_width(tmp_path: Path) -> None:
    executor = Obedient(4)
    controller = begun(tmp_path / "run", executor, sharing="node", members=[{}, {}], elastic=True)
    commands = controller.session.commands
    assert commands.widen("member-0", 2) and commands.widen("member-1", 2)
    assert not commands.widen("member-0", 2) and not commands.widen("member-0", 1)
    assert commands.cancel("member-1")
    turns(controller, executor)
    assert executor.jobs["member-0"].identity.workers == 2 and "member-1" not in executor.jobs
    assert commands.widen("member-0", 3)
    turns(controller, executor)
    identity = executor.jobs["member-0"].identity
    assert (identity.workers, identity.widened_from) == (3, 1)
    state = finish(controller, executor)
    assert state == {"member-0": "finished", "member-1": "cancelled"}
    events = read_events(controller.run_dir.events)
    notes = [event.get("widened") for event in events if event["type"] == "member" and event["number"] == 0]
    assert notes == [None, {"from": 1, "epoch": 1}, {"from": 2, "epoch": 1}]

    def declared(workers: int, elastic: bool = True) -> Any:
        return an_ensemble(members=[Member({}, workers=workers), Member({})], elastic=elastic)

    check_same(fold(events), declared(1), tmp_path)
    for other in (declared(2), declared(3), declared(1, elastic=False)):
        with pytest.raises(StoreError, match="workers="):
            check_same(fold(events), other, tmp_path)


def test_a_run_that_stops_widens_nobody(tmp_path: Path) -> None:
    executor = Obedient(4)
    controller = begun(tmp_path / "run", executor, members=[{}], elastic=True)
    assert controller.session.commands.widen("member-0", 2)
    controller.stop("asked to")
    controller.run()
    state = fold(read_events(controller.run_dir.events))
    assert state.members["member-0"].state == "stopped" and state.members["member-0"].identity["workers"] == 1
