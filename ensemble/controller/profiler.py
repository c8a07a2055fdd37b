"""Members are measured before they are packed: sessions of worker processes, started, heard and watched.

A session has some number of workers and measures a few steps of one member after another, on the device that
they would get. What it finds comes one by one and is logged at once (`profile` events), so that a session which is
killed loses nothing. A member that fails in one ends it; the others are measured by the next, and it keeps its
guesses.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.controller.actions import Action, Kill, Launch, RemoveAttemptFiles
from ensemble.controller.attempt import rendezvous_file
from ensemble.schedule import Node, Profile, list_candidate_widths, pack, select_unmeasured
from ensemble.schedule.cost_key import compute_cost_key
from ensemble.spec import Identity
from ensemble.store import RunDir
from ensemble.train.job import PROFILE, Job, ProfileRequest

log = logging.getLogger(__name__)

STEPS_S = (1.0, 20.0)  # of one member, of all that are measured together: seconds of steps
MEMORY_STEP = 0.05  # by how much more than was measured a running member must need for it to be told
MOST_FAILURES = 3  # sessions in a row that fail before the rest is left unmeasured


@dataclass
class _Session:
    """Members to be measured with so many workers; `left` by their outlines, one of each."""

    workers: int
    left: dict[str, Identity]


@dataclass
class _Live:
    """The session that runs: `at` is the member that it measures now, `failed` why that one could not be."""

    session: _Session
    number: int
    ranks: set[int]
    heard: float
    device: str
    at: str | None = None
    failed: str | None = None
    doomed: bool = field(default=False)


class Profiler:
    """Measures members: decides, logs through `emit`, and appends to `actions` what is to be done then.

    Args:
        is_possible: whether there are processes to measure in; not where members train in this one.
        devices: "auto", "cpu" or "cuda", as the ensemble says.
        known: `profile` events of an earlier start of the run (`RunState.profiles`).
        timeout_s: how long a session may say nothing before it is taken to hang.

    Attributes:
        profiles: what was measured, by member.
    """

    def __init__(
        self,
        actions: list[Action],
        run_dir: RunDir,
        emit: Callable[..., None],
        devices: str = "auto",
        known: Iterable[dict[str, Any]] = (),
        timeout_s: float = 60.0,
        is_possible: bool = True,
    ) -> None:
        self.profiles: dict[str, Profile] = {}
        self._by_shape: dict[tuple[str, str], Profile] = {}
        self._by_outline: dict[str, Profile] = {}
        self._actions, self._run_dir, self._emit = actions, run_dir, emit
        self._devices, self._timeout_s, self._is_possible = devices, timeout_s, is_possible
        self._sessions: deque[_Session] = deque()
        self._live: _Live | None = None
        self._number = self._failures = 0
        self._members: dict[str, list[str]] = {}  # those of an outline
        self._unmeasured: set[str] = set()  # outlines
        self._steps_s = STEPS_S[0]
        for event in known:
            self._learn(Profile.from_dict(event))

    @property
    def busy(self) -> bool:
        """Whether something is being or to be measured, or its processes are not all gone."""
        return self._live is not None or bool(self._sessions)

    def profile_of(self, identity: Identity) -> Profile | None:
        """What holds for a member, also for one that was not there yet when it was measured."""
        known = self.profiles.get(identity.member)
        if known is None and self._by_outline:
            known = self._by_outline.get(compute_cost_key(identity))
        return known

    def wanted(
        self, waiting: Sequence[Identity], nodes: Sequence[Node], coming: int = 0, crowded: bool = False
    ) -> list[Identity]:
        """The waiting members to measure before they are packed; see `ensemble.schedule.select_unmeasured`."""
        if not self._is_possible:
            return []
        found = select_unmeasured(waiting, nodes, self._devices, self.profiles, coming, crowded)
        return [one for one in found if compute_cost_key(one) not in self._unmeasured]

    # -- sessions -----------------------------------------------------------------------------------------------

    def begin(
        self, identities: Sequence[Identity], node: Node, now: float, numbers: Sequence[int] | None = None
    ) -> None:
        """Measure members on a node, nothing else being measured; those of one outline, and of one shape, once.

        Args:
            numbers: of workers, for members with `workers="auto"`; None: all that the node has room for. The
                others are measured with their own only.
        """
        assert not self.busy
        self._node, self._failures, self._members = node, 0, {}
        first: dict[str, Identity] = {}
        for identity in identities:
            same = compute_cost_key(identity)
            first.setdefault(same, identity)
            self._members.setdefault(same, []).append(identity.member)
        by_session: dict[tuple[int, str], dict[str, Identity]] = {}
        for same, identity in first.items():
            chosen = (
                numbers
                if numbers and "workers" in identity.auto
                else list_candidate_widths(identity, node, self._devices)
            )
            for workers in chosen:
                way = json.dumps(identity.communicator) if workers > 1 else ""
                by_session.setdefault((workers, way), {})[same] = identity
        for (workers, _), left in sorted(by_session.items(), key=lambda item: item[0]):
            self._sessions.append(_Session(workers, left))
        self._steps_s = min(STEPS_S[0], STEPS_S[1] / max(1, len(first)))
        self._prune()
        if self._sessions:
            self._emit("measuring", members=[identity.member for identity in identities], node=node.name)
        self._next(now)

    def _next(self, now: float) -> None:
        """Start the next session, if none runs."""
        if self._live is None and self._sessions:
            session = self._sessions[0]
            asking, devices = self._place(session) or (None, ())
            assert asking is not None  # else `_prune` had dropped it
            nobody = dataclasses.replace(asking, cpus_per_worker=0.0, gpus_per_worker=0.0, memory_gb=None)
            self._launch(session, nobody, devices, now)

    def _prune(self) -> None:
        """Drop sessions that have nothing left to measure, or find no room, up to the first that is to run."""
        while self._sessions:
            session = self._sessions[0]
            session.left = {same: one for same, one in session.left.items() if same not in self._unmeasured}
            if session.workers > 1:
                session.left = self._one_of_each_shape(session)
            if self._place(session) is not None:
                return
            self._sessions.popleft()

    def _place(self, session: _Session) -> tuple[Identity, Sequence[int | None]] | None:
        """Where it runs. It takes no room from members: that it runs now is the controller's decision."""
        wanted = next(iter(session.left.values()), None)
        if wanted is None:
            return None
        asking = dataclasses.replace(wanted, member=PROFILE, workers=session.workers)
        placed = pack([asking], [], [self._node], self._devices)
        return (asking, placed[0].devices) if placed else None

    def _one_of_each_shape(self, session: _Session) -> dict[str, Identity]:
        """Of members whose shape is known from fewer workers, one is enough."""
        kept: dict[str, str] = {}
        for same in session.left:
            known = self._by_outline.get(same)
            kept.setdefault(known.shape if known is not None else same, same)
        return {same: session.left[same] for same in kept.values()}

    def _launch(self, session: _Session, identity: Identity, devices: Sequence[int | None], now: float) -> None:
        self._number += 1
        device = "cpu" if devices[0] is None else self._node.gpus[devices[0]]
        live = self._live = _Live(session, self._number, set(range(session.workers)), now, device)
        meeting = rendezvous_file(self._run_dir, PROFILE, live.number)
        measured = [
            shape
            for (shape, on), known in self._by_shape.items()
            if on == device and session.workers in known.step_s
        ]
        jobs = [
            Job(
                run_dir=str(self._run_dir.path),
                identity=identity,
                attempt=live.number,
                rank=rank,
                rendezvous=meeting.as_uri() if session.workers > 1 else None,
                interface="lo",
                device="cpu" if number is None else "cuda:0",
                feeder=None,
                node=self._node.name,
                timeout_s=self._timeout_s,
                profile=ProfileRequest(members=list(session.left.values()), known=measured, steps_s=self._steps_s),
            )
            for rank, number in enumerate(devices)
        ]
        self._actions.append(Launch(jobs, devices))

    # -- listening ----------------------------------------------------------------------------------------------

    def handle(self, event: Mapping[str, Any], now: float) -> bool:
        """Handle an event; False for one that is none of a session's alone."""
        if event["type"] == "node_lost" and self.busy and event["node"] == self._node.name:
            self.stop()  # what is not measured yet will be wanted again, elsewhere
        if event.get("member") != PROFILE:
            return False
        live = self._live
        if live is None or event["attempt"] != live.number:
            return True
        live.heard = now
        kind = event["type"]
        if kind == "profiling":
            live.at = event["of"]
        elif kind == "profiled":
            self._found(live, event)
        elif kind == "launch_failed":
            live.failed = f"no session could be started on node {self._node.name}: {event['detail']}"
            self._ended(live)
        elif kind == "failed":
            self._fail(live, event["error"])
        elif kind == "exited":
            live.ranks.discard(event["rank"])
            if event["outcome"] != "finished":
                self._fail(live, f"rank {event['rank']} {event.get('detail') or 'ended without a word'}")
            if not live.ranks:
                self._ended(live)
        return True

    def watch(self, now: float) -> None:
        """End a session that hangs, start the next one; called when all events that are there were handled."""
        self._next(now)
        live = self._live
        if live is not None and now - live.heard > self._timeout_s and not live.doomed:
            log_file = self._run_dir.log(PROFILE)
            self._fail(live, f"nothing was heard of its steps for {self._timeout_s:g} s; see {log_file}")

    def observe(self, epoch: Mapping[str, Any]) -> None:
        """Learn from a running member's `epoch` event where it needs more memory than was measured."""
        known = self.profiles.get(epoch["member"])
        if known is not None and (epoch.get("memory_gb") or 0.0) > known.memory_gb * (1 + MEMORY_STEP):
            more = dataclasses.replace(known, memory_gb=float(epoch["memory_gb"]))
            self._learn(more)
            self._emit("profile", **self._by_shape[more.shape, more.device].as_dict())

    def stop(self) -> None:
        """Measure nothing more; the processes of the present session are ended."""
        self._sessions.clear()
        if self._live is not None:
            self._live.doomed = True
            self._actions.append(Kill(PROFILE))

    def _found(self, live: _Live, event: Mapping[str, Any]) -> None:
        """One shape has been measured, or was known."""
        self._failures = 0
        outlines = [same for same, one in live.session.left.items() if one.member in event["of"]]
        members = [member for same in outlines for member in self._members[same]]
        for same in outlines:
            del live.session.left[same]
        holds_for = {"members": members, "outlines": outlines}
        key = {"shape": event["shape"], "device": live.device}
        known = self._by_shape.get((event["shape"], live.device))
        if event["measured"] is not None:
            by_width = ("step_s", "samples_per_s", "cpus", "gpus")
            figures = {
                name: {live.session.workers: value} if name in by_width else value
                for name, value in event["measured"].items()
            }
            self._learn(Profile.from_dict({**holds_for, **figures, **key}))
        elif known is not None:
            self._learn(Profile.from_dict({**known.as_dict(), **holds_for}))
        self._emit("profile", **self._by_shape[event["shape"], live.device].as_dict())

    def _learn(self, found: Profile) -> None:
        key = found.shape, found.device
        known = self._by_shape.get(key)
        profile = self._by_shape[key] = found if known is None else known.merge(found)
        self.profiles |= dict.fromkeys(profile.members, profile)
        self._by_outline |= dict.fromkeys(profile.outlines, profile)

    def _fail(self, live: _Live, error: str) -> None:
        """The session cannot go on: what is left of it ends."""
        if live.failed is None:
            live.failed = error
        if not live.doomed:
            live.doomed = True
            self._actions.append(Kill(PROFILE))

    def _ended(self, live: _Live) -> None:
        """The last process of the session is gone."""
        self._actions.append(RemoveAttemptFiles(PROFILE, live.number))
        self._live = None
        if live.failed is not None and self._sessions:
            self._failures += 1
            left = live.session.left
            victims = {same: one for same, one in left.items() if one.member == live.at}
            if not victims or self._failures >= MOST_FAILURES:
                victims = left
            self._give_up(victims, live.failed)
        if live.failed is None and self._sessions:
            self._give_up(self._sessions.popleft().left, "the session ended without a word of them")
        self._prune()

    def _give_up(self, victims: dict[str, Identity], error: str) -> None:
        self._unmeasured |= set(victims)
        members = [member for same in victims for member in self._members[same]]
        line = next(iter(error.splitlines()), "")
        if members:
            self._emit("unmeasured", members=members, error=line)
            log.warning("%s: not measured, placed by guess: %s", ", ".join(members), line)
