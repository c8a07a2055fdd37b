"""What a cache keeps of a pipeline: up to which stage, and whether it is what is prepared now."""

from __future__ import annotations

import hashlib
import json
import warnings

import numpy as np

from pipelines.cache import codec, file
from pipelines.description import PipelineDescription
from pipelines.environment.processor import describe_machine
from pipelines.environment.torch_threads import limit_torch_threads
from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import SCHEME
from pipelines.prepare.checked import prepare_checked
from pipelines.prepare.inference import prepare_first_sample
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.verification.compare import CheckResult, compare_arrays, flatten_sample
from pipelines.verification.reader import Finding, choose_first

#: Parts of a pipeline that change nothing of a cached sample.
_NOT_CACHED = ("seed", "shuffle", "sampling", "on_error")


def count_cached_stages(pipeline: PipelineDescription) -> int:
    """Count the leading stages to apply to a sample before it is cached.

    They are those before the first random stage; fewer if a sample cannot be encoded there, which a warning tells.

    Raises:
        PipelineError: there is no such stage.
    """
    still = next((i for i, stage in enumerate(pipeline.stages) if stage.random), len(pipeline.stages))
    if not still:
        what = f"its first stage, {pipeline.stages[0].name}, is random" if pipeline.stages else "it has no stages"
        raise PipelineError(f"nothing of this pipeline can be cached: {what}")
    reasons: list[str] = []
    for stages in range(still, 0, -1):
        encoded = codec.encode(0, prepare_first_sample(pipeline, stages))
        if not isinstance(encoded, str):
            if reasons:
                warnings.warn(
                    f"the cache keeps samples up to {pipeline.stages[stages - 1].name}: {reasons[0]}", stacklevel=5
                )
            return stages
        reasons.append(f"after {pipeline.stages[stages - 1].name} {encoded}, which cannot be kept")
    raise PipelineError(
        f"nothing of this pipeline can be cached: {reasons[0]}; return numpy arrays, numbers or texts there"
    )


def compute_key(pipeline: PipelineDescription, stages: int) -> str | None:
    """Identify the content of a cache on disk: source, stages and installed packages (decoders differ)."""
    from importlib import metadata

    parts = pipeline.take_stages(stages).parts()
    if parts is None:
        return None
    kept = [SCHEME, *(digest for name, digest in parts if name not in _NOT_CACHED)]
    installed = sorted({(d.metadata["Name"], d.version) for d in metadata.distributions()}, key=str)
    return hashlib.sha256(json.dumps([file.VERSION, kept, installed]).encode()).hexdigest()[:32]


def find_difference(pipeline: PipelineDescription, stages: int, fd: int) -> Finding | None:
    """Prepare two samples of a cache that is opened again, and compare.

    What its key does not cover may have changed, such as a file for which an `id=` or `version=` stands.

    Args:
        stages: how many were applied to the cached samples.
        fd: of the cache file.

    Returns:
        What differs, of the first sample that does; None if none does.

    Raises:
        ForeignRandomness: a stage makes another sample each time.
    """
    n = len(pipeline.source)
    cached = np.flatnonzero(file.read_index(fd, 0, n))
    cache = file.Cache(fd, n, stages, file.count_used_bytes(fd))
    is_exact = file.read_header(fd).get("machine") == describe_machine()
    maker = SampleMaker(pipeline)
    for place in choose_first("cache", 0, 0, len(cached)):
        index = int(cached[place])
        kept = cache.get(index)
        if kept is None:
            continue
        try:
            with limit_torch_threads():
                sample = prepare_checked(maker, index, last=stages, is_repeated=True)
            result = compare_arrays(flatten_sample(kept), flatten_sample(sample), is_exact=is_exact)
        except SampleError as error:
            result = CheckResult(kind="different", detail=f"it cannot be prepared now: {error.reason}")
        if result.kind == "different":
            return Finding(result, 0, index, index, False)
    return None
