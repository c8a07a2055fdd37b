"""A consumer's CPU time for a batch: `python tests/pipelines/measure_batch_cost.py [PHOTOS.tar]`.

*Warm*: one consumer takes one batch after the other, all of which are there. *Cold*: sixteen take batches of
photographs as they are decoded and wait for each, so that the decoder and the other consumers have used the
processor's cache in between. Nothing is done with the batches; writes into them are guarded as always.
"""

from __future__ import annotations

import os
import statistics
import struct
import sys
import time

import numpy as np

from pipelines import Pipeline, attach, sources, stages
from pipelines.feeder.process import spawn

BATCH, EPOCHS, BEGINNING = 32, 9, 8
MEMBERS = 16


def cpu_us(address: str, pipeline: Pipeline, name: str, epochs: int, rest_s: float) -> float:
    """Microseconds of this process's CPU time for a batch, after the first few and a rest."""
    began, count = 0, 0
    for count, _ in enumerate(attach(address, pipeline, BATCH, range(epochs), name), start=1):
        if count == BEGINNING:
            time.sleep(rest_s)
            began = time.process_time_ns()
    return (time.process_time_ns() - began) / 1000 / (count - BEGINNING)


def measure(pipeline: Pipeline, members: int, capacity: int, epochs: int, rest_s: float = 0.0) -> list[float]:
    """`cpu_us` of each of so many consumer processes."""
    feeder = spawn(pipeline, expect=members, capacity=capacity)
    reading, writing = os.pipe()
    children = []
    for number in range(members):
        pid = os.fork()
        if not pid:
            os.write(writing, struct.pack("d", cpu_us(feeder.address, pipeline, f"{number}", epochs, rest_s)))
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    os.close(writing)
    feeder.stop()
    return [figure for (figure,) in struct.iter_unpack("d", os.read(reading, 1 << 16))]


def main() -> None:
    import torch

    torch.set_num_threads(1)
    images = np.zeros((250, 3, 224, 224), np.uint8)
    still = Pipeline(sources.arrays(image=images), seed=0)
    # The whole stream is in the ring when the rest is over.
    warm = statistics.median(measure(still, 1, 1024, epochs=4, rest_s=1.0)[0] for _ in range(5))
    print(f"warm: {warm:.0f} microseconds a batch of {BATCH} (median of 5 runs of one consumer)")
    if len(sys.argv) > 1:
        photos = Pipeline(sources.tar(sys.argv[1], rename={"jpeg": "image", "jpg": "image"}), seed=0)
        photos = photos.map(stages.decode_jpeg("image")).map(stages.resize("image", size=224))
        cold = measure(photos.map(stages.select("image")), MEMBERS, 8 * BATCH, EPOCHS)
        print(
            f"cold: {statistics.median(cold):.0f} microseconds a batch of {BATCH} "
            f"(median of {MEMBERS} consumers: {min(cold):.0f} to {max(cold):.0f})"
        )


if __name__ == "__main__":
    main()
