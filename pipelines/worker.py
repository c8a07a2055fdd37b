"""A preparation worker: `python -m pipelines.worker SOCKET_FD PAYLOAD_FD`, started by a feeder.

It is told runs, prepares them straight into shared memory and says that they are done. When the feeder
ends, its socket does, and the worker with it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass

from pipelines import _payload, wire
from pipelines.errors import SampleError
from pipelines.pipeline import Pipeline
from pipelines.prepare import Columns, Preparer
from pipelines.ring import Layout, map_shared


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


def serve(connection: socket.socket, pipelines: dict[int, Pipeline]) -> None:
    """Prepare what the feeder asks for until it is gone."""
    targets: dict[int, Target] = {}

    def skipped(error: SampleError) -> None:
        said = wire.pack("skipped", index=error.index, where=error.where, reason=error.reason[:2000])
        wire.send(connection, said)

    wire.send(connection, wire.pack("ready"))
    while True:
        message, descriptor = wire.receive_any(connection)
        if wire.is_struct(message, wire.RUN, b"R"):
            _, number, start, stop = wire.RUN.unpack(message)
            targets[number].fill(start, stop)
            wire.send(connection, wire.DONE.pack(b"D", number, start, stop, time.process_time_ns()))
            continue
        said = wire.unpack(message)
        number = said["target"]
        if said["kind"] == "forget":
            targets.pop(number, None)
            continue
        pipeline, capacity = pipelines[said["pipeline"]], said["capacity"]
        assert descriptor is not None
        columns = map_shared(descriptor, Layout(pipeline.fields, capacity))
        os.close(descriptor)
        targets[number] = Target(Preparer(pipeline, skipped, in_ring=True), columns, capacity)


def main() -> None:
    """The worker process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all of a terminal: the feeder decides when we end
    # What a stage starts must not hold our end open: the feeder would not see this process die.
    os.set_inheritable(int(sys.argv[1]), False)
    connection = socket.socket(fileno=int(sys.argv[1]))
    wire.keep_from_children(connection)
    pipelines = _payload.load(int(sys.argv[2]))
    try:
        serve(connection, pipelines)
    except wire.Lost:
        return


if __name__ == "__main__":
    main()
