"""Forms groups of nodes through files in a directory that all nodes see.

Each node without a group keeps its file `wait-<node>.json` fresh. The waiting node with the lowest number writes
the members of the next group into `group-<generation>.json`; if several nodes try, the file system lets one
succeed. No process listens. All times are stamped by the directory's file system; they are never compared with a
node's clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipelines.errors import PipelineError
from pipelines.feeder.peers import Peers

VERSION = 1
FRESH_S = 6.0
POLL_S = 0.2
_SLOW_POLL_S = 2.0
_FAST_POLLING_S = 10.0  # how long after leaving a group the directory is polled often
_REGROUP_S = 6.0  # how long the nodes that left one group wait for each other
_CHECK_S = 1.0
_MAX_PAUSE_S = 30.0
_GROUP = re.compile(r"group-(\d+)\.json")
_OWN = re.compile(r"(group|wait)-\d+\.json|time-\d+")


@dataclass(frozen=True)
class GroupAssignment:
    """Assigns this node to a group.

    Attributes:
        nodes: the numbers of its nodes, by rank.
        store: absolute path of the file through which its ranks connect.
    """

    generation: int
    rank: int
    nodes: tuple[int, ...]
    store: str


class WaitingNode(NamedTuple):
    """A node that waits for a group."""

    node: int
    boot: str  # identifies one start of its feeder
    identity: str
    head: int  # the position of its stream; -1 for any


class Rendezvous:
    """One node's search for a group, in its feeder's thread.

    The directory is polled often at first and seldom when no other node has come for a while; after failures there
    are longer and longer pauses.

    Args:
        peers: the directory and the node.
        identity: equal for feeders that may share a stream: same pipeline, ring and design.
        near: the largest distance, in samples, of streams that continue together.
        first_timeout_s: how long the first group waits for all nodes to be complete.

    Attributes:
        has_met: whether this node has ever joined a group.
        failures: how many groups in a row failed before their nodes had exchanged a state.
        alone_since: when this node has left its last group (time.monotonic).

    Raises:
        PipelineError: the directory cannot be made, other users may write to it, or a user's file is in the way.
    """

    def __init__(self, peers: Peers, identity: str, near: int, first_timeout_s: float = 0.0) -> None:
        self.peers = peers
        self.has_met = False
        self.failures = 0
        self._first_timeout_s = first_timeout_s
        self._not_before = self._last_poll = 0.0
        self.alone_since = time.monotonic()
        self._warned: set[str] = set()
        self._led_generations: list[int] = []
        self._identity = identity
        self._near = near
        self._boot = uuid.uuid4().hex
        try:
            os.makedirs(peers.directory, mode=0o700, exist_ok=True)
            status = os.stat(peers.directory)
            if status.st_uid != os.getuid() or status.st_mode & 0o022:
                raise PipelineError(
                    f"Peers.directory={peers.directory!r}: other users may write there; it must be yours alone"
                )
            for name in filter(_OWN.fullmatch, os.listdir(peers.directory)):
                _check_ours(os.path.join(peers.directory, name))
            self._last = max(self._list_generations(), default=0)
        except OSError as error:
            raise PipelineError(f"feeders cannot meet in {peers.directory}: {error}") from None

    # --- when to look -----------------------------------------------------------------------------------

    def interval_s(self, now_s: float) -> float:
        """Seconds between two polls of the directory."""
        return POLL_S if now_s - self.alone_since < _FAST_POLLING_S else _SLOW_POLL_S

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look for a group."""
        return now_s >= self._not_before and now_s - self._last_poll >= self.interval_s(now_s)

    def find_group(self, head: int, now_s: float) -> GroupAssignment | None:
        """Poll the directory; returns the group that this node has been assigned to, or None.

        Args:
            head: the position of this node's stream; -1 for any.
        """
        self._last_poll = now_s
        # Nodes that leave a group together should form the next one together, even if some take longer.
        timeout_s = _REGROUP_S if self.has_met else self._first_timeout_s
        try:
            assignment = self.poll(head, everybody=now_s - self.alone_since < timeout_s)
            mismatched = [] if assignment else self.mismatched_nodes()
        except OSError as error:
            self._warn_once(f"cannot meet other nodes in {self.peers.directory}: {error}")
            return None
        if mismatched:
            nodes = ", ".join(map(str, mismatched))
            other = "another pipeline, capacity, block or design, or another version of ray-ensemble"
            self._warn_once(f"shares no stream with node {nodes}, which has {other}")
        if assignment is not None and assignment.rank == 0:
            self._led_generations.append(assignment.generation)
        return assignment

    def has_newcomers(self, assignment: GroupAssignment, head: int) -> bool:
        """Whether nodes outside the group wait to join it; the directory is read once a second at most."""
        now_s = time.monotonic()
        if now_s - self._last_poll < _CHECK_S or now_s - self.alone_since < _FAST_POLLING_S:
            return False
        self._last_poll = now_s
        try:
            return bool(self.joinable_nodes(assignment.nodes, head))
        except OSError as error:
            self._warn_once(f"cannot see whether other nodes wait in {self.peers.directory}: {error}")
            return False

    def record_failure(self) -> None:
        """A group failed before its nodes had exchanged a state: pause before the next one."""
        self.failures += 1
        self._not_before = time.monotonic() + min(_MAX_PAUSE_S, 2.0 ** min(self.failures, 5))

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            warnings.warn(f"node {self.peers.node} {problem}; it prepares for itself", stacklevel=2)

    # --- files ------------------------------------------------------------------------------------------

    def poll(self, head: int, *, everybody: bool) -> GroupAssignment | None:
        """Announce that this node waits, form a group if it is the lowest that waits, and look for an assignment.

        Args:
            head: the position of this node's stream; -1 for any.
            everybody: form a group only if all nodes wait.

        Returns:
            The group that this node is assigned to, or None.

        Raises:
            OSError: the directory cannot be read or written at present.
        """
        generation = max([*self._list_generations(), self._last]) + 1
        assignment = self.find_assignment()
        if assignment is None:
            self.announce(head)
            self._form_group(generation, everybody=everybody)
            assignment = self.find_assignment()
        if assignment is not None:
            self.withdraw()
        return assignment

    def announce(self, head: int) -> None:
        """Write or refresh the file that says that this node waits."""
        note = {"v": VERSION, "boot": self._boot, "identity": self._identity, "head": head}
        _write_json(self._path(f"wait-{self.peers.node}.json"), note)

    def withdraw(self) -> None:
        """Remove this node's files: it no longer waits."""
        for path in (self._path(f"wait-{self.peers.node}.json"), self._path(f"time-{self.peers.node}")):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def waiting_nodes(self) -> list[WaitingNode]:
        nodes = {}
        for node in range(self.peers.nodes):
            with (
                contextlib.suppress(FileNotFoundError, ValueError, KeyError),
                open(self._path(f"wait-{node}.json"), encoding="utf-8") as file,
            ):
                record = json.load(file)
                if record["v"] == VERSION:
                    stamped = os.fstat(file.fileno()).st_mtime
                    nodes[node] = (stamped, WaitingNode(node, record["boot"], record["identity"], record["head"]))
        now_s, called = self._directory_time(), self._last_called()
        return [
            waiter
            for stamped, waiter in nodes.values()
            if now_s - stamped < FRESH_S and stamped > called.get(waiter.boot, 0.0)
        ]

    def mismatched_nodes(self) -> list[int]:
        """Numbers of the nodes that wait with another pipeline, ring or design."""
        return [waiter.node for waiter in self.waiting_nodes() if waiter.identity != self._identity]

    def joinable_nodes(self, nodes: tuple[int, ...], head: int) -> list[int]:
        """Numbers of the waiting nodes outside a group of `nodes` at `head` that could join it."""
        outside = [waiter for waiter in self._matching_nodes() if waiter.node not in nodes]
        return [waiter.node for waiter in outside if _near(waiter.head, head, self._near)]

    def find_assignment(self) -> GroupAssignment | None:
        """The newest group that this node is assigned to; each is returned once."""
        new = {generation: members for generation, _, members in self._read_groups() if generation > self._last}
        for generation, members in sorted(new.items(), reverse=True):
            self._last = max(self._last, generation)
            boots = [member["boot"] for member in members]
            if self._boot in boots:
                nodes = tuple(member["node"] for member in members)
                store = os.path.abspath(os.path.join(self.peers.directory, f"store-{generation}"))
                return GroupAssignment(generation, boots.index(self._boot), nodes, store)
        return None

    def is_superseded(self, assignment: GroupAssignment, now_s: float) -> bool:
        """Whether a node of a group waits again, or is in a later group: this one will never be complete.

        The directory is read once a second at most.
        """
        if now_s - self._last_poll <= _CHECK_S:
            return False
        self._last_poll = now_s
        with contextlib.suppress(OSError):
            return self._is_superseded(assignment)
        return False

    def _is_superseded(self, assignment: GroupAssignment) -> bool:
        groups = {
            generation: [member["boot"] for member in members] for generation, _, members in self._read_groups()
        }
        mine = set(groups.get(assignment.generation, ()))
        elsewhere = {waiter.boot for waiter in self.waiting_nodes()}
        elsewhere.update(*(groups[later] for later in groups if later > assignment.generation))
        return bool(mine & elsewhere)

    def _last_called(self) -> dict[str, float]:
        """Boot -> when that feeder was last assigned to a group."""
        when: dict[str, float] = {}
        for _, stamped, members in self._read_groups():
            when.update({member["boot"]: max(stamped, when.get(member["boot"], 0.0)) for member in members})
        return when

    def _read_groups(self) -> Iterator[tuple[int, float, list[dict[str, Any]]]]:
        """(generation, time, `node` and `boot` of its feeders) of all group files."""
        for generation in self._list_generations():
            with (
                contextlib.suppress(FileNotFoundError, ValueError, KeyError),
                open(self._path(f"group-{generation}.json"), encoding="utf-8") as file,
            ):
                record = json.load(file)
                if record["v"] == VERSION:
                    yield generation, os.fstat(file.fileno()).st_mtime, record["members"]

    def _matching_nodes(self) -> list[WaitingNode]:
        return [waiter for waiter in self.waiting_nodes() if waiter.identity == self._identity]

    def _form_group(self, generation: int, *, everybody: bool) -> None:
        """Write the next group's file if this node is the lowest that waits, and enough nodes do.

        Args:
            generation: the next generation, as of this node's last look for an assignment: if another node has
                formed a group since, the file exists.
        """
        waiting_nodes = self._matching_nodes()
        if not waiting_nodes or waiting_nodes[0].node != self.peers.node:
            return
        chosen = select_nearby(waiting_nodes, self._near)
        if len(chosen) < 2 or (everybody and len(waiting_nodes) < self.peers.nodes):
            return
        members = [{"node": waiter.node, "boot": waiter.boot} for waiter in chosen]
        # A node that reads an incomplete file will read it again.
        with (
            contextlib.suppress(FileExistsError),
            open(self._path(f"group-{generation}.json"), "x", encoding="utf-8") as file,
        ):
            json.dump({"v": VERSION, "members": members}, file)
            for old in self._list_generations():
                if old < generation - 1:
                    self.remove_group(old)

    def _directory_time(self) -> float:
        with open(self._path(f"time-{self.peers.node}"), "wb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime

    def remove_files(self) -> None:
        """Remove the files of the groups that this node has led."""
        for generation in self._led_generations:
            self.remove_group(generation)

    def remove_group(self, generation: int) -> None:
        for name in (f"group-{generation}.json", f"store-{generation}"):
            with contextlib.suppress(OSError):
                os.unlink(self._path(name))

    def _list_generations(self) -> list[int]:
        matches = map(_GROUP.fullmatch, os.listdir(self.peers.directory))
        return [int(match[1]) for match in matches if match]

    def _path(self, name: str) -> str:
        return os.path.join(self.peers.directory, name)


def select_nearby(waiting_nodes: list[WaitingNode], near: int) -> list[WaitingNode]:
    """The largest set of waiters whose streams can go on together; of equal ones, that which is farthest on."""
    anywhere = [waiter for waiter in waiting_nodes if waiter.head < 0]
    placed = [waiter for waiter in waiting_nodes if waiter.head >= 0]
    sets = [[w for w in placed if first.head - near <= w.head <= first.head] for first in placed]
    best = max(sets, key=lambda chosen: (len(chosen), max(w.head for w in chosen)), default=[])
    return sorted(best + anywhere, key=lambda waiter: waiter.node)


def _check_ours(path: str) -> None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # another node has just removed it
        if file.read(5) not in (b"", b'{"v":'):
            raise PipelineError(f"{path} was not written by a feeder: choose another Peers.directory")


def _near(here: int, other: int, near: int) -> bool:
    return here < 0 or other < 0 or abs(here - other) <= near


def _write_json(path: str, value: Any) -> None:
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
