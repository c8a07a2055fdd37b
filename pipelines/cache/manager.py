"""Creates and accounts for the sample cache of a feeder, in memory or on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from pipelines.cache import codec, file
from pipelines.cache.reopened import find_difference
from pipelines.checks import check_path
from pipelines.description import PipelineDescription
from pipelines.environment.machine_limits import available_bytes
from pipelines.errors import PipelineError
from pipelines.fingerprint import SCHEME
from pipelines.prepare.inference import prepare_first_sample
from pipelines.verification.machine import describe_machine
from pipelines.verification.reader import Finding

Where = Literal["memory", "disk"]

#: Parts of a pipeline that change nothing of a cached sample.
_NOT_CACHED = ("seed", "shuffle", "sampling", "on_error")


class CacheManager:
    """The cache of one pipeline: its file, and the counts that its workers report.

    Args:
        pipeline: its samples are cached as they are before the first random stage.
        where: `"memory"`, which ends with this object, or `"disk"`, which the next feeder uses again if the
            pipeline has a fingerprint.
        limit: largest size in bytes; by default a quarter of the free memory, or half of the free disk.
        directory: of the files, for `"disk"`.
        owner: closes the cache when it is closed itself.

    Attributes:
        fd: descriptor of the file.
        stages: the number of stages that were applied to the cached samples.
        difference: why the samples of an earlier feeder are not used: they are not what the pipeline prepares now.

    Raises:
        PipelineError: no sample can be cached, or the file cannot be made; says why.
    """

    def __init__(
        self,
        pipeline: PipelineDescription,
        where: Where,
        limit: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        owner: contextlib.ExitStack | None = None,
    ) -> None:
        check_options(where, limit, directory)
        self.difference: Finding | None = None
        self.stages = count_cached_stages(pipeline)
        self._n = len(pipeline.source)
        least = file.records_offset(self._n)
        if where == "memory":
            free = available_bytes()
            self.limit = free // 4 if limit is None else limit
            if self.limit > free:
                raise PipelineError(
                    f"cache_bytes asks for {self.limit / 2**20:.0f} MiB of memory, {free / 2**20:.0f} MiB are free"
                )
            self.fd = os.memfd_create("cache", os.MFD_CLOEXEC)
            file.initialize(self.fd, self._n)
        else:
            assert directory is not None
            try:
                self.fd = self._open_on_disk(pipeline, os.path.expanduser(os.fspath(directory)))
                file.check_locks(self.fd)
            except OSError as error:
                raise PipelineError(
                    f"cache_dir must be a directory that this user may make and write to, got {directory!s}: "
                    f"{error}"
                ) from None
            free = os.fstatvfs(self.fd).f_bavail * os.fstatvfs(self.fd).f_frsize
            self.limit = file.count_used_bytes(self.fd) + free // 2 if limit is None else limit
        if self.limit <= least:
            os.close(self.fd)
            raise PipelineError(f"cache_bytes must be above {least} for {self._n} samples, got {self.limit}")
        found = 0 if where == "memory" else file.count_samples(self.fd, self._n)
        self._counts = {"hits": 0, "added": found, "wrong": 0}
        self._lock = threading.Lock()
        self._last: dict[str, int] | None = None
        if owner is not None:
            owner.callback(self.close)

    def _open_on_disk(self, pipeline: PipelineDescription, directory: str) -> int:
        """The file of an earlier feeder, if its samples are what the pipeline prepares now; else a new one."""
        fd = _open_file(pipeline, self.stages, directory)
        self.difference = find_difference(pipeline, self.stages, fd)
        if self.difference is None:
            return fd
        os.close(fd)
        warnings.warn(
            f"the samples kept in {directory} are not what the pipeline prepares now, and are prepared anew; "
            f"{self.difference.describe()}",
            stacklevel=5,
        )
        return _open_file(pipeline, self.stages, directory, is_renewed=True)

    def add_counts(self, hits: int, added: int, wrong: int) -> None:
        """Adds the counts that a worker reports."""
        for name, count in (("hits", hits), ("added", added), ("wrong", wrong)):
            self._counts[name] += count

    def worker_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `file.Cache`, except the descriptor, for a worker."""
        return {"n": self._n, "stages": self.stages, "limit": self.limit}

    def stats(self) -> dict[str, int]:
        """Counts: `samples` cached, `bytes` in use of the `limit`, `hits`, and `wrong` ones (damaged records)."""
        with self._lock:
            return dict(self._last) if self._last is not None else self._read_stats()

    def _read_stats(self) -> dict[str, int]:
        counts = self._counts
        samples = max(0, counts["added"] - counts["wrong"])
        return {
            "samples": samples, "bytes": file.count_used_bytes(self.fd), "limit": self.limit,
            "hits": counts["hits"], "wrong": counts["wrong"],
        }  # fmt: skip

    def close(self) -> None:
        """Closes the file; `stats` then returns the last counts."""
        with self._lock:
            self._last = self._read_stats()
            os.close(self.fd)


