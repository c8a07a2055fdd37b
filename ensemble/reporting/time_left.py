"""Estimates how far a run is and how long it will take, from its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble.spec.identity import find_first_own_epoch
from ensemble.store.member import ENDED

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        return float(left * (member.history[-1].wall_s or 0.0))
    started = member.spans[-1].started if member.spans else None
    done = fraction_done(state, member) * member_epochs(state, member)
    return left * (state.updated - started) / done if started is not None and done > 0 else None


def epochs_done_and_left(state: RunState) -> tuple[float, float]:
    """Epochs trained and epochs still to train, over all members, those of a search not yet proposed included.

    Trials of a search may end early: what one still trains is expected by how long the others lasted
    (`expect_epochs`).
    """
    done = left = 0.0
    trials: list[tuple[float, bool]] = []
    lengths: list[int] = []
    for member in state.members.values():
        inherited = find_first_own_epoch(member.identity.get("lineage"))
        epochs = member_epochs(state, member)
        ended_early = member.state == "finished" and member.early_stopping is not None
        trained = float(member.epoch) if ended_early else fraction_done(state, member) * epochs
        epochs, trained = epochs - inherited, max(0.0, trained - inherited)
        lengths.append(epochs)
        done += trained
        trials.append((trained, member.state in ENDED))
        left += 0.0 if member.state in ENDED or state.mode == "search" else epochs - trained
    unborn = max(0, (state.declared or 0) - len(state.members))
    if state.mode != "search":
        return done, left + unborn * (state.epochs or 0)
    longest = float(max(lengths, default=0))
    to_come = [0.0] * unborn + [trained for trained, has_ended in trials if not has_ended]
    return done, sum(expect_epochs(trials, to_come, longest or float(state.epochs or 0)))


def expect_epochs(trials: Sequence[tuple[float, bool]], trained: Sequence[float], longest: float) -> list[float]:
    """How many more epochs trials are expected to train, by the Kaplan-Meier estimate of how long trials last.

    The mean of those that have ended would be too low: the first that end are those that are pruned first. A trial
    that still runs has lasted at least so long.

    Args:
        trials: epochs that each has trained, and whether it has ended.
        trained: epochs that those in question have trained.
        longest: epochs of a trial that is not ended early.
    """
    ends = sorted({length for length, has_ended in trials if has_ended and length < longest})
    surviving, steps = 1.0, [(0.0, 1.0)]  # from so many epochs on, this share goes on
    for end in ends:
        at_risk = sum(length >= end for length, _ in trials)
        surviving *= 1 - sum(has_ended and length == end for length, has_ended in trials) / at_risk
        steps.append((end, surviving))
    bounds = [*(start for start, _ in steps[1:]), longest]

    def expect(after: float) -> float:
        share = next(share for start, share in reversed(steps) if start <= after)
        area = sum(
            max(0.0, end - max(start, after)) * each for (start, each), end in zip(steps, bounds, strict=True)
        )
        return area / share if share else 0.0

    known = {after: expect(after) for after in set(trained)}
    return [known[after] for after in trained]


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
