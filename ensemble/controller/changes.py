"""What has changed since a run began: its members, the data, the code. Refused, or named and gone on with."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.store import RunDir, RunState, StoreError, load_code
from ensemble.train.data_identity import difference, training_data, why_unsure
from ensemble.user_code.fingerprint import Code
from ensemble.user_code.imports import syntax_of

if TYPE_CHECKING:
    from ensemble.spec import Ensemble
    from ensemble.store import MemberState

log = logging.getLogger(__name__)

_ANEW = "--fresh starts anew beside this run (fresh=True in Python)"


@dataclass(frozen=True)
class Change:
    """Code that is not what members were last to train with.

    Attributes:
        before, now: fingerprints.
        names: the parts that differ; empty where they cannot be named.
        trained: members whose weights are of other code than now.
        unsure: whether another version of Python compiled it, so that it may be the same.
    """

    before: str
    now: str
    names: list[str]
    trained: list[str]
    unsure: bool

    def __str__(self) -> str:
        shown = ", ".join(self.names[:5]) + (f" and {len(self.names) - 5} more" if len(self.names) > 5 else "")
        return f"the code has changed ({shown})" if shown else "the code has changed"

    def as_event(self) -> dict[str, Any]:
        """The fields of the `code_changed` event."""
        return {"before": self.before, "code": self.now, "changed": self.names, "trained": self.trained}


def change_of_code(state: RunState, now: Code, run_dir: RunDir) -> Change | None:
    """How the code differs from what the run's last start had; None where it does not, as far as can be told.

    What that start had was accepted then for the members that have trained with other code before.
    """
    fingerprint = now.fingerprint
    if state.header.get("code") == fingerprint:
        return None
    trained = [one for one in state.members.values() if one.has_weights_of_other_code(fingerprint)]
    before = trained[0].code if trained else state.header.get("code")
    if before is None or before == fingerprint:
        return None
    kept = load_code(run_dir.code(before))
    other = kept is not None and kept.python != now.python
    names = now.changed(kept) if kept is not None and not other else []
    if kept is not None and kept.scheme != now.scheme and not names and not other:
        return None
    return Change(before, fingerprint, names, [one.id for one in trained], other)


def check_code(state: RunState, now: Code, run_dir: RunDir, *, accept: bool) -> None:
    """Refuse to go on with other code than members were trained with, unless that is accepted; name what differs.

    Raises:
        StoreError: a member of the run has trained with other code.
    """
    if state.header and state.header.get("code") is None:
        log.warning(
            "%s was begun by an earlier version, which did not record its code: whether that has changed since "
            "cannot be told",
            run_dir.path,
        )
    kept = load_code(run_dir.code(state.header["code"])) if state.header.get("code") else None
    if kept is not None and kept.scheme != now.scheme:
        log.warning(
            "%s: whether the code that uses ray-ensemble's own has changed cannot be told: it was recorded by "
            "another version, which describes that otherwise",
            run_dir.path,
        )
    change = change_of_code(state, now, run_dir)
    if change is None:
        return
    if change.unsure:
        log.warning("%s: whether the code has changed cannot be told: it was another Python's", run_dir.path)
    elif change.trained and not accept:
        raise StoreError(
            f"{run_dir.path}: {change} since {_few(change.trained)} trained with it; --accept-code goes on with "
            f"the new code (accept_code=True in Python), {_ANEW}"
        )
    elif change.trained:
        log.warning("%s: %s, and is accepted for %s", run_dir.path, change, _few(change.trained))
    else:
        log.warning("%s: %s: members train with the new code, none had a checkpoint", run_dir.path, change)


def check_edits(now: Code, run_dir: RunDir, *, accept: bool) -> None:
    """Say that a run goes on with the code that is kept with it, where its sources were edited since.

    Args:
        accept: whether other code was to be taken, which only a new declaration brings.

    Raises:
        StoreError: it was.
    """
    kept = run_dir.code(now.fingerprint)
    edited = [
        str(source)
        for module, source in now.sources.items()
        for copy in [
            kept.joinpath(*module.split("."), "__init__.py"),
            kept.joinpath(f"{module.replace('.', '/')}.py"),
        ]
        if copy.is_file() and syntax_of(copy) != syntax_of(source)
    ]
    if not edited:
        return
    files = ", ".join(edited)
    if accept:
        raise StoreError(
            f"{run_dir.path}: a resume takes the code that is kept with the run; {files} changed since; "
            "`ensemble run SPEC.py --accept-code` goes on with the new code, a resume without it with the kept one"
        )
    log.warning(
        "%s goes on with the code that is kept with it: %s changed since; `ensemble run` takes the new code",
        run_dir.path,
        files,
    )


def check_same(state: RunState, ensemble: Ensemble, path: Path, *, in_progress: bool = False) -> None:
    """Refuse to go on with members that were declared otherwise; one without a checkpoint begins as declared now.

    Args:
        in_progress: whether another process drives the run: its members are what they are.

    Raises:
        StoreError: a member of the run in `path` is another one now, or is not declared any more.
    """
    for member in state.members.values():
        listed = ensemble.search is None and member.number < len(ensemble.members or ())
        if member.identity.get("added") and not listed:
            continue  # nothing declares it: the run goes on with what is recorded
        if member.reason == "impossible":
            continue  # a proposal that came to nothing
        if ensemble.search is None and not listed:
            raise StoreError(f"{path} has {member.id}, which this ensemble does not; {_ANEW}")
        returns = member.state not in ("finished", "pruned", "cancelled")
        begins = member.checkpoint is None and returns and not member.identity.get("added")
        if begins and not in_progress:
            continue
        for name, before, now in _differences(member, ensemble)[:1]:
            raise StoreError(f"{path}: {member.id} has {name}={before!r}, now {now!r}; {_ANEW}")
    check_data(state, ensemble, path, in_progress=in_progress)


def mended(state: RunState, ensemble: Ensemble) -> bool:
    """Whether a member that failed for good without a checkpoint is declared otherwise now: it is tried again."""
    declared = len(state.members) if ensemble.search is not None else len(ensemble.members or ())
    return any(
        member.in_vain and member.number < declared and bool(_differences(member, ensemble))
        for member in state.members.values()
    )


def _differences(member: MemberState, ensemble: Ensemble) -> list[tuple[str, Any, Any]]:
    """What decides a member's weights and is declared otherwise than it was: name, before, now."""
    fresh = ensemble.identify(member.number, member.params if ensemble.search is not None else None)
    declared = dict(member.identity)
    if ensemble.elastic and declared.get("widened_from"):  # it goes on as wide as it is
        declared["workers"] = declared["widened_from"]
    return [
        (name, declared[name], now)
        for name, now in fresh.compared_fields().items()
        if name in declared and declared[name] != now
    ]


def check_data(state: RunState, ensemble: Ensemble, path: Path, *, in_progress: bool = False) -> None:
    """Refuse to go on with other training data; warn where that cannot be told.

    Raises:
        StoreError: a member of the run in `path` has read something else so far.
    """
    before = state.header.get("data")
    trained = in_progress or any(member.checkpoint for member in state.members.values())
    if before is None or not trained:
        return
    now = training_data(ensemble)
    changed = difference(before, now)
    if changed:
        raise StoreError(f"{path}: {changed}; {_ANEW}")
    why = why_unsure(before, now)
    if why is not None:
        log.warning(
            "%s: whether the training data are what they were cannot be told but by their number (%s)",
            path,
            getattr(ensemble.train, "why_unsure", None) or why,
        )


def _few(members: list[str], most: int = 4) -> str:
    more = f" and {len(members) - most} more" if len(members) > most else ""
    return ", ".join(members[:most]) + more
