"""Base of the sources of text files: each file is converted once to an Arrow file, whose rows are read by index.

The Arrow file lies in the folder of `_kept_files`; all processes of a machine map it, and none parses the text.
"""

from __future__ import annotations

import io
import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from pipelines.errors import PipelineError
from pipelines.fingerprint import digest
from pipelines.sources._checked_arrow import CheckedTable, DamagedFile, write_batches
from pipelines.sources._columns import make_nested_reader, resolve_type
from pipelines.sources._file_records import GroupedRecords, Readers, format_error
from pipelines.sources._files import OPEN_FILES, File
from pipelines.sources._kept_files import find_folder
from pipelines.sources._recent import RecentlyUsed

log = logging.getLogger(__name__)

#: Bytes of text that are converted at a time.
BLOCK_BYTES = 4 << 20
_FORMAT = 2  # of the Arrow files: another one where the same text is converted to other values
_LARGE_BYTES = 1 << 30  # that take a while to convert
_KEPT_BATCHES = 4096  # of which a process keeps the readers; their data are mapped
# First bytes of compressed files, of which no row can be read without all that come before it.
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\3\4": "zip",
}


class TextTable(GroupedRecords):
    """Rows of text files; a subclass converts them.

    Attributes:
        types: field -> the name of the type of its values.
    """

    is_fork_safe = True
    columns: tuple[str, ...]
    types: dict[str, str]

    def _load(self, files: list[File], options: Any) -> None:
        """Converts the files that are not converted yet, and indexes the rows of all.

        Args:
            files: to be read.
            options: a JSON value: all that the Arrow files depend on beside the files.
        """
        self.files = files
        self._schema: Any = None
        self._key = digest([self._describe_class(), [file.content_key() for file in files], options])
        self._tables = RecentlyUsed[int, CheckedTable](OPEN_FILES)
        self._groups: list[tuple[int, int]] = []  # (number of the file, of the batch in it)
        bounds, counts = [0], list[int]()
        for number in range(len(files)):
            table = self._use(number, lambda table: table)
            for batch, rows in enumerate(table.rows):
                self._groups.append((number, batch))
                bounds.append(bounds[-1] + rows)
            counts.append(sum(table.rows))
        self._schema = table.schema
        self.columns = tuple(self._schema.names)
        super().__init__(files, counts, bounds, _KEPT_BATCHES, "record")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_schema": None}  # which is in the Arrow files

    @abstractmethod
    def _find_schema(self) -> Any:
        """The Arrow schema of the records of all files."""

    @abstractmethod
    def _convert(self, file: File, schema: Any) -> Iterator[Any]:
        """Yields the rows of a file as record batches of the schema."""

    def _open_table(self, number: int) -> tuple[CheckedTable, int]:
        """The Arrow file of a file, mapped into memory; it is made where it is not there."""
        import pyarrow

        file = self.files[number]
        file.open().close()  # it is unchanged

        def write(path: str) -> None:
            if file.size > _LARGE_BYTES:
                log.warning("%s: %.1f GB are converted to Arrow, once", file.path, file.size / 1e9)
            self._schema = self._find_schema() if self._schema is None else self._schema
            write_batches(path, self._schema, self._convert(file, self._schema))
            file.open().close()  # it is unchanged still

        key = [_FORMAT, pyarrow.__version__, self._key, number]
        with find_folder().open("table", f"{os.path.basename(file.path)}.arrow", key, file.size, write) as handle:
            return CheckedTable(handle), 1

    def _use(self, number: int, use: Callable[[CheckedTable], Any]) -> Any:
        """What a function makes of the Arrow file of a file, which is made once more if it is damaged."""
        try:
            return use(self._tables.get(number, self._open_table))
        except DamagedFile as error:
            log.warning("%s, and made again", error)
        self._tables.drop(number)
        return use(self._tables.get(number, self._open_table))

    def _decode(self, group: int) -> tuple[Readers, int]:
        number, within = self._groups[group]
        batch = self._use(number, lambda table: table.get_batch(within))
        return list(zip(self.columns, map(make_nested_reader, batch.columns), strict=True)), 1

    def where(self, index: int) -> str:
        number = self._find_file(index)
        return f"{self.files[number].path}:record {index - self._firsts[number] + 1}"  # as people count lines

    def is_text(self, field: str) -> bool:
        return self.types.get(field) in ("str", "text")

    def identity(self) -> Any:
        return {**super().identity(), "columns": [[name, self.types[name]] for name in self.columns]}


def read_declared(kind: str, columns: Any) -> dict[str, str]:
    """Field -> the type that a user declares for it."""
    declared = {}
    for name, value in columns.items() if isinstance(columns, Mapping) else ():
        if (resolved := resolve_type(value)) is None:
            raise PipelineError(
                f"{kind}(): the type of field {name!r} must be 'str', 'bool' or the name of a dtype of numbers "
                f"('int64', 'float32' ...), got {value!r}"
            )
        declared[name] = resolved
    return declared


def open_binary(file: File) -> io.BufferedReader:
    """Opens a text file."""
    handle: io.BufferedReader = io.BufferedReader(cast(io.RawIOBase, file.open()), 1 << 20)
    begin = handle.peek(8)
    for magic, name in _COMPRESSED.items():
        if begin.startswith(magic):
            handle.close()
            raise PipelineError(
                f"{file.path}: is compressed with {name}, so no row can be read without all before it; decompress "
                "it"
            )
    return handle


def explain(file: File, error: Exception) -> PipelineError:
    """What Arrow or Python say of a file that they cannot parse, as an error of one line."""
    text = format_error(error)
    if "straddling" in text:  # of a block of whole lines
        text = "the last line is no whole JSON object"
    hint = "; convert the file, as with iconv -t utf-8" if "utf-8" in text.lower() or "UTF8" in text else ""
    return PipelineError(f"{file.path}: {text[:300]}{hint}")
