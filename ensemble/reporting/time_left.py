"""Estimates how far a run is and how long it will take, from its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble.store.member import ENDED

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState


def member_epochs(state: RunState, member: MemberState) -> int:
    """How many epochs the member is to train."""
    return int(member.identity.get("epochs") or state.epochs or 0)


def fraction_done(state: RunState, member: MemberState) -> float:
    """How far the member is, 0 to 1."""
    if member.state == "finished":
        return 1.0
    epochs = member_epochs(state, member)
    if not epochs:
        return 0.0
    part = min(1.0, member.step / member.steps) if member.steps else 0.0
    return min(1.0, (member.epoch + part) / epochs)


def member_left_s(state: RunState, member: MemberState) -> float | None:
    """Seconds until a running member is done, by the duration of its last epoch or its progress so far."""
    if member.state != "running" or state.updated is None:
        return None
    left = (1.0 - fraction_done(state, member)) * member_epochs(state, member)
    if member.history:
        return float(left * member.history[-1]["wall_s"])
    started = member.spans[-1].started if member.spans else None
    done = fraction_done(state, member) * member_epochs(state, member)
    return left * (state.updated - started) / done if started is not None and done > 0 else None


def epochs_done_and_left(state: RunState) -> tuple[float, float]:
    """Epochs trained and epochs still to train, over all members, those of a search not yet proposed included.

    A trial that ended early has nothing left; those to come are taken to be as long as those that ended.
    """
    done = left = 0.0
    ended: list[float] = []
    for member in state.members.values():
        epochs = member_epochs(state, member)
        ended_early = member.state == "finished" and member.early_stopping is not None
        trained = float(member.epoch) if ended_early else fraction_done(state, member) * epochs
        done += trained
        if member.state in ENDED:
            ended.append(trained)
        else:
            left += epochs - trained
    usual = sum(ended) / len(ended) if ended and state.mode == "search" else float(state.epochs or 0)
    return done, left + max(0, (state.declared or 0) - len(state.members)) * usual


@dataclass
class TimeLeftEstimator:
    """Estimates a run's time left from the epochs trained since members were first seen to train.

    Measured from there, so that neither what was trained before a resume nor the start-up counts as pace.
    """

    begin: tuple[float, float] | None = None

    def left_s(self, state: RunState) -> float | None:
        """Seconds left, never less than any running member's; None until something was trained, and at the end."""
        if state.updated is None:
            return None
        done, left = epochs_done_and_left(state)
        if self.begin is None:
            if not any(member.state == "running" and member.samples_per_s for member in state.members.values()):
                return None
            self.begin = (state.updated, done)
        since, before = self.begin
        if done <= before or state.updated <= since or left <= 0:
            return None
        members = [member_left_s(state, member) or 0.0 for member in state.members.values()]
        return max(left * (state.updated - since) / (done - before), *members)
