"""Source of tar archives with the naming of WebDataset.

A member `dir/photo.seg.png` belongs to the record `dir/photo` and is its field `seg.png`: the key reaches to the
first dot of the base name, the rest, in lower case, names the field; members that follow one another with the same
key are one record (https://github.com/webdataset/webdataset, `base_plus_ext` and `group_by_keys`). Members without
a dot are none of the data, as there.

The archives' headers are read once, when the source is made; after that a record is one `pread` for each member,
at a known offset, in any order.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._file_records import FileRecords
from pipelines.sources._files import File, Paths, find_files
from pipelines.sources._strings import Strings

Found = dict[str, np.ndarray[Any, Any]]

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

    def __init__(self, paths: Paths, rename: Mapping[str, str] | None, ignore_zeros: bool) -> None:
        files = find_files(self.kind, paths)
        self.ignore_zeros = ignore_zeros
        self.rename = {old.lower(): new for old, new in (rename or {}).items()}
        found = [_scan_archive(file, ignore_zeros) for file in files]
        self._cut: dict[int, str] = {}  # last record of an archive that is cut off: what is wrong
        count = 0
        for file, each in zip(files, found, strict=True):
            here = len(each["starts"]) - 1
            count += here
            if why := _to_text(each["cut"]):
                if not here:
                    raise SampleError(count, file.path, why)
                self._cut[count - 1] = why
        super().__init__(files, [_list_begins(each) for each in found], "file named like key.extension")
        self._keys = Strings.join([(each["keys"], each["key_ends"]) for each in found])
        members = np.cumsum([0, *(len(each["offsets"]) for each in found)])
        firsts = [each["starts"][:-1] + before for each, before in zip(found, members[:-1], strict=True)]
        self._members = np.concatenate([*firsts, members[-1:]])  # the first one of each record, and their number
        self._offsets, self._sizes = (
            np.concatenate([each[name] for each in found]) for name in ("offsets", "sizes")
        )
        numbers: dict[str, int] = {}  # of the suffixes, as the members spell them
        codes = []
        for each in found:
            spelled = filter(None, _to_text(each["suffixes"]).split("/"))
            own = [numbers.setdefault(suffix, len(numbers)) for suffix in spelled]
            codes.append(np.array(own, np.int32)[each["suffix"]])
        self._suffix, self._suffixes = np.concatenate(codes), list(numbers)
        self.extensions = tuple(dict.fromkeys(suffix.lower() for suffix in self._suffixes))
        self._check_rename()
        self._fields = [self._field_name(suffix) for suffix in self._suffixes]
        self._check_fields()

    def _field_name(self, suffix: str) -> str:
        return self.rename.get(suffix.lower(), suffix.lower())

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
        if index in self._cut:
            raise SampleError(index, self.where(index), self._cut[index])
        members = slice(*self._members[index : index + 2].tolist())
        ranges = zip(self._offsets[members].tolist(), self._sizes[members].tolist(), strict=True)
        record: dict[str, Any] = {"key": self._keys[index]}
        found = self._read_ranges(index, self._find_file(index), ranges)
        for suffix, data in zip(self._suffix[members].tolist(), found, strict=True):
            record[self._fields[suffix]] = data
        return record

    def where(self, index: int) -> str:
        suffix = self._suffixes[self._suffix[self._members[index]]]
        return f"{self.files[self._find_file(index)].path}:{self._keys[index]}.{suffix}"

    def identity(self) -> Any:
        return {**super().identity(), "rename": self.rename, "ignore_zeros": self.ignore_zeros}


def tar(paths: Paths, rename: Mapping[str, str] | None = None, *, ignore_zeros: bool = False) -> Tar:
    """Makes a source of uncompressed tar archives with the naming of WebDataset (see the module's docstring).

    An archive that is truncated is read up to its last record. Reading that record raises `SampleError`, because
    it may be incomplete.

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either.
        rename: extension -> field, as in `{"jpeg": "image", "jpg": "image"}`.
        ignore_zeros: read on after an archive's end mark, as GNU tar's `-i` does: of archives that were joined
            (`cat a.tar b.tar`) all records. Without it, data after the end mark are an error.

    Returns:
        A source of records with `key` (str) and the bytes of each member under its extension in lower case.

    Raises:
        PipelineError: a file is missing or not an uncompressed archive; data follow an end mark; a pattern matches
            no file; there is no record; a record has a field twice; no member has an extension to be renamed.

    Examples:
        >>> source = tar("shard-*.tar", rename={"jpg": "image", "cls": "label"})
    """
    return Tar(paths, rename, ignore_zeros)


def _scan_archive(file: File, ignore_zeros: bool) -> Found:
    """Finds the records of an archive.

    Returns:
        keys, key_ends: the parts of `Strings`.
        starts: the first member of each record, and the number of members.
        suffix, offsets, sizes: of each member; the first is a number in `suffixes`.
        suffixes, cut: all suffixes, with "/" between them; what is wrong at the archive's end. Bytes of UTF-8.
    """
    keys: list[str] = []
    starts, suffix_numbers, offsets, sizes = array("q"), array("i"), array("q"), array("q")
    numbers: dict[str, int] = {}
    members = _ArchiveScan(file, ignore_zeros)
    for name, offset, size in members:
        key, suffix = _split_name(name)
        if not suffix:
            continue
        if not keys or key != keys[-1]:
            keys.append(key)
            starts.append(len(offsets))
        suffix_numbers.append(numbers.setdefault(suffix, len(numbers)))
        offsets.append(offset)
        sizes.append(size)
    starts.append(len(offsets))
    names, ends = Strings(keys).parts
    return {
        "keys": names,
        "key_ends": ends,
        "starts": np.array(starts, np.int64),
        "suffix": np.array(suffix_numbers, np.int32),
        "offsets": np.array(offsets, np.int64),
        "sizes": np.array(sizes, np.int64),
        "suffixes": _to_bytes("/".join(numbers)),
        "cut": _to_bytes(members.cut),
    }


def _list_begins(found: Found) -> npt.NDArray[np.int64]:
    """Where the first member of each record begins, and where the last one of all ends."""
    end = found["offsets"][-1:] + found["sizes"][-1:] if len(found["offsets"]) else [0]
    return np.concatenate([found["offsets"][found["starts"][:-1]], end])


def _to_bytes(text: str) -> npt.NDArray[np.uint8]:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)


def _to_text(data: npt.NDArray[np.uint8]) -> str:
    return data.tobytes().decode("utf-8", "surrogatepass")


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


class _ArchiveScan:
    """Iterates over (name, offset, size) of the files in an archive; then `cut` says where it is truncated.

    Args:
        ignore_zeros: whether zeros between members are skipped; else they are an end mark, after which no data may
            follow.
    """

    def __init__(self, file: File, ignore_zeros: bool) -> None:
        self.file = file
        self._ignore_zeros = ignore_zeros
        self.cut = ""

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        path = self.file.path
        raw = io.BufferedReader(cast(io.RawIOBase, self.file.open()))
        try:
            archive = tarfile.open(fileobj=raw, mode="r:", tarinfo=_CheckedHeader, errorlevel=2)  # noqa: SIM115
        except Exception as error:  # tarfile lets pass what int(), seek() and read() say to senseless numbers
            raw.close()
            if self.file.size == 0:
                raise PipelineError(f"{path}: is empty") from None
            if isinstance(error, OSError):
                raise PipelineError(f"{path}: cannot be read: {error.strerror or error}") from None
            said = str(error) or type(error).__name__
            raise PipelineError(f"{path}: is no uncompressed tar archive: at byte 0: {said}") from None
        at, why = 0, ""
        with raw, archive:
            while True:
                try:
                    member = archive.next()
                except Exception as error:  # as above
                    why = str(error) or type(error).__name__
                    break
                if member is None:
                    # Zeros, a header that cannot be read, or nothing.
                    more = _find_data(self.file, at)
                    if more is None or more == at:
                        break
                    if not self._ignore_zeros:
                        raise PipelineError(
                            f"{path}: the archive ends at byte {at}, and data follow its end mark at byte {more}: "
                            "if archives were joined (cat a.tar b.tar), tar(..., ignore_zeros=True) reads all, as "
                            "tar -i does; if not, it is damaged: copy it again"
                        )
                    archive.offset = at = more
                    continue
                archive.members = []  # type: ignore[attr-defined]  # it would keep every header
                if member.islnk() or member.issparse():
                    what = "a link" if member.islnk() else "a sparse file"
                    raise PipelineError(f"{path}: {member.name}: is {what}, not a plain file; pack it as one")
                if archive.offset <= at or member.size < 0:  # a pax header may say so, too
                    why = f"{member.name} claims {member.size} bytes"
                    break
                left = self.file.size - member.offset_data
                if member.isreg():
                    yield member.name, member.offset_data, min(member.size, left)
                if archive.offset - member.offset_data > left:
                    at = self.file.size
                    why = (
                        f"{member.name} claims {member.size} bytes, {left} are left" if member.size > left else ""
                    )
                    break
                at = archive.offset
        # tarfile takes a header that it cannot read for the end; a real end is a block of zeros.
        with self.file.open() as last:
            last.seek(at)
            block = last.read(_BLOCK)
        if why or block != bytes(_BLOCK):
            kind = "is cut off" if len(block) < _BLOCK else "is damaged"
            self.cut = (
                f"the archive {kind} at byte {at}{why and f' ({why})'}, in this record or after it, and "
                "what follows is lost; copy it again (whole and only without its end mark: append 1024 zero bytes)"
            )


def _find_data(file: File, at: int) -> int | None:
    """The first block from `at` on, which is the start of one, that is not all zeros; None if there is none."""
    with file.open() as opened:
        while True:
            try:  # holes of a sparse file are not read
                at = max(at, os.lseek(opened.fileno(), at, os.SEEK_DATA) // _BLOCK * _BLOCK)
            except OSError as error:
                if error.errno == errno.ENXIO:  # the rest is a hole, or there is none
                    return None
            opened.seek(at)
            data = np.frombuffer(opened.read(_CHUNK), np.uint8)
            if not len(data):
                return None
            found = np.flatnonzero(data)
            if len(found):
                return at + int(found[0]) // _BLOCK * _BLOCK
            at += len(data)


def _split_name(name: str) -> tuple[str, str]:
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return (folder + slash + stem, suffix) if stem else ("", "")
