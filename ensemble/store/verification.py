"""Reads all that a run keeps, and says of each file whether it is what the log says that was written."""

from __future__ import annotations

from ensemble.events import RunFinished
from ensemble.store.errors import DamagedError
from ensemble.store.file_checks import FileCheck, check_kept_code, check_members
from ensemble.store.folding import read_state
from ensemble.store.rundir import RunDir

#: How often a log is read again for members that have gone on while their files were read.
ROUNDS = 3


def verify(run_dir: RunDir) -> list[FileCheck]:
    """Check all files of a run, which may be in progress.

    Raises:
        StoreError: there is no run, or its log is unreadable.
    """
    try:
        state = read_state(run_dir.events)
    except DamagedError as error:  # what it names of other files is not known to be right
        return [FileCheck(run_dir.events.name, "log", None, "damaged", str(error))]
    checks = [FileCheck(run_dir.events.name, "log", None, "whole"), *check_kept_code(run_dir, state)]
    checks += check_members(run_dir, list(state.members.values()))
    for _ in range(ROUNDS):  # a member that trains has removed what the log named before
        lost = {check.member for check in checks if not check.is_sound} - {None}
        before, state = state.members, read_state(run_dir.events) if lost else state
        moved = [state.members[member] for member in lost if member and state.members[member] != before[member]]
        if not moved:
            break
        names = {member.id for member in moved}
        checks = [check for check in checks if check.member not in names] + check_members(run_dir, moved)
    if isinstance(state.ended, RunFinished):
        checks += [
            FileCheck(name, "result", None, "missing", "it was not written, or is gone")
            for name in run_dir.list_missing_results()
        ]
    return checks
