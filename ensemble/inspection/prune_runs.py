"""Old runs of a folder: which would be removed, why others are kept, and their removal."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ensemble.reporting.dashboard.runs import find_runs
from ensemble.store import RunDir, RunState, StoreError, fold, is_locked, read_events


@dataclass
class OldRun:
    """A run whose last event is older than what is kept.

    Attributes:
        path: of its directory.
        state: "finished", "stopped" or "interrupted".
        last: time of its last event, Unix seconds.
        size_bytes: what its files take on the disk.
        kept: why it is not removed; "" where it is.
    """

    path: Path
    state: str
    last: float
    size_bytes: int
    kept: str = ""


@dataclass
class _Read:
    """What is known of a run that is there."""

    path: Path
    state: RunState
    last: float
    names: list[str] = field(default_factory=list)  # absolute paths that its members start with


def find_old_runs(folder: str | os.PathLike[str], keep_s: float, now: float | None = None) -> list[OldRun]:
    """The runs of a folder, up to two levels deep, that have had no event for so many seconds, the oldest first.

    Symbolic links are not followed. A directory without a readable event log is no run. A run in progress, and one
    that a run which stays was started or distilled from, is kept.

    Raises:
        StoreError: there is no such folder.
    """
    root = Path(folder).expanduser().absolute()
    if root.is_symlink() or not root.is_dir():
        raise StoreError(f"there is no folder {root}: give the one that holds the run directories, no link to it")
    runs = [run for path in find_runs(root) if (run := _read(path)) is not None]
    before = (time.time() if now is None else now) - keep_s
    old = {
        run.path: OldRun(run.path, _describe_end(run.state), run.last, _measure(run.path), _find_use(run.path))
        for run in sorted(runs, key=lambda run: run.last)
        if run.last < before
    }
    # A run that is kept may itself need another one.
    staying = [run for run in runs if run.path not in old or old[run.path].kept]
    by_path = {run.path: run for run in runs}
    while staying:
        user = staying.pop()
        for each in old.values():
            if not each.kept and each.path != user.path and _needs(user, each.path):
                each.kept = f"{user.path} was made from it"
                staying.append(by_path[each.path])
    return list(old.values())


def remove_run(run: OldRun) -> None:
    """Remove the directory of a run, if nothing has begun to drive it or has written to it meanwhile.

    Raises:
        StoreError: something has.
        OSError: it cannot be removed.
    """
    with open(RunDir(run.path).events, "rb") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{run.path} is in progress: it is kept") from None
        again = _read(run.path)
        if again is None or again.last != run.last:
            raise StoreError(f"{run.path} has gone on meanwhile: it is kept")
        hidden = run.path.with_name(f".{run.path.name}.removed")  # what is removed in part is no run any more
        os.rename(run.path, hidden)
    shutil.rmtree(hidden)


def _read(path: Path) -> _Read | None:
    log = RunDir(path).events
    try:
        if not stat.S_ISREG(os.lstat(log).st_mode):
            return None
        events = read_events(log)
        state = fold(events)
    except (OSError, StoreError, KeyError, TypeError, ValueError):
        return None
    if not state.header or not events:
        return None
    starts = [(member.identity.get("lineage") or {}).get("from") for member in state.members.values()]
    return _Read(path, state, float(events[-1]["t"]), [os.path.abspath(start) for start in starts if start])


def _describe_end(state: RunState) -> str:
    words = {"run_finished": "finished", "run_stopped": "stopped"}
    return words.get(str((state.ended or {}).get("type")), "interrupted")


def _find_use(path: Path) -> str:
    unknown = "its file system has no locks: whether it is in progress is not known"
    return {True: "it is in progress", False: "", None: unknown}[is_locked(RunDir(path).events)]


def _needs(user: _Read, path: Path) -> bool:
    """Whether members of a run start with weights of another one, or its declaration names the other's folder."""
    if any(Path(name).is_relative_to(path) for name in user.names):
        return True
    try:
        declaration = (user.path / "ensemble.pkl").read_bytes()
    except OSError:
        return False
    name = os.fsencode(path)
    after = (declaration[at + len(name) : at + len(name) + 1] for at in _find_all(declaration, name))
    return any(not (byte.isalnum() or byte in (b"-", b"_", b".")) for byte in after)


def _find_all(data: bytes, part: bytes) -> Iterator[int]:
    at = data.find(part)
    while at >= 0:
        yield at
        at = data.find(part, at + 1)


def _measure(path: Path) -> int:
    """What the files of a directory take on the disk, in bytes; links count for themselves."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except OSError:  # it is gone
                continue
    return total
