"""Compares samples of a cache that is opened again with what its pipeline prepares now.

The key of a cache has all that the description of the pipeline covers. What it does not, such as a file that a
stage opens and that an `id=` or `version=` stands for, may have changed since.
"""

from __future__ import annotations

import numpy as np

from pipelines.cache import file
from pipelines.description import PipelineDescription
from pipelines.errors import SampleError
from pipelines.prepare.draw_watch import find_own_generators
from pipelines.prepare.global_generators import preserve_states
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.prepare.torch_threads import limit_torch_threads
from pipelines.verification.compare import CheckResult, compare_arrays, flatten_sample
from pipelines.verification.machine import describe_machine
from pipelines.verification.reader import Finding, choose_first


def find_difference(pipeline: PipelineDescription, stages: int, fd: int) -> Finding | None:
    """Prepares two of the cached samples again.

    Args:
        stages: how many were applied to the cached samples.
        fd: of the cache file.

    Returns:
        What differs, of the first sample that does; None if none does.

    Raises:
        SampleError: a stage makes another sample each time.
    """
    n = len(pipeline.source)
    cached = np.flatnonzero(file.read_index(fd, n))
    cache = file.Cache(fd, n, stages, file.count_used_bytes(fd))
    is_exact = file.read_header(fd).get("machine") == describe_machine()
    maker = SampleMaker(pipeline)
    for place in choose_first("cache", 0, 0, len(cached)):
        index = int(cached[place])
        kept = cache.get(index)
        if kept is None:
            continue
        try:
            with limit_torch_threads(), preserve_states(own=find_own_generators(pipeline)):
                first, second = (flatten_sample(maker.make(index, 0, last=stages)) for _ in range(2))
        except SampleError as error:
            detail = f"it cannot be prepared now: {error.reason}"
            return Finding(CheckResult(kind="different", detail=detail), 0, index, index, False)
        if (unstable := compare_arrays(first, second, is_exact=True)).kind != "equal":
            reason = f"two different samples were made of it, called twice: {unstable.detail}"
            raise SampleError(index, pipeline.source.where(index), reason)
        result = compare_arrays(flatten_sample(kept), first, is_exact=is_exact)
        if result.kind == "different":
            return Finding(result, 0, index, index, False)
    return None
