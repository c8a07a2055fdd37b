"""Reads what a run keeps, and says of each file whether it is what the log says that was written."""

from __future__ import annotations

import contextvars
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ensemble.interrupts import raise_if_deferred
from ensemble.store.digests import digest_file, open_checked
from ensemble.store.errors import DamagedError, StoreError
from ensemble.store.frozen_arrays import list_arrays, name_to_digest
from ensemble.store.initial_weights import load_initial_state
from ensemble.store.member import ENDED, MemberState
from ensemble.store.rundir import RunDir
from ensemble.store.state import RunState

#: Files that are read at a time.
READERS = 4

Condition = Literal["whole", "damaged", "missing", "not known"]
#: What is not as it should be.
UNSOUND: frozenset[Condition] = frozenset(("damaged", "missing"))


@dataclass(frozen=True)
class FileCheck:
    """What was found of a file, or a part of the log.

    Attributes:
        file: its path in the run directory.
        kind: "log", "code", "data", "base", "checkpoint", "predictions", "initial weights", "result", or "file" of
            a `member.folder`.
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
        return asdict(self)


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
    if (base := state.base) is not None:
        yield _check(run_dir, run_dir.path / "base" / f"{base.digest}.pt", base.file, "base", None)


def check_members(run_dir: RunDir, members: Sequence[MemberState]) -> list[FileCheck]:
    """Check the files of members, several at a time.

    Raises:
        Interrupted: a signal that is deferred was received; it ends the reading at once.
    """
    with ThreadPoolExecutor(READERS) as pool:
        # Each in a copy of this context, which knows the signals that are deferred.
        checks = [
            pool.submit(
                contextvars.copy_context().run, lambda member: list(_check_member(run_dir, member)), member
            )
            for member in members
        ]
        try:
            return [check for future in checks for check in future.result()]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_member(run_dir: RunDir, member: MemberState) -> Iterator[FileCheck]:
    """Check the files of a member that it goes on from, and that its ensemble is made of."""
    lineage = member.identity.get("lineage") if member.state not in ENDED or member.is_resumable(None) else None
    if lineage and lineage["warm"] and lineage["weights_sha256"] is not None and member.checkpoint is None:
        file = str(run_dir.initial_weights(member.id).relative_to(run_dir.path))
        try:
            whole = {"file_digest": lineage["digest"]} if lineage.get("whole") else {"parts": ("model",)}
            load_initial_state(run_dir, member.id, lineage["weights_sha256"], **whole)
            yield FileCheck(file, "initial weights", member.id, "whole")
        except StoreError as error:
            yield FileCheck(file, "initial weights", member.id, "damaged", str(error))
    for name, digest in member.list_kept():
        yield _check(run_dir, run_dir.member(member.id) / name, digest, "checkpoint", member.id)
    if (finished := member.result or member).predictions and member.has_result:
        digest = next(iter((finished.predictions or {}).values()))
        yield _check(run_dir, run_dir.predictions(member.id), digest, "predictions", member.id)
    # Further epochs that came to nothing may have written over the files.
    for name, digest in (
        (member.files or {}).items() if member.state == "finished" and not member.unextended else ()
    ):
        yield _check(run_dir, run_dir.files(member.id) / name, digest, "file", member.id)


def list_digests(run_dir: RunDir, state: RunState) -> dict[str, str]:
    """The digests of the declaration and the code of a run, by path, for its start.

    What is there is taken to be right where the log has lost its digest.
    """
    own = [run_dir.ensemble_file, run_dir.info_file, run_dir.spec_file, *(run_dir.path / "code").rglob("*.*")]
    names = {str(file.relative_to(run_dir.path)): file for file in own if file.is_file()}
    kept = {name: file for name, file in names.items() if not file.name.startswith(".")}  # no remains of a kill
    present = {name: digest_file(file) for name, file in kept.items()}
    arrays = {str(file.relative_to(run_dir.path)) for file in list_arrays(run_dir)}
    present |= {name: name_to_digest(name) for name in arrays}  # they were read for this start already
    files = {name: digest for name, digest in present.items() if digest in state.files.get(name, (digest,))}
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
) -> FileCheck:
    file = str(path.relative_to(run_dir.path))
    try:
        with open_checked(path, digest, others, raise_if_deferred):
            return FileCheck(file, kind, member, "not known" if digest is None else "whole")
    except FileNotFoundError:
        return FileCheck(file, kind, member, "missing", f"{path} is gone")
    except (DamagedError, OSError) as error:
        return FileCheck(file, kind, member, "damaged", str(error))
