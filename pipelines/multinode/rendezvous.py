"""How the feeders of several nodes find each other: through files in a directory that all of them see.

Each node that is in no group keeps a note `wait-<node>.json` fresh. The lowest of those that wait writes down who
forms the next group, `group-<generation>.json`; of several that try the file system lets one. Nothing listens for
it. Times are compared with each other, never with a node's clock: all are stamped by the directory's file system.
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

from pipelines import checks
from pipelines.errors import PipelineError
from pipelines.multinode.designs import DESIGNS
from pipelines.multinode.horovod_start import HOW_TO_GET_IT

VERSION = 1
FRESH_S = 6.0
_GROUP = re.compile(r"group-(\d+)\.json")


@dataclass(frozen=True)
class Peers:
    """Where a node's feeder meets those of the other nodes.

    Attributes:
        directory: a path that all nodes see; it is made, with mode 0700, and used for this stream alone.
        node: number of this node, 0 to `nodes` - 1.
        nodes: how many there are.
        interface: the network interface that reaches the others ("eth0"); the loopback unless given.
        transport: "gloo"; "nccl", where every node has a CUDA device to stage through; "horovod", where every node
            has it (deploy/build-horovod.sh); "module:function" of another
            (`pipelines.multinode.transport.connect`).
        timeout_s: how long a transfer may take before its group is given up; one that *dies* is noticed at once.
    """

    directory: str
    node: int
    nodes: int
    interface: str = "lo"
    transport: str = "gloo"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        nodes = checks.integer("Peers.nodes", self.nodes, 1)
        checks.transport(self.transport)
        # Whether this host has it is asked by the feeder: who says where to meet may be on another.
        if not isinstance(self.interface, str) or not self.interface:
            raise PipelineError(f"Peers.interface must be a name such as 'eth0', got {self.interface!r}")
        for name, value in (
            ("directory", checks.path("Peers.directory", self.directory)),
            ("nodes", nodes),
            ("node", checks.integer("Peers.node", self.node, 0, nodes - 1)),
            ("timeout_s", checks.seconds("Peers.timeout_s", self.timeout_s, above=True)),
        ):
            object.__setattr__(self, name, value)


def check_peers(peers: object, design: object, preparers: object) -> int | None:
    """Refuse what a feeder on this host cannot meet by; returns `preparers`.

    Raises:
        PipelineError: says what would be valid.
    """
    if design not in (*DESIGNS, "auto"):
        raise PipelineError(f"there is no design {design!r}; the designs are {', '.join(DESIGNS)} and auto")
    if peers is not None and not isinstance(peers, Peers):
        raise PipelineError(f"peers must be a pipelines.Peers or None, got {checks.shown(peers)}")
    if peers is not None:
        checks.interface(peers.interface)
        if peers.transport == "horovod" and importlib.util.find_spec("horovod") is None:
            raise PipelineError(HOW_TO_GET_IT)
    if preparers is None:
        return None
    if peers is None:
        raise PipelineError(f"preparers={checks.shown(preparers)} is for several nodes: give peers= too")
    return checks.integer("preparers", preparers, 1)


@dataclass(frozen=True)
class Invitation:
    """This node is rank `rank` of the group `generation` of `nodes` (their numbers, in order of rank)."""

    generation: int
    rank: int
    nodes: tuple[int, ...]
    store: str


@dataclass(frozen=True)
class Waiter:
    """A node that waits: `boot` tells one start of its feeder from the next, `head` is its stream's position, -1
    for anywhere."""

    node: int
    boot: str
    identity: str
    head: int


class Meeting:
    """One node's part in it.

    Args:
        peers: where.
        identity: equal for feeders that prepare the same samples in the same way into rings of the same form.
        near: how far apart, in samples, streams may be that go on together.

    Raises:
        PipelineError: the directory cannot be made, or is another user's.
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
                raise PipelineError(f"others than you may write where feeders meet: {peers.directory}")
            self._last = max(self._generations(), default=0)
        except OSError as error:
            raise PipelineError(f"feeders cannot meet in {peers.directory}: {error}") from None

    def look(self, head: int, *, everybody: bool) -> Invitation | None:
        """Wait here, form a group if that is for this node to do, and return the one that it was called into.

        Args:
            head: the position of this node's stream, -1 for anywhere.
            everybody: form one of all nodes only.

        Raises:
            OSError: the directory cannot be read or written, now.
        """
        generation = max([*self._generations(), self._last]) + 1
        invitation = self.invitation()
        if invitation is None:
            self.wait_here(head)
            self._call(generation, everybody=everybody)
            invitation = self.invitation()
        if invitation is not None:
            self.leave()
        return invitation

    def wait_here(self, head: int) -> None:
        """Keep the note fresh that this node waits."""
        note = {"v": VERSION, "boot": self._boot, "identity": self._identity, "head": head}
        _write(self._note(self.peers.node), note)

    def leave(self) -> None:
        """Wait no more, and leave nothing of this node behind."""
        for path in (self._note(self.peers.node), self._clock()):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def waiters(self) -> list[Waiter]:
        """The nodes that wait, by number."""
        found = {}
        for node in range(self.peers.nodes):
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError), open(self._note(node)) as file:
                said = json.load(file)
                if said["v"] == VERSION:
                    stamped = os.fstat(file.fileno()).st_mtime
                    found[node] = (stamped, Waiter(node, said["boot"], said["identity"], said["head"]))
        now, called = self._now(), self._called()
        return [
            waiter
            for stamped, waiter in found.values()
            if now - stamped < FRESH_S and stamped > called.get(waiter.boot, 0.0)
        ]

    def strangers(self) -> list[int]:
        """Nodes that wait with another pipeline, ring or design."""
        return [waiter.node for waiter in self.waiters() if waiter.identity != self._identity]

    def newcomers(self, nodes: tuple[int, ...], head: int) -> list[int]:
        """Nodes outside of the group of `nodes` at `head` that wait to come in, and could."""
        outside = [waiter for waiter in self._friends() if waiter.node not in nodes]
        return [waiter.node for waiter in outside if _near(waiter.head, head, self._near)]

    def invitation(self) -> Invitation | None:
        """The newest group that this node was called into; each once."""
        for generation in sorted(self._generations(), reverse=True):
            if generation <= self._last:
                return None
            try:
                with open(self._group(generation)) as file:
                    said = json.load(file)
                    members = said["members"] if said["v"] == VERSION else []
            except (FileNotFoundError, ValueError):
                continue
            self._last = max(self._last, generation)
            boots = [member["boot"] for member in members]
            if self._boot in boots:
                nodes = tuple(member["node"] for member in members)
                store = os.path.join(self.peers.directory, f"store-{generation}")
                return Invitation(generation, boots.index(self._boot), nodes, store)
        return None

    def superseded(self, invitation: Invitation) -> bool:
        """Whether somebody of a group waits again, or was called into a later one: it will never be complete."""
        groups = {generation: members for generation, _, members in self._groups()}
        mine = set(groups.get(invitation.generation, ()))
        elsewhere = {waiter.boot for waiter in self.waiters()}
        elsewhere.update(*(groups[later] for later in groups if later > invitation.generation))
        return bool(mine & elsewhere)

    def _called(self) -> dict[str, float]:
        """When each feeder was called into a group last."""
        when: dict[str, float] = {}
        for _, stamped, boots in self._groups():
            when.update({boot: max(stamped, when.get(boot, 0.0)) for boot in boots})
        return when

    def _groups(self) -> Iterator[tuple[int, float, list[str]]]:
        """(generation, when it was called, who is in it) of the groups that are written down."""
        for generation in self._generations():
            with (
                contextlib.suppress(FileNotFoundError, ValueError, KeyError),
                open(self._group(generation)) as file,
            ):
                said = json.load(file)
                if said["v"] == VERSION:
                    boots = [member["boot"] for member in said["members"]]
                    yield generation, os.fstat(file.fileno()).st_mtime, boots

    def _friends(self) -> list[Waiter]:
        return [waiter for waiter in self.waiters() if waiter.identity == self._identity]

    def _call(self, generation: int, *, everybody: bool) -> None:
        """Form a group if it is for this node to do so and there is one to form.

        Args:
            generation: the next one, when this node had last looked whether it was called: who looked too early
                finds that it is there already.
        """
        waiters = self._friends()
        if not waiters or waiters[0].node != self.peers.node:
            return
        chosen = near_each_other(waiters, self._near)
        if len(chosen) < 2 or (everybody and len(waiters) < self.peers.nodes):
            return
        members = [{"node": waiter.node, "boot": waiter.boot} for waiter in chosen]
        # Who reads it half written reads it again.
        with contextlib.suppress(FileExistsError), open(self._group(generation), "x") as file:
            json.dump({"v": VERSION, "members": members}, file)
            self._clear_before(generation)

    def _now(self) -> float:
        """The directory's time."""
        with open(self._clock(), "wb") as file:
            os.utime(file.fileno())
            return os.fstat(file.fileno()).st_mtime

    def _clear_before(self, generation: int) -> None:
        for old in self._generations():
            if old < generation - 1:
                self.clear(old)

    def clear(self, generation: int) -> None:
        """Remove what a group needed to meet."""
        for name in (f"group-{generation}.json", f"store-{generation}"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.peers.directory, name))

    def _generations(self) -> list[int]:
        found = map(_GROUP.fullmatch, os.listdir(self.peers.directory))
        return [int(match[1]) for match in found if match]

    def _group(self, generation: int) -> str:
        return os.path.join(self.peers.directory, f"group-{generation}.json")

    def _clock(self) -> str:
        return os.path.join(self.peers.directory, f"time-{self.peers.node}")

    def _note(self, node: int) -> str:
        return os.path.join(self.peers.directory, f"wait-{node}.json")


def near_each_other(waiters: list[Waiter], near: int) -> list[Waiter]:
    """The largest set of waiters whose streams can go on together; of equal ones, that which is farthest on."""
    anywhere = [waiter for waiter in waiters if waiter.head < 0]
    there = [waiter for waiter in waiters if waiter.head >= 0]
    sets = [[w for w in there if first.head - near <= w.head <= first.head] for first in there]
    best = max(sets, key=lambda each: (len(each), max(w.head for w in each)), default=[])
    return sorted(best + anywhere, key=lambda waiter: waiter.node)


def _near(here: int, there: int, near: int) -> bool:
    return here < 0 or there < 0 or abs(here - there) <= near


def _write(path: str, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    temporary = f"{path}.{uuid.uuid4().hex}"
    try:
        with open(temporary, "w") as file:
            json.dump(value, file)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
