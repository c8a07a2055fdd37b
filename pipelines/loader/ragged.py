"""Ragged fields of a batch, and what is done to each tensor of a batch with nested fields.

A ragged field is a list of tensors, one for each sample, as users of torch write it by hand: it goes into
`torch.cat`, `pad_sequence` and torchvision's detectors as it is. Its tensors are views of the samples' slots, so
nothing is copied. Nested tensors (`torch.nested`, layout jagged) are offered by `nested()`: most operators do not
take them, and one over slots with unused ends would take still fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from pipelines.errors import PipelineError
from pipelines.samples.fields import INDEX
from pipelines.samples.structure import Leaf, Structure, decode

if TYPE_CHECKING:
    import torch


class Ragged(list["torch.Tensor"]):
    """The values of a field whose first axis varies: one tensor [n, ...] for each sample of a batch.

    Args:
        rows: one tensor for each sample, alike except for the first axis.
        like: an empty tensor [0, ...] of their dtype, device and other axes, for a batch without samples.
    """

    def __init__(self, rows: Iterable[torch.Tensor], like: torch.Tensor) -> None:
        super().__init__(rows)
        self._like = like

    @property
    def lengths(self) -> torch.Tensor:
        """Entries of each sample, int64 [b], on the CPU."""
        import torch

        return torch.tensor([len(row) for row in self], dtype=torch.int64)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All entries one after the other, [sum of n, ...], and the bounds of the samples, int64 [b + 1]."""
        import torch

        offsets = torch.zeros(len(self) + 1, dtype=torch.int64)
        torch.cumsum(self.lengths, 0, out=offsets[1:])
        return torch.cat([self._like, *self]), offsets.to(self._like.device)

    def padded(self, value: float = 0, length: int | None = None) -> torch.Tensor:
        """A new tensor [b, length, ...], filled up at the end.

        Args:
            value: the value of missing entries.
            length: the length of the result; by default that of the batch's longest sample.

        Raises:
            PipelineError: a sample is longer.
        """
        import torch

        longest = max(map(len, self), default=0)
        if length is not None and length < longest:
            raise PipelineError(f"padded: a sample has {longest} entries, more than length={length}")
        shape = (len(self), longest if length is None else length, *self._like.shape[1:])
        made = self._like.new_full(shape, value)
        if longest:
            made[:, :longest] = torch.nn.utils.rnn.pad_sequence(list(self), True, value)
        return made

    def mask(self, length: int | None = None) -> torch.Tensor:
        """True at the entries that `padded` does not fill, bool [b, length], on the tensors' device."""
        import torch

        longest = max(map(len, self), default=0) if length is None else length
        return (torch.arange(longest) < self.lengths[:, None]).to(self._like.device)

    def nested(self) -> torch.Tensor:
        """A nested tensor of jagged layout, [b, *, ...], in memory of its own."""
        import torch

        values, offsets = self.packed()
        made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets)
        return made

    def map_packed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Ragged:
        """The same rows after a change to all entries at once, such as a copy to a device."""
        import torch

        changed = change(torch.cat([self._like, *self]))
        return Ragged(torch.split(changed, [len(row) for row in self]), changed[:0])

    @overload
    def __getitem__(self, key: SupportsIndex) -> torch.Tensor: ...

    @overload
    def __getitem__(self, key: slice) -> Ragged: ...

    def __getitem__(self, key: SupportsIndex | slice) -> torch.Tensor | Ragged:
        """One sample's tensor, or a part of the samples."""
        if isinstance(key, slice):
            return Ragged(super().__getitem__(key), self._like)
        return super().__getitem__(key)


def assemble(structure: Structure, columns: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The fields of a batch, in the structure of its samples.

    Args:
        columns: name -> tensor [b, ...], `index` included.
    """
    made = structure.build(lambda leaf: _make_values(leaf, columns))
    made[INDEX] = columns[INDEX]
    return made


def _make_values(leaf: Leaf, columns: Mapping[str, torch.Tensor]) -> Any:
    """The values of a leaf for the samples of a batch: a tensor [b, ...], a `Ragged`, or a list of str or bytes.

    Args:
        columns: name -> tensor [b, ...].
    """
    slots = columns[leaf.column]
    if leaf.kind == "array":
        return slots
    lengths = columns[leaf.length].tolist()
    if leaf.kind == "ragged":
        like = slots.new_empty((0, *slots.shape[2:]))
        return Ragged([row[:n] for row, n in zip(slots.unbind(0), lengths, strict=True)], like)
    content: Any = slots.numpy()
    return [decode(leaf.kind, row[:n]) for row, n in zip(content, lengths, strict=True)]


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A field of a batch after a change to each of its tensors; texts and other values stay."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Ragged):
        return value.map_packed(change)
    if isinstance(value, Mapping):
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(part, change) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(part, change) for part in value)
    return value


def find_tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a field of a batch, each sample's of a ragged one."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    parts: Any = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in find_tensors(part)]


def take_rows(value: Any, rows: slice, count: int, name: str) -> Any:
    """The rows of some samples of a field of a batch of `count` samples.

    Raises:
        PipelineError: the field does not have one row for each sample.
    """
    if isinstance(value, Mapping):
        return {key: take_rows(part, rows, count, f"{name}.{key}") for key, part in value.items()}
    if isinstance(value, tuple):
        made = [take_rows(part, rows, count, f"{name}.{number}") for number, part in enumerate(value)]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if not hasattr(value, "__len__") or isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0:
        return value
    if len(value) != count:
        raise PipelineError(f"the field {name!r} has {len(value)} rows for {count} samples: it cannot be divided")
    return value[rows]


def take_sample(value: Any, row: int) -> Any:
    """One sample's part of a field of a batch: tensors without the batch axis, texts as they are."""
    if isinstance(value, Mapping):
        return {key: take_sample(part, row) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(take_sample(part, row) for part in value)
    return value[row]
