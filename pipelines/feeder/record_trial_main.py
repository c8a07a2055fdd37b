"""Prepares one record: `python -m pipelines.feeder.record_trial_main PAYLOAD_FD PIPELINE INDEX EPOCH`.

It says when it has begun, so that imports do not count as the record's time (`pipelines.feeder.record_trial`).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback

from pipelines import memory_pickle
from pipelines.child_processes import end_with_parent
from pipelines.errors import SampleError
from pipelines.order import Generators
from pipelines.pipeline import Pipeline
from pipelines.prepare.preparer import prepare_sample

_BEGUN = b"."


def main(arguments: list[str]) -> None:
    """The process."""
    payload, number, index, epoch = map(int, arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    end_with_parent()
    told = os.dup(1)
    os.dup2(2, 1)  # what users' code prints goes to standard error
    os.register_at_fork(after_in_child=lambda: os.close(told))  # our end is to be seen
    pipeline: Pipeline = memory_pickle.load(payload)[number]
    os.write(told, _BEGUN)
    try:
        prepare_sample(pipeline, Generators(pipeline.seed), index, epoch)
    except SampleError as error:
        print(error, file=sys.stderr)  # an error as others have it: the process lives
    except BaseException:  # what would end a worker
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
