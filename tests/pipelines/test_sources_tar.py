"""tar(): archives by WebDataset's naming."""

from __future__ import annotations

import gc
import gzip
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
    members = {
        "train/a.JPG": b"pixels a",
        "train/a.cls": b"3",
        "train/a.seg.png": b"mask a",
        "README": b"no data",
        "train/.hidden": b"no data",
        "train/b.jpg": b"",
        "other/b.jpg": b"another",
    }
    source = sources.tar(write(tmp_path / "a.tar", members))
    assert list(source) == [
        {"key": "train/a", "jpg": b"pixels a", "cls": b"3", "seg.png": b"mask a"},
        {"key": "train/b", "jpg": b""},
        {"key": "other/b", "jpg": b"another"},
    ]
    assert source.where(0) == f"{tmp_path}/a.tar:train/a.JPG"
    assert source.extensions == ("jpg", "cls", "seg.png")


def test_an_archive_is_closed_with_its_source(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    source = sources.tar(write(tmp_path / "a.tar", {"a.txt": b"one"}))
    assert source[0]["txt"] == b"one"
    del source
    gc.collect()
    left_open = [warning for warning in recwarn if issubclass(warning.category, ResourceWarning)]
    assert not [warning for warning in left_open if str(tmp_path) in str(warning.message)]


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


def archive_bytes(tmp_path: Path) -> bytes:
    members = {f"{i}.{ext}": bytes([i]) * 700 for i in range(4) for ext in ("jpg", "cls")}
    return write(tmp_path / "whole.tar", members).read_bytes()


@given(data=st.data())
def test_an_archive_cut_off_anywhere_never_loses_a_record_silently(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    whole = archive_bytes(folder)
    end = 8 * (512 + 1024)
    cut = data.draw(st.integers(1, end + 511))
    path = folder / "cut.tar"
    path.write_bytes(whole[:cut])
    if cut < 512:
        with pytest.raises(PipelineError, match=r"cut\.tar: "):
            sources.tar(path)
        return
    source = sources.tar(path)
    for i in range(len(source) - 1):
        assert source[i] == {"key": str(i), "jpg": bytes([i]) * 700, "cls": bytes([i]) * 700}
    last = len(source) - 1
    with pytest.raises(
        SampleError, match=rf"sample {last} \(.*cut\.tar:{last}\.jpg\): the archive is cut off at byte"
    ):
        source[last]


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path: Path) -> None:
    data = bytearray(archive_bytes(tmp_path))
    data[4 * 1536 : 4 * 1536 + 512] = b"\x01" * 512
    (tmp_path / "bad.tar").write_bytes(data)
    source = sources.tar(tmp_path / "bad.tar")
    assert source[0]["key"] == "0"
    with pytest.raises(SampleError, match=r"sample 1 \(.*bad\.tar:1\.jpg\): the archive is damaged at byte 6144"):
        source[1]


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A header that says what it is told to, with the checksum that makes it believed."""
    head = b"".join(
        (name.ljust(100, b"\0"), b"0000644\0", b"0000000\0" * 2, size.ljust(12, b"\0"), b"00000000000\0")
    )
    head = (head + b" " * 8 + kind).ljust(257, b"\0") + b"ustar\x0000"
    head = head.ljust(512, b"\0")
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


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("what", HOSTILE)
def test_an_archive_that_lies_about_its_sizes_is_refused_with_file_and_offset(
    tmp_path: Path, what: str, first: bool
) -> None:
    path = tmp_path / "hostile.tar"
    before = b"" if first else write(tmp_path / "good.tar", {"a.jpg": b"x" * 600}).read_bytes()[:1536]
    path.write_bytes(before + HOSTILE[what] + bytes(2048))
    with pytest.raises(PipelineError, match=r"hostile\.tar.* at byte \d+") as caught:
        list(sources.tar(path))
    assert len(str(caught.value)) < 500
    if not first:
        with pytest.raises(SampleError, match=r"the archive is (damaged|cut off) at byte"):
            sources.tar(path)[-1]


def test_a_file_cut_off_after_it_was_indexed_is_a_sample_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a.jpg": b"x" * 100, "b.jpg": b"y" * 100})
    opened, unopened = sources.tar(path), sources.tar(path)
    assert opened[0]["jpg"] == b"x" * 100
    os.truncate(path, 1600)
    with pytest.raises(SampleError, match=r"sample 1 \(.*a\.tar:b\.jpg\): cannot be read: 64 of 100 bytes"):
        opened[1]
    with pytest.raises(SampleError, match=r"sample 0 .*a\.tar: was changed after"):
        unopened[0]


def test_archives_that_do_not_fit_are_refused_in_a_line(tmp_path: Path) -> None:
    good = write(tmp_path / "good.tar", {"a.jpg": b"x"})
    packed = tmp_path / "packed.tar"
    packed.write_bytes(gzip.compress(good.read_bytes() * 20))
    empty = tmp_path / "empty.tar"
    empty.write_bytes(b"")
    link = tmp_path / "link.tar"
    with tarfile.open(link, "w") as archive:
        info = tarfile.TarInfo("b.jpg")
        info.type, info.linkname = tarfile.LNKTYPE, "a.jpg"
        archive.addfile(info)
    cases: list[tuple[Any, Any, str]] = [
        (tmp_path / "missing.tar", None, "missing.tar.*no such file"),
        (str(tmp_path / "x*.tar"), None, "matches no file"),
        (tmp_path, None, "is a folder"),
        ([good, good], None, "given twice"),
        (good, {"jpeg": "image"}, r"no member has the extension 'jpeg' .*'image' \(there are: jpg\)"),
        (write(tmp_path / "twice.tar", {"a.jpg": b"", "a.JPG": b""}), None, "has the field 'jpg' already"),
        (write(tmp_path / "key.tar", {"a.key": b""}), None, "has the field 'key' already"),
        (write(tmp_path / "none.tar", {"README": b""}), None, "none.tar: holds no file named like"),
        (write(tmp_path / "zero.tar", {}), None, "zero.tar: holds no file named like"),
        (packed, None, "packed.tar: is no uncompressed tar archive"),
        (empty, None, "empty.tar: is empty"),
        (link, None, "link.tar: b.jpg: is a link"),
    ]
    for paths, renamed, said in cases:
        with pytest.raises(PipelineError, match=said) as caught:
            sources.tar(paths, renamed)
        assert "\n" not in str(caught.value)


def test_more_shards_than_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_file_records, "OPEN_FILES", 2)
    paths = [write(tmp_path / f"{i}.tar", {"a.txt": b"%d" % i}) for i in range(5)]
    source = sources.tar(paths)
    before = len(os.listdir("/proc/self/fd"))
    for i in (0, 4, 2, 2, 0, 3, 1, 4):
        assert source[i]["txt"] == b"%d" % i
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_data_after_the_end_mark_are_an_error_or_read_when_asked(tmp_path: Path) -> None:
    shards = [write(tmp_path / f"{n}.tar", {f"{n}-{i}.txt": b"%d" % i for i in range(5)}) for n in range(2)]
    path = tmp_path / "joined.tar"
    path.write_bytes(b"".join(shard.read_bytes() for shard in shards))
    with pytest.raises(
        PipelineError, match=rf"{path}: the archive ends at byte 5120, and data follow .* byte 10240"
    ):
        sources.tar(path)
    both = sources.tar(path, ignore_zeros=True)
    assert [(r["key"], r["txt"]) for r in both] == [(f"{n}-{i}", b"%d" % i) for n in range(2) for i in range(5)]
    # Zeros in place of a record, not of an end: the next header is missed all the same.
    whole = shards[0].read_bytes()
    path.write_bytes(whole[:2048] + bytes(1024) + whole[3072:])
    with pytest.raises(PipelineError, match="ends at byte 2048, and data follow"):
        sources.tar(path)
    assert [r["key"] for r in sources.tar(path, ignore_zeros=True)] == ["0-0", "0-1", "0-3", "0-4"]
    path.write_bytes(whole[:2048] + bytes(512) + whole[2560:])  # the header alone: its data are no header
    source = sources.tar(path, ignore_zeros=True)
    with pytest.raises(SampleError, match="damaged at byte 2560"):
        list(source)


def test_zeros_at_the_end_are_the_end_however_many(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"a.txt": b"1"})
    with open(path, "r+b") as file:
        file.truncate(1 << 40)  # a hole, which is not read
    assert [record["txt"] for record in sources.tar(path)] == [b"1"]
