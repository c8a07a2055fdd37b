"""What a run directory says of its mirror; what copies a run is loaded where one is declared."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import Struct

from ensemble.store.files import format_command, write_bytes
from ensemble.store.run_paths import RunPaths

#: Given as an address: the run is not copied any more.
NO_MIRROR = "none"


@dataclass(frozen=True)
class MirrorOptions:
    """What the process that copies a run is given: the address, and the name by which it knows its manifests."""

    name: ClassVar[str] = "mirror"
    url: str
    writer: str


class MirrorStatus(Struct, kw_only=True):
    """What `mirror.json` in a run directory says of its mirror.

    Attributes:
        files, bytes: that are not there yet.
        since: when the oldest of them was found, in Unix seconds; None: all are there.
        error: why the last attempt failed; empty where it did not.
        is_whole: whether the run has ended, and all of it is there.
    """

    url: str
    files: int = 0
    bytes: int = 0
    since: float | None = None
    error: str = ""
    is_whole: bool = False

    def __str__(self) -> str:
        if self.since is None:
            return f"mirror: {self.url}: {'complete' if self.is_whole else 'up to date'}"
        files = f"{self.files} files, {self.bytes / 1e6:.1f} MB " if self.files else ""
        since, error = time.strftime("%H:%M", time.localtime(self.since)), f" ({self.error})" * bool(self.error)
        return f"mirror: {self.url}: {files}behind since {since}{error}"


def load_status(run_dir: RunPaths) -> MirrorStatus | None:
    """What a run directory says of its mirror; None where it has none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(run_dir.mirror.read_bytes(), type=MirrorStatus)
    return None


def save_status(run_dir: RunPaths, status: MirrorStatus) -> None:
    write_bytes(run_dir.mirror, msgspec.json.encode(status) + b"\n")


def explain_incomplete(run_dir: RunPaths) -> str | None:
    """What the mirror of a run that has ended lacks, and what to do; None where it lacks nothing."""
    status = load_status(run_dir)
    if status is None or status.is_whole:
        return None
    return f"{status}; it is not complete, and {format_command('resume', run_dir.path)} completes it"
