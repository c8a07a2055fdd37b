"""A transport of the tests' own, over Unix sockets: what `pipelines.multinode.transport` asks of one is little."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np


def connect(*, path: str, rank: int, world: int, interface: str | None, timeout_s: float) -> Sockets:
    return Sockets(path, rank, world, timeout_s)


class Sockets:
    """The communicator."""

    def __init__(self, path: str, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world = rank, world
        self._path, self._timeout_s = path, timeout_s
        self._count = 0

    def group(self, ranks: Sequence[int], lane: int) -> Mesh:
        self._count += 1
        return Mesh(f"{self._path}-{self._count}", tuple(ranks), self.rank, self._timeout_s)


class Mesh:
    """A socket to each other rank of the group: the higher rank calls the lower one."""

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, timeout_s: float) -> None:
        self._ranks, self._rank = ranks, rank
        self._to: dict[int, socket.socket] = {}
        if rank not in ranks:
            return
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{name}-{rank}")
        listener.listen()
        end = time.monotonic() + timeout_s
        for peer in (peer for peer in ranks if peer < rank):
            while peer not in self._to:
                calling = socket.socket(socket.AF_UNIX)
                try:
                    calling.connect(f"{name}-{peer}")
                    calling.send(bytes([rank]))
                    self._to[peer] = calling
                except OSError:
                    calling.close()
                    assert time.monotonic() < end, f"rank {peer} does not come"
                    time.sleep(0.01)
        for _ in (peer for peer in ranks if peer > rank):
            connection, _address = listener.accept()
            self._to[connection.recv(1)[0]] = connection
        listener.close()

    def broadcast(self, buffer: Any, root: int) -> None:
        if self._rank != root:
            self._receive(root, buffer)
            return
        for peer in self._to:
            self._to[peer].sendall(buffer)

    def all_gather(self, parts: Sequence[Any]) -> None:
        mine = np.ascontiguousarray(parts[self._ranks.index(self._rank)])
        sending = [threading.Thread(target=self._to[peer].sendall, args=(mine,)) for peer in self._to]
        for thread in sending:
            thread.start()
        for place, peer in enumerate(self._ranks):
            if peer != self._rank:
                self._receive(peer, parts[place])
        for thread in sending:
            thread.join()

    def _receive(self, peer: int, buffer: Any) -> None:
        view = memoryview(buffer)
        while len(view):
            got = self._to[peer].recv_into(view)
            if not got:
                raise ConnectionError("Connection closed by peer")
            view = view[got:]
