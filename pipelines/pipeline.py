"""Source + stages = `Pipeline`: an immutable description of how each sample is made."""

from __future__ import annotations

import functools
import operator
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pipelines import checks, comparison, fingerprint
from pipelines.comparison import Difference
from pipelines.errors import ForeignRandomness, PipelineError
from pipelines.order import BlockOrder, Generators, Indices, epoch_indices
from pipelines.prepare.deadly_records import Hazards
from pipelines.prepare.fields import Field, describe_fields
from pipelines.prepare.memory_order import MemoryLayout
from pipelines.stages._pictures import Imaged, is_torchvision

if TYPE_CHECKING:
    from pipelines.loader.loader import Loader
    from pipelines.loader.resident import Resident
    from pipelines.weights import Weights

Randomness = Literal["numpy", "torch"]
SHUFFLE_WINDOW = 8


@dataclass(frozen=True)
class Stage:
    """One `map` of a pipeline: what is called, on which field, with which randomness."""

    call: Callable[..., Any]
    field: str | None
    random: Randomness | None
    id: str | None

    @property
    def name(self) -> str:
        """How errors call this stage."""
        call = self.call.transform if isinstance(self.call, Imaged) else self.call
        named = getattr(call, "__qualname__", None) or type(call).__qualname__
        return f"{named}({self.field!r})" if self.field else str(named)

    def describe(self) -> Any:
        """What this stage is; raises `fingerprint.Unsure` where that cannot be said."""
        what = ["id", self.id] if self.id is not None else fingerprint.describe(self.call)
        return [what, self.field, self.random]


