"""Prepares one record: `python -m pipelines.workers.record_trial_main PAYLOAD_FD PIPELINE INDEX EPOCH`.

It reports when it begins with the record: imports do not count as the record's time
(`pipelines.workers.record_trial`).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from pipelines.description import PipelineDescription
from pipelines.errors import DataOutOfReach, SampleError
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import end_with_parent
from pipelines.prepare.sample_maker import SampleMaker

_STARTED = b"."


def main(arguments: list[str]) -> None:
    """Prepare the record; the exit status is 1 if it raises what would end a worker."""
    payload, number, index, epoch = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    end_with_parent()
    output = os.dup(1)
    os.dup2(2, 1)  # user code prints to standard error
    os.register_at_fork(after_in_child=lambda: os.close(output))  # a child must not keep the pipe open
    pipeline: PipelineDescription = memory_pickle.load(payload)[number]
    # A record may have several positions in an epoch, with other random numbers at each.
    places = [0] if pipeline.sampling is None else pipeline.sampling.find_positions(epoch, index)
    for place in places:
        os.write(output, _STARTED)  # the time for one record begins again
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
