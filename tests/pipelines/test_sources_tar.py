"""tar(): archives by WebDataset's naming."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import sources
from pipelines.errors import PipelineError, SampleError
from pipelines.sources import _file_records


def write(path: Path, members: dict[str, bytes] | list[tuple[str, bytes]], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as archive:
        for name, data in dict(members).items() if isinstance(members, dict) else members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def test_extensions_are_fields_and_members_of_one_name_are_a_record(tmp_path: Path) -> None:
    members = {"train/a.JPG": b"pixels a", "train/a.cls": b"3", "train/a.seg.png": b"mask a", "README": b"no data"}
    members |= {"train/.hidden": b"no data", "train/b.jpg": b"", "other/b.jpg": b"another"}
    source = sources.tar(write(tmp_path / "a.tar", members))
    assert list(source) == [
        {"key": "train/a", "jpg": b"pixels a", "cls": b"3", "seg.png": b"mask a"},
        {"key": "train/b", "jpg": b""},
        {"key": "other/b", "jpg": b"another"},
    ]
    assert source.where(0) == f"{tmp_path}/a.tar:train/a.JPG"
    assert source.extensions == ("jpg", "cls", "seg.png")


def test_rename_gives_several_extensions_one_field(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a.jpg": b"1", "b.JPEG": b"2", "c.png": b"3"})
    source = sources.tar(path, rename={"jpeg": "image", "JPG": "image", "webp": "image"})
    assert [list(record) for record in source] == [["key", "image"], ["key", "image"], ["key", "png"]]
    assert source.identity() != sources.tar(path).identity()


def test_shards_are_read_as_one_even_where_keys_repeat(tmp_path: Path) -> None:
    for shard in range(3):
        write(tmp_path / f"{shard}.tar", {f"{i}.txt": b"%d-%d" % (shard, i) for i in range(4)})
    write(tmp_path / "1a.tar", {"README": b"an archive without a record"})
    source = sources.tar(str(tmp_path / "*.tar"))
    assert [source[i]["txt"] for i in range(12)] == [b"%d-%d" % (s, i) for s in range(3) for i in range(4)]
    assert source.where(4) == f"{tmp_path}/1.tar:0.txt"


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_read(tmp_path: Path, form: int) -> None:
    names = ["k" * 180 + ".txt", "d/" * 60 + "x.txt", "größe.txt"]
    source = sources.tar(write(tmp_path / "a.tar", {name: name.encode() for name in names}, format=form))
    assert [source[i]["txt"].decode() for i in range(3)] == names


@given(data=st.data())
def test_an_archive_cut_off_anywhere_never_loses_a_record_silently(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    members = {f"{i}.{ext}": bytes([i]) * 700 for i in range(4) for ext in ("jpg", "cls")}
    path = write(tmp_path_factory.mktemp("cut") / "cut.tar", members)
    cut = data.draw(st.integers(1, 8 * (512 + 1024) + 511))
    os.truncate(path, cut)
    with pytest.raises(PipelineError, match=r"cut\.tar: " + "the archive is cut off at byte" * (cut >= 512)):
        sources.tar(path)


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A header that says what it is told to, with the checksum that makes it believed."""
    head = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size.ljust(12, b"\0") + b"00000000000\0"
    head = ((head + b" " * 8 + kind).ljust(257, b"\0") + b"ustar\x0000").ljust(512, b"\0")
    return head[:148] + b"%06o\0 " % sum(head) + head[156:]


def base256(size: int) -> bytes:
    return (b"\xff" if size < 0 else b"\x80") + (size % 256**11).to_bytes(11, "big")


def pax(*records: bytes) -> bytes:
    return header(b"pax", b"%011o" % sum(map(len, records)), b"x") + b"".join(records).ljust(512, b"\0")


HOSTILE = {
    "a negative size": header(b"b.jpg", base256(-512)),
    "a size that leads to itself for ever": header(b"README", base256(-512)),
    "a negative octal size": header(b"b.jpg", b"-1000"),
    "a negative size in a pax header": pax(b"14 size=-1024\n") + header(b"b.jpg", b"0"),
    "2^62": header(b"b.jpg", base256(1 << 62)),
    "2^80": header(b"b.jpg", base256(1 << 80)),
    "2^80 of a kind that nobody knows": header(b"b.jpg", base256(1 << 80), b"Q"),
    "2^80 in a pax header": pax(b"34 size=%d\n" % (1 << 80)) + header(b"b.jpg", b"0"),
    "a pax header of 2^40": header(b"pax", base256(1 << 40), b"x"),
    "a long name of 2^62": header(b"name", base256(1 << 62), b"L"),
    "a negative long name": header(b"name", base256(-1), b"L"),
    "pax headers without an end": pax() * 3000,
    "a sparse map of no numbers": pax(b"25 GNU.sparse.map=1,x,3,4\n") + header(b"b.jpg", b"0"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_archive_that_lies_about_its_sizes_is_refused_with_file_and_offset(tmp_path: Path, what: str) -> None:
    path = tmp_path / "hostile.tar"
    for before in (b"", write(tmp_path / "good.tar", {"a.jpg": b"x" * 600}).read_bytes()[:1536]):
        path.write_bytes(before + HOSTILE[what] + bytes(2048))
        with pytest.raises(PipelineError, match=r"hostile\.tar.* at byte \d+") as caught:
            sources.tar(path)
        assert len(str(caught.value)) < 500


def test_a_file_cut_off_after_it_was_indexed_is_a_sample_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a.jpg": b"x" * 100, "b.jpg": b"y" * 100})
    opened, unopened = sources.tar(path), sources.tar(path)
    assert opened[0]["jpg"] == b"x" * 100
    os.truncate(path, 1600)
    with pytest.raises(SampleError, match=r"sample 1 \(.*a\.tar:b\.jpg\): cannot be read: 64 of 100 bytes"):
        opened[1]
    with pytest.raises(SampleError, match=r"sample 0 .*a\.tar: was changed after"):
        unopened[0]


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_file_records, "OPEN_FILES", 2)
    paths = [write(tmp_path / f"{i}.tar", {"a.txt": b"%d" % i}) for i in range(5)]
    source = sources.tar(paths)
    before = len(os.listdir("/proc/self/fd"))
    for i in (0, 4, 2, 2, 0, 3, 1, 4):
        assert source[i]["txt"] == b"%d" % i
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_zeros_at_the_end_are_the_end_however_many(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a.txt": b"1"})
    with open(path, "r+b") as file:
        file.truncate(64 << 20)
    assert [record["txt"] for record in sources.tar(path)] == [b"1"]
