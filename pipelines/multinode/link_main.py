"""Exchanges samples with other nodes over gloo: `python -m pipelines.multinode.link_main SOCKET_FD`.

A process of its own, because it fails when another node does: its feeder then prepares alone. Feeder to link:
`join` with the ring's descriptor; `state` (this node's numbers); `round`; H (a block was prepared). Link to
feeder: `joined`; `states` (of all nodes); G (a block was received); S (a block was sent to all who need it).
"""

from __future__ import annotations

import datetime
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

from pipelines.ipc import messages
from pipelines.multinode.agreement import STATE_NUMBERS
from pipelines.multinode.designs import Design, Transfer, plan_transfers
from pipelines.order.stream import Block
from pipelines.samples.fields import Columns, Field
from pipelines.shm.ring import Layout, map_writable

_MAX_PACKED_BYTES = 8192
_PROBE_BYTES = 1 << 20

Bytes = npt.NDArray[np.uint8]


class Communicator:
    """All nodes' links, ranked from 0.

    Args:
        path: absolute, of a file that does not exist yet, on a file system that all ranks see.
        interface: the network interface to bind to.
        timeout_s: the longest time of a call.
    """

    def __init__(self, path: str, rank: int, world: int, interface: str, timeout_s: float) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        self.rank, self.world = rank, world
        store = dist.FileStore(path, world)  # type: ignore[attr-defined]
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)

    def group(self, ranks: Sequence[int]) -> Group:
        """A new group of these ranks; all ranks of the communicator make the same groups in the same order.

        Threads that each have a group of their own transfer at the same time.
        """
        import torch.distributed as dist

        return Group(dist.new_group(list(ranks)), tuple(ranks), self.rank)


