"""Short epochs for a rehearsal: two training batches and the last one, and a part of each split."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ensemble.train.data import Data, describe_not_finite, steps_per_epoch
from ensemble.train.job import StopTraining
from pipelines.errors import PipelineError
from pipelines.loader.resident import StreamedSet
from pipelines.sources import Source

if TYPE_CHECKING:
    from pipelines import Batch
    from pipelines.loader.collate import Collate

#: Batches of a short epoch.
STEPS = 3
#: Fields of whole numbers whose least and largest values a split shows, at most.
_MOST_FIELDS = 4
#: Their types: ids and tokens, no images; and the size of a sample's field that is no such.
_WHOLE, _LARGE = ("int64", "int32"), 2**16
_NAMED = 3


class EndOfRehearsal(StopTraining):
    """Leaves a training loop after its last short epoch."""

    def __init__(self) -> None:
        super().__init__("finished")


@dataclass
class GivenBatch:
    """The batch that the user's code has now, or had last."""

    split: str
    batch: Batch
    is_partial: bool


class ShortData(Data):
    """The batches of short epochs, the same in each epoch.

    Attributes:
        on_epoch: called with each epoch before its first batch is given; what it raises leaves the loop.
        given: the batch that was given last.
    """

    on_epoch: Callable[[int], None] = staticmethod(lambda epoch: None)
    given: GivenBatch | None = None
    _batches: Sequence[Batch] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._parts: dict[str, list[Batch]] = {}

    @property
    def steps(self) -> int:
        """Batches of a short epoch."""
        return min(STEPS, steps_per_epoch(self._ensemble, self._identity))

    def start(self, *args: Any) -> None: ...  # splits are prepared batch by batch

    def open(self, epoch: int, step: int) -> None:
        self.first_epoch = self.first_epoch or 0

    def switch_feeder(self, feeder: str | None, own_epoch: int) -> bool:
        return False

    def epoch(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield the batches of a short epoch."""
        self.on_epoch(own_epoch)
        return self._note("train", self.reread(own_epoch, collate))

    def reread(self, own_epoch: int, collate: Collate | None = None) -> Iterator[Batch]:
        batches = (batch.clone() for batch in self._short_epoch)  # members may write into them
        return self._on_device(self._apply_collate(batches, collate))

    @property
    def _short_epoch(self) -> Sequence[Batch]:
        if not self._batches:
            first = self._read_steps(0, self.steps - 1)
            self._batches = [*first, *self._read_steps(steps_per_epoch(self._ensemble, self._identity) - 1, 1)]
        return self._batches

    def _read_steps(self, first: int, count: int) -> list[Batch]:
        own, comm = self._identity, self._comm
        loader = self.pipeline("train").loader(
            own.batch_size, 1, comm.rank, comm.world, self._ensemble.drop_last, first, weights=self._weights
        )
        with contextlib.closing(loader):
            epoch = next(iter(loader.epochs()))
            return [batch.clone() for batch, _ in zip(epoch.all_batches(), range(count), strict=False)]

    def _note(self, split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        largest = (
            self._identity.batch_size if split == "train" else -(-self._identity.batch_size // self._comm.world)
        )
        for batch in batches:
            size = batch.global_size if split == "train" else len(batch["index"])
            self.given = GivenBatch(split, batch, 0 < size < largest)
            yield batch

    def count_batches(self, own_epoch: int, steps: int) -> int:
        return sum(batch.global_size > 0 for batch in self._short_epoch)

    # --- splits -------------------------------------------------------------------------------------------

    def split_steps(self, name: str) -> int:
        return len(self._read_part(name))

    def split(self, name: str, collate: Collate | None = None) -> Iterator[Batch]:
        """Yield some of this rank's batches of a split: the first, the last, those with extreme values."""
        self._were_read.add(name)
        batches = (batch.clone() for batch in self._read_part(name))
        collated = self._apply_collate(batches, collate, is_training=False)
        return self._note(name, self._on_device(collated))

    def _read_part(self, name: str) -> list[Batch]:
        if name not in self._parts:
            size, rank, world = self._identity.batch_size, self._comm.rank, self._comm.world
            loader = self._resident(name).loader(size, rank, world, chosen=self.find_held_out(name))
            ends, extremes = loader.spans[:1] + loader.spans[-1:], self._find_extremes(name)
            loader.spans = [
                one for one in loader.spans if one in ends or any(one[0] <= row < one[1] for row in extremes)
            ]
            self._parts[name] = [batch.clone() for batch in loader]
        return self._parts[name]

    def _find_extremes(self, name: str) -> set[int]:
        """The samples with the least and the largest value of each field of whole numbers."""
        pipeline, found = self.pipeline(name), set[int]()
        source: Any = pipeline.source
        while isinstance(inner := getattr(source, "source", None), Source):  # a part of it
            source = inner
        if type(source).column is Source.column:  # it would read each record
            return found
        whole = [
            name
            for name, field in pipeline.fields.items()
            if field.dtype in _WHOLE and math.prod(field.shape) < _LARGE
        ]
        for field in whole[:_MOST_FIELDS]:
            with contextlib.suppress(PipelineError, ValueError, TypeError):  # a stage has made it
                values = pipeline.source.column(field).reshape(len(pipeline), -1)
                found |= {int(values.min(axis=1).argmin()), int(values.max(axis=1).argmax())}
        return found

    def _resident(self, split: str) -> StreamedSet:
        if split not in self._residents:
            self._residents[split] = StreamedSet(self.pipeline(split).without_randomness())
        resident = self._residents[split]
        assert isinstance(resident, StreamedSet)
        return resident

    def targets(self, split: str, field: str, index: torch.Tensor, task: Any) -> torch.Tensor | None:
        return None  # those of a part are of no use

    # --- errors -------------------------------------------------------------------------------------------

    def describe_given(self) -> str:
        """Return which batch the user's code had when it failed, and what to do about a partial one."""
        given = self.given
        if given is None or "index" not in given.batch or not len(given.batch["index"]):
            return ""
        index = given.batch["index"].tolist()
        named = ", ".join(self.describe_sample(given.split, row) for row in index[:_NAMED])
        more = f" and {len(index) - _NAMED} more" if len(index) > _NAMED else ""
        samples = "1 sample" if len(index) == 1 else f"{len(index)} samples"
        what = (
            f"the last batch of {given.split}, of {samples}" if given.is_partial else f"a batch of {given.split}"
        )
        remedy = "; Ensemble(drop_last=True) leaves it out" if given.is_partial and given.split == "train" else ""
        not_finite = describe_not_finite(given.batch, lambda row: self.describe_sample(given.split, row))
        return f"in {what} ({named}{more}){not_finite}{self._describe_extremes(given)}{remedy}"

    def _describe_extremes(self, given: GivenBatch) -> str:
        """The largest of each field of whole numbers in a batch of a split: an embedding may not have it."""
        if given.split == "train":
            return ""
        shown = []
        for name, values in given.batch.items():
            is_whole = isinstance(values, torch.Tensor) and str(values.dtype).removeprefix("torch.") in _WHOLE
            if is_whole and name not in ("index", getattr(self._ensemble.recipe, "target", "")):
                largest = values.reshape(len(values), -1).amax(dim=1)
                row = int(largest.argmax())
                where = self.describe_sample(given.split, int(given.batch["index"][row]))
                shown.append(f"the largest {name!r} is {int(largest[row])}, of {where}")
        return "".join(f"; {one}" for one in shown[:_MOST_FIELDS])
