"""Measures members before they are packed: starts groups of worker processes, collects profiles, handles failures.

Each group measures a few steps of one member after another, on the device that the members would get. A member
that fails ends its group and keeps the default estimates; the next group measures the others.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ensemble.events as events
from ensemble.controller.actions import Action, Kill, Launch, RemoveAttemptFiles
from ensemble.controller.attempt import rendezvous_file
from ensemble.events import to_dict
from ensemble.reporting.sections.notices import describe
from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.packing import pack
from ensemble.schedule.profiles import Profile, is_spread_open, list_candidate_widths, select_unmeasured
from ensemble.spec import Identity
from ensemble.spec.identity import compute_cost_key, select_gpu_part
from ensemble.store import RunDir
from ensemble.train.job import PROFILE, Job, ProfileRequest

log = logging.getLogger(__name__)

_ENDING = frozenset(
    ("node_lost", "node_draining", "gpu_quarantined")
)  # events of a node where nothing is measured on

STEPS_S = (1.0, 20.0)  # seconds of steps: at most for one member, at most for all that are measured together
MEMORY_STEP = 0.05  # a running member's profile is corrected when it needs this share more memory than measured
LEAST_SHARE = 1e-3  # of a GPU: a member may be measured where others leave that much of its memory
MOST_FAILURES = 3  # groups in a row that fail before the remaining members are left unmeasured


@dataclass
class _Group:
    """Members to be measured with the same number of workers, one for each cost key; perhaps over two nodes."""

    workers: int
    unmeasured: dict[str, Identity]
    is_spread: bool = False


@dataclass
class _Running:
    """The group whose processes run: ranks that have not exited, the member that is measured, why it failed."""

    group: _Group
    number: int
    ranks: set[int]
    last_event_at: float
    device: str
    member: str | None = None
    error: str | None = None
    is_killed: bool = False


class Profiler:
    """Decides what is measured, and in which processes; `earlier` are profiles of an earlier start of the run."""

    def __init__(
        self,
        actions: list[Action],
        run_dir: RunDir,
        log_event: Callable[..., None],
        earlier: Iterable[events.Profiled] = (),
        timeout_s: float = 60.0,
    ) -> None:
        self.profiles: dict[str, Profile] = {}
        self._by_shape: dict[tuple[str, str], Profile] = {}
        self._by_cost_key: dict[str, Profile] = {}
        self._actions, self._run_dir, self._log = actions, run_dir, log_event
        self._timeout_s = timeout_s
        self._devices = "auto"
        self._groups: deque[_Group] = deque()
        self._running: _Running | None = None
        self._number = self._failures = 0
        self._members: dict[str, list[str]] = {}  # by cost key
        self._given_up: set[str] = set()  # cost keys
        self._steps_s = STEPS_S[0]
        for event in earlier:
            self._add_profile(Profile.from_dict(to_dict(event)))

    @property
    def is_busy(self) -> bool:
        """Whether members are or will be measured, or processes that did so have not exited."""
        return self._running is not None or bool(self._groups)

    def find_profile(self, identity: Identity) -> Profile | None:
        """The profile of a member, or of one with the same cost key; None where neither was measured."""
        profile = self.profiles.get(identity.member)
        if profile is None and self._by_cost_key:
            profile = self._by_cost_key.get(compute_cost_key(identity))
        return profile

    def select_members(
        self,
        waiting: Sequence[Identity],
        nodes: Sequence[Node],
        coming: int = 0,
        crowded: bool = False,
        devices: str = "auto",
        samples: int = 0,
    ) -> list[Identity]:
        """The waiting members to measure before they are packed; see `select_unmeasured`."""
        unmeasured = select_unmeasured(waiting, nodes, devices, self.profiles, coming, crowded, samples)
        return [one for one in unmeasured if compute_cost_key(one) not in self._given_up]

    # -- groups -------------------------------------------------------------------------------------------------

    def start(
        self,
        identities: Sequence[Identity],
        node: Node,
        now_s: float,
        others: Sequence[Node] = (),
        devices: str = "auto",
    ) -> None:
        """Begin to measure members on a node; of those with the same cost key, or the same shape, one.

        Members with `workers="auto"` are measured with each number of workers for which the node has room, those
        with `span_nodes="auto"`, and those for which the node has no room, over several nodes.
        """
        assert not self.is_busy
        self._devices = devices
        self._node, self._failures, self._members = node, 0, {}
        self._nodes = [node, *(other for other in others if other.name != node.name)]
        first: dict[str, Identity] = {}
        for identity in identities:
            key = compute_cost_key(identity)
            first.setdefault(key, identity)
            self._members.setdefault(key, []).append(identity.member)
        groups: dict[tuple[int, str], dict[str, Identity]] = {}
        spread: dict[tuple[int, str], dict[str, Identity]] = {}
        for key, identity in first.items():
            if is_spread_open(identity, self._nodes) or self._fits_only_across(identity):
                spread.setdefault(_setting_of(identity), {})[key] = identity
            for workers in list_candidate_widths(identity, node, self._devices):
                groups.setdefault(_setting_of(dataclasses.replace(identity, workers=workers)), {})[key] = identity
        self._groups += [_Group(how[0], groups[how]) for how in sorted(groups)]
        self._groups += [_Group(how[0], spread[how], is_spread=True) for how in sorted(spread)]
        self._steps_s = min(STEPS_S[0], STEPS_S[1] / max(1, len(first)))
        self._drop_finished_groups()
        if self._groups:
            self._log("measuring", members=[identity.member for identity in identities], node=node.name)
        self._launch_next(now_s)

    def _fits_only_across(self, identity: Identity) -> bool:
        """Whether several nodes together have room for a member of a fixed width, but not this one."""
        return not pack([identity], [], [self._node], self._devices) and bool(
            pack([identity], [], self._nodes, self._devices)
        )

    def _drop_finished_groups(self) -> None:
        """Drop the first groups as long as they have nothing left to measure, or find no room on the node."""
        while self._groups:
            group = self._groups[0]
            group.unmeasured = {key: one for key, one in group.unmeasured.items() if key not in self._given_up}
            if group.workers > 1:  # the shapes are known from fewer workers
                by_shape: dict[str, str] = {}
                for key in group.unmeasured:
                    profile = self._by_cost_key.get(key)
                    by_shape.setdefault(profile.shape if profile is not None else key, key)
                group.unmeasured = {key: group.unmeasured[key] for key in by_shape.values()}
            if self._place(group) is not None:
                return
            self._groups.popleft()

    def _place(self, group: _Group) -> Placement | None:
        """Where a group runs, as if no member of the run did; its identity is the member as which it runs.

        Where no GPU has the share that it asks for, that is on those of which processes of others leave the most:
        they may need less. It is nowhere if they leave nothing.
        """
        example = next(iter(group.unmeasured.values()), None)
        if example is None:
            return None
        how: Literal["spread"] | bool = "spread" if group.is_spread else False
        asking = dataclasses.replace(example, member=PROFILE, workers=group.workers, span_nodes=how)
        nodes = self._nodes if group.is_spread else [self._node]
        least = min(LEAST_SHARE, asking.gpus_per_worker)
        for share in (asking.gpus_per_worker, least):
            placed = pack([dataclasses.replace(asking, gpus_per_worker=share)], [], nodes, self._devices)
            if placed and bool(placed[0].nodes) == group.is_spread:
                return placed[0]
        return None

    def _launch_next(self, now_s: float) -> None:
        """Launch the next group, unless one runs."""
        if self._running is not None or not self._groups:
            return
        group = self._groups[0]
        placement = self._place(group)
        assert placement is not None  # else it had been dropped
        identity = dataclasses.replace(
            placement.identity, cpus_per_worker=0.0, gpus_per_worker=0.0, memory_gb=None
        )
        self._number += 1
        nodes, devices = {node.name: node for node in self._nodes}, placement.devices
        device = "cpu" if devices[0] is None else nodes[placement.node].find_gpu(devices[0])
        self._running = _Running(group, self._number, set(range(group.workers)), now_s, device)
        meeting = rendezvous_file(self._run_dir, PROFILE, self._number)
        measured = [
            shape
            for (shape, on), profile in self._by_shape.items()
            if on == device
            and group.workers in (profile.spread_samples_per_s if group.is_spread else profile.step_s)
        ]
        jobs = [
            Job(
                run_dir=str(self._run_dir.path),
                identity=identity,
                attempt=self._number,
                rank=rank,
                rendezvous=meeting.as_uri() if group.workers > 1 else None,
                interface=nodes[placement.find_node(rank)].interface if group.is_spread else "lo",
                device="cpu" if number is None else "cuda:0",
                gpu=number,
                feeder=None,
                node=placement.find_node(rank),
                timeout_s=self._timeout_s,
                profile=ProfileRequest(
                    members=list(group.unmeasured.values()),
                    known=measured,
                    steps_s=self._steps_s,
                    is_all=set(group.unmeasured) == set(self._members) and not (self.profiles or self._given_up),
                ),
            )
            for rank, number in enumerate(devices)
        ]
        self._actions.append(Launch(jobs, devices))

    # -- events -------------------------------------------------------------------------------------------------

    def handle(self, event: Mapping[str, Any], now_s: float) -> bool:
        """Handle an event; returns whether it came from processes that measure, so that nobody else has to handle
        it.
        """
        kind = event["type"]
        names = [node.name for node in self._nodes] if self.is_busy else []
        if kind in _ENDING and event["node"] in names:
            self.stop()  # the remaining members are selected again, on another node
        if event.get("member") != PROFILE:
            return False
        running = self._running
        if running is None or event["attempt"] != running.number:
            return True
        running.last_event_at = now_s
        if kind == "profiling":
            running.member = event["of"]
        elif kind == "profiled":
            self._record(running, event)
        elif kind == "launch_failed":
            running.error = f"no process could be started on node {self._node.name}: {event['detail']}"
            self._finish(running)
        elif kind == "failed":
            self._fail(running, event["error"])
        elif kind == "exited":
            running.ranks.discard(event["rank"])
            if event["outcome"] != "finished":
                self._fail(running, f"rank {event['rank']} {event.get('detail') or 'exited without a report'}")
            if not running.ranks:
                self._finish(running)
        return True

    def watch(self, now_s: float) -> None:
        """Kill a group that hangs, launch the next one; called when all pending events have been handled."""
        self._launch_next(now_s)
        running = self._running
        if running is not None and now_s - running.last_event_at > self._timeout_s and not running.is_killed:
            log_file = self._run_dir.log(PROFILE)
            self._fail(running, f"no report of its steps for {self._timeout_s:g} s; see {log_file}")

    def observe(self, epoch: Mapping[str, Any]) -> None:
        """Correct a profile by a running member's `epoch` event where it needs more memory than was measured."""
        profile = self.profiles.get(epoch["member"])
        if profile is not None and (epoch.get("memory_gb") or 0.0) > profile.memory_gb * (1 + MEMORY_STEP):
            self._log_profile(dataclasses.replace(profile, memory_gb=float(epoch["memory_gb"])))

    def stop(self) -> None:
        """Measure nothing more, and kill the processes that measure."""
        self._groups.clear()
        if self._running is not None:
            self._running.is_killed = True
            self._actions.append(Kill(PROFILE))

    def _record(self, running: _Running, event: Mapping[str, Any]) -> None:
        """Record a `profiled` event: one shape was measured, or was known before."""
        self._failures = 0
        unmeasured = running.group.unmeasured
        keys = [key for key, one in unmeasured.items() if one.member in event["of"]]
        for key in keys:
            del unmeasured[key]
        identified = {
            "members": [member for key in keys for member in self._members[key]],
            "outlines": keys,
            "shape": event["shape"],
            "device": running.device,
        }
        if event["measured"] is None:
            measured = self._by_shape[event["shape"], running.device].as_dict()
        else:
            width, figures = running.group.workers, event["measured"]
            by_width = ("step_s", "samples_per_s", "cpus", "gpus")
            measured = {name: {width: value} if name in by_width else value for name, value in figures.items()}
            if running.group.is_spread:  # only its rate is another than on one node
                before = self._by_shape.get((event["shape"], running.device))
                measured |= {name: {} for name in by_width if before is not None}
                measured["spread_samples_per_s"] = {width: figures["samples_per_s"]}
        self._log_profile(Profile.from_dict({**measured, **identified}))

    def _log_profile(self, profile: Profile) -> None:
        self._log("profile", **self._add_profile(profile).as_dict())

    def _add_profile(self, measured: Profile) -> Profile:
        """Merge a profile with what is known of its shape and device."""
        key = measured.shape, measured.device
        before = self._by_shape.get(key)
        profile = self._by_shape[key] = measured if before is None else before.merge(measured)
        self.profiles |= dict.fromkeys(profile.members, profile)
        self._by_cost_key |= dict.fromkeys(profile.outlines, profile)
        return profile

    def _fail(self, running: _Running, error: str) -> None:
        running.error = running.error or error
        if not running.is_killed:
            running.is_killed = True
            self._actions.append(Kill(PROFILE))

    def _finish(self, running: _Running) -> None:
        """The last process of a group has exited."""
        self._actions.append(RemoveAttemptFiles(PROFILE, running.number))
        self._running = None
        if running.error is not None and self._groups:
            self._failures += 1
            unmeasured = running.group.unmeasured
            failed = {key for key, one in unmeasured.items() if one.member == running.member}
            self._give_up(failed if failed and self._failures < MOST_FAILURES else set(unmeasured), running.error)
        elif self._groups:
            self._give_up(set(self._groups.popleft().unmeasured), "its processes exited without a report of it")
        self._drop_finished_groups()

    def _give_up(self, keys: set[str], error: str) -> None:
        self._given_up |= keys
        members = [member for key, named in self._members.items() if key in keys for member in named]
        line = next(iter(error.splitlines()), "")
        if members:
            self._log("unmeasured", members=members, error=line)
            log.warning(describe(events.Unmeasured(members=members, error=line)))


def _setting_of(identity: Identity) -> tuple[int, str]:
    """Members for which this is equal are measured by the same processes: workers, communicator, kind of GPU."""
    exchange = json.dumps(identity.communicator) if identity.workers > 1 else ""
    return identity.workers, exchange + json.dumps(select_gpu_part(identity))
