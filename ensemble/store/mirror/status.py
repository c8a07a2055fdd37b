"""What a run says of its mirror in its directory, in `mirror.json`: where it is, and what it lacks."""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

from ensemble.store.files import format_command, write_bytes
from ensemble.store.mirror.layout import NO_MIRROR, VERSION
from ensemble.store.run_paths import RunPaths


class MirrorStatus(Struct, kw_only=True):
    """How far a mirror is.

    Attributes:
        url: of it.
        code: the digest that `--trust` takes.
        start: the number with which this run writes it; 0 where it does not.
        token: of this start of the run; only who has it changes this file.
        files, bytes: that are not there yet.
        log_bytes: of the log that are there.
        since: when the oldest of what is not there was written, in Unix seconds; None: nothing is missing.
        error: why the last attempt failed, in words; empty where it did not.
        is_whole: whether the run has ended, and all of it is there.
        is_fetched: whether this directory was fetched from a mirror.
        is_fenced: whether the run went on elsewhere, and writes the mirror there.
    """

    v: int = VERSION
    url: str
    code: str
    start: int = 0
    token: str = ""
    files: int = 0
    bytes: int = 0
    log_bytes: int = 0
    since: float | None = None
    error: str = ""
    is_whole: bool = False
    is_fetched: bool = False
    is_fenced: bool = False


def load_status(run_dir: RunPaths) -> MirrorStatus | None:
    """What a run's directory says of its mirror; None where it has none, or that is unreadable."""
    try:
        found = msgspec.json.decode(run_dir.mirror.read_bytes(), type=MirrorStatus)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.v == VERSION else None


def is_fetched(run_dir: RunPaths) -> bool:
    """Whether a directory was fetched from a mirror: what its checkpoints hold beside data must not run."""
    status = load_status(run_dir)
    return status.is_fetched if status is not None else run_dir.mirror.exists()


def save_status(run_dir: RunPaths, status: MirrorStatus) -> None:
    """Replace what a run's directory says of its mirror.

    Raises:
        WriteError: it cannot be written.
    """
    write_bytes(run_dir.mirror, msgspec.json.encode(status) + b"\n")


def describe_status(run_dir: RunPaths) -> str | None:
    """A line about the mirror of a run; None where it has none."""
    status = load_status(run_dir)
    if status is None or not status.start:
        return None
    return f"mirror: {status.url}: {_describe_rest(run_dir, status)}; --trust {status.code}"


def explain_rest(run_dir: RunPaths) -> str | None:
    """What the mirror of a run that has ended lacks, and what to do about it; None where it lacks nothing."""
    status = load_status(run_dir)
    if status is None or not status.start or status.is_whole:
        return None
    rest = f"the mirror {status.url} is not complete: {_describe_rest(run_dir, status)}"
    if status.is_fenced:
        ends = format_command("resume", run_dir.path, "--mirror", NO_MIRROR)
        return f"{rest}; the run went on elsewhere, and nothing is copied from here; {ends} ends that"
    return f"{rest}; {format_command('resume', run_dir.path)} completes it"


def _describe_rest(run_dir: RunPaths, status: MirrorStatus) -> str:
    if status.is_whole:
        return "complete"
    behind = max(0, run_dir.events.stat().st_size - status.log_bytes) if run_dir.events.exists() else 0
    since = "" if status.since is None else f" since {time.strftime('%H:%M', time.localtime(status.since))}"
    if status.files:
        count = "1 file" if status.files == 1 else f"{status.files} files"
        rest = f"{count}, {_describe_bytes(status.bytes)} behind{since}"
    elif status.error:
        rest = f"{_describe_bytes(behind)} of the log behind{since}"
    else:
        rest = "up to date" + (f" but for the last {_describe_bytes(behind)} of the log" if behind else "")
    return f"{rest} ({status.error})" if status.error else rest


def _describe_bytes(size: float) -> str:
    units = ["B", "kB", "MB", "GB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}"