def check_options(where: Any, limit: Any, directory: Any) -> None:
    """Checks the options of a cache.

    Raises:
        PipelineError: an option is invalid; says what is valid.
    """
    if where is None and (limit, directory) != (None, None):
        name = "cache_bytes" if directory is None else "cache_dir"
        raise PipelineError(f"{name}= is for a feeder that keeps samples: give cache='memory' or cache='disk' too")
    if where not in (None, "memory", "disk"):
        raise PipelineError(f"cache must be 'memory', 'disk' or None, got {where!r}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise PipelineError(f"cache_bytes must be a positive integer, got {limit!r}")
    if (where == "disk") != (directory is not None):
        raise PipelineError(
            "cache='disk' needs cache_dir=, a directory that this user may write to"
            if where == "disk"
            else "cache_dir= is for cache='disk'"
        )
    if directory is not None:
        check_path("cache_dir", directory)


def count_cached_stages(pipeline: PipelineDescription) -> int:
    """Counts the leading stages to apply to a sample before it is cached: those before the first random stage.

    Fewer if a sample cannot be encoded there; a warning says so.

    Raises:
        PipelineError: there is no such stage.
    """
    still = next((i for i, stage in enumerate(pipeline.stages) if stage.random), len(pipeline.stages))
    if not still:
        what = f"its first stage, {pipeline.stages[0].name}, is random" if pipeline.stages else "it has no stages"
        raise PipelineError(f"the cache has nothing to keep of this pipeline: {what}")
    reasons: list[str] = []
    for stages in range(still, 0, -1):
        said = codec.encode(0, prepare_first_sample(pipeline, stages))
        if not isinstance(said, str):
            if reasons:
                warnings.warn(
                    f"kept are samples up to {pipeline.stages[stages - 1].name}: {reasons[0]}", stacklevel=4
                )
            return stages
        reasons.append(f"after {pipeline.stages[stages - 1].name} {said}, which cannot be kept")
    raise PipelineError(f"the cache has nothing to keep of this pipeline: {reasons[0]}")


def _open_file(pipeline: PipelineDescription, stages: int, directory: str, *, is_renewed: bool = False) -> int:
    os.makedirs(directory, mode=0o700, exist_ok=True)
    key, n = _compute_key(pipeline, stages), len(pipeline.source)
    if key is None:
        warnings.warn(f"the cache on disk ends with its feeder: {pipeline.why_unsure}", stacklevel=4)
        fd, path = tempfile.mkstemp(prefix="cache-", dir=directory)
        os.unlink(path)
        file.initialize(fd, n)
        return fd
    own = os.path.join(directory, key)
    with contextlib.suppress(FileExistsError):
        os.mkdir(own, 0o700)
    found = os.lstat(own)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PipelineError(f"{own} is not a directory of yours alone (mode 0700); remove it")
    path = os.path.join(own, "samples")
    with _open_if_exists(path) as old:
        if old is not None and not is_renewed and file.is_cache_of(old, n, key=key, scheme=SCHEME):
            return os.dup(old)
    _warn_of_unusable(directory, key)
    fd, new = tempfile.mkstemp(prefix="new-", dir=own)
    file.initialize(fd, n, key=key, scheme=SCHEME, machine=describe_machine())
    os.rename(new, path)  # whoever still has the old file goes on in it, and it ends with him
    return fd


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
            stacklevel=5,
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
