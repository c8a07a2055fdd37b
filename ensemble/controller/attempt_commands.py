"""Starts attempts when their feeders have addresses; tells them to read another stream, pause, stop, cancel."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

from ensemble.controller.actions import Launch, Send
from ensemble.controller.attempt import Attempt, AttemptPhase, Intent, rendezvous_file
from ensemble.controller.session_state import SessionState
from ensemble.schedule.placement import Start
from ensemble.store import MemberState, RunDir

log = logging.getLogger(__name__)

# Shorter than the hang timeout, so that a rank can report which other rank hangs before the member is killed.
COLLECTIVE_SHARE = 0.7  # of the hang timeout
LINGER_S = 10.0  # how long processes of a member that has ended, or is cancelled, may take to exit


def send_join(member: str, key: tuple[str, int], feeder: str) -> Send:
    """The command to read the stream of the feeder `key`, (node, cohort)."""
    return Send(member, "join", {"feeder": feeder, "cohort": key[1]})


class AttemptCommands:
    """Commands of the planner and of users to attempts.

    Args:
        awaits_pruner: whether a member waits for a prune_decision after each epoch.
        hang_timeout_s: how long a member may report nothing before it is killed, and take to stop at most.
    """

    def __init__(
        self, session: SessionState, run_dir: RunDir, *, awaits_pruner: bool, hang_timeout_s: float
    ) -> None:
        self._session, self._live, self._actions = session, session.live, session.actions
        self._run_dir, self._state = run_dir, session.run
        self._awaits_pruner, self._hang_timeout_s = awaits_pruner, hang_timeout_s

    # -- starting -----------------------------------------------------------------------------------------------

    def reserve(
        self, start: Start, feeders: Mapping[str, str | None], awaits: Collection[tuple[str, int]] = ()
    ) -> None:
        """Reserve the place of a member that is to be launched.

        Args:
            feeders: the known addresses of its feeders, by node; None: ranks there prepare their own batches.
            awaits: (node, cohort) of the feeders whose addresses it needs first; none: it is launched.
        """
        identity = start.placement.identity
        member = self._state.members[identity.member]
        live = Attempt(
            start,
            identity,
            member.attempts,
            device=start.placement.describe_device(self._session.nodes.held),
            ranks=set(range(identity.workers)),
            last_event_at=self._session.now,
            cohort=start.cohort,
            target_cohort=start.cohort,
            awaits=set(awaits),
            feeders=dict(feeders),
        )
        self._live.reserve(live)
        if not awaits:
            self._launch(live)

    def _launch(self, live: Attempt) -> None:
        """Launch all ranks of a member whose place is reserved."""
        member, live.is_launched = live.member, True
        placement, state = live.start.placement, self._state.members[member]
        feeder = live.feeders.get(placement.node)
        if feeder is None and live.identity.first_epoch is None:
            live.identity = dataclasses.replace(live.identity, first_epoch=0)  # no stream to join
        before = state.spans[-1].device if state.spans else None
        self._session.log(
            "placed",
            member=member,
            attempt=live.number,
            node=placement.node,
            devices=list(placement.devices),
            device=live.device,
            cohort=live.start.cohort,
            feeder=feeder,
            first_epoch=live.identity.first_epoch,
            **({"nodes": list(placement.nodes)} if placement.nodes else {}),
        )
        if before not in (None, live.device):
            log.warning("%s trains on another device than before: %s instead of %s", member, live.device, before)
            self._session.log(
                "device_changed", member=member, attempt=live.number, device=live.device, before=before
            )
        meeting = rendezvous_file(self._run_dir, member, live.number)
        jobs = live.make_jobs(
            self._session.nodes.held,
            run_dir=str(self._run_dir.path),
            rendezvous=meeting.as_uri() if live.identity.workers > 1 else None,
            awaits_pruner=self._awaits_pruner,
            timeout_s=COLLECTIVE_SHARE * self._hang_timeout_s,
            checkpoints=state.list_checkpoints(),
            exchange_plan=_find_plan(state),
            files=self._state.files,
            accepts_data=self._state.header.accepts_data,
            bad=[[split, index, event.code] for (split, index), event in self._state.bad_records.items()],
        )
        self._actions.append(Launch(jobs, placement.devices))
        if live.phase is AttemptPhase.STOPPING:  # the request came while it waited for its feeder
            self._actions.append(Send(member, "cancel" if live.intent is Intent.CANCEL else "stop"))

    def supply_feeder(self, key: tuple[str, int], address: str | None) -> None:
        """Launch the members that wait for a feeder, and move those that are to read it; None: it could not be
        started.
        """
        for live in [live for live in self._live.values() if key in live.awaits]:
            live.awaits.discard(key)
            if not live.is_launched:
                live.feeders[key[0]] = address
                if not live.awaits:
                    self._launch(live)
            elif address is None:
                live.target_cohort = live.cohort
            else:
                self._actions.append(send_join(live.member, key, address))

    # -- changing between two epochs ----------------------------------------------------------------------------

    def alone(self, member: str) -> bool:
        """Ask a member to prepare its own batches from its next epoch on; False where it cannot be asked, or does
        so already.
        """
        live = self._live.get(member)
        is_asked = live is not None and live.request_move(None)
        if live is not None and is_asked:
            live.awaits.clear()
            self._actions.append(Send(member, "alone"))
        return is_asked

    def join(self, member: str, key: tuple[str, int], feeder: str | None) -> bool:
        """Ask a member to read the stream of another feeder of its node from its next epoch on.

        Where that stream is at another epoch, the member works alone until they meet. Without an address the
        feeder is being started, and the command is sent later. Returns False where it cannot be asked, or shares
        nothing.
        """
        live = self._live.get(member)
        if live is None or self._session.run.members[member].is_alone or not live.request_move(key[1]):
            return False
        live.awaits = {key} if feeder is None else set()
        if feeder is not None:
            self._actions.append(send_join(member, key, feeder))
        return True

    def widen(self, member: str, workers: int) -> bool:
        """Stop a member after this epoch, to place it again with more workers; False where it cannot be asked."""
        live = self._live.get(member)
        is_asked = live is not None and live.request_widening(workers)
        if is_asked:
            self._actions.append(Send(member, "stop_after_epoch"))
        return is_asked

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
        """Stop a running member with a checkpoint, until a time at most, and pause it; False where it does not
        run.
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
        """Let the members of a node that ends at `deadline` (Unix seconds, if known) write a checkpoint, to be
        placed elsewhere.
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


def _find_plan(member: MemberState) -> dict[str, Any] | None:
    """What an attempt has planned for the exchange; a checkpoint has its own, but may be damaged."""
    if member.plan is None or member.identity.get("widened_from") is not None:
        return None
    return {name: member.plan[name] for name in ("tuned", "rates")}
