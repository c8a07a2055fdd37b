"""One sample as a reader was served it, in a form that another process can compare."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.samples.fields import INDEX, OK, Columns, Field

_HEAD = struct.Struct("<q")


@dataclass(frozen=True, kw_only=True)
class ServedSample:
    """A sample in the columns of a ring or of a resident set, copied.

    Attributes:
        stages: how many of the pipeline's stages were applied to it.
        epoch: of the stream.
        place: its position in the epoch.
        index: its number in the source.
        status: how it was prepared (`pipelines.samples.fields`).
        structure: how its columns make up a sample (`Structure.as_record`); None: they are its fields.
        columns: name -> value, with the unused ends of slots.
    """

    stages: int
    epoch: int
    place: int
    index: int
    status: int
    structure: Any
    columns: Columns = field(repr=False)

    @classmethod
    def read(cls, columns: Columns, slot: int, **what: Any) -> ServedSample:
        """Copies the sample in a slot of columns [capacity, ...]."""
        values = {name: column[slot].copy() for name, column in columns.items() if name not in (INDEX, OK)}
        return cls(index=int(columns[INDEX][slot]), status=int(columns[OK][slot]), columns=values, **what)

    @property
    def fields(self) -> dict[str, Field]:
        """Shape and dtype of each column."""
        return {name: Field(value.shape, str(value.dtype)) for name, value in self.columns.items()}

    def pack(self, about: Mapping[str, Any]) -> bytes:
        """The sample as bytes, with a few JSON values; see `unpack`."""
        names = ("stages", "epoch", "place", "index", "status", "structure")
        head = {name: getattr(self, name) for name in names} | {"about": dict(about)}
        head["columns"] = [[name, *known] for name, known in self.fields.items()]
        text = json.dumps(head).encode()
        return b"".join([_HEAD.pack(len(text)), text, *(value.tobytes() for value in self.columns.values())])

    @classmethod
    def unpack(cls, packed: bytes) -> tuple[ServedSample, dict[str, Any]]:
        """The sample and the values that `pack` was given.

        Raises:
            ValueError: these bytes are not what `pack` makes.
        """
        (size,) = _HEAD.unpack_from(packed)
        head = json.loads(packed[_HEAD.size : _HEAD.size + size])
        at, columns = _HEAD.size + size, {}
        for name, shape, dtype in head.pop("columns"):
            count = int(np.prod(shape, dtype=np.int64))
            columns[name] = np.frombuffer(packed, dtype, count, at).reshape(shape)
            at += columns[name].nbytes
        about: dict[str, Any] = head.pop("about")
        return cls(columns=columns, **head), about
