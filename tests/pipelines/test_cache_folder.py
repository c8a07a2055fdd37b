"""Caches on disk are within the limit of their folder, the least recently used go first, none that is in use."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_pipes import wait_until

from pipelines import Feeder, Pipeline, PipelineError, attach, sources, stages
from pipelines.cache import file
from pipelines.cache.folder import CacheFolder, remove
from pipelines.ipc.child_processes import child_environment

N, PIXELS = 32, 16 << 10
SIZE = N * PIXELS  # bytes of the samples of one cache

#: Feeds the data of argument 2, reads an epoch, says so, and keeps the cache open until its input ends.
HOLDER = """
import sys
from test_cache_folder import feed
with feed(sys.argv[1], int(sys.argv[2])) as feeder:
    print(feeder.stats()["cache"]["samples"], flush=True)
    sys.stdin.read()
"""
#: Removes a cache, and kills itself when one file of it is gone.
KILLED = """
import os, signal, sys
from pipelines.cache.folder import CacheFolder, remove
events = []
def watch(event, arguments):
    if event in ("os.remove", "os.rmdir"):
        events.append(event)
        if len(events) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(watch)
remove(CacheFolder(sys.argv[1], 1).list_caches()[0])
"""


def pipe(number: int) -> Pipeline:
    """Pipelines of other data for another number."""
    images = np.random.default_rng(number).integers(0, 255, (N, PIXELS), np.uint8)
    return Pipeline(sources.arrays(image=images), seed=0).map(stages.cast("image", "uint8"))


def feed(folder: Any, number: int, **options: Any) -> Feeder:
    """A feeder of which one epoch was read."""
    feeder = Feeder(pipe(number), cache="disk", cache_dir=folder, **options)
    for batch in attach(feeder.address, feeder.pipeline, 8, epochs=range(1)):
        assert len(batch["image"]) == 8
    return feeder


def use(folder: Path, number: int, **options: Any) -> Any:
    with feed(folder, number, **options) as feeder:
        pass
    return feeder.stats()["cache"]


def keys(folder: Path) -> list[str]:
    return [Path(each.path).name for each in CacheFolder(str(folder)).list_caches()]


def remove_all(folder: Path) -> int:
    """Removes the caches that are not in use; returns how many."""
    return sum(map(remove, CacheFolder(str(folder), 1).list_caches()))


@contextlib.contextmanager
def start(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    environment = child_environment()
    environment["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_least_recently_used_cache_goes_when_a_new_one_needs_room(tmp_path: Path) -> None:
    limit = int(2.6 * SIZE)
    use(tmp_path, 0, cache_dir_bytes=limit)
    use(tmp_path, 1, cache_dir_bytes=limit)
    first, second = keys(tmp_path)

    def let_days_pass() -> None:
        for time, key in enumerate((first, second)):
            os.utime(tmp_path / key / "samples", (time, time))

    let_days_pass()
    with feed(tmp_path, 0, cache_dir_bytes=limit) as feeder:
        assert keys(tmp_path) == [second, first], "opened again: it is not the oldest any more"
        let_days_pass()
    assert feeder.stats()["cache"]["hits"] == N
    assert keys(tmp_path) == [second, first], "it was in use until now"
    assert use(tmp_path, 2, cache_dir_bytes=limit)["samples"] == N
    assert first in keys(tmp_path) and second not in keys(tmp_path) and len(keys(tmp_path)) == 2
    assert sum(each.stat().st_size for each in tmp_path.glob("*/*")) <= limit
    assert keys(tmp_path)[0] == first
    assert use(tmp_path, 0, cache_dir_bytes=int(1.5 * SIZE))["hits"] == N, "the oldest, but it is in use by now"
    assert keys(tmp_path) == [first], "a lower limit is kept from the next opening on"


def test_a_cache_that_another_process_has_open_is_never_removed(tmp_path: Path) -> None:
    folder = CacheFolder(str(tmp_path), SIZE)
    with start(HOLDER, tmp_path, 0) as holder:
        assert holder.stdout is not None and holder.stdout.readline().strip() == str(N)
        assert folder.make_room("another") < 0 and remove_all(tmp_path) == 0
        (entry,) = folder.list_caches()
        assert entry.in_use
        with pytest.warns(UserWarning, match="goes on without a cache: .*the limit of all its caches is"):
            assert use(tmp_path, 1, cache_dir_bytes=SIZE) is None
    wait_until(lambda: not folder.list_caches()[0].in_use)  # the lock ends with its process
    assert folder.make_room("another") > SIZE // 2 and Path(entry.path).name not in keys(tmp_path)


def test_after_a_kill_in_the_middle_of_removal_a_cache_is_gone(tmp_path: Path) -> None:
    use(tmp_path, 0)
    with start(KILLED, tmp_path) as pruner:
        assert pruner.wait(60) == -signal.SIGKILL
    assert len(keys(tmp_path)) == 1 and not list(tmp_path.glob("*/samples"))
    assert [use(tmp_path, 0)["hits"] for _ in range(2)] == [0, N]
    (own,) = tmp_path.glob("*/samples")
    own.unlink()
    (own.parent / "new-x").touch(mode=0o600)
    assert remove_all(tmp_path) == 1 and not own.parent.exists()


def test_what_is_not_certainly_a_cache_of_ours_is_left(tmp_path: Path) -> None:
    use(tmp_path, 0)
    (own,) = tmp_path.glob("*/samples")
    other, link = tmp_path / ("0" * 32), tmp_path / ("1" * 32)
    # A header with another key, an unknown name, a lock with text.
    for name, content in (("samples", own.read_bytes()), ("notes", b"mine"), ("used", b"text")):
        (tmp_path / name / other.name).mkdir(0o700, parents=True)
        file = tmp_path / name / other.name / name
        file.write_bytes(content)
        file.chmod(0o600)
        assert remove_all(tmp_path / name) == 0 and file.read_bytes() == content
    (own.parent / "notes").write_text("mine")
    (tmp_path / "f").write_text("mine")
    link.symlink_to(own.parent)
    assert remove_all(tmp_path) == 0 and own.exists()
    (own.parent / "notes").unlink()
    assert remove_all(tmp_path) == 1 and link.is_symlink()


def test_the_limit_comes_from_the_disk_where_no_option_gives_one(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    assert CacheFolder(str(tmp_path)).limit == pytest.approx(disk.f_bavail * disk.f_frsize / 2, rel=0.2)
    for wrong, words in (({"cache": "memory"}, "is for cache='disk'"), ({"cache_dir": "x"}, "at least 1")):
        with pytest.raises(PipelineError, match=words):
            Feeder(pipe(0), **{"cache": "disk", "cache_dir_bytes": 0 if "cache_dir" in wrong else 9, **wrong})


def test_where_the_disk_is_full_the_feeder_goes_on_without_a_cache(tmp_path: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **about: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(file, "initialize", fail)
    with pytest.warns(UserWarning, match=r"goes on without a cache: nothing is kept in .*: No space left"):
        assert use(tmp_path, 0) is None
    assert list(tmp_path.glob("*/*")) == []


def test_a_file_of_the_largest_size_ends_the_adding(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with tempfile.TemporaryFile(dir=tmp_path, buffering=0) as other:
        file.initialize(other.fileno(), N)
        cache = file.Cache(other.fileno(), N, 1, 10**9)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, limits[1]))
        try:
            samples = [{"image": np.zeros(PIXELS, np.uint8)} for _ in range(N)]
            with pytest.warns(UserWarning, match=rf"no more samples are added .* \[Errno {errno.EFBIG}\]"):
                list(map(cache.put, range(N), samples))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert 0 < cache.added < N
