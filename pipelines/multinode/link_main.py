"""Exchanges samples with other nodes: `python -m pipelines.multinode.link_main SOCKET_FD TRANSPORT`.

A feeder starts it, hands it the ring and tells it rounds. It runs apart from the feeder because it is what fails
when another node does: then it ends, the feeder sees the end of its socket, and samples are prepared on this node
until the nodes have met anew.

Feeder to link: `join` with the ring's descriptor; `state` (this node's numbers); `round`; H (a run was prepared
here). Link to feeder: `joined`; `states` (of all nodes, and the transfers under way here); G (a run has come); S
(a run was given to all who wait for it).
"""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines import ipc
from pipelines.multinode.agreement import STATE_NUMBERS
from pipelines.multinode.designs import Design, Transfer, transfers
from pipelines.multinode.transport import Bytes, Communicator, Group, connect
from pipelines.prepare.fields import Columns, Field
from pipelines.shm.ring import Layout, map_shared
from pipelines.stream import Run

_CONTROL = -1
_SMALL = 8192
_PROBE_BYTES = 1 << 20


class Parcels:
    """Runs of the ring as buffers to send and receive: large columns as they lie, small ones packed together."""

    def __init__(self, columns: Columns, capacity: int, block: int) -> None:
        self._capacity = capacity
        self._bytes = {name: _as_bytes(column) for name, column in sorted(columns.items())}
        self._small = {name for name, rows in self._bytes.items() if rows.shape[1] * block <= _SMALL}

    def open(self, run: Run, *, filled: bool) -> list[Bytes]:
        """The buffers of a run; the last one is of small columns, with what lies in them if `filled`."""
        rows = self._rows(run)
        large = [rows[name] for name in rows if name not in self._small]
        small = [rows[name] for name in rows if name in self._small]
        packed: Bytes = np.concatenate(small) if filled else np.empty(sum(map(len, small)), np.uint8)
        return [*large, packed]

    def close(self, run: Run, buffers: Sequence[Bytes]) -> None:
        """Put what has come into the small columns' buffer where it belongs."""
        at = 0
        for name, rows in self._rows(run).items():
            if name in self._small:
                rows[:] = buffers[-1][at : at + len(rows)]
                at += len(rows)

    def _rows(self, run: Run) -> dict[str, Bytes]:
        first, rows = run[0] % self._capacity, run[1] - run[0]
        return {name: column[first : first + rows].reshape(-1) for name, column in self._bytes.items()}


def _as_bytes(column: npt.NDArray[Any]) -> Bytes:
    """A column as uint8 [capacity, bytes of a row]."""
    flat = column.reshape(len(column), -1)
    return flat.view(np.uint8)


class Lanes:
    """Carries out transfers: a thread for each group of ranks and lane, in the order in which they were planned.

    Args:
        got, sent: called when a run has come, and when one was given to all who wait for it.
    """

    def __init__(self, communicator: Communicator, parcels: Parcels, got: Any, sent: Any) -> None:
        self.busy = 0
        self._communicator = communicator
        self._parcels = parcels
        self._got, self._sent = got, sent
        self._have: set[Run] = set()
        self._to_give: Counter[Run] = Counter()
        self._changed = threading.Condition()
        self._queues: dict[tuple[tuple[int, ...], int], queue.SimpleQueue[Transfer]] = {}

    def plan(self, planned: Sequence[Transfer]) -> None:
        """Add the transfers of a round."""
        rank = self._communicator.rank
        with self._changed:
            for transfer in planned:
                self._to_give.update(transfer.gives(rank))
        for transfer in planned:
            key = transfer.ranks, transfer.lane
            if key not in self._queues:
                # Every rank makes every group, also of others: in the same order, as the rounds are the same.
                group = self._communicator.group(*key)
                self._queues[key] = queue.SimpleQueue()
                if rank in transfer.ranks:
                    threading.Thread(target=self._carry, args=(group, self._queues[key]), daemon=True).start()
            if rank in transfer.ranks:
                self._queues[key].put(transfer)

    def have(self, run: Run) -> None:
        """A run was prepared here."""
        with self._changed:
            self._have.add(run)
            self._changed.notify_all()

    def _carry(self, group: Group, planned: queue.SimpleQueue[Transfer]) -> None:
        try:
            while True:
                self._exchange(group, planned.get())
        except BaseException as error:
            _end(error)

    def _exchange(self, group: Group, transfer: Transfer) -> None:
        rank = self._communicator.rank
        gives, takes = transfer.gives(rank), transfer.takes(rank)
        with self._changed:
            self._changed.wait_for(lambda: self._have.issuperset(gives))
            self.busy += 1
        opened = {run: self._parcels.open(run, filled=run in gives) for run in (*gives, *takes)}
        if transfer.root is None:
            empty = [np.empty(0, np.uint8)] * len(next(iter(opened.values())))
            parts = [opened.get(run, empty) for run in transfer.parts]
            for together in zip(*parts, strict=True):
                group.all_gather(together)
        else:
            for run in transfer.parts:
                for buffer in opened[run]:
                    group.broadcast(buffer, transfer.root)
        for run in takes:
            self._parcels.close(run, opened[run])
        with self._changed:
            self.busy -= 1
            self._have.update(takes)
            self._to_give.subtract(gives)
            over = {run for run in (*gives, *takes) if not self._to_give[run]}
            self._have -= over
            for run in over:
                del self._to_give[run]
            self._changed.notify_all()
        for run in takes:
            self._got(run)
        for run in over.intersection(gives):
            self._sent(run)


