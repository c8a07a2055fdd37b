"""What a start of a run does about damage: files of members that have ended, and declarations that the log lost.

A member that trains finds damage of its checkpoint itself (`ensemble.train.checkpoint`). One that has finished is
opened again here: it goes on from its last whole checkpoint, which may be its end, and saves predictions again. One
that has ended otherwise does without.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ensemble.controller.actions import Event
from ensemble.spec import Ensemble, Identity
from ensemble.store import MemberState, RunDir, RunState, StoreError, apply_event, read_checkpoint
from ensemble.store.member import ENDED
from ensemble.store.verification import FileCheck, check_members, describe_hole

log = logging.getLogger(__name__)


def check_ended(
    run_dir: RunDir, state: RunState, code: str | None, check: Callable[[], None] = lambda: None
) -> list[FileCheck]:
    """Check the files of members that have ended, and that a start with this code does not train further.

    Args:
        check: see `check_members`.
    """
    ended = [member for member in state.members.values() if member.state in ENDED]
    return check_members(run_dir, [member for member in ended if not member.is_resumable(code)], check)


def plan_repairs(
    run_dir: RunDir, ensemble: Ensemble, state: RunState, found: Iterable[FileCheck], code: str, t: float
) -> list[Event]:
    """The events by which a start mends what is damaged; they are applied to the state already.

    Args:
        found: by `check_ended`.
        code: the fingerprint of the code of this start.
        t: the time, in Unix seconds as in the log.
    """
    for hole in state.holes:
        log.warning("%s: %s", run_dir.path, describe_hole(hole))
    events: list[Event] = []
    updated = state.updated
    for event in (*restore_declarations(run_dir, ensemble, state), *_list_damage(run_dir, state, found, code)):
        events.append(event)
        apply_event(state, {**event, "t": t})
    state.updated = updated  # when the run was at work last
    return events


def _list_damage(run_dir: RunDir, state: RunState, found: Iterable[FileCheck], code: str) -> Iterator[Event]:
    """Yields a `damaged` event for each file of a member that is not what the log says, or is gone."""
    for each in found:
        if each.is_sound or each.member is None:
            continue
        member = state.members[each.member]
        then = "the member makes it again" if member.state == "finished" else "nothing needs it, and it is removed"
        log.warning("%s: %s; %s", run_dir.path, each.detail, then)
        who = {"member": member.id, "attempt": member.attempt, "code": code}
        yield {"type": "damaged", **who, "file": Path(each.file).name, "error": each.detail}


def restore_declarations(run_dir: RunDir, ensemble: Ensemble, state: RunState) -> Iterator[Event]:
    """Yields `member` events for members whose declaration was lost with a part of the log.

    They come from the member's checkpoint, or the list of members. A trial that has neither fails: what it was
    to be is not known.
    """
    if not state.holes:
        return
    declared = len(ensemble.members or ())
    highest = max((member.number for member in state.members.values()), default=-1)
    known = {member.number: member for member in state.members.values()}
    for number in range(highest + 1):
        member = known.get(number)
        if (member is None and number < declared) or (member is not None and not member.is_declared):
            identity = _find_identity(run_dir, ensemble, number, member)
            if identity is not None:
                yield {"type": "member", **identity.as_dict()}
            elif member is not None and member.state != "finished":
                error = "its declaration was lost with a part of the log, and it has no checkpoint that tells it"
                failed = {"error": error, "reason": "impossible", "retry": False}
                yield {"type": "failed", "member": member.id, "attempt": member.attempt, **failed}


def _find_identity(
    run_dir: RunDir, ensemble: Ensemble, number: int, member: MemberState | None
) -> Identity | None:
    declared = number < len(ensemble.members or ())
    saved: dict[str, Any] = {}
    if member is not None and member.checkpoint is not None:
        try:
            saved = read_checkpoint(run_dir, member, ("identity",))["identity"]
        except StoreError as error:
            log.info("the declaration of %s cannot be read from its checkpoint: %s", member.id, error)
    if not declared and not saved:
        return None
    identity = ensemble.identify(number, None if declared else saved["params"])
    fields = {field.name for field in dataclasses.fields(Identity)}
    kept = {name: value for name, value in saved.items() if name in fields}
    if member is not None and member.first_epoch is not None:
        kept["first_epoch"] = member.first_epoch
    return dataclasses.replace(identity, **kept)
