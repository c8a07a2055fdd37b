"""Source of TFRecord files of `tf.train.Example` messages, without TensorFlow.

A record is its length (8 bytes), the length's checksum (4), the data, and their checksum (4): `RecordWriter` of
TensorFlow, lib/io/record_writer.h. The lengths are read once, when the source is made; after that a record is one
`pread`. Both checksums are checked.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._crc32c import crc32c, crc32c_of_rows, mask
from pipelines.sources._file_records import FileRecords, Offsets
from pipelines.sources._files import File, Paths, check_names, find_files
from pipelines.sources._mapped import map_file
from pipelines.sources._scan import Found, scan_files
from pipelines.sources._tf_example import Malformed, Values, parse_example

Form = Literal["scalar", "list"]

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_COMPRESSED = ((b"\x1f\x8b", "gzip"), (b"\x78\x01", "zlib"), (b"\x78\x9c", "zlib"), (b"\x78\xda", "zlib"))


@known_as("pipelines.sources.tfrecord")
class TfRecord(FileRecords):
    """See `tfrecord`.

    Attributes:
        files: the files that are read.
        features: field -> "scalar" or "list".
    """

    kind = "tfrecord"

    def __init__(self, paths: Paths, features: Sequence[str] | Mapping[str, Form] | None) -> None:
        files = find_files(self.kind, paths)
        super().__init__(files, [found["offsets"] for found in scan_files(_find_records, files)])
        asked = check_names(self.kind, features, "features must name each column")
        self.features: dict[str, Form] = {}
        if isinstance(features, Mapping):
            for name, form in features.items():
                if form not in ("scalar", "list"):
                    raise PipelineError(f"tfrecord(): feature {name!r} must be 'scalar' or 'list', got {form!r}")
            self.features = dict(features)
        else:
            first = self._parse(0)
            self._open.drop(self._find_file(0))
            for name in first if asked is None else asked:
                if name not in first:
                    raise PipelineError(f"{self.where(0)}: has no feature {name!r} (it has: {', '.join(first)})")
                values = first[name]
                self.features[name] = "scalar" if values is not None and len(values) == 1 else "list"
        if not self.features:
            raise PipelineError(f"tfrecord(): {files[0].path}: the first record has no feature")

    def _parse(self, index: int) -> dict[str, Values | None]:
        data = self._read_bytes(index)
        body = memoryview(data)[_HEADER.size : -_FOOTER.size]
        (expected,) = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
        if mask(crc32c(body)) != expected:
            raise SampleError(index, self.where(index), "its checksum is another: the record is damaged")
        try:
            return parse_example(bytes(body))
        except Malformed as error:
            raise SampleError(index, self.where(index), f"is no tf.train.Example: {error}") from None

    def _read(self, index: int) -> dict[str, Any]:
        found = self._parse(index)
        record = {}
        for name, form in self.features.items():
            values = found.get(name)
            if values is None:
                reason = f"feature {name!r} is empty" if name in found else f"has no feature {name!r}"
                raise SampleError(index, self.where(index), reason)
            if form == "scalar" and len(values) != 1:
                reason = (
                    f"feature {name!r} has {len(values)} values, not 1; read it as features={{{name!r}: 'list'}}"
                )
                raise SampleError(index, self.where(index), reason)
            record[name] = values[0] if form == "scalar" else values
        return record

    def where(self, index: int) -> str:
        return f"{super().where(index)} (byte {self._starts[index]})"

    def identity(self) -> Any:
        return {**super().identity(), "features": [[name, form] for name, form in self.features.items()]}


def tfrecord(paths: Paths, features: Sequence[str] | Mapping[str, Form] | None = None) -> TfRecord:
    """Makes a source of the `tf.train.Example` records of TFRecord files; TensorFlow is not needed.

    Args:
        paths: a path, a glob pattern (matches in sorted order), or several of either.
        features: names of the features to read; all of the first record unless given. A mapping name -> `"scalar"`
            (one value) or `"list"` says what each is; otherwise one that has one value in the first record is a
            scalar. A record in which a scalar has more or no values is an error when it is read.

    Returns:
        A source of records with a field for each feature: bytes, float32 or int64, or a list of bytes or an array
        [n] of these dtypes.

    Raises:
        PipelineError: a file is missing, compressed, cut off or damaged in a length; a feature does not exist in
            the first record; there is no record.
        SampleError: the first record is damaged, or is no Example (a SequenceExample is none).

    Examples:
        >>> source = tfrecord("train-*.tfrecord", features={"image": "scalar", "tokens": "list"})
    """
    return TfRecord(paths, features)


def _find_records(file: File) -> Found:
    """Finds the `offsets` of the records of a file, and where the last one ends."""
    if not file.size:
        return {"offsets": np.zeros(1, np.int64)}
    with map_file(file) as data:
        offsets, why = _walk(data, file.size)
        heads = np.array(offsets[:-1], np.int64)
        bad = _find_bad_length(data, heads)
        if bad is not None:
            for magic, name in _COMPRESSED:
                if bad == 0 and data[:2] == magic:
                    raise PipelineError(
                        f"{file.path}: is compressed with {name}, so no record can be read without all before it; "
                        "decompress it"
                    )
            what = "is no TFRecord file" if bad == 0 else "is damaged"
            raise PipelineError(f"{file.path}: {what}: the length at byte {bad} has another checksum")
    if why:
        raise PipelineError(f"{file.path}: is cut off: {why}; copy it again")
    return {"offsets": np.array(offsets, np.int64)}


def _walk(data: mmap.mmap, size: int) -> tuple[list[int], str]:
    """Offsets of records up to the end, or up to the first one that does not fit; and what is wrong there."""
    offset, offsets = 0, [0]
    unpack, around = _HEADER.unpack_from, _HEADER.size + _FOOTER.size
    while offset < size:
        if offset + _HEADER.size > size:
            return offsets, f"{size - offset} bytes at {offset} are no whole length"
        length, _ = unpack(data, offset)
        offsets.append(offset + around + length)
        if offsets[-1] > size:
            left = max(0, size - offset - around)
            whole = f"the record at byte {offset} claims {length} bytes, {left} are left before its checksum"
            return [*offsets[:-1], min(offsets[-1], size)], whole
        offset = offsets[-1]
    return offsets, ""


def _find_bad_length(data: mmap.mmap, heads: Offsets) -> int | None:
    """The first of these offsets where a length has another checksum."""
    for start in range(0, len(heads), 1 << 16):
        some = heads[start : start + (1 << 16)]
        some = some[some + _HEADER.size <= len(data)]
        raw = np.frombuffer(b"".join(data[head : head + _HEADER.size] for head in some.tolist()), np.uint8)
        raw = raw.reshape(-1, _HEADER.size)
        masked = mask(crc32c_of_rows(raw[:, :8]))
        expected = np.ascontiguousarray(raw[:, 8:]).view("<u4")[:, 0].astype(np.uint64)
        wrong = np.flatnonzero(masked != expected)
        if len(wrong):
            return int(some[wrong[0]])
    return None
