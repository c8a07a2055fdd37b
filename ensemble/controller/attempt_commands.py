"""Commands to attempts: read another stream, stop for more workers, pause, stop, cancel."""

from __future__ import annotations

from ensemble.controller.actions import Send
from ensemble.controller.attempt import Attempt, Intent
from ensemble.controller.session_state import SessionState

LINGER_S = 10.0  # how long processes of a member that has ended, or is cancelled, may take to exit


def send_join(member: str, key: tuple[str, int], feeder: str) -> Send:
    """The command to read the stream of a feeder.

    Args:
        key: its (node, cohort).
        feeder: its address.
    """
    return Send(member, "join", {"feeder": feeder, "cohort": key[1]})


class AttemptCommands:
    """Commands of the rebalancer and of users to attempts.

    Args:
        hang_timeout_s: how long a member that stops may take at most, as long as it reports that it works.
    """

    def __init__(self, session: SessionState, hang_timeout_s: float) -> None:
        self._session, self._live, self._actions = session, session.live, session.actions
        self._hang_timeout_s = hang_timeout_s

    # -- changing between two epochs ----------------------------------------------------------------------------

    def alone(self, member: str) -> bool:
        """Ask a member to prepare its own batches from its next epoch on; its `moved` event says that it does.

        Returns:
            False where no command was sent: it does not run, is ending, or does so already.
        """
        live = self._live.get(member)
        asked = live is not None and live.request_move(None)
        if live is not None and asked:
            live.awaits.clear()
            self._actions.append(Send(member, "alone"))
        return asked

    def join(self, member: str, key: tuple[str, int], feeder: str | None) -> bool:
        """Ask a member to read the stream of another feeder of its node from its next epoch on.

        Where that stream is at another epoch than the member, the member works alone until they meet.

        Args:
            key: (node, cohort) of that feeder, as `Feeders.assign_late` returns it.
            feeder: its address; None: it is being started, and the command is sent once it has an address.

        Returns:
            False where no command will be sent: it does not run, is ending, reads there already, or shares nothing
            because shared samples were not those of its pipeline.
        """
        live = self._live.get(member)
        if live is None or self._session.run.members[member].is_alone or not live.request_move(key[1]):
            return False
        live.awaits = {key} if feeder is None else set()
        if feeder is not None:
            self._actions.append(send_join(member, key, feeder))
        return True

    def widen(self, member: str, workers: int) -> bool:
        """Stop a member after this epoch, to place it again with more workers.

        Returns:
            False where no command was sent: it does not run, is ending, or has as many workers.
        """
        live = self._live.get(member)
        asked = live is not None and live.request_widening(workers)
        if asked:
            self._actions.append(Send(member, "stop_after_epoch"))
        return asked

    # -- ending -------------------------------------------------------------------------------------------------

    def stop(self, until: float) -> None:
        """Ask all attempts to write a checkpoint and end; those that have not ended at `until` are killed."""
        for live in self._live.values():
            if live.advance("stop"):
                live.intent = Intent.STOP
                self._actions.append(Send(live.member, "stop"))
            self._limit_stop(live, until)

    def cancel(self, member: str) -> bool:
        """Cancel a member; False where it neither runs nor waits for a retry, is returning or paused."""
        live = self._live.get(member)
        if live is not None:
            live.advance("cancel")
            live.intent = Intent.CANCEL
            if not live.is_exiting:
                live.deadline = self._session.now + LINGER_S
                self._actions.append(Send(member, "cancel"))
            return True
        item = self._session.waitlist.withdraw(member)
        if item is not None:
            self._session.cancel(item[0])
        return item is not None

    def pause(self, member: str, until: float) -> bool:
        """Stop a running member with a checkpoint and pause it; False where it does not run.

        Args:
            until: the time at which it is killed if it has not ended; it then resumes from its last checkpoint.
        """
        live = self._live.get(member)
        if live is None:
            return False
        was_active = live.is_active
        if live.intent not in (Intent.STOP, Intent.CANCEL) and live.advance("pause"):
            live.intent = Intent.PAUSE
        if was_active:
            self._limit_stop(live, until)
            self._actions.append(Send(member, "stop"))
        return True

    def _limit_stop(self, live: Attempt, until: float) -> None:
        saved = self._session.run.members[live.member].checkpoint
        write_s = saved.write_s if saved is not None else None
        live.limit_stop(self._session.now, until, write_s or 0.0, self._hang_timeout_s)

    def leave_node(self, node: str, deadline: float | None) -> None:
        """Let the members of a node that is being drained write a checkpoint, to be placed elsewhere.

        Args:
            deadline: when the node ends, in Unix seconds; None: unknown. Members that train then are killed.
        """
        session = self._session
        session.log("node_draining", node=node, deadline=deadline)
        session.nodes.remove(node)
        session.placement_due = True
        until = None if deadline is None else session.now + max(LINGER_S, deadline - session.t)
        for live in [live for live in self._live.values() if live.start.placement.count_ranks(node)]:
            if not live.is_launched:
                self._release(live)
            elif live.is_active:
                live.advance("pause")
                live.intent, live.deadline = Intent.LEAVE, until
                self._actions.append(Send(live.member, "stop"))

    def _release(self, live: Attempt) -> None:
        """Release the place of a member that waits for its feeders; it was never launched there."""
        session, member = self._session, live.member
        self._live.free(member)
        if live.intent is Intent.CANCEL:
            session.cancel(live.identity)
        elif live.intent is Intent.PAUSE:
            session.waitlist.add_paused((live.identity, live.cohort))
            session.log("paused", member=member, attempt=session.run.members[member].attempt)
        else:
            session.waitlist.add_returning([(live.identity, live.cohort)])

    def unpause(self, member: str) -> bool:
        """Place a member that is about to pause again at once; False where it has no processes."""
        live = self._live.get(member)
        if live is not None and live.intent is Intent.PAUSE and live.advance("resume"):
            live.intent = Intent.RESUME
        return live is not None

    def is_being_pruned(self, member: str) -> bool:
        """Whether a member was told to end by the pruner, and has not yet."""
        live = self._live.get(member)
        return live is not None and live.is_active and live.is_being_pruned

    def is_held(self, member: str) -> bool:
        """Whether a member is paused, or will be once its processes have exited."""
        live = self._live.get(member)
        return live.intent is Intent.PAUSE if live is not None else self._session.waitlist.is_paused(member)
