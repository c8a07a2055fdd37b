"""Source of tar archives with the naming of WebDataset.

A member `dir/photo.seg.png` belongs to the record `dir/photo` and is its field `seg.png`: the key reaches to the
first dot of the base name, the rest, in lower case, names the field; members that follow one another with the
same key are one record. Members without a dot are left out, as there. The headers are read once, at the start.
"""

from __future__ import annotations

import io
import tarfile
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np

from pipelines.errors import PipelineError
from pipelines.fingerprint import known_as
from pipelines.sources._file_records import FileRecords
from pipelines.sources._files import File, Paths, find_files
from pipelines.sources._strings import Strings

_BLOCK = 512
_CHUNK = 1 << 20
# Headers that only say more of the next one: long names, pax records. They are read whole, into memory.
_EXTENSIONS = (b"L", b"K", b"x", b"g", b"X")
_LONGEST_HEADER = 64 << 10


@known_as("pipelines.sources.tar")
class Tar(FileRecords):
    """See `tar`.

    Attributes:
        files: the archives.
        extensions: the fields that their records have, before `rename`.
    """

    kind = "tar"

    def __init__(self, paths: Paths, rename: Mapping[str, str] | None) -> None:
        files = find_files(self.kind, paths)
        self.rename = {old.lower(): new for old, new in (rename or {}).items()}
        suffixes: dict[str, int] = {}  # as the members spell them
        firsts, suffix, offsets, sizes = array("q"), array("i"), array("q"), array("q")
        keys, begins = [], []
        for file in files:
            names, starts = list[str](), array("q")
            for name, offset, size in _scan_archive(file):
                folder, slash, base = name.rpartition("/")
                stem, _, extension = base.partition(".")
                if not stem or not extension:
                    continue
                if not names or folder + slash + stem != names[-1]:
                    names.append(folder + slash + stem)
                    firsts.append(len(offsets))
                    starts.append(offset)
                suffix.append(suffixes.setdefault(extension, len(suffixes)))
                offsets.append(offset)
                sizes.append(size)
            end = offsets[-1] + sizes[-1] if names else 0
            characters, ends = Strings(names).parts
            keys.append((characters, ends))
            begins.append(np.array([*starts, end], np.int64))
        super().__init__(files, begins, "file named like key.extension")
        self._keys = Strings.join(keys)
        self._members = np.array([*firsts, len(offsets)], np.int64)  # the first of each record, and their number
        self._offsets, self._sizes = np.array(offsets, np.int64), np.array(sizes, np.int64)
        self._suffix, self._suffixes = np.array(suffix, np.int32), list(suffixes)
        self.extensions = tuple(dict.fromkeys(extension.lower() for extension in suffixes))
        self._check_rename()
        self._fields = [self.rename.get(name.lower(), name.lower()) for name in suffixes]
        self._check_fields()

    def _check_rename(self) -> None:
        for target in dict.fromkeys(self.rename.values()):
            olds = [old for old, new in self.rename.items() if new == target]
            if not set(olds) & set(self.extensions):
                raise PipelineError(
                    f"tar(): {self.files[0].path}: no member has the extension {' or '.join(map(repr, olds))} "
                    f"that is to be renamed to {target!r} (there are: {', '.join(self.extensions)})"
                )

    def _check_fields(self) -> None:
        """Refuses a record of which two members have the name of one field."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(("key", *self._fields)))}
        field = np.array([numbers[name] for name in self._fields])[self._suffix]
        record = np.repeat(np.arange(len(self)), np.diff(self._members))
        pairs = record * len(numbers) + field
        order = np.argsort(pairs, kind="stable")
        again = order[1:][np.diff(pairs[order]) == 0]
        wrong = np.concatenate([again, np.flatnonzero(field == numbers["key"])])
        if len(wrong):
            member = int(wrong.min())
            index, suffix = int(record[member]), self._suffix[member]
            key, file = self._keys[index], self.files[self._find_file(index)]
            raise PipelineError(
                f"{file.path}: {key}.{self._suffixes[suffix]}: the record {key!r} has the field "
                f"{self._fields[suffix]!r} already"
            )

    def _read(self, index: int) -> dict[str, Any]:
        members = slice(*self._members[index : index + 2].tolist())
        ranges = zip(self._offsets[members].tolist(), self._sizes[members].tolist(), strict=True)
        record: dict[str, Any] = {"key": self._keys[index]}
        values = self._read_ranges(index, self._find_file(index), ranges)
        for suffix, data in zip(self._suffix[members].tolist(), values, strict=True):
            record[self._fields[suffix]] = data
        return record

    def where(self, index: int) -> str:
        suffix = self._suffixes[self._suffix[self._members[index]]]
        return f"{self.files[self._find_file(index)].path}:{self._keys[index]}.{suffix}"

    def identity(self) -> Any:
        return {**super().identity(), "rename": self.rename}


def tar(paths: Paths, rename: Mapping[str, str] | None = None) -> Tar:
    """Makes a source of uncompressed tar archives with the naming of WebDataset (see the module's docstring).

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either.
        rename: extension -> field, as in `{"jpeg": "image", "jpg": "image"}`.

    Returns:
        A source of records with `key` (str) and the bytes of each member under its extension in lower case.

    Raises:
        PipelineError: a file is missing, cut off, damaged or not an uncompressed archive; data follow an end mark
            (of archives that were joined); a pattern matches no file; there is no record; a record has a field
            twice; no member has an extension to be renamed.

    Examples:
        >>> source = tar("shard-*.tar", rename={"jpg": "image", "cls": "label"})
    """
    return Tar(paths, rename)


class _CheckedHeader(tarfile.TarInfo):
    """A header with a plausible size: `tarfile` would seek, or read, as far as any size that a header claims."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _CheckedHeader:
        header = super().frombuf(buf, encoding, errors)
        if header.size < 0:
            raise tarfile.ReadError(f"a header claims {header.size} bytes")
        if header.type in _EXTENSIONS and header.size > _LONGEST_HEADER:
            raise tarfile.ReadError(
                f"a header claims {header.size} bytes of its own, at most {_LONGEST_HEADER} are read"
            )
        return header


def _scan_archive(file: File) -> Iterator[tuple[str, int, int]]:
    """Yields (name, offset, size) of the files in an archive."""
    path = file.path
    raw = io.BufferedReader(cast(io.RawIOBase, file.open()))
    try:
        archive = tarfile.open(fileobj=raw, mode="r:", tarinfo=_CheckedHeader, errorlevel=2)  # noqa: SIM115
    except Exception as error:  # tarfile lets pass what int(), seek() and read() say to senseless numbers
        raw.close()
        if file.size == 0:
            raise PipelineError(f"{path}: is empty") from None
        if isinstance(error, OSError):
            raise PipelineError(f"{path}: cannot be read: {error.strerror or error}") from None
        text = str(error) or type(error).__name__
        raise PipelineError(f"{path}: is no uncompressed tar archive: at byte 0: {text}") from None
    at, problem = 0, ""
    with raw, archive:
        while not problem:
            try:
                member = archive.next()
            except Exception as error:  # as above
                problem = str(error) or type(error).__name__
                break
            if member is None:  # zeros, a header that cannot be read, or nothing
                break
            archive.members = []  # type: ignore[attr-defined]  # it would keep every header
            if member.islnk() or member.issparse():
                what = "a link" if member.islnk() else "a sparse file"
                raise PipelineError(f"{path}: {member.name}: is {what}, not a plain file; pack it as one")
            available = file.size - member.offset_data
            if archive.offset <= at or not 0 <= member.size <= available:  # a pax header may say so, too
                problem = f"{member.name} claims {member.size} bytes, {available} are left"
                at = file.size if member.size > available else at
                break
            if member.isreg():
                yield member.name, member.offset_data, member.size
            at = archive.offset
    _check_end(file, at, problem)


def _check_end(file: File, at: int, problem: str) -> None:
    """Raises unless an archive ends with zeros: tarfile takes a header that it cannot read for the end."""
    with file.open() as opened:
        opened.seek(at)
        block = opened.read(_BLOCK)
    if problem or block != bytes(_BLOCK):
        kind = "cut off" if len(block) < _BLOCK else "damaged"
        reason = f" ({problem})" if problem else ""
        raise PipelineError(
            f"{file.path}: the archive is {kind} at byte {at}{reason}, and what follows is lost; copy it again "
            "(whole and only without its end mark: append 1024 zero bytes)"
        )
    if (more := _find_data(file, at)) is not None:
        raise PipelineError(
            f"{file.path}: the archive ends at byte {at}, and data follow its end mark at byte {more}: if "
            "archives were joined (cat a.tar b.tar), give them one by one; if not, it is damaged: copy it again"
        )


def _find_data(file: File, at: int) -> int | None:
    """The first block from `at` on, which is the start of one, that is not all zeros; None if there is none."""
    with file.open() as opened:
        opened.seek(at)
        while data := opened.read(_CHUNK):
            places = np.flatnonzero(np.frombuffer(data, np.uint8))
            if len(places):
                return at + int(places[0]) // _BLOCK * _BLOCK
            at += len(data)
    return None
