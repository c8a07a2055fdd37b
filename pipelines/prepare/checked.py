"""Prepares a sample stage by stage, and refuses randomness that is not seeded."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from pipelines.description import PipelineDescription
from pipelines.errors import ForeignRandomness, SampleError
from pipelines.prepare.batches import vary_batch
from pipelines.prepare.generators import (
    NUMPY,
    PYTHON,
    SEEDED,
    TORCH,
    find_changes,
    find_draws,
    find_global,
    find_own_generators,
    preserve_states,
    read_states,
)
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.stages._batched import Batched


def prepare_checked(
    maker: SampleMaker,
    index: int,
    epoch: int = 0,
    last: int | None = None,
    *,
    place: int = 0,
    is_repeated: bool = False,
    is_varied: bool = False,
) -> dict[str, Any]:
    """One sample after the stages [0, last), by default all, made stage by stage.

    Args:
        maker: of the pipeline.
        place: see `SampleMaker.make`.
        is_repeated: whether to prepare it twice and compare, which shows randomness without a generator.
            Not so batch stages, for which one sample is as dear as a batch.
        is_varied: whether batch stages compute samples twice, at all places of a batch, and beside each other.

    Raises:
        SampleError: it cannot be prepared.
        ForeignRandomness: the source or a stage draws random numbers that are not seeded, or makes another sample
            of the same record each time.
    """
    pipeline, own = maker.pipeline, find_own_generators(maker.pipeline)

    def make(begun: Any, first: int, stop: int) -> Any:
        return maker.make(index, epoch, begun, first, stop, place)

    sample: Any = None
    second: Any = None
    with preserve_states(find_global() | own):
        for stop in range((len(pipeline.stages) if last is None else last) + 1):
            first = max(0, stop - 1)
            seeded = SEEDED.get(pipeline.stages[first].random, frozenset()) if stop else frozenset[str]()
            before = read_states(find_global() | own)
            sample = make(sample, first, stop)
            if find_changes(before, read_states(find_global() | own)) - seeded:
                # Made anew for each of the two calls: a stage may write into what it is given.
                begun = [make(None, 0, first) if stop else None for _ in range(2)]
                drawn = find_draws(lambda: make(begun.pop(), first, stop), lambda: own) - seeded  # noqa: B023 - called here
                if drawn:
                    raise ForeignRandomness(_explain_draws(pipeline, stop, index, drawn))
            if not isinstance(sample, dict):
                return maker.make(index, epoch, last=last, place=place)
            is_batched = stop > 0 and isinstance(pipeline.stages[first].call, Batched)
            if is_repeated:
                try:
                    is_copied = is_batched and not is_varied
                    second = copy.deepcopy(sample) if is_copied else make(second, first, stop)
                except SampleError:  # of a stage that fails now and then
                    is_repeated = False
                if is_repeated and not _is_same(sample, second):
                    raise ForeignRandomness(_explain_difference(pipeline, stop, index))
                varied = vary_batch(maker, first, index, epoch, place) if is_batched and is_varied else []
                if not all(_is_same(results[0], made) for results in varied for made in results):
                    raise ForeignRandomness(_explain_dependence(pipeline, stop))
    return sample  # type: ignore[no-any-return]


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values are equal bit for bit; of what cannot be compared, True."""
    if hasattr(one, "detach") and hasattr(other, "detach"):
        try:
            one, other = one.detach().cpu().numpy(), other.detach().cpu().numpy()
        except (TypeError, RuntimeError):
            return True
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, np.ndarray | np.generic | bool | int | float | complex):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype.hasobject:
            return True
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    return one == other if isinstance(one, str | bytes) else True


def _explain_draws(pipeline: PipelineDescription, stop: int, index: int, drawn: set[str]) -> str:
    generators = " and ".join(sorted(drawn))
    if not stop:
        return (
            f"reading {pipeline.source.where(index)} draws from {generators}, which is not seeded: the record "
            "differs each time. Leave what is random out of the source and map() it as a stage "
            '(random="torch" if it draws from torch)'
        )
    stage = pipeline.stages[stop - 1]
    if isinstance(stage.call, Batched):
        remedy = "draw from the generators of f(batch, rngs), one for each sample"
    elif drawn == {TORCH} and stage.random is None:
        remedy = 'declare it, map(..., random="torch")'
    elif drawn <= SEEDED["global"]:
        kind = "python" if drawn <= {PYTHON, NUMPY} and stage.random is None else "global"
        remedy = f'draw from the generator of f(sample, rng), or declare it, map(..., random="{kind}")'
    else:
        remedy = (
            "draw from the generator of f(sample, rng) instead (a transform of albumentations is mapped itself, "
            'map(transform, field="image"), and is then seeded)'
        )
    return (
        f"the stage {stage.name} draws from {generators}, which is not seeded: its samples would "
        f"differ from run to run and from process to process; {remedy}"
    )


def _explain_dependence(pipeline: PipelineDescription, stop: int) -> str:
    return (
        f"what the stage {pipeline.stages[stop - 1].name} makes of a sample depends on the other samples of its "
        "batch or on its place there: it has batch normalization in training mode, or another sum or random draw "
        "for the whole batch; let it compute each row from this row and its generator, f(batch, rngs), or take "
        "batch_size=1. Some matrix products compute the last rows of a batch in another way: let batch_size be a "
        "multiple of 16"
    )


def _explain_difference(pipeline: PipelineDescription, stop: int, index: int) -> str:
    where = pipeline.source.where(index)
    why = (
        "it draws numbers that cannot be seeded (numpy.random.default_rng() without a seed, os.urandom), counts "
        "its calls or reads the clock"
    )
    if not stop:
        return f"reading {where} twice gives two different records: {why}; move this from the source to a stage"
    return (
        f"the stage {pipeline.stages[stop - 1].name} returns two different samples for {where} when it is called "
        f"twice: {why}; draw from the generator of f(sample, rng)"
    )
