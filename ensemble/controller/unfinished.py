"""Whether a run that has ended has more to do: damaged files, results that are missing.

Of the declaration a start refuses damage; members that have finished go on from their last whole checkpoint, which
may be their end, and save predictions again. One that trains finds damage itself (`ensemble.train.checkpoint`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from ensemble.controller.changes import (
    explain_changed_splits,
    explain_evaluated_again,
    find_code_change,
    has_corrected_member,
    has_failed_combination,
    is_combined_otherwise,
)
from ensemble.controller.finalize import Finalizer
from ensemble.controller.retention import is_more_to_remove
from ensemble.events import Report, RunFinished, make_event
from ensemble.spec import Ensemble
from ensemble.spec.loggers import resolve_loggers
from ensemble.store import DamagedError, RunDir, RunState, StoreError, WriteError, apply_event
from ensemble.store.file_checks import FileCheck, check_kept_code, check_members
from ensemble.store.member import ENDED
from ensemble.store.rundir import ANEW
from ensemble.user_code.fingerprint import Code

log = logging.getLogger(__name__)


def is_finished(state: RunState, code: str | None) -> bool:
    """Whether a run has finished, and none of its members would be tried again with that code."""
    over = isinstance(state.ended, RunFinished)
    return over and not any(member.is_resumable(code) for member in state.members.values())


def is_over(state: RunState, ensemble: Ensemble, code: str) -> bool:
    """Whether a run has finished, and nothing of this declaration is left to train."""
    declared = ensemble.search.trials if ensemble.search else len(ensemble.members or ())
    over = is_finished(state, code) and not has_corrected_member(state, ensemble)
    return over and len(state.members) >= declared


def explain_start_again(
    run_dir: RunDir, state: RunState, ensemble: Ensemble, code: Code
) -> tuple[str | None, list[FileCheck]]:
    """Why a run that is over is started again with this declaration, None: it is not; and how its files are."""
    checked = check_ended(run_dir, state, code.fingerprint)
    again = explain_rest(state, [*checked, *check_kept_code(run_dir, state)])
    change, keep_gb = find_code_change(state, code, run_dir), ensemble.keep_predictions_gb
    if again is None and (
        explain_changed_splits(state, ensemble) or explain_evaluated_again(state, change, keep_gb)
    ):
        again = "it goes on"  # the controller says why
    if again is None and is_combined_otherwise(state, ensemble):
        again = "its members are combined again as is declared now"
    if again is None and is_more_to_remove(state, ensemble.keep_checkpoints):
        again = f"no more is kept than keep_checkpoints={ensemble.keep_checkpoints!r} says"
    added = [one.name for one in resolve_loggers(ensemble.loggers) if not run_dir.logger_state(one.name).exists()]
    if again is None and added:
        again = f"its loggers that were added write it now: {', '.join(added)}"
    return again, checked


def explain_rest(state: RunState, checks: Sequence[FileCheck]) -> str | None:
    """Why a run whose members have all ended is to be started again; None where it is not."""
    if has_failed_combination(state):
        return "its members, which could not be combined, are now"
    if (again := explain_evaluated_again(state, None)) is not None:
        return again
    for check in checks:
        if not check.is_sound:
            return f"{check.file} is {check.condition}, and is made again or removed"
    return None


def complete_results(run_dir: RunDir, state: RunState, anew: Sequence[str] = ()) -> list[str]:
    """Write what is missing of the results of a run that has ended, or is wanted anew; returns the names of the
    files.

    Raises:
        WriteError: some found no room; the message says which, and how much is needed.
        StoreError: some could not be made for another reason.
    """
    if not isinstance(state.ended, RunFinished):
        return []
    missing = list(dict.fromkeys([*run_dir.list_missing_results(), *anew]))
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
    """Raise a WriteError if results of a run that has ended are missing; `notes` say why they may be."""
    missing = run_dir.list_missing_results() if isinstance(state.ended, RunFinished) else []
    if missing:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise WriteError(
            f"{run_dir.path}: {', '.join(missing)} could not be written{why}; when that is mended, "
            f"`ensemble report {run_dir.path}` writes them"
        )


def check_declaration(run_dir: RunDir, state: RunState) -> None:
    """Refuse a start where a file of the declaration, its code or its data is damaged; warn of others.

    Raises:
        DamagedError: a start needs one of them; the message says what to do.
    """
    code, needed = run_dir.code(state.header.code) if state.header.code else None, list[str]()
    for check in check_kept_code(run_dir, state):
        path = run_dir.path / check.file
        is_needed = path == run_dir.ensemble_file or (code in path.parents and path.suffix != ".py")
        if check.kind == "data" or is_needed:
            needed += [] if check.is_sound else [f"{check.detail}; {ANEW}"]
        elif not check.is_sound:
            log.warning("%s; the run continues without it", check.detail)
    if needed:
        raise DamagedError("\n".join(needed))


def check_ended(run_dir: RunDir, state: RunState, code: str | None) -> list[FileCheck]:
    """Check the files of members that have ended, and that a start with this code does not train further."""
    ended = [member for member in state.members.values() if member.state in ENDED]
    return check_members(run_dir, [member for member in ended if not member.is_resumable(code)])


def report_damage(
    run_dir: RunDir, state: RunState, checks: Iterable[FileCheck], code: str, t: float
) -> list[Report]:
    """A `damaged` event for each file of a member that is not what the log says; they are applied to the state."""
    events: list[Report] = []
    updated = state.updated
    for check in checks:
        if check.is_sound or check.member is None:
            continue
        member = state.members[check.member]
        is_needed = member.state == "finished" and (check.kind == "file" or not member.is_checkpoint_removed)
        consequence = "the member makes it again" if is_needed else "nothing needs it, and it is removed"
        log.warning("%s: %s; %s", run_dir.path, check.detail, consequence)
        event: Report = {"type": "damaged", "member": member.id, "attempt": member.attempt, "code": code}
        event |= {"file": check.file.split("/", 2)[2], "error": check.detail}
        events.append(event)
        apply_event(state, make_event(**event, t=t))
    state.updated = updated  # when the run was at work last
    return events