class Link:
    """What the process does."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._saying = threading.Lock()
        self._states: queue.SimpleQueue[list[float]] = queue.SimpleQueue()
        self._rounds: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lanes: Lanes | None = None
        self._communicator: Communicator | None = None
        self._block = 0

    def serve(self) -> None:
        """Do what the feeder says until it is gone."""
        while True:
            message, descriptor = ipc.receive_any(self._connection)
            if ipc.is_struct(message, ipc.MOVED, b"H"):
                _, start, stop = ipc.MOVED.unpack(message)
                assert self._lanes is not None
                self._lanes.have((start, stop))
                continue
            said = ipc.unpack(message)
            if said["kind"] == "join":
                assert descriptor is not None
                self._join(said, descriptor)
            elif said["kind"] == "state":
                self._states.put(said["numbers"])
            else:
                self._rounds.put(said)

    def _join(self, said: dict[str, Any], descriptor: int) -> None:
        fields = {name: Field(tuple(shape), dtype) for name, shape, dtype in said["fields"]}
        layout = Layout(fields, said["capacity"])
        columns = map_shared(descriptor, layout)
        os.close(descriptor)
        self._block = said["block"]
        self._communicator = connect(
            said["transport"],
            path=said["store"],
            rank=said["rank"],
            world=said["world"],
            interface=said["interface"],
            timeout_s=said["timeout_s"],
        )
        everyone = range(said["world"])
        control = self._communicator.group(everyone, _CONTROL)
        link_bps = _probe(control, said["rank"], said["world"])
        self._lanes = Lanes(
            self._communicator,
            Parcels(columns, said["capacity"], self._block),
            lambda run: self._say(ipc.MOVED.pack(b"G", *run)),
            lambda run: self._say(ipc.MOVED.pack(b"S", *run)),
        )
        self._say(ipc.pack("joined", link_bps=link_bps))
        threading.Thread(target=self._exchange_states, args=(control,), daemon=True).start()
        threading.Thread(target=self._plan_rounds, args=(self._lanes, said["world"]), daemon=True).start()

    def _plan_rounds(self, lanes: Lanes, world: int) -> None:
        # Apart from the states: a group that waits for a dead node to be formed must not keep its death unknown.
        try:
            while True:
                said = self._rounds.get()
                design = Design(said["design"], said["preparers"])
                lanes.plan(transfers(design, world, said["start"], said["stop"], self._block))
        except BaseException as error:
            _end(error)

    def _exchange_states(self, control: Group) -> None:
        assert self._communicator is not None and self._lanes is not None
        rank, world = self._communicator.rank, self._communicator.world
        try:
            while True:
                numbers = np.zeros((world, STATE_NUMBERS))
                numbers[rank] = self._states.get()
                control.all_gather([row.view(np.uint8) for row in numbers])
                said = {"busy": self._lanes.busy, "cpu_s": time.process_time()}
                self._say(ipc.pack("states", states=numbers.tolist(), **said))
        except BaseException as error:
            _end(error)

    def _say(self, message: bytes) -> None:
        with self._saying:
            ipc.send(self._connection, message)


def _probe(group: Group, rank: int, world: int) -> float:
    """Bytes/s that this node's interface sends while all send to all, from two short exchanges."""
    parts = [np.zeros(_PROBE_BYTES, np.uint8) for _ in range(world)]
    group.all_gather([part[:1] for part in parts])
    took = []
    for _ in range(2):
        began = time.perf_counter()
        group.all_gather(parts)
        took.append(time.perf_counter() - began)
    return _PROBE_BYTES * (world - 1) / min(took)


def _end(error: BaseException) -> None:
    """End the process from any of its threads: the feeder knows what to do without it."""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    # A peer that ends is nothing to speak of: this node goes on alone, and counts it.
    if not isinstance(error, ipc.Lost) and not re.search("onnection (closed|reset)|Broken pipe", said):
        os.write(2, f"pipelines.multinode.link_main: {said[:500]}\n".encode())
    os._exit(1)


def main() -> None:
    """The link process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the feeder decides when we end
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(int(sys.argv[1]), False)
    try:
        # While the other nodes are awaited:
        if sys.argv[2] in ("gloo", "nccl"):
            import torch  # noqa: F401
        elif sys.argv[2] == "horovod":
            import horovod.torch  # noqa: F401
        Link(connection).serve()
    except BaseException as error:
        _end(error)


if __name__ == "__main__":
    main()
