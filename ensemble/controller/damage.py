"""What a start of a run does about damage: of the declaration it refuses it, of members it has it made again.

A member that trains finds damage of its checkpoint itself (`ensemble.train.checkpoint`). One that has finished is
opened again here: it goes on from its last whole checkpoint, which may be its end, and saves predictions again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ensemble.events import Report, make_event
from ensemble.store import DamagedError, RunDir, RunState, apply_event
from ensemble.store.member import ENDED
from ensemble.store.rundir import ANEW
from ensemble.store.verification import FileCheck, check_kept_code, check_members

log = logging.getLogger(__name__)


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
    """A `damaged` event for each file of a member that is not what the log says; they are applied to the state.

    Args:
        checks: by `check_ended`.
        code: the fingerprint of the code of this start.
        t: the time, in Unix seconds as in the log.
    """
    events: list[Report] = []
    updated = state.updated
    for check in checks:
        if check.is_sound or check.member is None:
            continue
        member = state.members[check.member]
        is_needed = member.state == "finished" and not member.is_checkpoint_removed
        then = "the member makes it again" if is_needed else "nothing needs it, and it is removed"
        log.warning("%s: %s; %s", run_dir.path, check.detail, then)
        event: Report = {"type": "damaged", "member": member.id, "attempt": member.attempt, "code": code}
        event |= {"file": check.file.rpartition("/")[2], "error": check.detail}
        events.append(event)
        apply_event(state, make_event(**event, t=t))
    state.updated = updated  # when the run was at work last
    return events