class Pipeline:
    """Where samples come from and what is done to each; a pure function of (seed, epoch, index).

    A pipeline is immutable: `map` returns a new one. It is used alone by `loader`, shared by `Feeder` and
    `attach`, kept whole in memory by `resident`.

    Args:
        source: a `pipelines.sources` source.
        seed: of the epochs' order and of all randomness in the stages.
        shuffle: whether each epoch has an order of its own; else the source's order is kept. `"blocks"` shuffles
            the groups in which a source is read (Parquet's row groups, ranges of tar files) and the samples of a
            few groups at a time, so that each group is read once an epoch: for data that does not fit the source's
            cache, or lies on a disk that is slow to seek. `pipelines.order.BlockOrder` says what is lost.
        shuffle_window: groups whose samples are mixed with each other where `shuffle="blocks"`; a source's cache
            should hold as many.
        on_error: `"raise"`, or `"skip"`: a record that cannot be prepared keeps its position, its batch is
            smaller by one, and it is counted, for every reader alike.
        id: a name that stands for the source where its identity cannot be found out.
    """

    def __init__(
        self,
        source: Any,
        *,
        seed: int = 0,
        shuffle: bool | Literal["blocks"] = True,
        shuffle_window: int = SHUFFLE_WINDOW,
        on_error: Literal["raise", "skip"] = "raise",
        id: str | None = None,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise PipelineError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        if not hasattr(source, "where"):
            raise PipelineError(f"a Pipeline starts from a pipelines.sources source, got {type(source).__name__}")
        if len(source) == 0:
            raise PipelineError(f"the source is empty: {source!r}")
        try:
            seed = int(operator.index(seed))
        except TypeError:
            raise PipelineError(f"seed must be an integer, got {seed!r}") from None
        if shuffle not in (True, False, "blocks"):
            raise PipelineError(f"shuffle must be True, False or 'blocks', got {shuffle!r}")
        if shuffle == "blocks" and getattr(source, "groups", None) is None:
            raise PipelineError(
                f"shuffle='blocks' is for a source that is read in groups (parquet, tar), not for {source!r}, "
                "which gives any record at the same cost: leave shuffle=True"
            )
        shuffle_window = checks.integer("shuffle_window", shuffle_window, 1)
        self.source = source
        self.seed = seed
        self.shuffle = shuffle
        self.shuffle_window = shuffle_window
        self.on_error: Literal["raise", "skip"] = on_error
        self.id = id
        self.stages: tuple[Stage, ...] = ()
        self._declared: dict[str, Field] | None = None
        self._inferred: tuple[dict[str, Field], dict[str, MemoryLayout] | str] | None = None
        # Of this very object, and of those that it has grown from: one for each number of stages.
        self._tokens: tuple[str, ...] = (uuid.uuid4().hex,)
        self._is_cut = False
        self._hazards = Hazards()

    def map(
        self,
        call: Callable[..., Any],
        *,
        field: str | None = None,
        random: Randomness | Literal[False] | None = None,
        fields: Mapping[str, tuple[tuple[int, ...], str]] | None = None,
        id: str | None = None,
    ) -> Pipeline:
        """The pipeline with one more stage.

        Args:
            call: `f(sample)` or `f(sample, rng)`, a dict of numpy arrays in and out, `rng` a
                `numpy.random.Generator` of this sample, epoch and stage alone.
            field: the stage gets and returns the value of this field in place of the whole sample. A transform of
                torchvision's gets an image there as a PIL image (`pipelines.stages._pictures`).
            random: `"torch"` if the stage draws from torch's global generator, which is then seeded for it;
                False if it draws nothing, although its second argument looks like a generator.
            fields: name -> (shape, dtype) of all fields after this stage, where it is the last one; found out
                by preparing a sample otherwise.
            id: stands for the stage in the pipeline's fingerprint.
        """
        if not callable(call):
            raise PipelineError(f"map() takes a function of a sample, got {call!r}")
        if random not in (None, False, "numpy", "torch"):
            raise PipelineError(f"random must be 'torch', 'numpy', False or left out, got {random!r}")
        if random is None and fingerprint.has_generator_parameter(call):
            random = "numpy"
        if field is not None and is_torchvision(call):
            call = Imaged(call)
        longer = self._copy()
        longer.stages = (*self.stages, Stage(call, field, random or None, id))
        longer._tokens = (*self._tokens, uuid.uuid4().hex)
        longer._hazards = Hazards()
        longer._declared = (
            {k: Field(tuple(s), str(np.dtype(d))) for k, (s, d) in fields.items()} if fields else None
        )
        return longer

    @property
    def hazards(self) -> Hazards:
        """What this process knows of records that are deadly; one for all copies that prepare the same."""
        known: Hazards = self.__dict__.setdefault("_hazards", Hazards())
        return known

    def _copy(self) -> Pipeline:
        _ = self.hazards
        other = object.__new__(Pipeline)
        other.__dict__ = {**self.__dict__, "_inferred": None, "_is_cut": False}
        return other

    def prefix(self, stages: int, *, is_cut: bool = False) -> Pipeline:
        """The pipeline of the first so many stages only; one that grew from the same is the same.

        Args:
            is_cut: nobody reads it as it is, all go on from it: samples that its fields cannot hold (of another
                shape than the first) are no bad records, each reader prepares them in full.

        Raises:
            PipelineError: it has not as many.
        """
        if not 0 <= stages <= len(self.stages):
            raise PipelineError(f"prefix({stages!r}) of a pipeline of {len(self.stages)} stages")
        if stages == len(self.stages) and not is_cut:
            return self
        cut = self._copy()
        cut.stages, cut._tokens = self.stages[:stages], self._tokens[: stages + 1]
        cut._declared = self._declared if stages == len(self.stages) else None
        cut._is_cut = is_cut
        return cut

    def take(self, n: int) -> Pipeline:
        """The same pipeline over the first `n` records of its source."""
        shorter = self._copy()
        shorter._tokens = tuple(uuid.uuid4().hex for _ in self._tokens)
        shorter.source = self.source.take(n)
        shorter._hazards = Hazards()
        shorter._declared = self._declared
        return shorter

    def __len__(self) -> int:
        """Samples in an epoch, the ones that will be skipped included."""
        return len(self.source)

    def __repr__(self) -> str:
        return "Pipeline(" + " -> ".join([repr(self.source), *(s.name for s in self.stages)]) + ")"

    @property
    def random_stage(self) -> Stage | None:
        """The first stage that draws random numbers, if any."""
        return next((s for s in self.stages if s.random), None)

    @property
    def fields(self) -> dict[str, Field]:
        """Name -> (shape, dtype) of one sample's fields; prepares a sample to find out, unless declared."""
        if self._declared is not None:
            return self._declared
        return self._infer()[0]

    @property
    def layouts(self) -> dict[str, MemoryLayout] | str:
        """Field -> how its value lies in memory after the last stage, for readers whose pipelines go on from here.

        A text says why none can: a value that is neither array nor number, which no ring gives back as it was.
        """
        if self._declared is not None and self._inferred is None:
            try:
                return self._infer()[1]
            except ForeignRandomness:
                raise
            except PipelineError as error:
                return str(error)
        return self._infer()[1]

    @property
    def is_cut(self) -> bool:
        """Whether all its readers go on from it (`prefix`)."""
        return self._is_cut

    def _infer(self) -> tuple[dict[str, Field], dict[str, MemoryLayout] | str]:
        if self._inferred is None:
            from pipelines.prepare.inference import infer

            self._inferred = infer(self)
        return self._inferred

    @property
    def fingerprint(self) -> str | None:
        """A name for what this pipeline computes; None where that cannot be said surely (`why_unsure`)."""
        parts = self.parts()
        return None if parts is None else fingerprint.digest([fingerprint.SCHEME, parts])

    def parts(self) -> list[list[str]] | None:
        """[name, digest] of source, seed, order, error policy and each stage; None where one is unsure."""
        parts = self._describe_parts()
        return None if any(digest is None for _, digest, _ in parts) else [[name, str(d)] for name, d, _ in parts]

    @property
    def why_unsure(self) -> str | None:
        """What keeps the pipeline from having a fingerprint, for the user."""
        why = next((why for _, _, why in self._describe_parts() if why is not None), None)
        return None if why is None else f"{why} has no sure identity: give it an id="

    def _describe_parts(self) -> list[comparison.Part]:
        """(name, digest, what is unsure) of each part."""

        def part(name: str, what: Callable[[], Any]) -> comparison.Part:
            try:
                return name, fingerprint.digest(what()), None
            except fingerprint.Unsure as unsure:
                return name, None, str(unsure)

        return [
            part("source", self._describe_source),
            part("seed", lambda: [fingerprint.describe_ours(Generators), self.seed]),
            part("shuffle", self._describe_order),
            part("on_error", lambda: self.on_error),
            *(part(f"stage {i} {stage.name}", stage.describe) for i, stage in enumerate(self.stages)),
        ]

    def _describe_source(self) -> Any:
        source = self.id if self.id is not None else self.source.identity()
        if source is None:
            raise fingerprint.Unsure(f"the source {self.source!r}")
        return source

    def _describe_order(self) -> Any:
        if self.shuffle != "blocks":
            return [fingerprint.describe_ours(epoch_indices), self.shuffle]
        return [
            fingerprint.describe_ours(BlockOrder),
            self.shuffle_window,
            fingerprint.describe(self.source.groups),
        ]

    def order(self) -> Callable[[int, int, int], Indices]:
        """`(epoch, start, stop)` -> the sample indices at the places [start, stop) of an epoch, int64."""
        if self.shuffle == "blocks":
            return BlockOrder(self.source.groups, self.seed, self.shuffle_window)
        return functools.partial(epoch_indices, len(self), self.seed, shuffle=bool(self.shuffle))

    @property
    def token(self) -> str:
        """Names this very object and its pickled copies."""
        return self._tokens[-1]

    def describe_for_peers(self) -> dict[str, Any]:
        """Describes the pipeline as JSON values, for `find_difference` in another process."""
        return {
            **self._describe_for_comparison(),
            "why_unsure": self.why_unsure,
            "fields": describe_fields(self.fields),
        }

    def _describe_for_comparison(self) -> dict[str, Any]:
        parts = [[name, digest] for name, digest, _ in self._describe_parts()]
        return {"scheme": fingerprint.SCHEME, "tokens": self._tokens, "parts": parts}

    def count_common_stages(self, theirs: Mapping[str, Any]) -> int:
        """How many leading stages the pipeline of this `describe_for_peers` has in common with this one.

        -1 where not even the source, seed, order and error policy are, or nobody can say so.
        """
        return comparison.count_common_stages(self._tokens, self._describe_parts(), theirs)

    def is_prefix_of(self, other: Pipeline) -> bool:
        """Whether another pipeline is this one, or this one and some more stages."""
        return self.count_common_stages(other._describe_for_comparison()) == len(self.stages)

    def is_continued_by(self, theirs: Mapping[str, Any]) -> bool:
        """Whether the pipeline of this `describe_for_peers` is this one and some more stages."""
        return len(theirs["tokens"]) > len(self._tokens) and self.count_common_stages(theirs) == len(self.stages)

    def find_obstacle(self) -> Difference | None:
        """Why no reader can go on from this pipeline's samples in a ring; None where any can."""
        why = self.layouts
        if isinstance(why, dict):
            return None
        stages = len(self.stages)
        return Difference(f"nobody can go on from the {stages} stages at the feeder: {why}", unsure=True)

    def describe_samples(self) -> dict[str, Any]:
        """What a reader that goes on from this pipeline's samples in a ring has to know of them: JSON values."""
        return {"stages": len(self.stages), "fields": describe_fields(self.fields), "forms": self.layouts}

    def find_difference(self, theirs: Mapping[str, Any]) -> Difference | None:
        """Why the pipeline that `theirs` describes (`describe_for_peers`) is not this one; None where it is."""
        return comparison.find_difference(
            self._tokens, self._describe_parts(), describe_fields(self.fields), theirs
        )

    def without_randomness(self) -> Pipeline:
        """The pipeline in its source's order, for a set that is prepared once.

        Raises:
            PipelineError: a stage draws random numbers.
        """
        stage = self.random_stage
        if stage is not None:
            raise PipelineError(f"a resident set is prepared once, but the stage {stage.name} is random")
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
    ) -> Loader:
        """An iterable of batches that this process prepares for itself.

        Args:
            batch_size: samples of a *global* batch; rank r of `world` gets its own rows of each.
            epochs: stream epochs, a range or how many from 0. Unless given, each pass over the loader is the next
                epoch, from 0 on.
            drop_last: whether the last, smaller batch of an epoch is left out.
            start_step: global batches of the first epoch to leave out, for a resume.
            weights: see `attach`.
        """
        from pipelines.loader.loader import Loader
        from pipelines.loader.reading import Reading

        stream_epochs = checks.epochs(1 if epochs is None else epochs)
        stream_epochs = range(stream_epochs) if isinstance(stream_epochs, int) else stream_epochs
        reading = Reading(len(self), batch_size, stream_epochs, rank, world, drop_last, start_step)
        return Loader(self, reading, weights=weights, passes=epochs is None)

    def resident(self) -> Resident:
        """All samples, prepared once, in this process's memory; read at any pace, as often as wanted."""
        from pipelines.loader.resident import Resident

        return Resident.prepare(self.without_randomness())
