"""Reads what a run keeps, and says of each file whether it is what the log says that was written."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ensemble.events import RunFinished
from ensemble.interrupts import raise_if_deferred
from ensemble.store.digests import digest_file, open_checked
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.files import write_json
from ensemble.store.folding import read_state
from ensemble.store.frozen_arrays import list_arrays, name_to_digest
from ensemble.store.initial_weights import load_initial_state
from ensemble.store.member import ENDED, MemberState
from ensemble.store.mirror import is_of_run
from ensemble.store.rundir import RunDir
from ensemble.store.state import RunState

#: Files that are read at a time, members that a reader takes at once, and seconds between looks whether to go on.
READERS, PART = 4, 32
POLL_S = 0.1
#: How often a log is read again for members that have gone on while their files were read.
ROUNDS = 3

Condition = Literal["whole", "damaged", "missing", "not known"]
#: What is not as it should be.
UNSOUND: frozenset[Condition] = frozenset(("damaged", "missing"))


@dataclass(frozen=True)
class FileCheck:
    """What was found of a file, or a part of the log.

    Attributes:
        file: its path in the run directory.
        kind: "log", "code", "data", "checkpoint", "predictions", "initial weights" or "result".
        member: whose it is; None where it is nobody's.
        condition: "not known" where there is no digest of it, as of a study, into which Optuna may write.
        detail: what is wrong; empty where nothing is.
    """

    file: str
    kind: str
    member: str | None
    condition: Condition
    detail: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether nothing is known to be wrong with it."""
        return self.condition not in UNSOUND

    def as_row(self) -> dict[str, Any]:
        """Its fields, as a row for programs."""
        return asdict(self)


def verify(run_dir: RunDir) -> list[FileCheck]:
    """Check all files of a run, which may be in progress.

    Raises:
        StoreError: there is no run, or its log is unreadable.
    """
    try:
        state = read_state(run_dir.events)
    except DamagedError as error:  # what it names of other files is not known to be right
        return [FileCheck(run_dir.events.name, "log", None, "damaged", str(error))]
    found = list(_verify(run_dir, state))
    for _ in range(ROUNDS):
        lost = {each.member for each in found if not each.is_sound}
        if not lost:
            break
        before, state = state.members, read_state(run_dir.events)
        # A member that trains has removed what the log named before.
        moved = [each for each in state.members.values() if each.id in lost and each != before[each.id]]
        if not moved:
            break
        names = {member.id for member in moved}
        found = [each for each in found if each.member not in names] + check_members(run_dir, moved)
    return found


def _verify(run_dir: RunDir, state: RunState) -> Iterator[FileCheck]:
    yield FileCheck(run_dir.events.name, "log", None, "whole")
    yield from check_kept_code(run_dir, state)
    yield from check_members(run_dir, list(state.members.values()))
    yield from check_results(run_dir, state)


def check_kept_code(run_dir: RunDir, state: RunState) -> Iterator[FileCheck]:
    """Check the declaration and the code that are kept with a run, and run.json."""
    arrays = list_arrays(run_dir)
    for name, digests in state.files.items():
        path = run_dir.path / name
        if path.parent == run_dir.data and path not in arrays:
            continue
        if path.exists() or path.parent.is_dir():  # else it is code that no member trained with
            kind = "data" if path.parent == run_dir.data else "code"
            yield _check(run_dir, path, digests[-1], kind, None, digests)


def check_members(run_dir: RunDir, members: Sequence[MemberState]) -> list[FileCheck]:
    """Check the files of members, several at a time.

    Raises:
        Interrupted: a signal that is deferred was received; it ends the reading at once.
    """
    is_over = threading.Event()

    def stop() -> None:
        if is_over.is_set():
            raise CancelledError

    with ThreadPoolExecutor(READERS) as pool:
        try:
            parts = [members[first : first + PART] for first in range(0, len(members), PART)]
            checks = [pool.submit(_check_part, run_dir, part, stop) for part in parts]
            while wait(checks, POLL_S).not_done:
                raise_if_deferred()
        except BaseException:
            is_over.set()
            pool.shutdown(cancel_futures=True)
            raise
        return [check for future in checks for check in future.result()]


