"""Old runs of a folder: which would be removed, why others are kept, and their removal."""

from __future__ import annotations

import fcntl
import os
import pickletools
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from ensemble.inspection.run_contents import find_foreign_files
from ensemble.reporting.run_projection import RunProjection
from ensemble.store import RunDir, RunState, StoreError, fold, is_locked, read_events

REMOVED = "removed in part"
_SUFFIX = ".removed-by-ensemble"
_LONGEST = 4096  # characters of a path


@dataclass
class OldRun:
    """A run whose last event is older than what is kept.

    Attributes:
        path: of its directory.
        state: "finished", "stopped", "interrupted", or `REMOVED`: its removal was interrupted, and is finished.
        last: time of its last event, Unix seconds.
        size_bytes: what its files take on the disk.
        kept: why it is not removed; "" where it is.
        needs: other old runs that it may need.
    """

    path: Path
    state: str
    last: float
    size_bytes: int
    kept: str = ""
    needs: list[Path] = field(default_factory=list)


@dataclass
class _Read:
    """What is known of a run that is there.

    Attributes:
        names: texts of it that may name what it needs.  joined: the same, with zeros between them.
        paths: those of them that may be paths, links resolved.  relative: the components of the relative ones.
    """

    path: Path
    state: RunState
    last: float
    names: frozenset[str]
    joined: str = field(init=False)
    paths: list[Path] = field(init=False)
    relative: list[tuple[str, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.joined = "\0".join(self.names)
        named = [n for n in self.names if os.sep in n and len(n) < _LONGEST and "\n" not in n and "\0" not in n]
        self.paths = [Path(os.path.realpath(name)) for name in named]
        relative = (Path(name).parts for name in named if not os.path.isabs(name))
        self.relative = [tuple(part for part in parts if part not in (".", "..")) for parts in relative]


def find_old_runs(folder: str | os.PathLike[str], keep_s: float, now: float | None = None) -> list[OldRun]:
    """The runs of a folder, however deep, that have had no event for so many seconds, the oldest first.

    A run stays, and says why, that is in progress, that a run which stays names (it was started or distilled from
    it), that has another run in it, or a file that no run has written. Symbolic links are not followed.

    Raises:
        StoreError: there is no such folder, or a part of it or a run in it cannot be read: what that needs is not
            known.
    """
    root = Path(os.path.realpath(Path(folder).expanduser()))
    if Path(folder).expanduser().is_symlink() or not root.is_dir():
        raise StoreError(
            f"there is no folder {folder}: give the one that holds the run directories, no link to it"
        )
    found = list(_find_runs(root))
    runs = [_read(path) for path in found if not _is_removed(path)]
    before = (time.time() if now is None else now) - keep_s
    old = {
        run.path: OldRun(
            run.path, _describe(run.state), run.last, _measure(run.path), _find_reason(run.path, found)
        )
        for run in sorted(runs, key=lambda run: run.last)
        if run.last < before
    }
    # A run that is kept may itself need another one.
    by_path = {run.path: run for run in runs}
    staying = [run for run in runs if run.path not in old or old[run.path].kept]
    for path, each in old.items():
        each.needs = [other for other in old if other != path and _needs(by_path[path], other)]
    while staying:
        user = staying.pop()
        for each in old.values():
            if not each.kept and each.path != user.path and _needs(user, each.path):
                each.kept = f"{user.path} may need it"
                staying.append(by_path[each.path])
    left = [OldRun(path, REMOVED, path.stat().st_mtime, _measure(path)) for path in found if _is_removed(path)]
    return left + list(old.values())


def remove_runs(runs: Sequence[OldRun]) -> None:
    """Remove those that are not kept, a run after those that need it; where one cannot be removed, what it needs
    stays, too. `kept` says why.
    """
    left = [run for run in runs if not run.kept]
    while left:
        needed = {path for run in left for path in run.needs}
        for run in [run for run in left if run.path not in needed] or left:  # else they need one another
            left.remove(run)
            user = next((user.path for user in runs if user.kept and run.path in user.needs), None)
            try:
                if user is not None:
                    raise StoreError(f"{user}, which is kept, may need it")
                remove_run(run)
            except (OSError, StoreError) as error:
                run.kept = str(error)


def remove_run(run: OldRun) -> None:
    """Remove the directory of a run, if nothing has begun to drive it or has written to it meanwhile.

    Raises:
        StoreError: something has.
        OSError: it cannot be removed.
    """
    hidden = run.path
    if run.state != REMOVED:
        with open(RunDir(run.path).events, "rb") as log:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"{run.path} is in progress: it is kept") from None
            if _read(run.path).last != run.last:
                raise StoreError(f"{run.path} was continued meanwhile: it is kept")
            if foreign := find_foreign_files(RunDir(run.path)):
                raise StoreError(f"{run.path / foreign[0]} was written by no run: it is kept")
            hidden = _hide(run.path)  # what is removed in part is no run any more
            os.rename(run.path, hidden)
    log_file = RunDir(hidden).events
    for each in hidden.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each != log_file:
            each.unlink()
    log_file.unlink(missing_ok=True)  # the last: by it the rest of a removal that was interrupted is known
    hidden.rmdir()


def _find_runs(root: Path) -> Iterator[Path]:
    """All directories with a log or a declaration."""

    def refuse(error: OSError) -> NoReturn:
        raise StoreError(f"{error.filename} cannot be read ({error.strerror}): which runs it has is not known")

    for name, _, files in os.walk(root, onerror=refuse):
        directory = Path(name)
        if "events.jsonl" in files or ("ensemble.pkl" in files and directory.parent.name != "code"):
            yield directory


def _hide(path: Path) -> Path:
    """Where a run is while it is removed."""
    return path.with_name(f".{path.name}{_SUFFIX}")


def _is_removed(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(_SUFFIX)


def _read(path: Path) -> _Read:
    run_dir = RunDir(path)
    try:
        if not stat.S_ISREG(os.lstat(run_dir.events).st_mode):
            raise StoreError("its log is no file")
        events = read_events(run_dir.events)
        state = fold(events)
        last = events[-1].t if events else run_dir.events.stat().st_mtime
        names = {
            str(start)
            for member in state.members.values()
            if (start := (member.identity.get("lineage") or {}).get("from")) and start not in state.members
        }
        for declaration in path.rglob("ensemble.pkl"):
            names |= _list_texts(declaration.read_bytes())
        for module in path.rglob("*.py"):
            names.add(module.read_text(encoding="utf-8", errors="replace"))
    except (OSError, StoreError, KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}): which other runs it needs is not known. Repair it (`ensemble "
            f"verify {path} --repair`), or move it elsewhere"
        ) from None
    return _Read(path, state, last, frozenset(names - {state.name}))


