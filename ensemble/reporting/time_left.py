"""Estimates how far a run is and how long it will take, from its state."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ensemble.reporting import text
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


LEAST_PART = 0.1  # of its first epoch until the rate of a member is its pace


def member_left_s(state: RunState, member: MemberState) -> float | None:
    """Seconds until a running member is done, by the duration of its last epoch, or its rate in the first one."""
    if member.state != "running":
        return None
    left = (1.0 - fraction_done(state, member)) * member_epochs(state, member)
    if member.history:
        return float(left * (member.history[-1].wall_s or 0.0))
    if not member.samples_per_s or not member.steps or member.step < LEAST_PART * member.steps:
        return None  # the first steps are slow
    return float(left * member.steps * member.identity["batch_size"] / member.samples_per_s)


RECENT = 8  # trials


class Epochs(NamedTuple):
    """Epochs trained, and the most and the least still to train, over all members and trials to come."""

    done: float
    left: float
    least_left: float


def count_epochs(state: RunState) -> Epochs:
    """The epochs of a run.

    Trials of a search may end early: what one still trains is expected by how long the others lasted, at most by
    `expect_epochs`; at least as long as the last ones, as more are pruned the better the best one is.
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
        left += unborn * (state.epochs or 0)
        return Epochs(done, left, left)
    longest = float(max(lengths, default=0))
    to_come = [0.0] * unborn + [trained for trained, has_ended in trials if not has_ended]
    left = sum(expect_epochs(trials, to_come, longest or float(state.epochs or 0)))
    ended = [trained for trained, has_ended in trials if has_ended][-RECENT:]
    usual = sum(ended) / len(ended) if ended else 0.0
    return Epochs(done, left, min(left, sum(max(0.0, usual - trained) for trained in to_come)))


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


class TimeLeft(NamedTuple):
    """Bounds of the seconds until the members of a run have ended."""

    least_s: float
    most_s: float

    def __str__(self) -> str:
        least, most = text.clock(_round_s(self.least_s)), text.clock(_round_s(self.most_s))
        return f"about {most} left" if self.most_s <= 1.2 * self.least_s else f"{least} to {most} left"


def _round_s(seconds: float) -> float:
    """Seconds as precisely as they are worth: by 5 s from a minute on, by a minute from an hour on."""
    unit = 60 if seconds >= 3600 else 5 if seconds >= 60 else 1
    return unit * round(seconds / unit)


LEAST_ERROR = 0.15  # members that train at one time are not equally fast
LEAST_EVIDENCE = 4.0  # epochs until there is an estimate: it may then be wrong by half
EPOCH_S = 5.0  # of training: as much evidence as an epoch
LEAST_WALL_S = 2.0  # of training until there is one
LEAST_LEFT_S = 3.0  # of less there is nothing to say


@dataclass
class TimeLeftEstimator:
    """Estimates a run's time left from the epochs trained since members were first seen to train.

    Measured from there, so that neither what was trained before a resume nor the start-up counts as pace. After n
    epochs (of long ones each `EPOCH_S` counts as one) the estimate has a relative error of 1/sqrt(n), which gives
    the bounds of the run's end. They only become narrower, so the time left only becomes less, unless something
    happens by which the estimate leaves them: then they are new. Of a search each trial that has ended counts as
    two epochs, as how long trials last is what is not known.
    """

    begin: tuple[float, float, int] | None = None
    _end: tuple[float, float] | None = field(default=None, init=False)

    def estimate(self, state: RunState) -> TimeLeft | None:
        """Bounds of the time left; None until there is something to say, and at the end."""
        if state.updated is None:
            return None
        done, left, least_left = count_epochs(state)
        ended = sum(member.state in ENDED for member in state.members.values())
        if self.begin is None:
            if not any(member.state == "running" and member.samples_per_s for member in state.members.values()):
                return None
            self.begin = (state.updated, done, ended)
        since, done_before, ended_before = self.begin
        trained, wall_s = done - done_before, state.updated - since
        evidence = max(trained, wall_s / EPOCH_S)
        if state.mode == "search":
            evidence = min(evidence, 2.0 * (ended - ended_before))
        if evidence < LEAST_EVIDENCE or wall_s < LEAST_WALL_S or trained <= 0 or left <= 0:
            return None
        slowest_s = max(member_left_s(state, member) or 0.0 for member in state.members.values())
        most_s, least_s = (max(epochs * wall_s / trained, slowest_s) for epochs in (left, least_left))
        error = max(LEAST_ERROR, 1 / math.sqrt(evidence))
        first, last = self._end = self._narrow(
            state.updated + least_s * (1 - error), state.updated + most_s * (1 + error)
        )
        bounds = TimeLeft(max(0.0, first - state.updated), last - state.updated)
        return None if bounds.most_s < LEAST_LEFT_S else bounds

    def _narrow(self, first: float, last: float) -> tuple[float, float]:
        """Bounds of the end: those so far and these together, or these alone if their middle left the former."""
        if self._end is None or not self._end[0] <= (first + last) / 2 <= self._end[1]:
            return first, last
        return max(first, self._end[0]), min(last, self._end[1])
