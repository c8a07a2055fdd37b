"""Lets members that have finished wait again: for more epochs, to be evaluated again, to save what was damaged."""

from __future__ import annotations

from collections.abc import Iterable

import ensemble.events as events
from ensemble.store.member import LEARNS_NOTHING, OUTDATED, UNCOMBINED, MemberState
from ensemble.store.state import RunState


def give_more_epochs(run: RunState, more_epochs: events.MoreEpochs, t: float) -> None:
    """Gives members more epochs; those that have finished wait to be trained further, and keep their results.

    A second call with the same arguments changes nothing.

    Args:
        more_epochs: as in a `run_started` event.
        t: Unix seconds.
    """
    for name, before in more_epochs.members.items():
        member = run.members[name]
        if member.state == "finished":
            if more_epochs.keeps_results:
                member.keep_result()
            reopen_member(run, member, t)
            member.remarks = [text for text in member.remarks if not text.startswith(LEARNS_NOTHING)]
        member.identity["epochs"] = more_epochs.epochs
        member.identity["epochs_before"] = member.identity.get("epochs_before") or before
    if not more_epochs.keeps_results:
        run.combined = None


def evaluate_again(run: RunState, members: Iterable[str], t: float) -> None:
    """Lets members that have finished wait to be evaluated on other data, or with other code."""
    for member in map(run.members.__getitem__, members):
        trained = run.finished.get(member.id, member.trained)
        reopen_member(run, member, t)
        member.trained = trained
        outdated = (UNCOMBINED, OUTDATED)  # of the former predictions
        member.remarks = [text for text in member.remarks if not text.startswith(outdated)]
    run.combined = None


def reopen_member(run: RunState, member: MemberState, t: float) -> None:
    """Lets a member that has finished wait to be trained further, or to save again what it had saved."""
    if member.result is None:
        run.finished.pop(member.id, None)
        run.combined = None  # it was of the members as they had finished
    member.cost = member.constraints = member.weights_sha256 = member.kept = None
    member.trained = member.outdated = None
    member.requeue(t)
