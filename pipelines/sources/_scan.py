"""Scans the files of a source for where their records are, and keeps what was found in an index.

An index is a directory `index-UID` in one that the user names, `ENSEMBLE_INDEX_DIR`. It has a file for each data
file and way to scan it: a digest (XXH3, 128 bits), and the arrays that were found with the *stamp* of the data
file, which is its size, its inode, and when its content and its inode were changed. The kernel sets that last time
at each change; no program can set it back. What was found is used again only for the same path, the same stamp and
the same code; else the file is scanned anew. Nothing is kept of a file that was changed less than two seconds
before its scan, because a second change might have the same time.

A scan that takes long goes on in several processes: the interpreter is busy most of the time, so threads gain
little.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import os
import queue
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.environment.machine_limits import usable_cpus
from pipelines.errors import PipelineError
from pipelines.ipc.child_processes import child_environment
from pipelines.sources._files import File

log = logging.getLogger(__name__)

INDEX = "ENSEMBLE_INDEX_DIR"
Found = dict[str, np.ndarray[Any, Any]]
Scan = Callable[..., Found]

_ALONE_S = 1.0  # after which other processes help
_SAY_S = 10.0  # between two notes on a scan that goes on
_RECENT_NS = 2 * 10**9  # longer than the steps in which any usual file system counts time
_STAMP = "stamp"
_DIGEST_BYTES = 16


def scan_files(scan: Scan, files: list[File], *options: Any) -> list[Found]:
    """Returns what a function finds in each file: from the index where the file is unchanged, else from a scan.

    Args:
        scan: called as `scan(file, *options)`; a function of a module. The arrays that it returns hold no objects.
        files: to be scanned.
        options: values for JSON.

    Raises:
        PipelineError: what the function raises; or the index belongs to somebody else.
    """
    index = _Index.open(scan, options)
    found = {number: kept for number, file in enumerate(files) if index and (kept := index.load(file)) is not None}
    missing = [number for number in range(len(files)) if number not in found]
    scanned = _scan_all(scan, [files[number] for number in missing], options)
    began = said = time.monotonic()
    for done, (number, blob) in enumerate(zip(missing, scanned, strict=True), 1):
        if index:
            index.save(files[number], blob)
        found[number] = _decode(blob)
        del found[number][_STAMP]
        if time.monotonic() - said > _SAY_S and done < len(missing):
            said = time.monotonic()
            left_s = (said - began) / done * (len(missing) - done)
            log.warning(
                "%d of %d files are scanned for records, about %.0f s are left", done, len(missing), left_s
            )
    return [found[number] for number in range(len(files))]


def scan_one(scan: Scan, file: File, options: Sequence[Any]) -> bytes:
    """Scans a file; returns the content of its file in an index."""
    before, began = file.stamp(), time.time_ns()
    found = scan(file, *options)
    is_certain = before == file.stamp() and began - before[2] > _RECENT_NS
    with io.BytesIO() as body:
        np.savez(body, allow_pickle=False, **found, **{_STAMP: np.array(before if is_certain else [], np.int64)})
        return _digest(body.getbuffer()) + body.getvalue()


def _decode(blob: bytes) -> Found:
    """What was found, and the stamp, which is empty where the file may have changed meanwhile.

    Raises:
        ValueError: the digest is another.
    """
    body = memoryview(blob)[_DIGEST_BYTES:]
    if blob[:_DIGEST_BYTES] != _digest(body):
        raise ValueError("is damaged")
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return dict(arrays)


def _digest(body: Any) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(body)


class _Index:
    """The files of an index that one function, with the same options, has written."""

    def __init__(self, folder: str, scan: Scan, options: Any) -> None:
        self._folder, self._is_full = folder, False
        code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
        which = repr((sys.version, scan.__module__, scan.__qualname__, options)).encode()
        self._scan = hashlib.sha256(which + code).digest()

    @classmethod
    def open(cls, scan: Scan, options: Any) -> _Index | None:
        """The index that the environment names, None if there is none or it cannot be used, which is said."""
        if not (folder := os.environ.get(INDEX)):
            return None
        try:
            own = os.path.join(folder, f"index-{os.geteuid()}")
            os.makedirs(own, 0o700, exist_ok=True)
            status = os.lstat(own)
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise PipelineError(f"{own} is not a directory of yours alone (mode 0700); remove it")
            return cls(own, scan, options)
        except OSError as error:
            log.warning("%s=%s is not used: %s", INDEX, folder, error.strerror or error)
            return None

    def _path(self, file: File) -> str:
        key = hashlib.blake2b(self._scan + os.fsencode(file.path), digest_size=16).hexdigest()
        return os.path.join(self._folder, f"{key}.scan")

    def load(self, file: File) -> Found | None:
        """What was found in a file that is unchanged since; None where that is not certain."""
        with contextlib.suppress(OSError, ValueError, PipelineError):  # a scan says what is wrong with the data
            fd = os.open(self._path(file), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(fd, "rb") as kept:
                found = _decode(kept.read())
            if tuple(found.pop(_STAMP).tolist()) == file.stamp():
                return found
        return None

    def save(self, file: File, blob: bytes) -> None:
        """Keeps what was found, whole or not at all; a directory that cannot be written to is said once."""
        path = self._path(file)
        own = f"{path}.{os.getpid()}"
        try:
            with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as kept:
                kept.write(blob)
            os.replace(own, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(own)
            if not self._is_full:
                log.warning("%s=%s: what was found is not kept: %s", INDEX, self._folder, error.strerror)
            self._is_full = True


def _scan_all(scan: Scan, files: list[File], options: Sequence[Any]) -> Iterator[bytes]:
    """Scans files in this process, and after a second the rest in several; yields their `scan_one` in order."""
    began = time.monotonic()
    for number, file in enumerate(files):
        if time.monotonic() - began > _ALONE_S and number + 1 < len(files):
            yield from _scan_in_processes(scan, files[number:], options)
            return
        yield scan_one(scan, file, options)


def _scan_in_processes(scan: Scan, files: list[File], options: Sequence[Any]) -> Iterator[bytes]:
    count = max(1, min(len(files), int(usable_cpus())))
    which = [scan.__module__, scan.__qualname__, json.dumps(options)]
    command = [sys.executable, "-P", "-m", "pipelines.sources.scan_main", *which]
    environment, pipe = child_environment(), subprocess.PIPE
    idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def ask(file: File) -> bytes:
        process = idle.get()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(dataclasses.astuple(file)).encode() + b"\n")
            process.stdin.flush()
            size = int(process.stdout.readline())
            blob = process.stdout.read(size)
            return blob if len(blob) == size else b""
        except (OSError, ValueError):  # it has ended
            return b""
        finally:
            idle.put(process)

    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) for _ in range(count)]
    for process in processes:
        idle.put(process)
    with ThreadPoolExecutor(count) as threads:
        try:
            for file, blob in zip(files, threads.map(ask, files), strict=True):
                # What a process cannot do is done here, where an error is the caller's.
                yield blob or scan_one(scan, file, options)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.kill()
                process.wait()
