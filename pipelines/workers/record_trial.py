"""Tries the record that a process was preparing when it died: `python -m pipelines.workers.record_trial ...`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import traceback

from pipelines.description import PipelineDescription
from pipelines.errors import DataOutOfReach, SampleError
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import START_S, child_environment, end_with_parent
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.samples.poison_records import HUNG, KILLED


def try_record(pipeline: PipelineDescription, index: int, epoch: int, timeout_s: float) -> int | None:
    """Prepare a record in a process of its own and wait; returns KILLED, HUNG, or None if it is harmless.

    Args:
        epoch: whose randomness is used.
        timeout_s: the longest time for the record, beside that in which the process starts.
    """
    payload = memory_pickle.dump(pipeline)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipelines.workers.record_trial", str(payload), str(index), str(epoch)],
            pass_fds=[payload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
    finally:
        os.close(payload)
    with process:
        assert process.stdout is not None
        try:
            # It writes a byte when it begins: the time until then is that of its imports.
            output = select.poll()
            output.register(process.stdout, select.POLLIN)
            if not output.poll(1000 * START_S) or not process.stdout.read(1):
                return None
            return KILLED if process.wait(timeout_s) else None
        except subprocess.TimeoutExpired:
            return HUNG
        finally:
            process.kill()


def main(arguments: list[str]) -> None:
    """Prepare the record; the exit status is 1 after what would end a worker."""
    payload, index, epoch = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    end_with_parent()
    output = os.dup(1)
    os.dup2(2, 1)  # user code prints to standard error
    pipeline: PipelineDescription = memory_pickle.load(payload)
    os.write(output, b".")
    # A record may have several positions in an epoch, with other random numbers at each.
    for place in [0] if pipeline.sampling is None else pipeline.sampling.find_positions(epoch, index):
        try:
            SampleMaker(pipeline).make(index, epoch, place=place)
        except (SampleError, DataOutOfReach) as error:
            print(error, file=sys.stderr)  # an ordinary error, which a worker survives
        except BaseException:  # what would end a worker
            traceback.print_exc()
            os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
