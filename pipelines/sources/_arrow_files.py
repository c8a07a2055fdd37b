"""Columns of Arrow tables that are pickled as places in files, as far as they lie in files."""

from __future__ import annotations

import functools
import hashlib
import pickle
from typing import Any

import numpy as np

from pipelines.errors import PipelineError
from pipelines.sources._columns import unwrap
from pipelines.sources._files import File
from pipelines.sources._mapped import MappedFiles, MappedPlace


class ArrowColumn:
    """A column of a table, in chunks.

    Pickled, a buffer that lies in a mapped file is its place in it, and any other is sent out of band, which the
    processes of a machine share. Chunks of files are mapped at first use.

    Args:
        column: a chunked Arrow array; extension types are read as their storage.
        files: that may hold it.

    Attributes:
        starts: the first row of each chunk that has rows.
    """

    def __init__(self, column: Any, files: MappedFiles) -> None:
        import pyarrow

        self._chunks: list[Any] = [unwrap(chunk) for chunk in column.chunks if len(chunk)]
        self.starts = np.cumsum([0, *map(len, self._chunks)])[:-1].tolist()
        self._frozen: list[tuple[bytes, list[Any]]] = []  # of each chunk, what pickle makes of it, and its buffers
        for chunk in self._chunks:
            buffers: list[pickle.PickleBuffer] = []
            body = pickle.dumps(chunk, 5, buffer_callback=buffers.append)
            memory = [buffer.raw() for buffer in buffers]
            self._frozen.append((body, [files.locate(part) or pyarrow.py_buffer(part) for part in memory]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_chunks": [None] * len(self.starts)}

    def chunk(self, number: int) -> Any:
        """Returns a chunk as an Arrow array."""
        if self._chunks[number] is None:
            body, buffers = self._frozen[number]
            self._chunks[number] = pickle.loads(
                body, buffers=[_map_place(part) if isinstance(part, MappedPlace) else part for part in buffers]
            )
        return self._chunks[number]

    def find_file(self, number: int) -> File | None:
        """The file in which a chunk lies; None if it lies in memory."""
        return next((part.file for part in self._frozen[number][1] if isinstance(part, MappedPlace)), None)

    def identity(self) -> list[Any]:
        """Describes type and values as a JSON value: places in files, and the content of what lies in memory."""
        digest = hashlib.sha256()
        for number, (_, buffers) in enumerate(self._frozen):
            chunk = self.chunk(number)
            digest.update(repr((len(chunk), chunk.offset)).encode())
            if all(isinstance(part, MappedPlace) or not part.size for part in buffers):
                places = [[*part.file.identity(), *part[1:]] for part in buffers if part.size]
                digest.update(repr(places).encode("utf-8", "surrogateescape"))
            else:
                _add_content(digest, chunk)
        return [str(self.chunk(0).type) if self.starts else "", digest.hexdigest()]


def _add_content(digest: Any, chunk: Any) -> None:
    """Adds an array's values, wherever and however they lie in memory."""
    import pyarrow

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


@functools.lru_cache(maxsize=1 << 16)
def _map_file(file: File) -> Any:
    import pyarrow

    file.open().close()  # it is unchanged
    try:
        with pyarrow.memory_map(file.path, "r") as mapped:
            return mapped.read_buffer()
    except OSError as error:
        raise PipelineError(f"{file.path}: cannot be mapped: {error}") from error


def _map_place(place: MappedPlace) -> Any:
    return _map_file(place.file).slice(place.offset, place.size)
