"""Applies batch stages (`Pipeline.map_batches`) to many samples at once."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipelines.errors import DataOutOfReach, PipelineError, SampleError
from pipelines.prepare.sample_maker import SampleMaker
from pipelines.stage import Stage
from pipelines.stages._batched import Batched, describe_shapes
from pipelines.stages._sample import get_value

_NEIGHBOURS = 3  # of the first sample, beside which it is computed

#: Position in the epoch, index, and the sample as far as it is prepared, or why it cannot be; None: not yet.
Begun = tuple[int, int, dict[str, Any] | SampleError | DataOutOfReach | None]


@dataclass
class _Sample:
    """A sample in preparation: `value` is it after `done` stages, or why it cannot be prepared."""

    place: int
    index: int
    value: Any
    done: int

    @property
    def has_failed(self) -> bool:
        return isinstance(self.value, Exception)


class BatchStages:
    """The stages of a pipeline up to the last one that computes on batches.

    Args:
        maker: of the pipeline.
        cache: see `Preparer`.

    Attributes:
        end: how many stages are applied to what `run` yields: those, and all that the cache keeps.
    """

    def __init__(self, maker: SampleMaker, cache: Any = None) -> None:
        self._maker, self._cache = maker, cache
        self._poison_records = maker.pipeline.poison_records
        self._positions = [at for at, stage in enumerate(maker.pipeline.stages) if isinstance(stage.call, Batched)]
        self._last = max(self._positions, default=-1)
        self.end = max(self._last + 1, 0 if cache is None else cache.stages)

    def are_due(self, first: int) -> bool:
        """Whether one of them comes after the stages [0, first)."""
        return first <= self._last

    def run(self, samples: Iterable[Begun], epoch: int, first: int) -> Iterator[Begun]:
        """Apply them to samples of an epoch, in order.

        Args:
            samples: after the stages [0, first), which somebody else has done; see `Preparer.complete`.
        """
        samples = iter(samples)
        while chunk := list(itertools.islice(samples, self._maker.pipeline.batch_unit)):
            prepared = self._prepare(chunk, epoch, first)[::-1]
            while prepared:  # an error that is yielded is held by nobody here, else nothing frees its frames
                yield prepared.pop()

    def _prepare(self, samples: list[Begun], epoch: int, first: int) -> list[Begun]:
        begun = [_Sample(place, index, value, first) for place, index, value in samples]
        for sample in begun:
            if sample.value is None:
                sample.done = 0
                if self._cache is not None and (kept := self._cache.get(sample.index)) is not None:
                    sample.value, sample.done = kept, self._cache.stages
        for position in self._positions:
            for sample in begun:
                self._advance(sample, epoch, position)
            self._compute([s for s in begun if not s.has_failed and s.done == position], epoch, position)
        for sample in begun:
            self._advance(sample, epoch, self.end)
        return [(sample.place, sample.index, sample.value) for sample in begun]

    def _advance(self, sample: _Sample, epoch: int, stop: int) -> None:
        """Apply the stages up to `stop`, one sample at a time."""
        kept = 0 if self._cache is None else self._cache.stages
        for last in (kept, stop) if sample.done < kept < stop else (stop,):
            if sample.has_failed or (sample.value is not None and sample.done >= last):
                continue
            self._note(sample)
            try:
                value = self._maker.make(sample.index, epoch, sample.value, sample.done, last, sample.place)
            except (SampleError, DataOutOfReach) as error:
                sample.value = error
            else:
                self._set(sample, value, last)

    def _set(self, sample: _Sample, value: Any, done: int) -> None:
        sample.value, sample.done = value, done
        if self._cache is not None and done == self._cache.stages:
            self._cache.put(sample.index, value)  # as bytes, at once: what is written into it later is not kept

    def _compute(self, samples: list[_Sample], epoch: int, position: int) -> None:
        """Apply a batch stage to samples: to as many together as it takes, and whose shapes are equal."""
        stage = self._maker.pipeline.stages[position]
        alike: dict[Any, list[_Sample]] = {}
        for sample in samples:
            alike.setdefault(_describe(stage, sample.value), []).append(sample)
        size = stage.call.batch_size  # type: ignore[attr-defined]
        for group in alike.values():
            for start in range(0, len(group), size):
                part = group[start : start + size]
                self._note(part[0])
                try:
                    if any(sample.index in self._poison_records.suspects for sample in part):
                        raise _ComputeAlone
                    begun = [(sample.place, sample.index, sample.value) for sample in part]
                    values = self._maker.make_batch(position, epoch, begun)
                except Exception:  # the fault of one sample is its own: each alone, in a batch of copies
                    for sample in part:
                        self._advance(sample, epoch, position + 1)
                else:
                    for sample, value in zip(part, values, strict=True):
                        self._set(sample, value, position + 1)

    def _note(self, sample: _Sample) -> None:
        if (note := self._poison_records.note) is not None:
            note.words[0] = sample.index + 1


class _ComputeAlone(Exception):
    """A worker has ended while it computed this batch."""


def vary_batch(maker: SampleMaker, position: int, index: int, epoch: int, place: int) -> list[list[Any]]:
    """What a batch stage makes of a few samples: of each at all places of a batch, and beside the others.

    Args:
        position: of the stage.
        index, epoch, place: of the first of them; the others are the next ones in the source.

    Returns:
        For each sample the results, which have to be equal.
    """
    stage, n = maker.pipeline.stages[position], len(maker.pipeline.source)
    size = stage.call.batch_size  # type: ignore[attr-defined]
    samples = [(place, index, maker.make(index, epoch, last=position, place=place))]
    results = [maker.make_batch(position, epoch, samples * size)]
    for other in sorted({(index + step) % n for step in range(1, _NEIGHBOURS + 1)} - {index}):
        with contextlib.suppress(Exception):  # a bad record
            beside = place, other, maker.make(other, epoch, last=position)
            if _describe(stage, beside[2]) == _describe(stage, samples[0][2]):
                results.append(maker.make_batch(position, epoch, [beside] * size))
                samples.append(beside)
    for turn in range(2):
        order = [(turn + row) % len(samples) for row in range(size)]
        with contextlib.suppress(Exception):  # of such a batch, each sample is computed alone
            for number, made in zip(
                order, maker.make_batch(position, epoch, [samples[i] for i in order]), strict=True
            ):
                results[number].append(made)
    return results


def _describe(stage: Stage, sample: Any) -> Any:
    """Equal for samples that can be in one batch; None for one that cannot be in any."""
    with contextlib.suppress(PipelineError):
        return describe_shapes(sample if stage.field is None else get_value(sample, stage.field))
    return None
