"""Forms groups of nodes through files in a directory that all nodes see.

Each node without a group keeps its file `wait-<node>.json` fresh. The waiting node with the lowest number writes
the members of the next group into `group-<generation>.json`; if several nodes try, the file system lets one
succeed. No process listens. All times are stamped by the directory's file system; they are never compared with a
node's clock.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.checks import (
    check_integer,
    check_interface,
    check_path,
    check_seconds,
    check_transport,
    shorten_repr,
)
from pipelines.errors import PipelineError
from pipelines.multinode.designs import DESIGNS

VERSION = 1
FRESH_S = 6.0
_GROUP = re.compile(r"group-(\d+)\.json")
_OWN = re.compile(r"(group|wait)-\d+\.json|time-\d+")


@dataclass(frozen=True)
class Peers:
    """How a node's feeder reaches those of the other nodes.

    Attributes:
        directory: a path that all nodes see, for this stream alone; it is made with mode 0700.
        node: number of this node, 0 to `nodes` - 1.
        nodes: the number of nodes.
        interface: the network interface that reaches the other nodes ("eth0"); by default the loopback.
        transport: "gloo"; "nccl", where every node has a CUDA device to stage through; "horovod", where every node
            has it (deploy/build-horovod.sh); "module:function" of another
            (`pipelines.multinode.transport.connect`).
        timeout_s: the longest time of a transfer, after which its group ends; a node that dies is noticed at once.
    """

    directory: str
    node: int
    nodes: int
    interface: str = "lo"
    transport: str = "gloo"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        nodes = check_integer("Peers.nodes", self.nodes, 1)
        check_transport(self.transport)
        # Whether this host has the interface is checked by its feeder: this may be another host.
        if not isinstance(self.interface, str) or not self.interface:
            raise PipelineError(f"Peers.interface must be a name such as 'eth0', got {self.interface!r}")
        for name, value in (
            ("directory", check_path("Peers.directory", self.directory)),
            ("nodes", nodes),
            ("node", check_integer("Peers.node", self.node, 0, nodes - 1)),
            ("timeout_s", check_seconds("Peers.timeout_s", self.timeout_s, above=True)),
        ):
            object.__setattr__(self, name, value)


def check_peers(peers: object, design: object, preparers: object) -> int | None:
    """Check the arguments with which a feeder on this host meets others; returns `preparers`.

    Raises:
        PipelineError: one of them is invalid, or not available on this host.
    """
    if design not in (*DESIGNS, "auto"):
        raise PipelineError(f"there is no design {design!r}; the designs are {', '.join(DESIGNS)} and auto")
    if peers is not None and not isinstance(peers, Peers):
        raise PipelineError(f"peers must be a pipelines.Peers or None, got {shorten_repr(peers)}")
    if peers is not None:
        check_interface(peers.interface)
        if peers.transport == "horovod" and importlib.util.find_spec("horovod") is None:
            from pipelines.multinode.horovod_start import INSTALL_HINT  # with an HTTP server, rarely needed

            raise PipelineError(INSTALL_HINT)
    if preparers is None:
        return None
    if peers is None:
        raise PipelineError(f"preparers={shorten_repr(preparers)} is for several nodes: give peers= too")
    return check_integer("preparers", preparers, 1)


@dataclass(frozen=True)
class GroupAssignment:
    """Assigns this node to a group.

    Attributes:
        generation: number of the group.
        rank: this node's rank in it.
        nodes: the numbers of its nodes, by rank.
        store: absolute path of the file through which its ranks connect.
    """

    generation: int
    rank: int
    nodes: tuple[int, ...]
    store: str


@dataclass(frozen=True)
class WaitingNode:
    """A node that waits for a group.

    Attributes:
        node: its number.
        boot: identifies one start of its feeder.
        identity: of its pipeline, ring and design.
        head: the position of its stream; -1 for any.
    """

    node: int
    boot: str
    identity: str
    head: int


class Rendezvous:
    """One node's view of the rendezvous directory.

    Args:
        peers: the directory and the node.
        identity: equal for feeders that may share a stream: same pipeline, ring and design.
        near: the largest distance, in samples, of streams that continue together.

    Raises:
        PipelineError: the directory cannot be made, other users may write to it, or a user's file is in the way.
    """

    def __init__(self, peers: Peers, identity: str, near: int) -> None:
        self.peers = peers
        self._identity = identity
        self._near = near
        self._boot = uuid.uuid4().hex
        try:
            os.makedirs(peers.directory, mode=0o700, exist_ok=True)
            found = os.stat(peers.directory)
            if found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise PipelineError(
                    f"Peers.directory={peers.directory!r}: other users may write there; it must be yours alone"
                )
            for name in filter(_OWN.fullmatch, os.listdir(peers.directory)):
                _check_ours(os.path.join(peers.directory, name))
            self._last = max(self._list_generations(), default=0)
        except OSError as error:
            raise PipelineError(f"feeders cannot meet in {peers.directory}: {error}") from None

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
        _write_json(self._note_path(self.peers.node), note)

    def withdraw(self) -> None:
        """Remove this node's files: it no longer waits."""
        for path in (self._note_path(self.peers.node), self._clock_path()):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def waiting_nodes(self) -> list[WaitingNode]:
        """The nodes that wait, by number."""
        found = {}
        for node in range(self.peers.nodes):
            with (
                contextlib.suppress(FileNotFoundError, ValueError, KeyError),
                open(self._note_path(node), encoding="utf-8") as file,
            ):
                record = json.load(file)
                if record["v"] == VERSION:
                    stamped = os.fstat(file.fileno()).st_mtime
                    found[node] = (stamped, WaitingNode(node, record["boot"], record["identity"], record["head"]))
        now, called = self._directory_time(), self._last_called()
        return [
            waiter
            for stamped, waiter in found.values()
            if now - stamped < FRESH_S and stamped > called.get(waiter.boot, 0.0)
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

    def is_superseded(self, assignment: GroupAssignment) -> bool:
        """Whether a node of a group waits again, or is in a later group: this one will never be complete."""
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
            when.update({each["boot"]: max(stamped, when.get(each["boot"], 0.0)) for each in members})
        return when

    def _read_groups(self) -> Iterator[tuple[int, float, list[dict[str, Any]]]]:
        """(generation, time, `node` and `boot` of its feeders) of all group files."""
        for generation in self._list_generations():
            with (
                contextlib.suppress(FileNotFoundError, ValueError, KeyError),
                open(self._group_path(generation), encoding="utf-8") as file,
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
            open(self._group_path(generation), "x", encoding="utf-8") as file,
        ):
            json.dump({"v": VERSION, "members": members}, file)
            self._remove_older_groups(generation)

    def _directory_time(self) -> float:
        """The present time of the directory's file system."""
        with open(self._clock_path(), "wb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime

    def _remove_older_groups(self, generation: int) -> None:
        for old in self._list_generations():
            if old < generation - 1:
                self.remove_group(old)

    def remove_group(self, generation: int) -> None:
        """Remove the files of a group."""
        for name in (f"group-{generation}.json", f"store-{generation}"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.peers.directory, name))

    def _list_generations(self) -> list[int]:
        found = map(_GROUP.fullmatch, os.listdir(self.peers.directory))
        return [int(match[1]) for match in found if match]

    def _group_path(self, generation: int) -> str:
        return os.path.join(self.peers.directory, f"group-{generation}.json")

    def _clock_path(self) -> str:
        return os.path.join(self.peers.directory, f"time-{self.peers.node}")

    def _note_path(self, node: int) -> str:
        return os.path.join(self.peers.directory, f"wait-{node}.json")


def select_nearby(waiting_nodes: list[WaitingNode], near: int) -> list[WaitingNode]:
    """The largest set of waiters whose streams can go on together; of equal ones, that which is farthest on."""
    anywhere = [waiter for waiter in waiting_nodes if waiter.head < 0]
    there = [waiter for waiter in waiting_nodes if waiter.head >= 0]
    sets = [[w for w in there if first.head - near <= w.head <= first.head] for first in there]
    best = max(sets, key=lambda each: (len(each), max(w.head for w in each)), default=[])
    return sorted(best + anywhere, key=lambda waiter: waiter.node)


def _check_ours(path: str) -> None:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # another node has just removed it
        if file.read(5) not in (b"", b'{"v":'):
            raise PipelineError(f"{path} was not written by a feeder: choose another Peers.directory")


def _near(here: int, there: int, near: int) -> bool:
    return here < 0 or there < 0 or abs(here - there) <= near


def _write_json(path: str, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
