"""Creates and accounts for the sample cache of a feeder, in memory or on disk."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from typing import Any, Literal

from pipelines.cache import file
from pipelines.cache.content import compute_key, count_cached_stages, find_difference
from pipelines.cache.folder import CacheFolder
from pipelines.checks import check_integer, check_path
from pipelines.description import PipelineDescription
from pipelines.environment.machine_limits import available_bytes
from pipelines.environment.processor import describe_machine
from pipelines.errors import PipelineError
from pipelines.fingerprint import SCHEME
from pipelines.verification.reader import Finding

Where = Literal["memory", "disk"]

_KNOWN = 32  # samples from which the size of all is told


class NoRoom(PipelineError):
    """The disk has no room for a cache."""


class CacheManager:
    """The cache of one pipeline: its file, and the counts that its workers report.

    Args:
        pipeline: its samples are cached as they are before the first random stage.
        where: `"memory"`, which ends with this object, or `"disk"`, which the next feeder uses again if the
            pipeline has a fingerprint.
        limit: largest size in bytes; by default a quarter of the free memory, or the limit of the directory.
        directory: of the files, for `"disk"`.
        directory_limit: largest size of all caches in the directory (`CacheFolder`).

    Attributes:
        fd: descriptor of the file.
        stages: the number of stages that were applied to the cached samples.
        difference: why the samples of an earlier feeder are not used: they are not what the pipeline prepares now.

    Raises:
        PipelineError: no sample can be cached, or the file cannot be made; says why.
        NoRoom: the disk is full.
    """

    def __init__(
        self,
        pipeline: PipelineDescription,
        where: Where,
        limit: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        directory_limit: int | None = None,
    ) -> None:
        self.difference: Finding | None = None
        self.stages = count_cached_stages(pipeline)
        self._n = len(pipeline.source)
        least = file.records_offset(self._n)
        self.fd = -1
        self._lock = threading.Lock()
        self._last: dict[str, int | None] | None = None
        self._is_room_known = False
        try:
            if where == "memory":
                self.limit = find_limit(where, limit)
                if self.limit > (free := available_bytes()):
                    request = f"cache_bytes asks for {self.limit / 2**20:.0f} MiB of memory: take less"
                    raise PipelineError(f"{request}, {free / 2**20:.0f} MiB are free")
                self.fd = os.memfd_create("cache", os.MFD_CLOEXEC)
                file.initialize(self.fd, self._n)
            else:
                room = self._open_on_disk(pipeline, str(directory), directory_limit)
                self.limit = room if limit is None else min(limit, room)
            if self.limit <= least and where == "disk" and (limit is None or limit > least):
                raise NoRoom(
                    f"nothing is kept in {directory!s}: {self._n} samples need more than {least} bytes, and "
                    f"the limit of all its caches is {self.limit} (cache_dir_bytes=, or half of the disk)"
                )
            if self.limit <= least:
                raise PipelineError(f"cache_bytes must be above {least} for {self._n} samples, got {self.limit}")
        except BaseException:
            self._release()
            raise
        earlier = 0 if where == "memory" else file.count_samples(self.fd, self._n)
        earlier_bytes = file.count_used_bytes(self.fd) - least
        self._counts = {"hits": 0, "added": earlier, "wrong": 0, "added_bytes": earlier_bytes}

    def _open_on_disk(self, pipeline: PipelineDescription, directory: str, limit: int | None) -> int:
        """Open the file of an earlier feeder, if its samples are what the pipeline prepares now, or a new one.

        Returns:
            The bytes that it may have.
        """
        key = compute_key(pipeline, self.stages)
        if key is None:
            raise PipelineError(
                f"cache='disk' cannot recognize the samples of this pipeline: {pipeline.why_unsure}; or use "
                "cache='memory'"
            )
        path = os.path.abspath(os.path.expanduser(directory))
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            folder = CacheFolder(path, limit)
            room, what = folder.make_room(key), (key, self._n, SCHEME)
            self.fd, is_earlier = folder.open(*what, is_new=False, machine=describe_machine())
            self.difference = find_difference(pipeline, self.stages, self.fd) if is_earlier else None
            if self.difference is not None:
                self._release()
                self.fd, _ = folder.open(*what, is_new=True, machine=describe_machine())
                warnings.warn(
                    f"the samples kept in {path} differ from what the pipeline prepares now, so all are prepared "
                    f"again; {self.difference.describe()}",
                    stacklevel=6,
                )
        except OSError as error:
            if error.errno in file.FULL:
                raise NoRoom(f"nothing is kept in {path}: {error.strerror}") from None
            raise PipelineError(
                f"cache_dir must be a directory that this user may make and write to, got {directory}: {error}"
            ) from None
        return room

    def _release(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def add_counts(self, *counts: int) -> None:
        for name, count in zip(self._counts, counts, strict=True):
            self._counts[name] += count
        if self._is_room_known or self._counts["added"] < min(_KNOWN, self._n):
            return
        self._is_room_known = True
        if (expected := self._estimate_bytes()) is not None and expected > self.limit:
            warnings.warn(
                f"the cache has room for about {self.limit / expected:.0%} of the samples: all need about "
                f"{expected / 2**20:.0f} MiB, its limit is {self.limit / 2**20:.0f} MiB; the others are prepared "
                "in each epoch",
                stacklevel=2,
            )

    def _estimate_bytes(self) -> int | None:
        """Bytes of all samples, from those that were added so far; None where there are none."""
        added, size = self._counts["added"], self._counts["added_bytes"]
        return file.records_offset(self._n) + self._n * size // added if added else None

    def worker_arguments(self) -> dict[str, Any]:
        """The arguments of `file.Cache` for a worker, except the descriptor."""
        return {"n": self._n, "stages": self.stages, "limit": self.limit}

    def stats(self) -> dict[str, int | None]:
        """Counts: `samples` cached, `bytes` in use of the `limit`, `hits`, and `wrong` ones (damaged records).

        `expected_bytes` is the size with all samples, estimated from those that are kept; None before the first.
        """
        with self._lock:
            return dict(self._last) if self._last is not None else self._read_stats()

    def _read_stats(self) -> dict[str, int | None]:
        counts = self._counts
        samples = max(0, counts["added"] - counts["wrong"])
        return {
            "samples": samples, "bytes": file.count_used_bytes(self.fd), "limit": self.limit,
            "hits": counts["hits"], "wrong": counts["wrong"], "expected_bytes": self._estimate_bytes(),
        }  # fmt: skip

    def close(self) -> None:
        """Close the file; `stats` then returns the last counts."""
        with self._lock:
            self._last = self._read_stats()
            if self.fd >= 0:
                os.utime(self.fd)  # it was used last
            self._release()


def open_cache(
    pipeline: PipelineDescription,
    where: Where | None,
    limit: int | None,
    directory: str | os.PathLike[str] | None,
    directory_limit: int | None,
    owner: contextlib.ExitStack,
) -> CacheManager | None:
    """Open the cache of a feeder, which `owner` closes; None where the disk has no room, which a warning says.

    Raises:
        PipelineError: an option is invalid, or as `CacheManager`.
    """
    check_options(where, limit, directory, directory_limit)
    assert where is not None  # else an option of it is refused
    try:
        cache = CacheManager(pipeline, where, limit, directory, directory_limit)
    except NoRoom as error:
        warnings.warn(f"the feeder goes on without a cache: {error}", stacklevel=3)
        return None
    owner.callback(cache.close)
    return cache


def find_limit(
    where: Where,
    limit: int | None,
    directory: str | os.PathLike[str] | None = None,
    directory_limit: int | None = None,
) -> int:
    """The largest size of a cache in bytes, now; of one on disk also before its directory exists."""
    if where == "memory":
        return available_bytes() // 4 if limit is None else limit
    assert directory is not None
    path = os.path.abspath(os.path.expanduser(os.fspath(directory)))
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    room = CacheFolder(path, directory_limit).limit
    return room if limit is None else min(limit, room)


def check_options(where: Any, limit: Any, directory: Any, directory_limit: Any) -> None:
    """Check the options of a cache.

    Raises:
        PipelineError: an option is invalid; says what is valid.
    """
    if where not in (None, "memory", "disk"):
        raise PipelineError(f"cache must be 'memory', 'disk' or None, got {where!r}")
    if where is None and (limit, directory) != (None, None):
        name = "cache_bytes" if directory is None else "cache_dir"
        raise PipelineError(f"{name}= needs a cache: give cache='memory' or cache='disk' too")
    for name, value in (("cache_bytes", limit), ("cache_dir_bytes", directory_limit)):
        if value is not None:
            check_integer(name, value, 1)
    if where != "disk" and (directory, directory_limit) != (None, None):
        raise PipelineError(f"cache_dir{'_bytes' * (directory is None)}= is for cache='disk'")
    if where == "disk":
        if directory is None:
            raise PipelineError("cache='disk' needs cache_dir=, a directory that this user may write to")
        check_path("cache_dir", directory)
