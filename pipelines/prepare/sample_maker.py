"""Makes one sample: reads a record and applies the stages, with the random numbers of that sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines.description import PipelineDescription
from pipelines.errors import DataOutOfReach, PipelineError, SampleError
from pipelines.order.epoch_order import Generators
from pipelines.prepare.generators import seed_for_sample
from pipelines.prepare.transient import Outages
from pipelines.samples.memory_order import normalize_sample
from pipelines.samples.nested import find_path, get_at, require_path, set_at
from pipelines.stage import Stage
from pipelines.stages._batched import draw_seed


class SampleMaker:
    """Makes the samples of one pipeline, one at a time.

    Attributes:
        pipeline: the same.
    """

    def __init__(self, pipeline: PipelineDescription) -> None:
        self.pipeline = pipeline
        self._generators = Generators(pipeline.seed)
        self._poison_records = pipeline.poison_records
        self._outages = Outages()
        self._may_repeat = pipeline.sampling is not None  # a record in an epoch
        # A source of a class of its own need not have more than `[]`.
        is_ours = hasattr(type(pipeline.source), "find_reader")
        self._read = pipeline.source.find_reader() if is_ours else pipeline.source.__getitem__
        for stage in pipeline.stages:
            stage.hold()  # what it holds before it is used
        # Looked up once and not for each sample, most of which take microseconds.
        self._steps = [
            (position, stage, stage.call, stage.field, stage.random)
            for position, stage in enumerate(pipeline.stages)
        ]
        self._parts: dict[int, Any] = {}
        if len(pipeline.stages) > 1:
            from pipelines.prepare.decoded_part import find_decoded_parts

            self._parts = find_decoded_parts(pipeline.stages)

    def make(
        self,
        index: int,
        epoch: int,
        begun: dict[str, Any] | None = None,
        first: int = 0,
        last: int | None = None,
        place: int = 0,
    ) -> dict[str, Any]:
        """One sample after the stages [0, last), by default all.

        Args:
            index: in the source, from 0.
            begun: the same sample after the stages [0, first), normalized: only the others are run.
            place: its position in the epoch, which counts only if the pipeline has `sampling` (`Generators.at`).

        Raises:
            SampleError: naming the index, the file and the stage.
            DataOutOfReach: it was read again, with growing pauses, and is out of reach (`Outages`).
        """
        if index in self._poison_records.codes:
            raise self._poison_records.error(index, self.pipeline.source.where(index))
        if not self._may_repeat:
            place = 0
        stage, failure = None, None
        try:
            sample: Any = self._read(index) if begun is None else begun
            fresh = None  # the field that was made anew; None: perhaps any
            steps = iter(self._steps[first:last])
            for position, step, call, field, random in steps:
                sample = normalize_sample(sample, fresh)
                if position in self._parts and (last is None or position + 1 < last):
                    stage = self._steps[position + 1][1]
                    both = self._parts[position](sample, self._generators.at(epoch, index, position + 1, place))
                    if both is not None:
                        sample, fresh = both, None
                        next(steps)
                        continue
                stage, fresh, path = step, field, None
                if fresh is None:
                    value = sample
                elif isinstance(sample, dict) and ("." in fresh or fresh not in sample):
                    path = find_path(sample, fresh)
                    if path is None:
                        raise PipelineError(f"no field {fresh!r}")
                    fresh, value = str(path[0]), get_at(sample, path)
                else:
                    value = sample[fresh]
                if random is None:
                    value = call(value)
                elif random == "numpy":
                    value = call(value, self._generators.at(epoch, index, position, place))
                elif random == "own":
                    seed = int(self._generators.at(epoch, index, position, place).integers(1 << 32))
                    from pipelines.stages._transforms import find_seeding

                    find_seeding(call)(seed)  # type: ignore[misc]
                    value = call(value)
                else:
                    seed_for_sample(random, self._generators.at(epoch, index, position, place))
                    value = call(value)
                if path is not None:
                    sample = set_at(sample, path, value)
                else:
                    sample = value if fresh is None else {**sample, fresh: value}
                if sample is None:
                    raise PipelineError("it returned None: let it return the sample, a dict")
        except Exception as error:
            failure = self._explain(error, index, stage)
        if failure is not None:
            if not self._wait_to_retry(failure):
                raise failure
            # In full: a stage may have changed what it was given.
            return self.make(index, epoch, None, 0, last, place)
        if self._outages.is_on:
            self._outages.end()
        if not isinstance(sample, dict) and last is None:
            raise SampleError(index, self.pipeline.source.where(index), self._explain_no_dict(sample))
        return sample  # type: ignore[no-any-return]

    def make_batch(self, position: int, epoch: int, samples: Sequence[tuple[int, int, Any]]) -> list[Any]:
        """Samples after a batch stage, as `make` makes each of them.

        Args:
            position: of the stage.
            samples: (position in the epoch, index, sample before the stage), no more than its batches have.

        Raises:
            Exception: what the stage's function raises.
        """
        stage: Any = self.pipeline.stages[position]
        normalized = [normalize_sample(sample, None) for _, _, sample in samples]
        keys = [(epoch, index, position, place if self._may_repeat else 0) for place, index, _ in samples]
        seeds = [draw_seed(self._generators.at(*key)) for key in keys] if stage.random else []
        if stage.field is None:
            return stage.call.compute(normalized, seeds)  # type: ignore[no-any-return]
        paths = [require_path(sample, stage.field) for sample in normalized]
        made = stage.call.compute([get_at(*pair) for pair in zip(normalized, paths, strict=True)], seeds)
        return [set_at(*parts) for parts in zip(normalized, paths, made, strict=True)]

    def _explain(self, error: Exception, index: int, stage: Stage | None) -> SampleError:
        """The error of a sample at which the source, or this stage, has raised one."""
        if isinstance(error, DataOutOfReach):
            raise error
        if isinstance(error, SampleError):
            if error.index == index:
                return error
            failure = SampleError(index, error.where, error.reason)
        else:
            reason = str(error) or type(error).__name__
            if isinstance(error, KeyError):  # which says the key alone
                reason = f"KeyError: {error}"
            reason = f"{stage.name}: {reason}" if stage else reason
            failure = SampleError(index, self.pipeline.source.where(index), reason)
        failure.__cause__ = error
        return failure

    def _explain_no_dict(self, sample: Any) -> str:
        what = "the last stage returned" if self._steps else "the record is"
        remedy = 'name its values, by a stage that returns {"image": ..., "label": ...}'
        if isinstance(sample, list) and all(isinstance(crop, dict) for crop in sample):  # MONAI's crops
            remedy = "a record makes one sample: take one of them, by a stage as map(lambda crops: crops[0])"
        return f"{what} {type(sample).__name__}, not a dict: {remedy}"

    def _wait_to_retry(self, failure: SampleError) -> bool:
        """Whether a record is to be read again, after a pause in which it does not count as one that hangs."""
        note = self._poison_records.note
        if note is None:
            return self._outages.wait(failure)
        before, note.words[0] = note.words[0], 0
        try:
            return self._outages.wait(failure)
        finally:
            note.words[0] = before
