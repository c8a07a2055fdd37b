"""Preparation workers: `python -m pipelines.workers.worker_main PAYLOAD_FD SOCKET_FD`, or forks of a feeder.

A worker receives blocks, prepares them directly into shared memory and reports them. When the feeder ends, its
socket closes and the worker ends.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelines.description import PipelineDescription
from pipelines.errors import SampleError
from pipelines.ipc import memory_pickle, messages
from pipelines.order.rank_rows import RankRows
from pipelines.prepare.preparer import Preparer
from pipelines.providers import import_object
from pipelines.samples.fields import Columns
from pipelines.samples.poison_records import PreparationNote
from pipelines.shm.ring import Layout, map_writable
from pipelines.stages._batched import take_computed_ns

_LINGER_S = 5.0


@dataclass
class BufferWriter:
    """Fills one buffer: the ring (epochs in sequence, slots wrap around) or a resident set.

    Attributes:
        rows: the rows of each epoch that the buffer holds; None: all.
    """

    preparer: Preparer
    columns: Columns
    capacity: int
    rows: RankRows | None = None

    def fill(self, start: int, stop: int) -> None:
        """Prepare the positions [start, stop), which may span epochs."""
        n = len(self.preparer.pipeline) if self.rows is None else self.rows.per_epoch
        while start < stop:
            epoch, place = divmod(start, n)
            count = min(stop - start, n - place)
            if self.rows is None:
                self.preparer.fill(self.columns, start % self.capacity, epoch, place, place + count)
            else:  # of several batches at once: a batch stage may take more rows than one has
                spans = list(self.rows.places(place, place + count))
                indices = np.concatenate([self.preparer.indices(epoch, *span) for span in spans])
                places = itertools.chain(*(range(*span) for span in spans))
                self.preparer.prepare(self.columns, start % self.capacity, epoch, places, indices)
            start += count


def serve(connection: socket.socket, pipelines: dict[int, PipelineDescription]) -> None:
    """Handle the feeder's requests until the feeder ends.

    Args:
        connection: the socket to the feeder.
        pipelines: pipeline number -> pipeline.

    Raises:
        ConnectionLost: the feeder has ended.
    """
    writers: dict[int, BufferWriter] = {}
    caches: dict[int, Any] = {}  # by pipeline: buffers come and go

    def skipped(error: SampleError) -> None:
        request = messages.pack("skipped", index=error.index, where=error.where, reason=error.reason[:2000])
        messages.send(connection, request)

    take_computed_ns()  # those of the process that was forked
    messages.send(connection, messages.pack("ready"))
    while True:
        message, descriptor = messages.receive_with_descriptor(connection)
        if messages.is_struct(message, messages.PREPARE, b"R"):
            _, buffer_id, start, stop = messages.PREPARE.unpack(message)
            writers[buffer_id].fill(start, stop)
            for cache in caches.values():
                if (counts := cache.flush_counts()) is not None:
                    messages.send(connection, messages.CACHED.pack(b"C", *counts))
            cpu_ns = time.process_time_ns(), take_computed_ns()
            messages.send(connection, messages.DONE.pack(b"D", buffer_id, start, stop, *cpu_ns))
            continue
        request = messages.unpack(message)
        if request["kind"] == "poison":
            records = pipelines[request["pipeline"]].poison_records
            if request["code"]:
                records.codes[request["index"]] = request["code"]
            else:
                records.suspects.add(request["index"])
            continue
        if request["kind"] == "note":
            assert descriptor is not None
            note = PreparationNote(descriptor)
            os.close(descriptor)
            for pipeline in pipelines.values():
                pipeline.poison_records.note = note
                pipeline.poison_records.reads_alone = request["alone"]
            continue
        if request["kind"] == "cache":
            assert descriptor is not None
            make_cache = import_object("pipelines.cache.file:Cache")
            caches[request["pipeline"]] = make_cache(descriptor, request["n"], request["stages"], request["limit"])
            continue
        buffer_id = request["target"]
        if request["kind"] == "forget":
            writers.pop(buffer_id, None)
            continue
        pipeline, capacity = pipelines[request["pipeline"]], request["capacity"]
        assert descriptor is not None
        columns = map_writable(descriptor, Layout(pipeline.fields, capacity))
        os.close(descriptor)
        rows = RankRows(**request["rows"]) if request.get("rows") is not None else None
        writers[buffer_id] = BufferWriter(
            Preparer(
                pipeline, skipped, in_ring=rows is None, cache=caches.get(request["pipeline"]), is_for_others=True
            ),
            columns,
            capacity,
            rows,
        )


def _run(descriptor: int, load: Callable[[], dict[int, PipelineDescription]]) -> None:
    """Serve a feeder's socket; does not return."""
    connection = socket.socket(fileno=descriptor)
    # Children of a stage must not keep the socket open: the feeder would not notice this process ending.
    connection.set_inheritable(False)
    messages.close_in_children(connection)
    _exit_after_feeder(connection)
    try:
        serve(connection, load())
    except messages.ConnectionLost:  # the feeder has ended: run the exit handlers that stages have registered
        atexit._run_exitfuncs()
        _exit(0)
    except BaseException:
        traceback.print_exc()
        _exit(1)


def _exit_after_feeder(connection: socket.socket) -> None:
    """End this process a few seconds after the feeder, even if it hangs in a sample."""
    feeder = select.poll()
    feeder.register(connection, 0)  # hang-ups only, which are always reported

    def wait() -> None:
        feeder.poll()
        threading.Event().wait(_LINGER_S)  # normally the worker ends by itself before
        os._exit(1)

    threading.Thread(target=wait, name="feeder", daemon=True).start()


def _exit(code: int) -> None:
    """End this process at once: the interpreter's exit would wait for threads that a stage has started."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_forked(descriptor: int, pipelines: memory_pickle.Inherited) -> None:
    """Run a worker that was forked from the process that feeds it; does not return.

    Args:
        descriptor: of the worker's socket.
        pipelines: pipeline number -> pipeline.
    """
    _run(descriptor, pipelines.load)


def main() -> None:
    """Run a worker in an interpreter of its own."""
    # Ctrl-C in a terminal reaches all its processes; the feeder decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    payload, descriptor = map(int, sys.argv[1:])
    _run(descriptor, functools.partial(memory_pickle.load, payload))


if __name__ == "__main__":
    main()
