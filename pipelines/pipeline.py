"""`Pipeline`: an immutable description of where samples come from and how each is prepared."""

from __future__ import annotations

import functools
import hashlib
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pipelines import comparison, fingerprint
from pipelines.checks import (
    check_choice,
    check_integer,
    check_repeatable,
    check_seed,
    check_share_or_count,
    check_shuffle,
    check_source,
)
from pipelines.comparison import Difference
from pipelines.errors import DataOutOfReach, ForeignRandomness, PipelineError, TooManySkipped
from pipelines.order import BlockOrder, Indices, epoch_indices
from pipelines.prepare.fields import Field, declare_fields, describe_fields
from pipelines.prepare.memory_order import MemoryLayout
from pipelines.prepare.poison_records import PoisonRecords
from pipelines.sampling import SampledOrder, Sampling, check_sampling
from pipelines.stage import Randomness, Stage, make_stage
from pipelines.stages._declared import find_slots

if TYPE_CHECKING:
    from pipelines.loader.collate import Collate
    from pipelines.loader.loader import Loader
    from pipelines.loader.resident import Resident
    from pipelines.prepare.structure import Inferred, Structure
    from pipelines.weights import Weights

SHUFFLE_WINDOW = 8
MAX_SKIPPED = 0.01


class Pipeline:
    """A source and the stages applied to each of its records.

    A sample is a pure function of (pipeline, seed, epoch, index); with `sampling`, of its position in the epoch
    too. A pipeline is immutable: `map` and `take` return a new one. One process reads it with `loader`, several
    share it through `Feeder` and `attach`, and `resident` loads all of it into memory.

    Args:
        source: a source from `pipelines.sources`.
        seed: an integer; determines the order of each epoch and all randomness in the stages.
        shuffle: `True` shuffles the samples anew in each epoch, `False` keeps the order of the source. `"blocks"`
            shuffles the groups in which the source is read (Parquet row groups, ranges of tar files) and mixes the
            samples of `shuffle_window` groups at a time. Each group is read once per epoch, for data larger than
            the cache of the source. See `pipelines.order.BlockOrder`.
        shuffle_window: number of groups whose samples are mixed with each other if `shuffle="blocks"`. The cache
            of the source should hold as many.
        sampling: draws the records of each epoch by weight or equally from each class (`pipelines.sampling`). Each
            of a record's positions in an epoch has random numbers of its own.
        on_error: `"raise"` fails on a record that cannot be prepared. `"skip"` leaves it out for all readers: its
            batch has one sample less, and the record is counted.
        max_skipped: how many records of an epoch `"skip"` may leave out: a share from 0.0 to 1.0 of its samples
            (one at least, unless it is 0.0), or a number. Reading ends with `TooManySkipped` where there are more.
        id: a name that identifies the source in fingerprints if its identity is unknown.

    Raises:
        PipelineError: the source is empty or not a source, or an argument is invalid.
        SampleError: the labels for `sampling` cannot be read.

    Examples:
        >>> pipe = Pipeline(sources.arrays(x=np.arange(8.0)), seed=0).map(stages.cast("x", "float32"))
    """

    sampling: SampledOrder | None = None

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
        seed = check_seed(seed)
        check_shuffle(shuffle, source)
        shuffle_window = check_integer("shuffle_window", shuffle_window, 1)
        if sampling is not None:
            check_sampling(sampling, shuffle)
            self.sampling = sampling.resolve(source, seed)
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
        self._is_cut = False
        self._poison_records = PoisonRecords()

    def map(
        self,
        call: Callable[..., Any],
        *,
        field: str | None = None,
        random: Randomness | Literal[False] | None = None,
        fields: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
        id: str | None = None,
        version: str | int | None = None,
    ) -> Pipeline:
        """Returns the pipeline with one more stage.

        Args:
            call: `f(sample)` or `f(sample, rng)`. A sample is a dict of numpy arrays, numbers, texts or bytes; the
                function returns one, too. `rng` is a `numpy.random.Generator` seeded for this sample, epoch and
                stage.
            field: pass the value of this field to the function instead of the whole sample, and replace it by the
                result. Transforms of torchvision, albumentations and kornia are given what they take; for an image
                with its boxes or masks see `stages.tv_transform`.
            random: what it draws from, seeded before each call: `"numpy"` (its parameter `rng`), `"torch"`,
                `"python"` (`random`, numpy's global generator), `"global"` (all three), `"own"` (it has
                `set_random_seed`). Found for `rng`, torchvision, kornia and `"own"`. `False`: nothing.
            fields: name -> (shape, dtype) of all fields after this stage, if it is the last one. Unless given, a
                sample is prepared to find out.
            id: identifies the stage in fingerprints instead of its code and all that is bound to it.
            version: of what the description of its code does not cover (`why_unsure`), such as a file that it
                opens. Its code is still compared.

        Raises:
            PipelineError: `call` is not callable, or `random` is invalid.
        """
        longer = self._copy()
        longer.stages = (*self.stages, make_stage(call, field, random, id, version))
        longer._tokens = (*self._tokens, uuid.uuid4().hex)
        longer._poison_records = PoisonRecords()
        longer._declared = declare_fields(fields, has_slots=bool(find_slots(longer.stages))) if fields else None
        return longer

    @property
    def poison_records(self) -> PoisonRecords:
        """The records known to crash or hang this process; shared by all copies that prepare the same samples."""
        known: PoisonRecords = self.__dict__.setdefault("_poison_records", PoisonRecords())
        return known

    def check_skipped(self, skipped: int, n: int, indices: Sequence[int]) -> None:
        """Check how many records of an epoch were left out so far.

        Args:
            skipped: how many.
            n: samples of the epoch.
            indices: of those among them that are known.

        Raises:
            TooManySkipped: more than `max_skipped`.
        """
        limit = self.max_skipped
        if isinstance(limit, float):
            limit = max(int(limit * n), limit > 0)
        if skipped > limit:
            named = [f"{index} ({self.source.where(index)})" for index in indices[: limit + 1]]
            raise TooManySkipped.of(skipped, int(limit), n, named)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes of a pickled pipeline; one of a run from before `max_skipped` skips as it did."""
        self.__dict__.update({"max_skipped": 1.0} | state)
        if "max_skipped" not in state and self.on_error == "skip":
            warnings.warn(
                "this pipeline was declared before there was max_skipped=: any number of records is left out, as "
                "before; give max_skipped= in a new run",
                RuntimeWarning,
                stacklevel=2,
            )

    def _copy(self) -> Pipeline:
        _ = self.poison_records
        other = object.__new__(Pipeline)
        other.__dict__ = {**self.__dict__, "_inferred": None, "_is_cut": False}
        return other

    def take_stages(self, stages: int, *, is_cut: bool = False) -> Pipeline:
        """Returns the pipeline of the first `stages` stages; it compares equal to the one that was mapped on.

        Args:
            stages: how many leading stages to keep.
            is_cut: every reader applies further stages. A sample of another shape than the first is then not a bad
                record: each reader prepares it in full.

        Raises:
            PipelineError: there are fewer stages.
        """
        if not 0 <= stages <= len(self.stages):
            raise PipelineError(f"take_stages({stages!r}) of a pipeline of {len(self.stages)} stages")
        if stages == len(self.stages) and not is_cut:
            return self
        cut = self._copy()
        cut.stages, cut._tokens = self.stages[:stages], self._tokens[: stages + 1]
        cut._declared = self._declared if stages == len(self.stages) else None
        cut._is_cut = is_cut
        return cut

    def take(self, n: int) -> Pipeline:
        """Returns the same pipeline over the first `n` records of its source.

        Raises:
            PipelineError: the source has fewer than `n` records, or the pipeline has `sampling`.
        """
        if self.sampling is not None:
            raise PipelineError(
                "take() of a pipeline with sampling=: take records with Pipeline(source.take(n), sampling=...), "
                "or draw fewer of them with samples="
            )
        shorter = self._copy()
        shorter._tokens = tuple(uuid.uuid4().hex for _ in self._tokens)
        shorter.source = self.source.take(n)
        shorter._poison_records = PoisonRecords()
        shorter._declared = self._declared
        return shorter

    def number_classes(self, field: str, names: Sequence[str]) -> Pipeline:
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
        # The same tokens for every copy: pipelines that share stages go on to share them.
        other._tokens = tuple(
            hashlib.sha256(f"{token} {numbering}".encode()).hexdigest()[:32] for token in self._tokens
        )
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
        """The first stage that draws random numbers, or None."""
        return next((s for s in self.stages if s.random), None)

    @property
    def fields(self) -> dict[str, Field]:
        """Name -> (shape, dtype) of the fields of one sample, without the batch axis.

        The first access prepares a sample, unless `map(fields=...)` declared them.

        Raises:
            PipelineError: a field cannot be part of a batch.
            SampleError: the sample cannot be prepared.
        """
        if self._declared is not None:
            return self._declared
        return self._infer()[0]

    @property
    def layouts(self) -> dict[str, MemoryLayout] | str:
        """Field -> memory layout of its value after the last stage, for readers that apply further stages.

        A text says why no reader can: a value that is neither an array nor a number does not fit into a ring.
        """
        if self._declared is not None and self._inferred is None:
            try:
                return self._infer()[1]
            except (ForeignRandomness, DataOutOfReach):
                raise
            except PipelineError as error:
                return str(error)
        return self._infer()[1]

    @property
    def is_cut(self) -> bool:
        """Whether every reader applies further stages (see `take_stages`)."""
        return self._is_cut

    @property
    def structure(self) -> Structure | None:
        """How the fields make up a sample with nested or declared fields; None: they are its values."""
        if self._declared is not None:
            return None
        inferred = self._infer()
        return inferred[2] if len(inferred) > 2 else None  # pickles of an earlier version have no structure

    @property
    def top_fields(self) -> list[str]:
        """The names of a sample's own fields, not of those inside them."""
        return list(self.fields if self.structure is None else self.structure.tree)

    def _infer(self) -> Inferred:
        if self._inferred is None:
            from pipelines.prepare.inference import infer

            self._inferred = infer(self)
        return self._inferred

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

    def _describe_parts(self) -> list[comparison.Part]:
        return comparison.describe_parts(self)

    def order(self) -> Callable[[int, int, int], Indices]:
        """Returns a function (epoch, start, stop) -> indices of the samples there, int64 [stop - start]."""
        if self.sampling is not None:
            return self.sampling
        if self.shuffle == "blocks":
            return BlockOrder(self.source.groups, self.seed, self.shuffle_window)
        return functools.partial(epoch_indices, len(self), self.seed, shuffle=bool(self.shuffle))

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
        parts, known = self._describe_parts(), {"scheme": fingerprint.SCHEME, "tokens": self._tokens}
        return known | {
            "parts": [part.as_json() for part in parts],
            "why_unsure": comparison.explain_unsure(parts),
        }

    def count_common_stages(self, theirs: Mapping[str, Any]) -> int:
        """See `comparison.count_common_stages`."""
        return comparison.count_common_stages(self._tokens, self._describe_parts(), theirs)

    def begins(self, other: Pipeline) -> bool:
        """Whether another pipeline is this one, or this one with further stages."""
        return self.count_common_stages(other.describe_identity()) == len(self.stages)

    def is_continued_by(self, theirs: Mapping[str, Any]) -> bool:
        """Whether the pipeline that `theirs` describes (`describe_for_peers`) is this one with further stages."""
        return len(theirs["tokens"]) > len(self._tokens) and self.count_common_stages(theirs) == len(self.stages)

    def find_obstacle(self) -> Difference | None:
        """See `comparison.find_obstacle`."""
        return comparison.find_obstacle(self)

    def describe_samples(self) -> dict[str, Any]:
        """Describes the samples in a ring to a reader, as JSON values."""
        fields = [[name, *field] for name, field in self.fields.items()]
        held = {"stages": len(self.stages), "fields": fields, "layouts": self.layouts, "token": self.token}
        return held if self.structure is None else {**held, "structure": self.structure.as_record()}

    def find_difference(self, theirs: Mapping[str, Any]) -> Difference | None:
        """Says why the pipeline that `theirs` describes (`describe_for_peers`) is not this one; None if it is."""
        fields = describe_fields(self.fields)
        return comparison.find_difference(self._tokens, self._describe_parts(), fields, theirs)

    def without_randomness(self) -> Pipeline:
        """Returns the pipeline without shuffling, for a set that is prepared once.

        Raises:
            PipelineError: a stage draws random numbers, or the pipeline has `sampling`.
        """
        check_repeatable(self)
        if not self.shuffle:
            return self
        ordered = self._copy()
        ordered.shuffle = False
        ordered._inferred = self._inferred
        return ordered

    def loader(
        self,
        batch_size: int,
        epochs: range | int | None = None,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        start_step: int = 0,
        weights: Weights | None = None,
        *,
        workers: int = 0,
        prefetch: int | None = None,
        timeout_s: float | None = None,
        copy: bool = False,
        collate: Collate | None = None,
    ) -> Loader:
        """Returns an iterable of batches for this process alone.

        Args:
            batch_size: samples in a *global* batch; each rank receives its own rows of it.
            epochs: the epochs to read: a range, or a number of epochs from 0. Unless given, each pass over the
                loader is the next epoch, from 0.
            rank: of this process, 0 to `world - 1`.
            world: number of processes that divide each global batch.
            drop_last: whether to leave out the last, smaller batch of an epoch.
            start_step: number of global batches of the first epoch to leave out, for a resume.
            weights, collate: see `attach`.
            workers: processes that prepare batches ahead; 0: each is prepared here when it is asked for.
            prefetch: batches that they prepare ahead; None: 2 for each worker, fewer if they exceed 256 MiB.
            timeout_s: seconds that a batch of workers may take; None: any time.
            copy: whether batches of workers are copies; else each is valid until the next one.

        Returns:
            Batches, dicts of tensors: each field [rows, *shape], and `"index"` int64 [rows].

        Raises:
            PipelineError: an argument is invalid.

        Examples:
            >>> for batch in pipe.loader(batch_size=128, epochs=3): ...
        """
        from pipelines.loader.factory import open_loader

        return open_loader(
            self, batch_size, epochs, rank=rank, world=world, drop_last=drop_last, start_step=start_step,
            weights=weights, workers=workers, prefetch=prefetch, timeout_s=timeout_s, copy=copy, collate=collate,
        )  # fmt: skip

    def resident(self) -> Resident:
        """Prepares all samples once, into the memory of this process.

        Raises:
            PipelineError: a stage draws random numbers, or the pipeline has `sampling`.
        """
        from pipelines.loader.resident import Resident

        return Resident.prepare(self.without_randomness())
