"""What a scan of a data file has found is kept in an index, and used only where it is certainly still true."""

from __future__ import annotations

import io
import logging
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import sources
from pipelines.errors import PipelineError
from pipelines.sources import _scan
from pipelines.sources._files import File
from pipelines.sources._scan import Found, scan_files
from tests.pipelines import test_sources_tfrecord

scanned: list[str] = []


def count_bytes(file: File, *options: Any) -> Found:
    scanned.append(os.path.basename(file.path))
    data = Path(file.path).read_bytes()
    if data == b"damaged":
        raise PipelineError(f"{file.path}: is damaged")
    return {
        "counts": np.bincount(np.frombuffer(data, np.uint8), minlength=256),
        "none": np.empty((0, 2), np.int32),
    }


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of three files, whose scans are kept although they are new."""
    monkeypatch.setenv(_scan.INDEX, str(tmp_path / "kept"))
    monkeypatch.setattr(_scan, "_RECENT_NS", 0)
    (tmp_path / "data").mkdir()
    for name in "abc":
        (tmp_path / "data" / name).write_bytes(name.encode() * 100)
    return tmp_path / "data"


def scan(folder: Path, *options: Any) -> tuple[list[str], list[int]]:
    """The files that were scanned, and the most frequent byte of each."""
    scanned.clear()
    files = [File.of(str(path)) for path in sorted(folder.iterdir())]
    found = scan_files(count_bytes, files, *options)
    assert all(list(each) == ["counts", "none"] and each["none"].shape == (0, 2) for each in found)
    return list(scanned), [int(each["counts"].argmax()) for each in found]


def kept_files(folder: Path) -> list[Path]:
    (own,) = (folder.parent / "kept").iterdir()
    return sorted(own.iterdir())


def test_only_what_is_new_is_scanned(data: Path) -> None:
    assert scan(data) == (["a", "b", "c"], [*b"abc"])
    assert scan(data) == ([], [*b"abc"])
    (data / "bb").write_bytes(b"d")
    assert scan(data) == (["bb"], [*b"abdc"])
    assert scan(data, "another option")[0] == ["a", "b", "bb", "c"]


def test_a_change_is_seen_that_keeps_size_and_time(data: Path) -> None:
    scan(data)
    for name, is_replaced in (("a", False), ("b", True)):
        before = (data / name).stat()
        if is_replaced:
            (data.parent / "new").write_bytes(b"z" * 100)
            os.utime(data.parent / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
            os.replace(data.parent / "new", data / name)
        else:
            (data / name).write_bytes(b"z" * 100)
            os.utime(data / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert scan(data) == (["a", "b"], [*b"zzc"])


def test_files_that_change_places_are_scanned_anew(data: Path) -> None:
    scan(data)
    (data / "a").rename(data / "x")
    (data / "b").rename(data / "a")
    (data / "x").rename(data / "b")
    assert scan(data) == (["a", "b"], [*b"bac"])


def test_a_file_changed_just_before_its_scan_is_not_kept(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_scan, "_RECENT_NS", 3600 * 10**9)
    for _ in range(2):
        assert scan(data)[0] == ["a", "b", "c"]


def test_a_file_that_changes_during_its_scan_is_not_kept(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan_and_touch(file: File) -> Found:
        os.utime(file.path, ns=(0, file.mtime_ns))
        return count_bytes(file)

    monkeypatch.setattr(scan_and_touch, "__module__", __name__)
    for _ in range(2):
        scanned.clear()
        scan_files(scan_and_touch, [File.of(str(data / "a"))])
        assert scanned == ["a"]


def test_damage_of_an_index_leads_to_a_scan(data: Path) -> None:
    (data / "b").unlink()
    (data / "c").unlink()
    scan(data)
    (kept,) = kept_files(data)
    whole = kept.read_bytes()
    flipped = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 41)]
    cut = [whole[:size] for size in (0, 5, 16, 17, len(whole) // 2, len(whole) - 1)]
    for damaged in (*flipped, *cut, whole + b"\0"):
        kept.write_bytes(damaged)
        assert scan(data) == (["a"], [*b"a"])
        assert kept.read_bytes() == whole


def test_an_index_is_its_users_alone(data: Path) -> None:
    scan(data)
    (folder,) = (data.parent / "kept").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600} and len(kept_files(data)) == 3
    folder.chmod(0o750)
    with pytest.raises(PipelineError, match="not a directory of yours alone"):
        scan(data)


def test_without_a_directory_that_can_be_written_to_every_file_is_scanned(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(_scan.INDEX, str(data / "a"))
    with caplog.at_level(logging.WARNING):
        assert scan(data) == (["a", "b", "c"], [*b"abc"])
    assert f"{_scan.INDEX}={data / 'a'} is not used: Not a directory" in caplog.text
    monkeypatch.delenv(_scan.INDEX)
    assert scan(data)[0] == ["a", "b", "c"]


def test_several_processes_find_the_same_and_an_error_is_that_of_the_first_file(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_scan, "_ALONE_S", 0.0)
    monkeypatch.setattr(_scan, "_SAY_S", 0.0)
    with caplog.at_level(logging.WARNING):
        assert scan(data) == ([], [*b"abc"])  # none in this process
    assert "2 of 3 files are scanned for records, about" in caplog.text
    assert scan(data) == ([], [*b"abc"]) and len(kept_files(data)) == 3
    for name in ("a", "b"):
        (data / name).write_bytes(b"damaged")
    with pytest.raises(PipelineError, match=r"/a: is damaged$"):
        scan(data)


def test_sources_have_the_same_records_from_an_index(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(2):
        with tarfile.open(data / f"{shard}.tar", "w") as archive:
            for number in range(5):
                for name in (f"{number}.Txt", f"{number}.cls.{shard}"):
                    info = tarfile.TarInfo(name)
                    info.size = 1
                    archive.addfile(info, io.BytesIO(b"%d" % number))
    cut = (data / "0.tar").read_bytes()[: 5 * 2048 - 512]
    (data / "cut.tar").write_bytes(cut)
    test_sources_tfrecord.write(data / "a.tfrecord", {"x": np.array([1, 2])}, {"x": np.array([3, 4])})

    def read() -> list[Any]:
        tar, records = sources.tar(str(data / "*.tar")), sources.tfrecord(data / "a.tfrecord")
        whole = [{**tar[i]} for i in range(len(tar) - 1)]
        with pytest.raises(PipelineError, match="cut off at byte") as error:
            tar[len(tar) - 1]
        assert tar.extensions == ("txt", "cls.0", "cls.1")
        return [whole, str(error.value), tar.identity(), [each["x"].tolist() for each in records]]

    monkeypatch.setenv(_scan.INDEX, "")
    expected = read()
    monkeypatch.setenv(_scan.INDEX, str(data.parent / "kept"))
    assert read() == expected
    monkeypatch.setattr(_scan, "_scan_all", lambda scan, files, options: iter([] if not files else [b"none"]))
    assert read() == expected