def _list_texts(pickled: bytes) -> set[str]:
    """The texts and names of bytes in a pickle, which is not run; a `pathlib.Path` is pickled as its components.

    Raises:
        ValueError: it is none, or damaged.
    """
    arguments = (argument for _, argument, _ in pickletools.genops(pickled))
    texts = (argument for argument in arguments if isinstance(argument, str | bytes | bytearray))
    return {text if isinstance(text, str) else os.fsdecode(bytes(text)) for text in texts if len(text) < 2**16}


def _describe(state: RunState) -> str:
    return RunProjection(state, driver="none has the lock").word


def _find_reason(path: Path, runs: list[Path]) -> str:
    """Why a run is kept whatever others need; "" where nothing keeps it."""
    is_busy = is_locked(RunDir(path).events)
    if is_busy is None:
        return "its file system has no locks: whether it is in progress is not known"
    if is_busy:
        return "it is in progress"
    inside = next((other for other in runs if other != path and other.is_relative_to(path)), None)
    if inside is not None:
        return f"{inside} is in it"
    foreign = find_foreign_files(RunDir(path))
    return f"it has files that no run has written, such as {foreign[0]}" if foreign else ""


def _needs(user: _Read, path: Path) -> bool:
    """Whether a run may name another one: by its path, by a link to it, by the end of its path, by its name alone.

    The name that both ensembles have is the exception: it is no path.
    """
    if path.name in user.names or {path.parent.name, path.name} <= user.names | {user.state.name}:
        return True
    if str(path) in user.joined or f"{path.parent.name}/{path.name}" in user.joined:
        return True
    return any(name.is_relative_to(path) for name in user.paths) or any(
        path.parts[-n:] == parts[:n] for parts in user.relative for n in range(1, len(parts) + 1)
    )


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
