"""Launches attempts, follows what their workers report, and ends those that hang or are asked to end.

What an attempt may do next is said by the table of its phases (`ensemble.controller.attempt`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from ensemble.controller.actions import (
    Action,
    AppendMemberLog,
    Kill,
    Launch,
    RemoveAttemptFiles,
    RemoveEarlierCheckpoints,
    Send,
    rendezvous_file,
)
from ensemble.controller.attempt import (
    Attempt,
    AttemptPhase,
    Intent,
    PlaceState,
    checkpoint_position,
    publish_predictions,
)
from ensemble.controller.failure_policy import Decision, Failure, FailurePolicy, lowered
from ensemble.controller.failures import FailureTracker, PendingRetry
from ensemble.schedule import Placement, Start
from ensemble.search.trials import NoObjectiveError, Trials
from ensemble.spec import Identity, SpecError
from ensemble.store import RunDir, RunState

log = logging.getLogger(__name__)

LINGER_S = 10.0  # what processes of a member that has ended, or is to be cancelled, may take to end
# A rank is to find out which of the others hangs, and say so, before the member is killed for its silence.
COLLECTIVE_SHARE = 0.7  # of the time after which a silent member is taken to hang


class Attempts:
    """All attempts under way: decides, logs through `emit`, and appends to `actions` what is to be done then.

    Attributes:
        returning: members to be placed again, each with its cohort; the controller takes them from here.
        failures: what has failed, who rests before it is tried again.
        paused: members that are to go on when they are asked to, each with its cohort.
        limits: most members at one time, by node, learnt from running out of memory.
        changed: whether a place has become free since the controller last reset it.
    """

    def __init__(
        self,
        run_dir: RunDir,
        actions: list[Action],
        state: RunState,
        trials: Trials,
        policy: FailurePolicy,
        emit: Callable[..., None],
        hang_timeout_s: float,
        elastic: bool = False,
    ) -> None:
        self.returning: list[PendingRetry] = []
        self.paused: list[PendingRetry] = []
        self.limits: dict[str, int] = {}
        self.changed = True
        self._live: dict[str, Attempt] = {}
        self._run_dir, self._actions, self._state = run_dir, actions, state
        self._trials, self._emit = trials, emit
        self.failures = FailureTracker(policy, emit, rooms=state.rooms)
        self._hang_timeout_s, self._elastic = hang_timeout_s, elastic

    def __len__(self) -> int:
        """Those under way, and those that rest before they will be."""
        return len(self._live) + len(self.failures)

    def placements(self) -> list[Placement]:
        """Where members hold a place."""
        return [live.start.placement for live in self._live.values()]

    def placement_of(self, member: str) -> Placement | None:
        """Where this one holds a place, if it does."""
        return self._live[member].start.placement if member in self._live else None

    def reading(self) -> list[tuple[str, int]]:
        """(node, cohort) of each attempt; two for one that is to move from the one to the other."""
        return [key for live in self._live.values() for key in live.feeder_keys]

    def readers(self) -> Counter[tuple[str, int]]:
        """(node, cohort) -> attempts that have not come to their end, and read there or will."""
        return Counter(key for live in self._live.values() if not live.is_exiting for key in live.feeder_keys)

    def training(self) -> list[tuple[Identity, str, int | None]]:
        """(member, node, cohort) of each attempt that goes on; cohort None: it prepares its own batches.

        So does one whose cohort has no feeder, or that was not given it: nobody waits for another there.
        """
        members = self._state.members
        return [
            (
                live.identity,
                live.start.placement.node,
                live.cohort if members[live.member].feeder else None,
            )
            for live in self._live.values()
            if live.is_active and live.intent is None and not live.is_moving
        ]

    def launch(self, start: Start, feeder: str | None, now: float) -> None:
        """Start all ranks of a member.

        Raises:
            RuntimeError: processes of its previous attempt still hold their place.
        """
        placement, identity = start.placement, start.placement.identity
        if identity.member in self._live:
            raise RuntimeError(f"{identity.member} was to be launched while its previous attempt has processes")
        if feeder is None and identity.first_epoch is None:
            identity = dataclasses.replace(identity, first_epoch=0)  # no stream to join
        known = self._state.members[identity.member]
        live = self._live[identity.member] = Attempt(
            start,
            identity,
            known.attempts,
            ranks=set(range(identity.workers)),
            last_event_at=now,
            resumed_from=checkpoint_position(known),
            cohort=start.cohort,
            target_cohort=start.cohort,
        )
        self._emit(
            "placed",
            member=identity.member,
            attempt=live.number,
            node=placement.node,
            devices=list(placement.devices),
            cohort=start.cohort,
            feeder=feeder,
            first_epoch=identity.first_epoch,
        )
        meeting = rendezvous_file(self._run_dir, live.member, live.number)
        jobs = live.make_jobs(
            run_dir=str(self._run_dir.path),
            rendezvous=meeting.as_uri() if identity.workers > 1 else None,
            feeder=feeder,
            gated=self._trials.gated,
            timeout_s=COLLECTIVE_SHARE * self._hang_timeout_s,
            checkpoint=self._run_dir.valid_checkpoint(known).name if known.checkpoint else None,
            bad=[[split, index, event["code"]] for (split, index), event in self._state.bad_records.items()],
        )
        self._actions.append(Launch(jobs, placement.devices))

    # -- listening ----------------------------------------------------------------------------------------------

    def take(self, event: dict[str, Any], now: float) -> None:
        """News of an attempt, or the exit of one of its ranks; late ones of an earlier attempt are dropped."""
        live = self._live.get(event["member"])
        if live is None or live.number != event["attempt"]:
            return
        live.last_event_at = now
        if event["type"] == "exited":
            self._exited(live, event, now)
        elif event["type"] == "launch_failed":
            live.ranks.clear()
            why = f"could not be started on node {live.start.placement.node}: {event['detail']}"
            self._fail(live, "launch_failed", "lost", why, now)
            self._gone(live, now)
        elif not live.is_exiting:
            self._news(live, event, now)

    def _news(self, live: Attempt, event: dict[str, Any], now: float) -> None:
        kind, identity = event["type"], live.identity
        if kind == "waiting" and live.place is PlaceState.REQUESTED:
            return  # logged once
        if kind == "failed":
            place = (event["epoch"], event["step"]) if "step" in event else None
            reason, said = event.get("reason", "error"), event.get("error", "")
            self._fail(live, "failed", reason, said, now, event.get("retry", True), place=place)
            return
        if kind == "finished":
            publish_predictions(self._run_dir, identity.member, live.number)
            event = {**event, "metrics": self._trials.final(identity.number, event.get("metrics") or {})}
        outcome = live.event_type(kind)
        if kind in ("finished", "pruned", "cancelled", "stopped"):
            goes_on = outcome == "paused" or (outcome == "stopped" and live.intent is Intent.WIDEN)
            live.end(kind, outcome, Decision(goes_on), now + LINGER_S)
        elif not live.advance(kind):
            log.warning("%s: dropped a %r event of an attempt that is %s", identity.member, kind, live.phase)
            return
        self._emit(outcome, **{key: value for key, value in event.items() if key not in ("type", "v", "t")})
        if kind == "started" and identity.first_epoch is None and event.get("first_epoch") is not None:
            live.identity = dataclasses.replace(identity, first_epoch=event["first_epoch"])
            self._emit("member", **live.identity.as_dict())
        elif kind == "epoch":
            try:
                verdict = self._trials.verdict(identity.number, event["epoch"], event.get("metrics") or {})
            except NoObjectiveError as error:  # the same epoch again would report the same
                why = f"epoch {event['epoch']}: {error}"
                self._fail(live, "failed", "error", why, now, may_help=False)
                self._actions.append(Send(live.member, "cancel"))
                return
            if self._trials.gated and live.phase is not AttemptPhase.STOPPING:
                self._actions.append(Send(live.member, verdict))
        elif kind == "checkpoint" and not live.has_checkpoint:
            live.has_checkpoint = True
            self._actions.append(RemoveEarlierCheckpoints(live.member, live.number))
        elif kind == "moved":
            live.record_move(event["cohort"])
            self.changed = True  # the feeder that it has left may have nobody to feed any more
        elif live.is_exiting and outcome not in ("stopped", "paused"):
            self._trials.ended(identity.number, outcome, event.get("metrics") or {})

    def take_bad_record(self, event: dict[str, Any]) -> None:
        """A feeder, or the second attempt of a member, has found a record that ends or hangs who prepares it."""
        known = (event["split"], event["index"]) in self._state.bad_records
        self._emit("bad_record", **{key: value for key, value in event.items() if key not in ("type", "v", "t")})
        if event.get("member") is not None:
            self.failures.forgive(event["member"])
        if not known:
            record = {key: event[key] for key in ("split", "index", "code")}
            self._actions += [
                Send(live.member, "bad_record", record) for live in self._live.values() if not live.is_exiting
            ]

    def _exited(self, live: Attempt, event: dict[str, Any], now: float) -> None:
        live.ranks.discard(event["rank"])
        live.advance("rank_exited")
        if event.get("node_lost"):
            live.lose_node()
        if not live.is_exiting:
            if event["rank"] > 0 and event["outcome"] == "failed":
                note = event.get("note")
                rank_0_lost = note is not None and note["reason"] == "lost"
                # Rank 0 learns of it, and reports what it was, unless it is rank 0 that the others miss.
                live.deadline, live.kill_reason = now if rank_0_lost else now + LINGER_S, "error"
            elif event["rank"] == 0 or event["outcome"] is None:
                self._died(live, event, now)
                self._actions.append(Kill(live.member))
        if not live.ranks:
            self._gone(live, now)

    def _died(self, live: Attempt, event: dict[str, Any], now: float) -> None:
        """An attempt ended without a report of how: a rank exited on which the others depend."""
        member = live.member
        if live.intent is Intent.CANCEL:
            live.end("died", "cancelled", Decision(False))
            self._emit("cancelled", member=member, attempt=live.number)
            self._trials.ended(live.identity.number, "cancelled", {})
            return
        if live.phase is AttemptPhase.STOPPING and live.kill_reason:
            # It was too slow to write a checkpoint: it goes on from its last one.
            outcome = live.event_type("stopped")
            live.end("died", outcome, Decision(outcome == "paused"))
            self._emit(outcome, member=member, attempt=live.number)
            return
        failed = event["outcome"] == "failed"
        reason = live.kill_reason or event.get("reason") or ("error" if failed else "lost")
        note = event.get("note") if live.kill_reason == "error" else None
        why = live.describe_failure(event, self._run_dir.log(member), self._hang_timeout_s)
        for split, index in event.get("preparing", ()):
            why += f" (it was preparing sample {index} of {split})"
        known = note or {"error": why, "reason": reason, "retry": True}
        line = f"attempt {live.number}: failed ({known['reason']}): {known['error']}"
        self._actions.append(AppendMemberLog(member, line))
        node_lost = event.get("node_lost", False)
        self._fail(live, "died", known["reason"], known["error"], now, known["retry"], node_lost)

    def _fail(
        self,
        live: Attempt,
        event: str,
        reason: str,
        error: str,
        now: float,
        may_help: bool = True,
        node_lost: bool = False,
        place: tuple[int, int] | None = None,
    ) -> None:
        member, node = live.member, live.start.placement.node
        together = sum(placement.node == node for placement in self.placements())
        held_to, more_room = live.identity.memory_gb, False
        if reason == "oom" and may_help:
            offered = self._state.node(node).info.get("memory_gb")
            more_room = self.failures.more_room(live.start.placement, error, together, offered)
            live.identity = self.failures.grants.apply(live.identity)
        if not more_room or held_to is None:  # else it took its own part, and nobody else's
            limit = lowered(reason, together, self.limits.get(node))
            if limit is not None:
                self.limits[node] = limit
        decision = self.failures.decide(
            Failure(
                reason=reason,
                member=member,
                node=node,
                at=now,
                began=live.resumed_from,
                reached=checkpoint_position(self._state.members[member]),
                may_help=may_help,
                node_lost=node_lost,
                more_room=more_room,
                said=error,
                place=place,
            )
        )
        live.end(event, "failed", decision, now + LINGER_S)
        self._emit("failed", member=member, attempt=live.number, error=error, reason=reason, retry=decision.retry)
        if live.identity.workers > 1:
            self._actions.append(Kill(member))  # the other ranks would wait for this one in a collective
        if not decision.retry:
            self._trials.ended(live.identity.number, "failed", {})

    def _gone(self, live: Attempt, now: float) -> None:
        """The last process of an attempt has ended: its place is free."""
        del self._live[live.member]
        self._actions.append(RemoveAttemptFiles(live.member, live.number))
        self.changed = True
        decision, intent = live.decision, live.intent
        if decision.retry and live.outcome == "stopped":
            before, live.identity = live.identity.workers, live.widened_identity()
            epoch = self._state.members[live.member].epoch
            self._emit("member", **live.identity.as_dict(), widened={"from": before, "epoch": epoch})
        if intent is Intent.CANCEL and (decision.retry or live.outcome == "stopped"):
            self._cancelled(live.identity)
        elif decision.retry and intent is Intent.PAUSE:
            self.paused.append((live.identity, live.cohort))
            if live.outcome != "paused":
                self._emit("paused", member=live.member, attempt=live.number)
        elif decision.retry:
            self.failures.defer((live.identity, live.cohort), now + decision.wait_s)
            if live.outcome == "paused":
                self._emit("resumed", member=live.member, attempt=live.number)
            self._rested(now)

    def _rested(self, now: float) -> None:
        """Those whose rest is over return."""
        back = self.failures.pop_due(now)
        self.returning += back
        self.changed = self.changed or bool(back)

    def _cancelled(self, identity: Identity) -> None:
        member = identity.member
        self._emit("cancelled", member=member, attempt=self._state.members[member].attempt)
        self._trials.ended(identity.number, "cancelled", {})

    # -- changing between two epochs ----------------------------------------------------------------------------

    def alone(self, member: str) -> bool:
        """Ask a member to prepare its own batches from its next epoch on; its `moved` event says that it does.

        Returns:
            False where there is nothing to ask: it does not run, ends, or does so already.
        """
        live = self._live.get(member)
        asked = live is not None and live.request_move(None)
        if asked:
            self._actions.append(Send(member, "alone"))
        return asked

    def join(self, member: str, cohort: int, feeder: str) -> bool:
        """Ask a member to read the stream of another feeder of its node from its next epoch on.

        Where that stream is at another epoch than the member, the member works alone until they meet.

        Args:
            cohort, feeder: the feeder's, and its address (`Feeders.open_for`).

        Returns:
            False where there is nothing to ask: it does not run, ends, or reads there already.
        """
        live = self._live.get(member)
        asked = live is not None and live.request_move(cohort)
        if asked:
            self._actions.append(Send(member, "join", {"feeder": feeder, "cohort": cohort}))
        return asked

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
        self.failures.stop()
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

    def cancel(self, member: str, now: float) -> bool:
        """End a member for good; False when it neither runs nor returns."""
        live = self._live.get(member)
        if live is not None:
            live.advance("cancel")
            live.intent = Intent.CANCEL
            if not live.is_exiting:
                live.deadline = self._end_by(live, now + LINGER_S)
                self._actions.append(Send(member, "cancel"))
            return True
        item = self.withdraw(member)
        if item is not None:
            self._cancelled(item[0])
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
            else any(known.member == member for known, _ in self.paused)
        )

    def withdraw(self, member: str) -> PendingRetry | None:
        """Take a member, with its cohort, from those that return, rest or are paused; None where it does not."""
        for where in (self.returning, self.paused):
            for item in [item for item in where if item[0].member == member]:
                where.remove(item)
                return item
        return self.failures.withdraw(member)

    def watch(self, now: float) -> None:
        """Kill what hangs, and what has not ended in time; let return who has rested."""
        self._rested(now)
        for live in self._live.values():
            if live.deadline is not None and now >= live.deadline:
                live.deadline, live.kill_reason = None, live.kill_reason or "killed"
                self._actions.append(Kill(live.member))
            elif (
                not live.is_exiting
                and live.kill_reason is None
                and now - live.last_event_at > self._hang_timeout_s
            ):
                live.kill_reason = "hang"
                self._actions.append(Kill(live.member))
