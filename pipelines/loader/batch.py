"""Batches, which know their place in the stream, and the part of a stream from which one rank reads them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pipelines.checks import MOST_RANKS, check_integer
from pipelines.errors import FieldError, unknown_name
from pipelines.loader.ragged import map_tensors
from pipelines.order import epoch_order
from pipelines.samples.fields import GOOD, INDEX, Field

if TYPE_CHECKING:
    import torch


#: Which samples of a global batch are prepared, bool [b]; None: all.
Good = npt.NDArray[np.bool_] | None


def find_good(ok: bytes) -> Good:
    """Which samples are prepared by their status."""
    if ok.count(GOOD) == len(ok):
        return None
    good: npt.NDArray[np.bool_] = np.frombuffer(ok, np.uint8) & GOOD != 0
    return None if good.all() else good


@dataclass(frozen=True)
class ReadRange:
    """What one rank of one consumer reads of a stream over n samples."""

    n: int
    batch_size: int
    epochs: range
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    start_step: int = 0

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("world", 1), ("start_step", 0)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), low))
        check_integer("world", self.world, 1, MOST_RANKS)
        rank = check_integer("rank", self.rank, 0, self.world - 1, f" of world {self.world}")
        object.__setattr__(self, "rank", rank)

    @property
    def steps(self) -> int:
        """Global batches in an epoch."""
        return epoch_order.steps_per_epoch(self.n, self.batch_size, drop_last=self.drop_last)

    def first_step(self, epoch: int) -> int:
        return min(self.start_step, self.steps) if epoch == self.epochs.start else 0

    def places(self, step: int) -> tuple[int, int]:
        """Places [start, stop) of a global batch in its epoch."""
        return epoch_order.batch_bounds(self.n, self.batch_size, step)

    def own(self, start: int, stop: int) -> tuple[int, int]:
        """The part of a global batch that belongs to this rank."""
        return epoch_order.rank_bounds(start, stop, self.rank, self.world)


class Batch(dict[str, Any]):
    """Field name -> tensor [b, ...], and `index` int64 [b]: the samples' places in the source.

    A field of nested samples is a dict or a tuple of such fields; a ragged one is a list of tensors (`Ragged`), a
    text or bytes one a list of str or bytes.

    It is valid until the next batch is requested, and stays valid if the loop ends before that. Other readers do
    not see what is written into it.

    Attributes:
        epoch: the stream epoch.
        step: number of the global batch in that epoch.
        global_size: samples in the global batch, over all ranks.
    """

    def __init__(self, fields: Mapping[str, Any], *, epoch: int, step: int, global_size: int) -> None:
        super().__init__(fields)
        self.epoch = epoch
        self.step = step
        self.global_size = global_size
        self._staging: Staging | None = None

    def __missing__(self, name: object) -> Any:
        raise FieldError(unknown_name("the batch has no field", str(name), list(self)))

    def clone(self) -> Batch:
        """A copy in memory of its own."""
        copy = self._change(lambda tensor: tensor.clone())
        copy._staging = self._staging
        return copy

    def to(self, device: str | torch.device, non_blocking: bool = False) -> Batch:
        """The batch on a device; a copy to CUDA goes through pinned memory, so that `non_blocking` takes effect.

        A copy stays valid after the next batch is requested. Tensors that are on the device are not copied.
        """
        import torch

        device = torch.device(device)
        if device.type == "cuda" and self._staging is not None:
            return self._staging.copy(self, device, non_blocking)
        return self._change(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        fields = {name: map_tensors(value, change) for name, value in self.items()}
        return Batch(fields, epoch=self.epoch, step=self.step, global_size=self.global_size)


class Staging:
    """Two sets of pinned buffers, used in turn, between shared memory and a CUDA device.

    Pages of a private mapping must not be registered with CUDA themselves: that would end their
    copy-on-write. A set is written again only when the copy that read it is complete.
    """

    def __init__(self) -> None:
        self._sets: list[dict[int, torch.Tensor]] = [{}, {}]
        self._done: list[Any] = [None, None]
        self._turn = 0

    def copy(self, batch: Batch, device: torch.device, non_blocking: bool) -> Batch:
        import torch

        self._turn ^= 1
        buffers = self._sets[self._turn]
        if self._done[self._turn] is not None:
            self._done[self._turn].synchronize()
        order = itertools.count()  # of the tensors: the same in each batch

        def move(value: torch.Tensor) -> torch.Tensor:
            number = next(order)
            buffer = buffers.get(number)
            if buffer is None or buffer.numel() < value.numel() or buffer.dtype != value.dtype:
                buffer = buffers[number] = torch.empty(value.numel(), dtype=value.dtype, pin_memory=True)
            pinned = buffer[: value.numel()].view(value.shape)
            pinned.copy_(value)
            return pinned.to(device, non_blocking=non_blocking)

        moved = batch._change(move)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        self._done[self._turn] = event
        return moved


@functools.cache
def _torch_dtype(dtype: str) -> Any:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


def empty_batch(fields: dict[str, Field], rows: int) -> dict[str, torch.Tensor]:
    """New tensors `[rows, *shape]`, one for each field and one for `index`; torch aligns them to 64 bytes."""
    import torch

    tensors = {
        name: torch.empty((rows, *shape), dtype=_torch_dtype(dtype)) for name, (shape, dtype) in fields.items()
    }
    tensors[INDEX] = torch.empty(rows, dtype=torch.int64)
    return tensors
