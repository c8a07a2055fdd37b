"""Asks attempts to read another stream, to return wider, to pause, to stop, or to end for good."""

from __future__ import annotations

from ensemble.controller.actions import Send
from ensemble.controller.attempt import Attempt, Intent, PlaceState
from ensemble.controller.failures import FailureTracker
from ensemble.controller.session_state import PendingRetry, SessionState
from ensemble.spec import SpecError

LINGER_S = 10.0  # what processes of a member that has ended, or is to be cancelled, may take to end


def send_join(member: str, key: tuple[str, int], feeder: str) -> Send:
    """Tells a member to read the stream of a feeder: its (node, cohort), its address."""
    return Send(member, "join", {"feeder": feeder, "cohort": key[1]})


class AttemptCommands:
    """What the planner and users ask of attempts.

    Args:
        session: what all parts of the session share.
        failures: has the members that wait for a retry.
        elastic: whether members may be widened.
    """

    def __init__(self, session: SessionState, failures: FailureTracker, *, elastic: bool) -> None:
        self._session, self._live, self._actions = session, session.live, session.actions
        self._failures, self._elastic = failures, elastic

    # -- changing between two epochs ----------------------------------------------------------------------------

    def alone(self, member: str) -> bool:
        """Ask a member to prepare its own batches from its next epoch on; its `moved` event says that it does.

        Returns:
            False where there is nothing to ask: it does not run, ends, or does so already.
        """
        live = self._live.get(member)
        asked = live is not None and live.request_move(None)
        if live is not None and asked:
            live.awaits = None
            self._actions.append(Send(member, "alone"))
        return asked

    def join(self, member: str, key: tuple[str, int], feeder: str | None) -> bool:
        """Ask a member to read the stream of another feeder of its node from its next epoch on.

        Where that stream is at another epoch than the member, the member works alone until they meet.

        Args:
            key: (node, cohort) of that feeder, as `Feeders.assign_late` returns it.
            feeder: its address; None where it is being started: the member is asked once that is done.

        Returns:
            False where there is nothing to ask: it does not run, ends, or reads there already.
        """
        live = self._live.get(member)
        if live is None or not live.request_move(key[1]):
            return False
        live.awaits = key if feeder is None else None
        if feeder is not None:
            self._actions.append(send_join(member, key, feeder))
        return True

    def widen(self, member: str, workers: int) -> bool:
        """Let a member end after this epoch, and return to be placed with more workers.

        Returns:
            False where there is nothing to ask: it does not run, ends, or has as many.

        Raises:
            SpecError: the ensemble is not elastic.
        """
        if not self._elastic:
            raise SpecError(f"{member} cannot be given {workers} workers: Ensemble.elastic is False")
        live = self._live.get(member)
        asked = live is not None and live.request_widening(workers)
        if asked:
            self._actions.append(Send(member, "stop_after_epoch"))
        return asked

    # -- ending -------------------------------------------------------------------------------------------------

    def stop(self, until: float) -> None:
        """Ask all to write a checkpoint and end; those that have not by then are killed."""
        self._failures.stop()
        for live in self._live.values():
            if live.advance("stop"):
                live.intent = Intent.STOP
                self._actions.append(Send(live.member, "stop"))
            by = self._end_by(live, until)
            live.deadline = by if live.deadline is None else min(live.deadline, by)

    @staticmethod
    def _end_by(live: Attempt, until: float) -> float:
        """When to end an attempt by force; at once where no place was given: nothing runs that could stop."""
        return 0.0 if live.place is PlaceState.REQUESTED else until

    def cancel(self, member: str) -> bool:
        """End a member for good; False when it neither runs nor returns."""
        live = self._live.get(member)
        if live is not None:
            live.advance("cancel")
            live.intent = Intent.CANCEL
            if not live.is_exiting:
                live.deadline = self._end_by(live, self._session.now + LINGER_S)
                self._actions.append(Send(member, "cancel"))
            return True
        item = self.withdraw(member)
        if item is not None:
            self._session.cancel(item[0])
        return item is not None

    def pause(self, member: str, until: float) -> bool:
        """Let a member end with a checkpoint, and `paused` have it then; False when it does not run.

        Args:
            until: when it is killed if it has not ended by then; it will go on from its last checkpoint.
        """
        live = self._live.get(member)
        if live is None:
            return False
        was_active = live.is_active
        if live.intent not in (Intent.STOP, Intent.CANCEL) and live.advance("pause"):
            live.intent = Intent.PAUSE
        if was_active:
            live.deadline = self._end_by(live, until)
            self._actions.append(Send(member, "stop"))
        return True

    def unpause(self, member: str) -> bool:
        """Let a member that is about to pause return at once; False when it does not run any more."""
        live = self._live.get(member)
        if live is not None and live.intent is Intent.PAUSE and live.advance("resume"):
            live.intent = Intent.RESUME
        return live is not None

    def holds(self, member: str) -> bool:
        """Whether a member is paused, or will be once its processes have ended."""
        live = self._live.get(member)
        return (
            live.intent is Intent.PAUSE
            if live is not None
            else any(known.member == member for known, _ in self._session.paused)
        )

    def withdraw(self, member: str) -> PendingRetry | None:
        """Take a member, with its cohort, from those that return, rest or are paused; None where it does not."""
        for where in (self._session.returning, self._session.paused):
            for item in [item for item in where if item[0].member == member]:
                where.remove(item)
                return item
        return self._failures.withdraw(member)