class Group:
    """A set of ranks that exchange memory: each of them makes the same calls in the same order."""

    def __init__(self, group: Any, ranks: tuple[int, ...], rank: int) -> None:
        self._group, self._ranks, self._rank = group, ranks, rank

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy `buffer`, uint8 [n], from rank `root` of the communicator to all other ranks of the group."""
        import torch
        import torch.distributed as dist

        dist.broadcast(torch.from_numpy(buffer), src=root, group=self._group)

    def all_gather(self, parts: Sequence[Bytes]) -> None:
        """Send this rank's part to each other rank and receive theirs, without an intermediate copy.

        Args:
            parts: one buffer for each rank of the group, in its order; each has the same length on all ranks.
        """
        import torch
        import torch.distributed as dist

        tensors = [torch.from_numpy(part) for part in parts]
        own, calls = self._ranks.index(self._rank), []
        # Each rank starts with a different peer, so that no interface receives all parts at once.
        for step in range(1, len(self._ranks)):
            to, source = (own + step) % len(self._ranks), (own - step) % len(self._ranks)
            if tensors[own].numel():
                calls.append(dist.P2POp(dist.isend, tensors[own], self._ranks[to], self._group))
            if tensors[source].numel():
                calls.append(dist.P2POp(dist.irecv, tensors[source], self._ranks[source], self._group))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()


class BlockPacker:
    """Presents blocks of the ring as buffers to send and receive: large columns in place, small ones packed."""

    def __init__(self, columns: Columns, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._bytes = {name: _as_bytes(column) for name, column in sorted(columns.items())}
        self._small = {
            name for name, rows in self._bytes.items() if rows.shape[1] * block_size <= _MAX_PACKED_BYTES
        }

    def pack(self, block: Block, *, filled: bool) -> list[Bytes]:
        """The buffers of a block; the last one holds the small columns, with their contents if `filled`."""
        rows = self._rows(block)
        large = [rows[name] for name in rows if name not in self._small]
        small = [rows[name] for name in rows if name in self._small]
        packed: Bytes = np.concatenate(small) if filled else np.empty(sum(map(len, small)), np.uint8)
        return [*large, packed]

    def unpack(self, block: Block, buffers: Sequence[Bytes]) -> None:
        """Copy the received buffer of small columns into the ring."""
        at = 0
        for name, rows in self._rows(block).items():
            if name in self._small:
                rows[:] = buffers[-1][at : at + len(rows)]
                at += len(rows)

    def _rows(self, block: Block) -> dict[str, Bytes]:
        first, rows = block[0] % self._capacity, block[1] - block[0]
        return {name: column[first : first + rows].reshape(-1) for name, column in self._bytes.items()}


def _as_bytes(column: npt.NDArray[Any]) -> Bytes:
    flat = column.reshape(len(column), -1)
    return flat.view(np.uint8)


class TransferThreads:
    """Carries out transfers: a thread for each group of ranks and channel, in planned order.

    Args:
        on_received, on_sent: called when a run has come, and when one was given to all who wait for it.
    """

    def __init__(self, communicator: Communicator, packer: BlockPacker, on_received: Any, on_sent: Any) -> None:
        self.busy = 0
        self._communicator = communicator
        self._packer = packer
        self._on_received, self._on_sent = on_received, on_sent
        self._available: set[Block] = set()
        self._pending_sends: Counter[Block] = Counter()
        self._changed = threading.Condition()
        self._queues: dict[tuple[tuple[int, ...], int], queue.SimpleQueue[Transfer]] = {}

    def schedule(self, planned: Sequence[Transfer]) -> None:
        """Add the transfers of a round."""
        rank = self._communicator.rank
        with self._changed:
            for transfer in planned:
                self._pending_sends.update(transfer.blocks_sent_by(rank))
        for transfer in planned:
            key = transfer.ranks, transfer.channel
            if key not in self._queues:
                # Every rank creates every group, in the same order, because the rounds are the same.
                group = self._communicator.group(transfer.ranks)
                self._queues[key] = queue.SimpleQueue()
                if rank in transfer.ranks:
                    threading.Thread(
                        target=self._run_transfers, args=(group, self._queues[key]), daemon=True
                    ).start()
            if rank in transfer.ranks:
                self._queues[key].put(transfer)

    def mark_prepared(self, block: Block) -> None:
        """Record that a block was prepared on this node."""
        with self._changed:
            self._available.add(block)
            self._changed.notify_all()

    def _run_transfers(self, group: Group, planned: queue.SimpleQueue[Transfer]) -> None:
        try:
            while True:
                self._exchange(group, planned.get())
        except BaseException as error:
            _exit_on_error(error)

    def _exchange(self, group: Group, transfer: Transfer) -> None:
        rank = self._communicator.rank
        sent, received = transfer.blocks_sent_by(rank), transfer.blocks_received_by(rank)
        with self._changed:
            self._changed.wait_for(lambda: self._available.issuperset(sent))
            self.busy += 1
        buffers = {block: self._packer.pack(block, filled=block in sent) for block in (*sent, *received)}
        if transfer.root is None:
            empty = [np.empty(0, np.uint8)] * len(next(iter(buffers.values())))
            parts = [buffers.get(block, empty) for block in transfer.parts]
            for together in zip(*parts, strict=True):
                group.all_gather(together)
        else:
            for block in transfer.parts:
                for buffer in buffers[block]:
                    group.broadcast(buffer, transfer.root)
        for block in received:
            self._packer.unpack(block, buffers[block])
        with self._changed:
            self.busy -= 1
            self._available.update(received)
            self._pending_sends.subtract(sent)
            over = {block for block in (*sent, *received) if not self._pending_sends[block]}
            self._available -= over
            for block in over:
                del self._pending_sends[block]
            self._changed.notify_all()
        for block in received:
            self._on_received(block)
        for block in over.intersection(sent):
            self._on_sent(block)


class Link:
    """Handles the feeder's requests."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._send_lock = threading.Lock()
        self._states: queue.SimpleQueue[list[float]] = queue.SimpleQueue()
        self._rounds: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._transfers: TransferThreads | None = None
        self._communicator: Communicator | None = None
        self._block_size = 0

    def serve(self) -> None:
        """Handle requests until the feeder is gone.

        Raises:
            ConnectionLost: the feeder is gone.
        """
        while True:
            message, descriptor = messages.receive_with_descriptor(self._connection)
            if messages.is_struct(message, messages.TRANSFERRED, b"H"):
                _, start, stop = messages.TRANSFERRED.unpack(message)
                assert self._transfers is not None
                self._transfers.mark_prepared((start, stop))
                continue
            request = messages.unpack(message)
            if request["kind"] == "join":
                assert descriptor is not None
                self._join(request, descriptor)
            elif request["kind"] == "state":
                self._states.put(request["numbers"])
            else:
                self._rounds.put(request)

    def _join(self, request: dict[str, Any], descriptor: int) -> None:
        fields = {name: Field(tuple(shape), dtype) for name, shape, dtype in request["fields"]}
        columns = map_writable(descriptor, Layout(fields, request["capacity"]))
        os.close(descriptor)
        self._block_size = request["block_size"]
        where = (request[name] for name in ("store", "rank", "world", "interface", "timeout_s"))
        self._communicator = Communicator(*where)
        control = self._communicator.group(range(request["world"]))
        link_bps = _measure_bandwidth(control, request["rank"], request["world"])
        self._transfers = TransferThreads(
            self._communicator,
            BlockPacker(columns, request["capacity"], self._block_size),
            lambda block: self._send(messages.TRANSFERRED.pack(b"G", *block)),
            lambda block: self._send(messages.TRANSFERRED.pack(b"S", *block)),
        )
        self._send(messages.pack("joined", link_bps=link_bps))
        threading.Thread(target=self._exchange_states, args=(control,), daemon=True).start()
        threading.Thread(target=self._plan_rounds, args=(self._transfers, request["world"]), daemon=True).start()

    def _plan_rounds(self, transfers: TransferThreads, world: int) -> None:
        # In another thread than the states: creating a group may wait for a dead node, whose end must be noticed.
        try:
            while True:
                request = self._rounds.get()
                design = Design(request["design"], request["preparers"])
                transfers.schedule(
                    plan_transfers(design, world, request["start"], request["stop"], self._block_size)
                )
        except BaseException as error:
            _exit_on_error(error)

    def _exchange_states(self, control: Group) -> None:
        assert self._communicator is not None and self._transfers is not None
        rank, world = self._communicator.rank, self._communicator.world
        try:
            while True:
                numbers = np.zeros((world, STATE_NUMBERS))
                numbers[rank] = self._states.get()
                control.all_gather([row.view(np.uint8) for row in numbers])
                busy, cpu_s = self._transfers.busy, time.process_time()
                self._send(messages.pack("states", states=numbers.tolist(), busy=busy, cpu_s=cpu_s))
        except BaseException as error:
            _exit_on_error(error)

    def _send(self, message: bytes) -> None:
        with self._send_lock:
            messages.send(self._connection, message)


def _measure_bandwidth(group: Group, rank: int, world: int) -> float:
    """Bytes/s that this node's interface sends while all nodes send to all, from two short exchanges."""
    parts = [np.zeros(_PROBE_BYTES, np.uint8) for _ in range(world)]
    group.all_gather([part[:1] for part in parts])
    took = []
    for _ in range(2):
        began = time.perf_counter()
        group.all_gather(parts)
        took.append(time.perf_counter() - began)
    return _PROBE_BYTES * (world - 1) / min(took)


def _exit_on_error(error: BaseException) -> None:
    """Print an error and end the process, from any of its threads."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    # The end of a peer is expected: the feeder continues alone and counts it.
    if not isinstance(error, messages.ConnectionLost) and not re.search(
        "onnection (closed|reset)|Broken pipe", text
    ):
        os.write(2, f"pipelines.multinode.link_main: {text[:500]}\n".encode())
    os._exit(1)


def main() -> None:
    """Run the link process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the feeder decides when we end
    connection = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(int(sys.argv[1]), False)
    try:
        import torch  # noqa: F401 - while the feeder looks for other nodes

        Link(connection).serve()
    except BaseException as error:
        _exit_on_error(error)


if __name__ == "__main__":
    main()
