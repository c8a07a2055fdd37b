"""Stages that declare fields whose values differ in size: texts, bytes, ragged arrays.

Memory has a slot of the declared size for each sample, so that samples lie where their positions say. Values pass
between stages as they are; a declaration holds for its field, whatever stages follow, as long as its values are of
the declared kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.samples.exact import convert
from pipelines.samples.nested import Kind, Slot, get_at, require_path, set_at
from pipelines.stages._sample import SIDES, Sample, Side, Transform

_NUMBERS = "biufc"  # kinds of dtypes


class _Declared(Transform, ABC):
    """A stage that declares one field, and brings its values into the declared form."""

    kind: ClassVar[Kind]
    field: str

    def __call__(self, sample: Sample) -> Sample:
        path = require_path(sample, self.field)
        raw = get_at(sample, path)
        value = self._fit(raw)
        return sample if value is raw else set_at(sample, path, value)

    def change_slots(self, slots: dict[str, Slot], within: str) -> dict[str, Slot]:
        most: Any = getattr(self, "most" if self.kind == "ragged" else "most_bytes")
        return {**slots, within + self.field: Slot(self.kind, most)}

    @abstractmethod
    def _fit(self, raw: Any) -> Any:
        """A value in the declared form."""


@known_as("pipelines.stages.text")
@dataclass(frozen=True)
class Text(_Declared):
    """See `text`."""

    kind = "text"
    field: str
    most_bytes: int
    truncate: bool

    def _fit(self, raw: Any) -> str:
        if isinstance(raw, bytes | bytearray):
            try:
                raw = bytes(raw).decode()
            except UnicodeDecodeError as error:
                raise PipelineError(f"field {self.field!r} holds bytes that are no UTF-8: {error}") from None
        if not isinstance(raw, str):
            raise PipelineError(f"field {self.field!r} is {_name(raw)}, not a str")
        value = str(raw)
        raw = value.encode("utf-8", "surrogatepass")
        if len(raw) > self.most_bytes:
            if not self.truncate:
                raise PipelineError(
                    f"field {self.field!r} has {len(raw)} bytes, more than most_bytes={self.most_bytes}: take "
                    "more, or truncate=True"
                )
            value = _cut_text(raw, self.most_bytes)
        return value


@known_as("pipelines.stages.binary")
@dataclass(frozen=True)
class Binary(_Declared):
    """See `binary`."""

    kind = "binary"
    field: str
    most_bytes: int

    def _fit(self, raw: Any) -> bytes:
        if not isinstance(raw, bytes | bytearray | memoryview):
            raise PipelineError(f"field {self.field!r} is {_name(raw)}, not bytes")
        value = bytes(raw)
        if len(value) > self.most_bytes:
            raise PipelineError(
                f"field {self.field!r} has {len(value)} bytes, more than most_bytes={self.most_bytes}: take more"
            )
        return value


@known_as("pipelines.stages.ragged")
@dataclass(frozen=True)
class RaggedField(_Declared):
    """See `ragged`."""

    kind = "ragged"
    field: str
    most: int
    shape: tuple[int, ...] | None
    dtype: str | None
    truncate: Side | None

    def _fit(self, raw: Any) -> npt.NDArray[Any]:
        if isinstance(raw, list | tuple) and not len(raw) and (self.shape is None or self.dtype is None):
            raise PipelineError(
                f"field {self.field!r} is an empty {_name(raw)}, which says neither dtype nor shape of its "
                "entries: give ragged shape= and dtype="
            )
        try:
            values = np.asarray(raw)
        except ValueError as error:
            raise PipelineError(f"field {self.field!r} is no array: {error}") from None
        if self.shape is not None and not values.size and values.ndim == 1:
            values = values.reshape(0, *self.shape)
        if self.dtype is not None and values.dtype != self.dtype and values.dtype.kind in _NUMBERS:
            values = convert(
                values,
                self.dtype,
                f"field {self.field!r}",
                "declare another dtype, or convert it first with a stage",
            )
        if not values.ndim or values.dtype.kind not in _NUMBERS:
            raise PipelineError(
                f"field {self.field!r} is of {values.dtype}{list(values.shape)}, not an array [n, ...]"
            )
        if self.shape is not None and values.shape[1:] != self.shape:
            raise PipelineError(
                f"field {self.field!r} has entries of {list(values.shape[1:])}, not {list(self.shape)}"
            )
        if len(values) > self.most:
            if self.truncate is None:
                raise PipelineError(
                    f"field {self.field!r} has {len(values)} entries, more than most={self.most}: take more, or "
                    "say where to cut with truncate='end' or 'start'"
                )
            values = values[: self.most] if self.truncate == "end" else values[len(values) - self.most :]
        return values


def text(field: str, most_bytes: int, *, truncate: bool = False) -> Text:
    """Declares a field of texts: in a batch it is a list of str.

    Each sample takes `most_bytes` of memory, whatever the length of its text.

    Args:
        field: a str, or UTF-8 bytes, which become a str; a path such as "meta.caption" inside another field.
        most_bytes: the largest size of a text in UTF-8; a longer one fails the sample.
        truncate: cut longer texts instead, between two characters.

    Raises:
        PipelineError: `most_bytes` is no positive integer.

    Example:
        >>> text("caption", most_bytes=4, truncate=True)({"caption": "caf\u00e9s"})
        {'caption': 'caf'}
    """
    return Text(field, check_integer("text: most_bytes", most_bytes, 1), bool(truncate))


def binary(field: str, most_bytes: int) -> Binary:
    """Declares a field of bytes: in a batch it is a list of bytes.

    Each sample takes `most_bytes` of memory, whatever the length of its value.

    Args:
        field: bytes; a path such as "meta.file" inside another field.
        most_bytes: the largest size of a value; a longer one fails the sample.

    Raises:
        PipelineError: `most_bytes` is no positive integer.
    """
    return Binary(field, check_integer("binary: most_bytes", most_bytes, 1))


def ragged(
    field: str,
    most: int,
    *,
    shape: Sequence[int] | None = None,
    dtype: str | None = None,
    truncate: Side | None = None,
) -> RaggedField:
    """Declares a field of arrays whose first axis varies: in a batch it is a list of tensors (`pipelines.Ragged`).

    The tensors are views, one for each sample. A sample takes the memory of `most` entries, however many it has.

    Args:
        field: an array [n, ...], or a list of its entries; a path such as "target.boxes" inside another field.
        most: entries of a sample; a sample with more fails.
        shape: the shape of one entry; needed if samples may be empty lists, which have none. `()` for a number.
        dtype: numpy's name of the dtype to which values are converted; needed where samples may be empty lists.
            Floats are rounded to it; a value that it cannot hold fails the sample.
        truncate: which side of a longer array to cut, "end" or "start", instead of failing.

    Raises:
        PipelineError: an argument is invalid.

    Example:
        >>> ragged("boxes", most=100, shape=(4,), dtype="float32")({"boxes": []})["boxes"].shape
        (0, 4)
    """
    if truncate is not None and truncate not in SIDES:
        raise PipelineError(f"ragged: truncate must be 'end', 'start' or None, got {truncate!r}")
    try:
        declared = None if dtype is None else np.dtype(dtype)
    except TypeError:
        raise PipelineError(f"ragged: dtype {dtype!r} is not known to numpy") from None
    if declared is not None and declared.kind not in _NUMBERS:
        raise PipelineError(f"ragged: dtype {dtype!r} is not numeric")
    name = None if declared is None else declared.name
    entry = None if shape is None else tuple(check_integer("ragged: an axis of shape", axis, 0) for axis in shape)
    return RaggedField(field, check_integer("ragged: most", most, 1), entry, name, truncate)


def _cut_text(raw: bytes, most: int) -> str:
    """The characters of a text in UTF-8 that lie within its first bytes."""
    while most and raw[most] & 0xC0 == 0x80:
        most -= 1
    return raw[:most].decode("utf-8", "surrogatepass")


def _name(value: Any) -> str:
    return type(value).__name__
