"""Columns of Arrow tables that are pickled as places in the files in which they lie, as far as they lie in
files."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._columns import unwrap
from pipelines.sources._files import File
from pipelines.sources._mapped import FileMappings


class _Place:
    """The memory of a buffer as a range of bytes of a file."""

    def __init__(self, file: File, offset: int, size: int) -> None:
        self.file, self.offset, self.size = file, offset, size


class ArrowColumn:
    """A column of a table, in chunks.

    Pickled, a buffer that lies in a mapped file is its place in it, and any other is sent out of band, which the
    processes of a machine share. Chunks of files are mapped at first use.

    Args:
        column: a chunked Arrow array; extension types are read as their storage.

    Attributes:
        starts: the first row of each chunk that has rows.
    """

    def __init__(self, column: Any) -> None:
        chunks = [unwrap(chunk) for chunk in column.chunks if len(chunk)]
        self._chunks: list[Any] = chunks
        self._frozen: list[Any] | None = None
        self.starts = np.cumsum([0, *map(len, chunks)])[:-1].tolist()

    def __getstate__(self) -> dict[str, Any]:
        return {"starts": self.starts, "_chunks": [None] * len(self.starts), "_frozen": self._freeze()}

    def _freeze(self) -> list[Any]:
        """Of each chunk the function and the arguments that make it anew (`__reduce__`), with places for
        buffers."""
        if self._frozen is None:
            mappings = FileMappings()
            locate = functools.partial(_find_place, mappings)
            self._frozen = [_replace(chunk.__reduce__()[:2], locate) for chunk in self._chunks]
        return self._frozen

    def chunk(self, number: int) -> Any:
        """Returns a chunk as an Arrow array.

        Raises:
            PipelineError: its file is missing, or was changed since.
        """
        if self._chunks[number] is None:
            assert self._frozen is not None
            make, arguments = _replace(self._frozen[number], _map_place)
            self._chunks[number] = make(*arguments)
        return self._chunks[number]

    def chunks(self) -> Iterator[tuple[int, Any]]:
        """All chunks, with their numbers."""
        return ((number, self.chunk(number)) for number in range(len(self.starts)))

    def file(self, number: int) -> File | None:
        """The file in which a chunk lies; None if it lies in memory."""
        return next((leaf.file for leaf in _iterate(self._freeze()[number]) if isinstance(leaf, _Place)), None)

    def identity(self) -> list[Any]:
        """Describes type and values as a JSON value: places in files, and the content of what lies in memory."""
        described = [
            _describe(frozen) if _is_mapped(frozen) else _digest_content(self.chunk(number))
            for number, frozen in enumerate(self._freeze())
        ]
        kind = str(self.chunk(0).type) if self.starts else ""
        return [kind, hashlib.sha256(repr(described).encode("utf-8", "surrogateescape")).hexdigest()]


def _digest_content(chunk: Any) -> str:
    """A digest of an array's values, wherever and however they lie in memory."""
    import pyarrow

    digest = hashlib.sha256()

    class Sink:
        closed = False

        def write(self, data: Any) -> int:
            digest.update(data)
            return len(data)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    schema = pyarrow.schema([("", chunk.type)])
    with pyarrow.ipc.new_stream(pyarrow.PythonFile(Sink(), "w"), schema) as writer:
        writer.write_batch(pyarrow.record_batch([chunk], schema=schema))
    return digest.hexdigest()


def _replace(value: Any, change: Callable[[Any], Any]) -> Any:
    """What makes an array, with each of its parts changed."""
    if isinstance(value, tuple | list):
        return type(value)(_replace(each, change) for each in value)
    return change(value)


def _iterate(value: Any) -> Iterator[Any]:
    """The parts of what makes an array."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _iterate(each)
    else:
        yield value


def _find_place(mappings: FileMappings, value: Any) -> Any:
    """The place of a buffer that lies in a file; anything else is itself."""
    import pyarrow

    found = mappings.find(value.address, value.size) if isinstance(value, pyarrow.Buffer) and value.size else None
    return value if found is None else _Place(*found, value.size)


def _is_mapped(frozen: Any) -> bool:
    """Whether all buffers that hold something lie in files."""
    import pyarrow

    parts = list(_iterate(frozen))
    is_in_memory = any(isinstance(part, pyarrow.Buffer) and part.size for part in parts)
    return not is_in_memory and any(isinstance(part, _Place) for part in parts)


def _describe(value: Any) -> Any:
    """A frozen array as values with a stable representation; the count of nulls may be unknown or not."""
    import pyarrow

    if isinstance(value, _Place):
        return [*value.file.identity(), value.offset, value.size]
    if isinstance(value, tuple) and len(value) == 7 and isinstance(value[0], pyarrow.DataType):
        return [_describe(each) for place, each in enumerate(value) if place != 2]
    if isinstance(value, tuple | list):
        return [_describe(each) for each in value]
    if isinstance(value, pyarrow.Buffer):  # an empty one
        return "empty"
    return value if value is None or isinstance(value, int | bool) else str(getattr(value, "__name__", value))


_maps: dict[File, Any] = {}  # of this process: a file is mapped once, for all columns and sources


def _map_place(place: Any) -> Any:
    """The buffer at a place; anything else is itself."""
    import pyarrow

    if not isinstance(place, _Place):
        return place
    whole = _maps.get(place.file)
    if whole is None:
        place.file.open().close()  # it is unchanged
        try:
            with pyarrow.memory_map(place.file.path, "r") as mapped:
                whole = _maps[place.file] = mapped.read_buffer()
        except OSError as error:
            raise PipelineError(f"{place.file.path}: cannot be mapped: {error}") from error
    return whole.slice(place.offset, place.size)
