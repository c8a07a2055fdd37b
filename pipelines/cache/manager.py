"""Creates and accounts for the sample cache of a feeder, in memory or on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from pipelines.cache import file
from pipelines.cache.content import FORMATS, Format, count_cached_stages
from pipelines.cache.folder import LIMIT, CacheFolder, open_directory
from pipelines.cache.reopened import find_difference
from pipelines.checks import check_path
from pipelines.description import PipelineDescription
from pipelines.environment.machine_limits import available_bytes
from pipelines.errors import PipelineError
from pipelines.fingerprint import SCHEME
from pipelines.verification.machine import describe_machine
from pipelines.verification.reader import Finding

Where = Literal["memory", "disk"]

#: Parts of a pipeline that change nothing of a cached sample.
_NOT_CACHED = ("seed", "shuffle", "sampling", "on_error")

_KNOWN = 32  # samples from which the size of all is told
_MAX_TEXT = 400  # bytes of each text in the header, which has 2048 in all


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
        owner: closes the cache when it is closed itself.
        form: see `count_cached_stages`.

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
        owner: contextlib.ExitStack | None = None,
        form: Format | None = None,
    ) -> None:
        check_options(where, limit, directory, directory_limit, form)
        self.difference: Finding | None = None
        self.stages = count_cached_stages(pipeline, form)
        self._n = len(pipeline.source)
        least = file.records_offset(self._n)
        self.fd, self._used = -1, -1
        self._folder: CacheFolder | None = None
        if where == "memory":
            free = available_bytes()
            self.limit = find_limit(where, limit)
            if self.limit > free:
                raise PipelineError(
                    f"cache_bytes asks for {self.limit / 2**20:.0f} MiB of memory, {free / 2**20:.0f} MiB are free"
                )
            self.fd = os.memfd_create("cache", os.MFD_CLOEXEC)
            file.initialize(self.fd, self._n)
        else:
            assert directory is not None
            path = os.path.abspath(os.path.expanduser(os.fspath(directory)))
            try:
                os.makedirs(path, mode=0o700, exist_ok=True)
                self._folder = CacheFolder(path, directory_limit)
                self._open_in_folder(pipeline, self._folder)
            except OSError as error:
                self._release()
                if error.errno in file.FULL:
                    raise NoRoom(f"nothing is kept in {path}: {error.strerror}") from None
                raise PipelineError(
                    f"cache_dir must be a directory that this user may make and write to, got {directory!s}: "
                    f"{error}"
                ) from None
            except BaseException:
                self._release()
                raise
            self.limit = self._folder.limit if limit is None else min(limit, self._folder.limit)
        if self.limit <= least:
            self._release()
            if where == "disk" and (limit is None or limit > least):
                raise NoRoom(
                    f"nothing is kept in {directory!s}: {self._n} samples need more than {least} bytes, and "
                    f"the limit of all its caches is {self.limit} (cache_dir_bytes=, {LIMIT}, or half of the disk)"
                )
            raise PipelineError(f"cache_bytes must be above {least} for {self._n} samples, got {self.limit}")
        found = 0 if where == "memory" else file.count_samples(self.fd, self._n)
        found_bytes = file.count_used_bytes(self.fd) - least
        self._counts = {"hits": 0, "added": found, "wrong": 0, "added_bytes": found_bytes}
        self._is_room_known = False
        self._lock = threading.Lock()
        self._last: dict[str, int | None] | None = None
        if owner is not None:
            owner.callback(self.close)

    def _open_in_folder(self, pipeline: PipelineDescription, folder: CacheFolder) -> None:
        """Opens the file of an earlier feeder, if its samples are what the pipeline prepares now, or a new one."""
        while self.fd < 0:
            try:
                self._open_file(pipeline, folder.path)
            except OSError as error:
                if error.errno not in file.FULL or not folder.remove_oldest():
                    raise
        with folder.lock() as is_locked:
            if is_locked:  # the limit may be lower than last time; this cache is in use by now
                folder.grant(0, 0, 0)

    def _open_file(self, pipeline: PipelineDescription, directory: str) -> None:
        key = _compute_key(pipeline, self.stages)
        if key is None:
            warnings.warn(f"the cache on disk ends with its feeder: {pipeline.why_unsure}", stacklevel=6)
            with tempfile.TemporaryFile(dir=directory, buffering=0) as nameless:
                file.initialize(nameless.fileno(), self._n)
                self.fd = os.dup(nameless.fileno())
            return
        own = os.path.join(directory, key)
        if self._used < 0:
            self._used = open_directory(own)
        fd = _open_earlier(own, self._n, key)
        if fd is not None:
            try:
                self.difference = find_difference(pipeline, self.stages, fd)
            except BaseException:
                os.close(fd)
                raise
            if self.difference is None:
                self.fd = fd
                return
            os.close(fd)
            warnings.warn(
                f"the samples kept in {directory} are not what the pipeline prepares now, and are prepared anew; "
                f"{self.difference.describe()}",
                stacklevel=6,
            )
        _warn_of_unusable(directory, key)
        fd, new = tempfile.mkstemp(prefix="new-", dir=own)
        try:
            about = _describe_content(pipeline, self.stages)
            file.initialize(fd, self._n, key=key, scheme=SCHEME, machine=describe_machine(), **about)
            os.rename(new, os.path.join(own, "samples"))  # whoever has the old file open continues in it
        except BaseException:
            os.close(fd)
            os.unlink(new)
            raise
        self.fd = fd

    def _release(self) -> None:
        for fd in (self.fd, self._used):
            if fd >= 0:
                os.close(fd)
        self.fd = self._used = -1

    def add_counts(self, *counts: int) -> None:
        """Adds the counts that a worker reports (`file.Cache.flush_counts`)."""
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
        """Returns the arguments of `file.Cache`, except the descriptor, and those of its folder, for a worker."""
        folder = None if self._folder is None else [self._folder.path, self._folder.limit]
        return {"n": self._n, "stages": self.stages, "limit": self.limit, "folder": folder}

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
        """Closes the file; `stats` then returns the last counts."""
        with self._lock:
            self._last = self._read_stats()
            if self._used >= 0:
                with contextlib.suppress(OSError):
                    os.utime(self._used)
            self._release()


def open_cache(
    pipeline: PipelineDescription,
    where: Where | None,
    limit: int | None,
    directory: str | os.PathLike[str] | None,
    directory_limit: int | None,
    owner: contextlib.ExitStack,
    form: Format | None = None,
) -> CacheManager | None:
    """Opens the cache of a feeder; None without one, also where the disk has no room for it, which a warning says.

    Raises:
        PipelineError: as `CacheManager`.
    """
    if where is None:
        return None
    try:
        return CacheManager(pipeline, where, limit, directory, directory_limit, owner, form)
    except NoRoom as error:
        warnings.warn(f"the feeder goes on without a cache: {error}", stacklevel=3)
        return None


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


def check_options(where: Any, limit: Any, directory: Any, directory_limit: Any = None, form: Any = None) -> None:
    """Checks the options of a cache.

    Raises:
        PipelineError: an option is invalid; says what is valid.
    """
    if where is None and (limit, directory, form) != (None, None, None):
        given = {"cache_bytes": limit, "cache_dir": directory, "cache_format": form}
        name = next(name for name in ("cache_dir", "cache_bytes", "cache_format") if given[name] is not None)
        raise PipelineError(f"{name}= is for a feeder that keeps samples: give cache='memory' or cache='disk' too")
    if where not in (None, "memory", "disk"):
        raise PipelineError(f"cache must be 'memory', 'disk' or None, got {where!r}")
    if form not in (None, *FORMATS):
        raise PipelineError(f"cache_format must be 'jpeg', 'raw' or None, got {form!r}")
    for name, value in (("cache_bytes", limit), ("cache_dir_bytes", directory_limit)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise PipelineError(f"{name} must be a positive integer, got {value!r}")
    if where != "disk" and directory_limit is not None:
        raise PipelineError("cache_dir_bytes= is for cache='disk'")
    if (where == "disk") != (directory is not None):
        raise PipelineError(
            "cache='disk' needs cache_dir=, a directory that this user may write to"
            if where == "disk"
            else "cache_dir= is for cache='disk'"
        )
    if directory is not None:
        check_path("cache_dir", directory)


def _open_earlier(own: str, n: int, key: str) -> int | None:
    """Opens the file of an earlier feeder; None where there is none that can be used."""
    with _open_if_exists(os.path.join(own, "samples")) as old:
        return None if old is None or not file.is_cache_of(old, n, key=key, scheme=SCHEME) else os.dup(old)


def _describe_content(pipeline: PipelineDescription, stages: int) -> dict[str, str]:
    """What a cache is of, for people: source, place of its first record, stages."""
    said = {
        "source": repr(pipeline.source),
        "first": pipeline.source.where(0),
        "stages": ", ".join(stage.name for stage in pipeline.stages[:stages]),
    }
    for name, text in said.items():
        while len(json.dumps(text)) > _MAX_TEXT:  # as it is in the header
            text = text[: len(text) * 9 // 10] + "..."
        said[name] = text
    return said


def _warn_of_unusable(directory: str, key: str) -> None:
    """Warns of caches that other versions wrote: their keys cannot be compared, so they are not used."""
    unknown = []
    for own in sorted({*os.listdir(directory)} - {key}):
        with contextlib.suppress(OSError), _open_if_exists(os.path.join(directory, own, "samples")) as old:
            if old is not None and (said := file.read_header(old)) and said.get("scheme", 1) != SCHEME:
                unknown.append(own)
    if unknown:
        warnings.warn(
            f"samples are kept anew: {', '.join(unknown)} in {directory} is of another version of ray-ensemble, "
            "which cannot be compared; remove it unless that version is still used",
            stacklevel=7,
        )


@contextlib.contextmanager
def _open_if_exists(path: str) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _compute_key(pipeline: PipelineDescription, stages: int) -> str | None:
    """Identifies the content of a cache on disk: source, stages and installed packages (decoders differ)."""
    from importlib import metadata

    parts = pipeline.take_stages(stages).parts()
    if parts is None:
        return None
    kept = [SCHEME, *(digest for name, digest in parts if name not in _NOT_CACHED)]
    installed = sorted({(d.metadata["Name"], d.version) for d in metadata.distributions()}, key=str)
    return hashlib.sha256(json.dumps([file.VERSION, kept, installed]).encode()).hexdigest()[:32]
