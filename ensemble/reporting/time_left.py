"""Estimates how far a run is and how long it will take, from its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ensemble.reporting import text
from ensemble.spec.identity import find_first_own_epoch
from ensemble.store.member import ENDED

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState


def member_epochs(state: RunState, member: MemberState) -> int:
    return int(member.identity.get("epochs") or state.epochs or 0)


def fraction_done(state: RunState, member: MemberState) -> float:
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
    epochs_left = (1.0 - fraction_done(state, member)) * member_epochs(state, member)
    if member.history:
        return float(epochs_left * (member.history[-1].wall_s or 0.0))
    if not member.samples_per_s or not member.steps or member.step < LEAST_PART * member.steps:
        return None  # the first steps are slow
    return float(epochs_left * member.steps * member.identity["batch_size"] / member.samples_per_s)


class Epochs(NamedTuple):
    """Epochs that are trained, and those still to train, over all members and trials to come."""

    done: float
    left: float


def count_epochs(state: RunState) -> Epochs:
    """The epochs of a run, without those that a clone has from another member.

    A trial of a search may end early: those to come are taken to train the epochs of all trials, divided by the
    number of those that came to their end. The mean of these alone is too low: what is pruned first ends first.
    """
    done = remaining = longest = 0.0
    at_their_end = 0
    for member in state.members.values():
        inherited = find_first_own_epoch(member.identity.get("lineage"))
        epochs = member_epochs(state, member)
        ended_early = member.state == "finished" and member.early_stopping is not None
        trained = float(member.epoch) if ended_early else fraction_done(state, member) * epochs
        trained = max(0.0, trained - inherited)
        done += trained
        longest = max(longest, epochs - inherited)
        if member.state not in ENDED:
            remaining += epochs - inherited - trained
        at_their_end += member.state in ("finished", "pruned")
    unborn = max(0, (state.declared or 0) - len(state.members))
    each = float(state.epochs or longest)
    if state.mode == "search" and at_their_end:
        each = min(each, done / at_their_end)
    return Epochs(done, remaining + unborn * each)


def describe_time_left(seconds: float) -> str:
    """`about 3:10 left`, as precise as it is worth: to 5 s from a minute on, to a minute from an hour on."""
    unit = 60 if seconds >= 3600 else 5 if seconds >= 60 else 1
    return f"about {text.clock(unit * round(seconds / unit))} left"


LEAST_EVIDENCE = 4.0  # epochs until there is an estimate
EPOCH_S = 5.0  # of training: as much evidence as an epoch
LEAST_WALL_S = 2.0  # of training until there is one
LEAST_LEFT_S = 3.0  # of less there is nothing to say


@dataclass
class TimeLeftEstimator:
    """Estimates a run's time left by its pace since members were first seen to train.

    Neither what was trained before a resume nor the start-up counts as pace.
    """

    begin: tuple[float, float] | None = None

    def estimate(self, state: RunState) -> float | None:
        """Seconds until the members have ended; None until there is something to say, and at the end."""
        if state.updated is None:
            return None
        done, remaining = count_epochs(state)
        if self.begin is None:
            if not any(member.state == "running" and member.samples_per_s for member in state.members.values()):
                return None
            self.begin = (state.updated, done)
        trained, wall_s = done - self.begin[1], state.updated - self.begin[0]
        has_evidence = max(trained, wall_s / EPOCH_S) >= LEAST_EVIDENCE and wall_s >= LEAST_WALL_S
        if not has_evidence or trained <= 0 or remaining <= 0:
            return None
        slowest_s = max(member_left_s(state, member) or 0.0 for member in state.members.values())
        left_s = max(remaining * wall_s / trained, slowest_s)
        return left_s if left_s >= LEAST_LEFT_S else None
