"""What a start of a run does about damage: files of members that have ended, and the code.

A member that trains finds damage of its checkpoint itself (`ensemble.train.checkpoint`). One that has finished is
opened again here: it goes on from its last whole checkpoint, which may be its end, and saves predictions again.
One that has ended otherwise does without.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from ensemble.events import Report, make_event
from ensemble.store import (
    DamagedError,
    EventLog,
    RunDir,
    RunState,
    StoreError,
    apply_event,
)
from ensemble.store.digests import digest_bytes
from ensemble.store.files import encode_json, write_bytes
from ensemble.store.kept_code import describe_code
from ensemble.store.member import ENDED
from ensemble.store.rundir import ANEW, VERSION
from ensemble.store.verification import FileCheck, check_code, check_members
from ensemble.user_code.fingerprint import code_of
from pipelines.environment.library_settings import keep_settings

log = logging.getLogger(__name__)

#: What is said of damaged files of code that the run has no more.
OF_OTHER_CODE = (
    "no copy of it is known: models that were trained with that code cannot be built by it, and the run continues"
)


def restore_files(run_dir: RunDir, state: RunState) -> None:
    """Make again what is damaged or gone of the declaration and the code: from the log, or from other copies.

    Raises:
        DamagedError: no copy is left of what a start needs; the message says what to do.
    """
    needed, lost = [run_dir.ensemble_file, run_dir.info_file], []
    needed_code = run_dir.code(state.header.code) if state.header.code else None
    for found in check_code(run_dir, state):
        if found.is_sound:
            continue
        path = run_dir.path / found.file
        # Arrays are not copied.
        copies = _list_copies(run_dir, state, path) if found.kind == "code" else ()
        content = next((each for each in copies if each is not None), None)
        if content is not None:
            write_bytes(path, content)
            log.warning("%s; it was made again", found.detail)
        elif found.kind == "data":
            lost.append(f"{found.detail}; {ANEW}")
        elif path not in needed and needed_code not in path.parents:
            log.warning("%s; %s", found.detail, ANEW if path == run_dir.spec_file else OF_OTHER_CODE)
        elif path.suffix == ".py":  # for people
            log.warning("%s; %s", found.detail, ANEW)
        else:
            lost.append(f"{found.detail}; {ANEW}")
    if lost:
        raise DamagedError("\n".join(lost))


def _list_copies(run_dir: RunDir, state: RunState, path: Path) -> Iterator[bytes | None]:
    """Yields what a file of the declaration or the code was, as far as there are copies of it."""
    name = str(path.relative_to(run_dir.path))
    known = state.files.get(name, [])
    if path == run_dir.info_file:
        yield _restore_info(run_dir, state)
    same = (other for other, digests in state.files.items() if set(digests) & set(known))
    copies = [run_dir.path / other for other in same]
    if state.info.get("code"):
        inside = path.relative_to(run_dir.path).parts
        copies.append(Path(state.info["code"]).joinpath(*(inside[2:] if inside[0] == "code" else inside)))
    for copy in copies:
        with contextlib.suppress(OSError):
            content = copy.read_bytes()
            yield content if digest_bytes(content) in known else None
    if path.name == "code.json":
        with contextlib.suppress(StoreError, OSError), keep_settings():
            content = describe_code(code_of(run_dir.load_ensemble(path.parent.name, takes_settings=True)))
            yield content if digest_bytes(content) in known else None


def _restore_info(run_dir: RunDir, state: RunState) -> bytes | None:
    """What run.json says, by the log; one that differs from what it was is logged."""
    if state.info:
        return encode_json(state.info)
    if not state.starts:
        return None
    info = {"v": VERSION, "created": state.started}
    info |= {name: getattr(state.header, name) for name in ("name", "run_id", "versions", "revision", "executor")}
    content = encode_json(info)
    with EventLog(run_dir.events) as events:
        run_dir.log_files(events, {run_dir.info_file: content}, info)
    return content


def check_ended(run_dir: RunDir, state: RunState, code: str | None) -> list[FileCheck]:
    """Check the files of members that have ended, and that a start with this code does not train further."""
    ended = [member for member in state.members.values() if member.state in ENDED]
    return check_members(run_dir, [member for member in ended if not member.is_resumable(code)])


def plan_repairs(
    run_dir: RunDir, state: RunState, found: Iterable[FileCheck], code: str, t: float
) -> list[Report]:
    """The events by which a start mends what is damaged; they are applied to the state already.

    Args:
        found: by `check_ended`.
        code: the fingerprint of the code of this start.
        t: the time, in Unix seconds as in the log.
    """
    events: list[Report] = []
    updated = state.updated
    for event in _list_damage(run_dir, state, found, code):
        events.append(event)
        apply_event(state, make_event(**event, t=t))
    state.updated = updated  # when the run was at work last
    return events


def _list_damage(run_dir: RunDir, state: RunState, found: Iterable[FileCheck], code: str) -> Iterator[Report]:
    """Yields a `damaged` event for each file of a member that is not what the log says, or is gone."""
    for each in found:
        if each.is_sound or each.member is None:
            continue
        member = state.members[each.member]
        is_needed = member.state == "finished" and not member.is_checkpoint_removed
        then = "the member makes it again" if is_needed else "nothing needs it, and it is removed"
        log.warning("%s: %s; %s", run_dir.path, each.detail, then)
        who = {"member": member.id, "attempt": member.attempt, "code": code}
        yield {"type": "damaged", **who, "file": Path(each.file).name, "error": each.detail}
