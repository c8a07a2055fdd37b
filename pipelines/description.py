"""What a pipeline is: source, stages, seed, order, error policy, and the identity of all that.

Nothing here prepares or loads a sample: `pipelines.pipeline.Pipeline`, which users have, adds that.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from pipelines import fingerprint
from pipelines.checks import (
    check_any_integer,
    check_choice,
    check_integer,
    check_repeatable,
    check_share_or_count,
    check_shuffle,
    check_source,
)
from pipelines.environment.library_settings import find_settings
from pipelines.errors import DataOutOfReach, ForeignRandomness, PipelineError, TooManySkipped
from pipelines.fingerprint import Description, comparison, describe, describe_ours
from pipelines.fingerprint.comparison import Difference, Part
from pipelines.order.epoch_order import BlockOrder, Generators, Indices, epoch_indices
from pipelines.samples.fields import Field, declare_fields, describe_fields
from pipelines.samples.memory_order import MemoryLayout
from pipelines.samples.poison_records import PoisonRecords
from pipelines.samples.structure import Inferred, Structure
from pipelines.stage import Stage, find_slots
from pipelines.stages._batched import Batched

if TYPE_CHECKING:
    from pipelines.order.sampled_order import SampledOrder
    from pipelines.sampling import Sampling

SHUFFLE_WINDOW = 8
MAX_SKIPPED = 0.01


class PipelineDescription(ABC):
    """A source and the stages applied to each of its records; `Pipeline` documents the arguments.

    Attributes:
        is_set: whether all samples are prepared before one is read: if the first cannot be, the next one shows the
            fields, and all that cannot be are named together.
        poison_records: the records known to crash or hang this process; all copies that prepare the same samples
            share them.
    """

    def __init__(
        self,
        source: Any,
        *,
        seed: int = 0,
        shuffle: bool | Literal["blocks"] = True,
        shuffle_window: int = SHUFFLE_WINDOW,
        sampling: Sampling | None = None,
        on_error: Literal["raise", "skip"] = "raise",
        max_skipped: float | int = MAX_SKIPPED,
        id: str | None = None,
    ) -> None:
        check_choice("on_error", on_error, ("raise", "skip"))
        self.max_skipped: float | int = check_share_or_count("max_skipped", max_skipped)
        check_source(source)
        seed = check_any_integer("seed", seed)
        check_shuffle(shuffle, source)
        shuffle_window = check_integer("shuffle_window", shuffle_window, 1)
        if sampling is not None:
            from pipelines.sampling import check_sampling

            check_sampling(sampling, shuffle)
        self.sampling: SampledOrder | None = None if sampling is None else sampling.resolve(source, seed)
        self.source = source
        self.seed = seed
        self.shuffle = shuffle
        self.shuffle_window = shuffle_window
        self.on_error: Literal["raise", "skip"] = on_error
        self.id = id
        self.stages: tuple[Stage, ...] = ()
        self._declared: dict[str, Field] | None = None
        self._inferred: Inferred | None = None
        # Identify this object and the pipelines that it was mapped from: one token per number of stages.
        self._tokens: tuple[str, ...] = (uuid.uuid4().hex,)
        self.is_cut = self.is_set = False
        self.poison_records = PoisonRecords()

    def _append(self, stage: Stage, fields: Mapping[str, tuple[tuple[int, ...], str]] | None) -> Self:
        longer = self._copy()
        longer.stages = (*self.stages, stage)
        longer._tokens = (*self._tokens, uuid.uuid4().hex)
        longer.poison_records = PoisonRecords()
        longer._declared = declare_fields(fields, has_slots=bool(find_slots(longer.stages))) if fields else None
        return longer

    def check_skipped(self, skipped: int, n: int, indices: Sequence[int]) -> None:
        """Check how many records of an epoch were left out so far.

        Args:
            skipped: how many.
            n: samples of the epoch.
            indices: the known ones among them.

        Raises:
            TooManySkipped: more than `max_skipped`.
        """
        limit = self.max_skipped
        if isinstance(limit, float):
            limit = max(int(limit * n), limit > 0)
        if skipped > limit:
            named = [f"{index} ({self.source.where(index)})" for index in indices[: limit + 1]]
            raise TooManySkipped.of(skipped, int(limit), n, named)

    def _copy(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__ = {**self.__dict__, "_inferred": None, "is_cut": False}
        return other

    def take_stages(self, stages: int, *, is_cut: bool = False) -> Self:
        """Returns the pipeline of the first `stages` stages; it compares equal to the one that was mapped on.

        Args:
            stages: how many leading stages to keep.
            is_cut: every reader applies further stages. A sample of another shape than the first is then not a bad
                record: each reader prepares it in full.

        Raises:
            PipelineError: there are fewer stages.
        """
        if not 0 <= stages <= len(self.stages):
            raise PipelineError(f"take_stages({stages!r}): the pipeline has {len(self.stages)} stages")
        if stages == len(self.stages) and not is_cut:
            return self
        cut = self._copy()
        cut.stages, cut._tokens = self.stages[:stages], self._tokens[: stages + 1]
        cut._declared = self._declared if stages == len(self.stages) else None
        cut.is_cut = is_cut
        return cut

    def take(self, n: int) -> Self:
        """Returns the same pipeline over the first `n` records of its source.

        Raises:
            PipelineError: the source has fewer than `n` records, or the pipeline has `sampling`.
        """
        return self._select("take", "(n)", lambda source: source.take(n))

    def _select(self, name: str, arguments: str, choose: Callable[[Any], Any]) -> Self:
        if self.sampling is not None:
            raise PipelineError(
                f"{name}() does not go with sampling=: choose records with Pipeline(source.{name}{arguments}, "
                "sampling=...), or draw fewer of them with samples="
            )
        shorter = self._copy()
        shorter._tokens = tuple(uuid.uuid4().hex for _ in self._tokens)
        shorter.source = choose(self.source)
        shorter.poison_records = PoisonRecords()
        shorter._declared = self._declared
        if self.id is not None:  # which stands for the records of the whole source
            chosen = fingerprint.digest(fingerprint.describe_array(np.asarray(shorter.source.indices)))
            shorter.id = f"{self.id}, records {chosen}"
        return shorter

    def renew(self, renewed: dict[int, Any]) -> Self:
        """Returns the same pipeline, its source made again if a file has changed: see `Source.renew`."""
        if not hasattr(self.source, "renew") or (source := self.source.renew(renewed)) is self.source:
            return self
        other = self._copy()
        other.source, other.poison_records = source, PoisonRecords()
        other._tokens = tuple(uuid.uuid4().hex for _ in self._tokens)
        return other

    def number_classes(self, field: str, names: Sequence[str]) -> Self:
        """Returns the same pipeline, in whose records the classes of a field have the numbers of `names`.

        See `Source.number_classes`. The numbering is part of the fingerprint, as all of the source is.

        Raises:
            PipelineError: the source does not know the classes of the field.
        """
        source = self.source.number_classes(field, names)
        if source is self.source:
            return self
        other = self._copy()
        other.source = source
        numbering = hashlib.sha256(repr((field, tuple(names))).encode("utf-8", "surrogatepass")).hexdigest()
        other._tokens = _derive_tokens(self._tokens, numbering)
        other.id = None if self.id is None else f"{self.id}, classes {numbering}"
        return other

    def __len__(self) -> int:
        """The number of positions in an epoch: without `sampling` that of the records, bad ones included."""
        return len(self.source) if self.sampling is None else self.sampling.positions

    def __repr__(self) -> str:
        order = [] if self.sampling is None else [repr(self.sampling)]
        return "Pipeline(" + " -> ".join([repr(self.source), *order, *(s.name for s in self.stages)]) + ")"

    @property
    def random_stage(self) -> Stage | None:
        return next((s for s in self.stages if s.random), None)

    @property
    def batch_unit(self) -> int:
        """How many samples are best prepared at a time: as many as its largest batch stage computes at once."""
        return max((call.batch_size for call in self.batched), default=1)

    @property
    def needs_gpu(self) -> bool:
        """Whether a batch stage computes on a GPU, which no fork of this process can use."""
        return any(call.device != "cpu" for call in self.batched)

    @property
    def batched(self) -> list[Batched]:
        """Its stages that compute on batches."""
        return [stage.call for stage in self.stages if isinstance(stage.call, Batched)]

    @property
    def repeats(self) -> bool:
        """Whether each epoch has the same samples, each once, in an order of its own."""
        return self.random_stage is None and self.sampling is None

    @property
    def fields(self) -> dict[str, Field]:
        """Name -> (shape, dtype) of the fields of one sample, without the batch axis.

        The first access prepares a sample, unless `map(fields=...)` declared them.

        Raises:
            PipelineError: a field cannot be part of a batch.
            SampleError: the sample cannot be prepared.
        """
        return self._known.fields if self._declared is None else self._declared

    @property
    def layouts(self) -> dict[str, MemoryLayout] | str:
        """Field -> memory layout of its value after the last stage, for readers that apply further stages.

        A text says why no reader can: a value that is neither an array nor a number does not fit into a ring.
        """
        try:
            return self._known.layouts
        except PipelineError as error:
            if self._declared is None or isinstance(error, ForeignRandomness | DataOutOfReach):
                raise
            return str(error)

    @property
    def structure(self) -> Structure | None:
        """How the fields make up a sample with nested or declared fields; None: they are its values."""
        return None if self._declared is not None else self._known.structure

    @property
    def top_fields(self) -> list[str]:
        """The names of a sample's own fields, not of those inside them."""
        return list(self.fields if self.structure is None else self.structure.tree)

    @property
    def _known(self) -> Inferred:
        if self._inferred is None:
            self._inferred = self._infer()
        return self._inferred

    @abstractmethod
    def _infer(self) -> Inferred:
        """Prepares a sample, for what it shows of all."""

    @property
    def fingerprint(self) -> str | None:
        """Identifies what this pipeline computes: equal for equal samples, in any process.

        Returns:
            32 hexadecimal digits; None if a part has no sure identity (see `why_unsure`).
        """
        parts = self.parts()
        return None if parts is None else fingerprint.digest([fingerprint.SCHEME, parts])

    def parts(self) -> list[list[str]] | None:
        """Returns [name, digest] of source, seed, order, error policy and stages; None if one is unsure."""
        parts = self._describe_parts()
        return [[part.name, part.digest] for part in parts] if all(part.is_sure for part in parts) else None

    @property
    def why_unsure(self) -> str | None:
        """Says which part keeps the pipeline from having a fingerprint, and what to do; None if it has one."""
        return comparison.explain_unsure(self._describe_parts())

    def _describe_parts(self) -> list[Part]:
        """The parts of the pipeline: source, seed, order, error policy, stages."""

        source = self.source.describe_for_fingerprint() if self.id is None else Description(self.id)
        parts = {
            "source": source,
            "seed": Description([describe_ours(Generators), self.seed]),
            "shuffle" if self.sampling is None else "sampling": Description(self._describe_order()),
            "on_error": Description(self.on_error),
        }
        settings = find_settings(only_of_samples=True)
        for number, stage in enumerate(self.stages):
            what = stage.description
            described = Description([what.value, settings], what.gaps) if settings else what
            parts[f"stage {number} {stage.name}"] = described
        return [Part(name, described.digest, described.gaps) for name, described in parts.items()]

    def _describe_order(self) -> Any:
        if self.sampling is not None:
            return self.sampling.describe()
        if self.shuffle != "blocks":
            return [describe_ours(epoch_indices), self.shuffle]
        return [describe_ours(BlockOrder), self.shuffle_window, describe(self.source.groups).value]

    def order(self) -> Callable[[int, int, int], Indices]:
        """Returns a function (epoch, start, stop) -> indices of the samples there, int64 [stop - start]."""
        if self.sampling is not None:
            return self.sampling
        order: Callable[[int, int, int], Indices]
        order = functools.partial(epoch_indices, len(self), self.seed, shuffle=bool(self.shuffle))
        if self.shuffle == "blocks":
            order = BlockOrder(self.source.groups, self.seed, self.shuffle_window)
        return order

    @property
    def token(self) -> str:
        """Identifies this object and its pickled copies."""
        return self._tokens[-1]

    def describe_for_peers(self) -> dict[str, Any]:
        """Describes the pipeline as JSON values, for `find_difference` elsewhere; unknown fields are None."""
        fields = describe_fields(self.fields) if self._declared or self._inferred else None
        return {**self.describe_identity(), "fields": fields}

    def describe_identity(self) -> dict[str, Any]:
        """Describes the pipeline as JSON values, without its fields, for which a sample has to be prepared."""
        parts, fields = self._describe_parts(), {"scheme": fingerprint.SCHEME, "tokens": self._tokens}
        return fields | {
            "parts": [part.as_json() for part in parts],
            "why_unsure": comparison.explain_unsure(parts),
        }

    def count_common_stages(self, theirs: Mapping[str, Any]) -> int:
        """See `comparison.count_common_stages`."""
        return comparison.count_common_stages(self._tokens, self._describe_parts(), theirs)

    def begins(self, other: PipelineDescription) -> bool:
        """Whether another pipeline is this one, or this one with further stages."""
        return self.count_common_stages(other.describe_identity()) == len(self.stages)

    def is_continued_by(self, theirs: Mapping[str, Any]) -> bool:
        """Whether another pipeline is this one with further stages."""
        return len(theirs["tokens"]) > len(self._tokens) and self.count_common_stages(theirs) == len(self.stages)

    def find_obstacle(self) -> Difference | None:
        """Says why no reader can apply further stages to the samples from a ring; None if readers can."""
        why, stages = self.layouts, len(self.stages)
        if isinstance(why, dict):
            return None
        return Difference(f"no consumer can continue from the {stages} stages at the feeder: {why}", unsure=True)

    def describe_samples(self) -> dict[str, Any]:
        """Describes the samples in a ring to a reader, as JSON values."""
        fields = [[name, *field] for name, field in self.fields.items()]
        held = {"stages": len(self.stages), "fields": fields, "layouts": self.layouts, "token": self.token}
        return held if self.structure is None else {**held, "structure": self.structure.as_record()}

    def find_difference(self, theirs: Mapping[str, Any]) -> Difference | None:
        """See `comparison.find_difference`."""
        fields = describe_fields(self.fields)
        return comparison.find_difference(self._tokens, self._describe_parts(), fields, theirs)

    def without_randomness(self) -> Self:
        """Returns the pipeline without shuffling, for a set that is prepared once.

        Raises:
            PipelineError: a stage draws random numbers, or the pipeline has `sampling`.
        """
        check_repeatable(self)
        if self.is_set:
            return self
        ordered = self._copy()
        ordered.shuffle, ordered.is_set = False, True
        ordered._inferred = self._inferred
        return ordered


def _derive_tokens(tokens: Sequence[str], change: str) -> tuple[str, ...]:
    """Tokens after a change, the same for every copy: pipelines that share stages go on to share them."""
    return tuple(hashlib.sha256(f"{token} {change}".encode()).hexdigest()[:32] for token in tokens)
