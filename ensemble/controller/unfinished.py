"""Whether a run that has ended has more to do: damaged files, results that are missing."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble.controller.changes import explain_evaluated_again, has_failed_combination
from ensemble.controller.finalize import Finalizer
from ensemble.store import RunDir, RunState, StoreError, WriteError
from ensemble.store.verification import FileCheck, check_results


def explain_rest(state: RunState, found: Sequence[FileCheck]) -> str | None:
    """Why a run whose members have all ended is to be started again; None where it is not.

    Args:
        found: by `ensemble.controller.damage.check_ended`, and of the declaration where it is written anew.
    """
    if has_failed_combination(state):
        return "its members, which could not be combined, are now"
    if (again := explain_evaluated_again(state, None)) is not None:
        return again
    for each in found:
        if not each.is_sound:
            return f"{each.file} is {each.condition}, and is made again or removed"
    return None


def complete_results(run_dir: RunDir, state: RunState, anew: Sequence[str] = ()) -> list[str]:
    """Write what is missing or damaged of the results of a run that has ended, from its log.

    Args:
        anew: names of those that are written also where they are whole.

    Returns:
        The names of the files that were written.

    Raises:
        WriteError: some found no room; the message says which, and how much is needed.
        StoreError: some could not be made for another reason.
    """
    missing = [found.file for found in check_results(run_dir, state) if not found.is_sound or found.file in anew]
    if missing:
        finalizer = Finalizer(run_dir)
        finalizer.write_missing(state, missing)
        try:
            check_complete(run_dir, state, finalizer.notes)
        except WriteError as error:
            if not finalizer.lacks_room:
                raise StoreError(str(error)) from None
            raise
    return missing


def check_complete(run_dir: RunDir, state: RunState, notes: list[str]) -> None:
    """Check that all results of a run that has ended are there.

    Args:
        notes: why they may not be.

    Raises:
        WriteError: some are missing.
    """
    missing = [found.file for found in check_results(run_dir, state) if not found.is_sound]
    if missing:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise WriteError(
            f"{run_dir.path}: {', '.join(missing)} could not be written{why}; when that is mended, "
            f"`ensemble report {run_dir.path}` writes them"
        )
