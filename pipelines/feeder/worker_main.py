"""Preparation workers: `python -m pipelines.feeder.worker_main PAYLOAD_FD SOCKET_FD ...`, started by a feeder.

A worker is told runs, prepares them straight into shared memory and says that they are done. When the feeder
ends, its socket does, and the worker with it. With several sockets each is served by a thread of its own, which
has pipelines of its own: stages that keep something from call to call keep it for themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipelines import ipc, memory_pickle
from pipelines.cache.file import Cache
from pipelines.errors import SampleError
from pipelines.pipeline import Pipeline
from pipelines.prepare.deadly_records import Note
from pipelines.prepare.fields import Columns
from pipelines.prepare.preparer import Preparer
from pipelines.shm.ring import Layout, map_shared

_LINGER_S = 5.0


@dataclass
class Target:
    """A memory to fill: the ring (epochs follow each other, slots wrap) or a resident set."""

    preparer: Preparer
    columns: Columns
    capacity: int

    def fill(self, start: int, stop: int) -> None:
        """Prepare the stream positions [start, stop), which may span epochs."""
        n = len(self.preparer.pipeline)
        while start < stop:
            epoch, place = divmod(start, n)
            count = min(stop - start, n - place)
            self.preparer.fill(self.columns, start % self.capacity, epoch, place, place + count)
            start += count


def serve(connection: socket.socket, pipelines: dict[int, Pipeline], cpu_ns: Callable[[], int]) -> None:
    """Prepare what the feeder asks for until it is gone.

    Args:
        cpu_ns: this worker's CPU-nanoseconds so far.
    """
    targets: dict[int, Target] = {}
    caches: dict[int, Cache] = {}  # of a pipeline: memories come and go

    def skipped(error: SampleError) -> None:
        said = ipc.pack("skipped", index=error.index, where=error.where, reason=error.reason[:2000])
        ipc.send(connection, said)

    ipc.send(connection, ipc.pack("ready"))
    while True:
        message, descriptor = ipc.receive_any(connection)
        if ipc.is_struct(message, ipc.RUN, b"R"):
            _, number, start, stop = ipc.RUN.unpack(message)
            targets[number].fill(start, stop)
            for cache in caches.values():
                if (told := cache.flush_counts()) is not None:
                    ipc.send(connection, ipc.CACHED.pack(b"C", *told))
            ipc.send(connection, ipc.DONE.pack(b"D", number, start, stop, cpu_ns()))
            continue
        said = ipc.unpack(message)
        if said["kind"] == "deadly":
            pipelines[said["pipeline"]].hazards.deadly[said["index"]] = said["code"]
            continue
        if said["kind"] == "note":
            assert descriptor is not None
            note = Note(descriptor)
            os.close(descriptor)
            for each in pipelines.values():
                each.hazards.note = note
            continue
        if said["kind"] == "cache":
            assert descriptor is not None
            caches[said["pipeline"]] = Cache(descriptor, said["n"], said["stages"], said["limit"])
            continue
        number = said["target"]
        if said["kind"] == "forget":
            targets.pop(number, None)
            continue
        pipeline, capacity = pipelines[said["pipeline"]], said["capacity"]
        assert descriptor is not None
        columns = map_shared(descriptor, Layout(pipeline.fields, capacity))
        os.close(descriptor)
        targets[number] = Target(
            Preparer(pipeline, skipped, in_ring=True, cache=caches.get(said["pipeline"])), columns, capacity
        )


@contextlib.contextmanager
def _or_end() -> Iterator[None]:
    """What would end a worker ends the process, and all workers in it; that the feeder is gone is no error."""
    try:
        yield
    except ipc.Lost:
        pass
    except BaseException:
        traceback.print_exc()
        _end(1)


@_or_end()
def _work(connection: socket.socket, payload: int, threads: int) -> None:
    """`serve` on one of so many threads."""
    serve(connection, memory_pickle.load(payload), lambda: time.process_time_ns() // threads)


def _end_with_feeder(connections: list[socket.socket]) -> None:
    """End this process some time after the feeder, also where it hangs in a sample and does not see it go."""
    feeder = select.poll()
    for connection in connections:
        feeder.register(connection, 0)  # hang-ups only, which come unasked

    def wait() -> None:
        feeder.poll()
        threading.Event().wait(_LINGER_S)  # what has been prepared and who asked to be told ends as it should
        os._exit(1)

    threading.Thread(target=wait, name="feeder", daemon=True).start()


def _end(code: int) -> None:
    """End this process now: an interpreter that ends would wait for threads that a stage has started."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    """The workers' process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all of a terminal: the feeder decides when we end
    payload, *descriptors = map(int, sys.argv[1:])
    connections = []
    for descriptor in descriptors:
        # What a stage starts must not hold our end open: the feeder would not see this process die.
        os.set_inheritable(descriptor, False)
        connection = socket.socket(fileno=descriptor)
        ipc.keep_from_children(connection)
        connections.append(connection)
    _end_with_feeder(connections)
    if len(connections) == 1:
        _work(connections[0], payload, 1)
    else:
        # Modules are imported here, once, and not by all threads at a time; this thread only waits from now on.
        with _or_end():
            memory_pickle.load(payload)
        count = len(connections)
        threads = [threading.Thread(target=_work, args=(each, payload, count)) for each in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # The feeder is gone. What stages have asked to be done at the end is done.
    atexit._run_exitfuncs()
    _end(0)


if __name__ == "__main__":
    main()
