"""Launches members: reserves their places, waits for the addresses of their feeders, starts their ranks."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

from ensemble.controller.actions import Launch, Send
from ensemble.controller.attempt import Attempt, AttemptPhase, Intent, checkpoint_position, rendezvous_file
from ensemble.controller.attempt_commands import send_join
from ensemble.controller.session_state import SessionState
from ensemble.schedule import Start
from ensemble.store import MemberState, RunDir

log = logging.getLogger(__name__)

# Shorter than the hang timeout, so that a rank can report which other rank hangs before the member is killed.
COLLECTIVE_SHARE = 0.7  # of the hang timeout


class Launcher:
    """Launches members.

    Args:
        awaits_pruner: whether a member waits for a prune_decision after each epoch.
        hang_timeout_s: how long a member may report nothing before it is killed.
    """

    def __init__(
        self, session: SessionState, run_dir: RunDir, *, awaits_pruner: bool, hang_timeout_s: float
    ) -> None:
        self._session, self._live, self._actions = session, session.live, session.actions
        self._run_dir, self._state = run_dir, session.run
        self._awaits_pruner, self._hang_timeout_s = awaits_pruner, hang_timeout_s

    def reserve(
        self, start: Start, feeders: Mapping[str, str | None], awaits: Collection[tuple[str, int]] = ()
    ) -> None:
        """Reserve the place of a member that is to be launched.

        Args:
            feeders: the known addresses of its feeders, by node; None: ranks there prepare their own batches.
            awaits: (node, cohort) of the feeders whose addresses it needs first; none: it can be launched.

        Raises:
            RuntimeError: its previous attempt still has processes.
        """
        identity = start.placement.identity
        known = self._state.members[identity.member]
        live = Attempt(
            start,
            identity,
            known.attempts,
            device=start.placement.describe_device(self._session.nodes.held),
            ranks=set(range(identity.workers)),
            last_event_at=self._session.now,
            resumed_from=checkpoint_position(known),
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
        placement, known = live.start.placement, self._state.members[member]
        feeder = live.feeders.get(placement.node)
        if feeder is None and live.identity.first_epoch is None:
            live.identity = dataclasses.replace(live.identity, first_epoch=0)  # no stream to join
        before = known.spans[-1].device if known.spans else None
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
            log.warning("%s trains on another device than before: %s, and not %s", member, live.device, before)
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
            checkpoints=known.list_checkpoints(),
            exchange_plan=_find_plan(known),
            files=self._state.files,
            accepts_data=self._state.header.accepts_data,
            bad=[[split, index, event.code] for (split, index), event in self._state.bad_records.items()],
        )
        self._actions.append(Launch(jobs, placement.devices))
        if live.phase is AttemptPhase.STOPPING:  # the request came while it waited for its feeder
            self._actions.append(Send(member, "cancel" if live.intent is Intent.CANCEL else "stop"))

    def supply_feeder(self, key: tuple[str, int], address: str | None) -> None:
        """Launch the members that wait for a feeder, and move those that are to read it.

        Args:
            key: its (node, cohort).
            address: None: it could not be started; members stay where they are, or prepare their own batches.
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


def _find_plan(member: MemberState) -> dict[str, Any] | None:
    """What an attempt has planned for the exchange; a checkpoint has its own, but may be damaged."""
    if member.plan is None or member.identity.get("widened_from") is not None:
        return None
    return {name: member.plan[name] for name in ("tuned", "rates")}