def _check_part(run_dir: RunDir, members: Sequence[MemberState], stop: Callable[[], None]) -> list[FileCheck]:
    return [check for member in members for check in _check_member(run_dir, member, stop)]


def _check_member(run_dir: RunDir, member: MemberState, stop: Callable[[], None]) -> Iterator[FileCheck]:
    """Check the files of a member that it goes on from, and that its ensemble is made of."""
    folder = run_dir.member(member.id)
    lineage = member.identity.get("lineage") if member.state not in ENDED or member.is_resumable(None) else None
    if lineage and lineage["warm"] and lineage["weights_sha256"] is not None and member.checkpoint is None:
        file = str(run_dir.initial_weights(member.id).relative_to(run_dir.path))
        try:
            whole = {"file_digest": lineage["digest"]} if lineage.get("whole") else {"parts": ("model",)}
            load_initial_state(run_dir, member.id, lineage["weights_sha256"], **whole)
            yield FileCheck(file, "initial weights", member.id, "whole")
        except StoreError as error:
            yield FileCheck(file, "initial weights", member.id, "damaged", str(error))
    for event in (member.checkpoint, member.checkpoint_before):
        if event is not None:
            path, digest = folder / Path(event.path).name, event.digest
            yield _check(run_dir, path, digest, "checkpoint", member.id, stop=stop)
    if member.predictions and member.state == "finished":
        path, digest = run_dir.predictions(member.id), next(iter(member.predictions.values()))
        yield _check(run_dir, path, digest, "predictions", member.id, stop=stop)


def check_results(run_dir: RunDir, state: RunState) -> Iterator[FileCheck]:
    """Check what is written at the end of a run, if it has ended: it is made again from the rest."""
    if state.ended is None or not isinstance(state.ended, RunFinished):
        return
    try:
        known: Mapping[str, str] = dict(json.loads(run_dir.result_digests.read_bytes()).items())
    except (OSError, ValueError, AttributeError):
        known = dict.fromkeys((path.name for path in run_dir.list_results(state)), "unreadable")
    for path in run_dir.list_results(state):
        if path.exists() and path.stat().st_size > 0:
            yield _check(run_dir, path, known.get(path.name), "result", None)
        else:
            detail = "it is empty" if path.exists() else "it was not written, or is gone"
            yield FileCheck(path.name, "result", None, "missing", detail)


def save_result_digests(run_dir: RunDir, state: RunState) -> None:
    """Write the digests of the results that are there.

    Raises:
        WriteError: they cannot be written.
    """
    there = [path for path in run_dir.list_results(state) if path.is_file()]
    write_json(run_dir.result_digests, {path.name: digest_file(path) for path in there})


def list_digests(run_dir: RunDir, state: RunState) -> dict[str, str]:
    """The digests of the declaration and the code of a run, by path, for its start.

    What is there is taken to be right where the log has lost its digest.
    """
    own = [run_dir.ensemble_file, run_dir.info_file, run_dir.spec_file, *(run_dir.path / "code").rglob("*.*")]
    names = {str(file.relative_to(run_dir.path)): file for file in own if file.is_file()}
    there = {name: digest_file(file) for name, file in names.items() if is_of_run(name)}  # no remains of a kill
    arrays = {str(file.relative_to(run_dir.path)) for file in list_arrays(run_dir)}
    there |= {name: name_to_digest(name) for name in arrays}  # they were read for this start already
    files = {name: digest for name, digest in there.items() if digest in state.files.get(name, (digest,))}
    gone = (name for name in state.files if name not in files and (run_dir.path / name).parent.is_dir())
    lost = {name for name in gone if (run_dir.path / name).parent != run_dir.data}
    return files | {name: state.files[name][-1] for name in lost}


def _check(
    run_dir: RunDir,
    path: Path,
    digest: str | None,
    kind: str,
    member: str | None,
    others: Collection[str] = (),
    stop: Callable[[], None] = lambda: None,
) -> FileCheck:
    file = str(path.relative_to(run_dir.path))
    try:
        with open_checked(path, digest, others, stop):
            return FileCheck(file, kind, member, "not known" if digest is None else "whole")
    except FileNotFoundError:
        return FileCheck(file, kind, member, "missing", f"{path} is gone")
    except (DamagedError, OSError) as error:
        return FileCheck(file, kind, member, "damaged", str(error))
