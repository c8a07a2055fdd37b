"""Handles what the workers of attempts report, and kills attempts that hang or do not end in time.

The table of phases in `ensemble.controller.attempt` says which event is accepted when.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from ensemble.controller.actions import (
    AppendMemberLog,
    EndTrial,
    Kill,
    RemoveAttemptFiles,
    RemoveCheckpoints,
    Send,
)
from ensemble.controller.attempt import Attempt, AttemptPhase, Intent, checkpoint_position
from ensemble.controller.attempt_commands import LINGER_S
from ensemble.controller.costs import TrialCosts
from ensemble.controller.failures import Decision, Failure, FailureTracker, RetryPolicy
from ensemble.controller.session_state import SessionState
from ensemble.events import to_dict
from ensemble.meter.cpu import report_interval_s
from ensemble.spec import Ensemble, Identity
from ensemble.store import RunDir

log = logging.getLogger(__name__)

#: What is said where a disk is full.
KEEPS_LESS = "; Ensemble(keep_checkpoints='weights') or 'selected' keeps less of members that have ended"

PROGRESS_PER_S = 4.0  # `progress` events of all members together that are logged

NODE_LOSS_S = 75.0  # until it is known that a node was lost, or that what starts ranks there has ended

#: Fields of `exited` events: why a rank was lost, through no fault of its member.
_NO_WEIGHTS = hashlib.sha256().hexdigest()  # of a model without any
_LOSSES = ("node_lost", "agent_lost", "gpu_lost")


class Attempts:
    """All attempts that have not ended; the failures so far; finished trials whose cost is not known yet."""

    def __init__(
        self,
        session: SessionState,
        ensemble: Ensemble,
        run_dir: RunDir,
        *,
        awaits_pruner: bool,
    ) -> None:
        self._session, self._live, self._actions = session, session.live, session.actions
        self._state, self._log = session.run, session.log
        self._run_dir, self._awaits_pruner = run_dir, awaits_pruner
        self._hang_timeout_s = ensemble.hang_timeout_s
        self.failures = FailureTracker(RetryPolicy(ensemble.retries), session.log, session.run.memory_increases)
        self.costs = TrialCosts(session, ensemble.search)
        self._first_with: dict[str, Identity] = {}  # weights after some training -> the first member with them
        self._equal: set[str] = set()  # members whose weights were those of another one

    def __len__(self) -> int:
        """The number of attempts, of members that wait for a retry, and of trials whose cost is not known."""
        return len(self._live) + len(self._session.waitlist.deferred) + len(self.costs)

    def handle(self, event: dict[str, Any]) -> None:
        """Handle an event of an attempt or of one of its ranks; events of earlier attempts are dropped."""
        live = self._live.find(event)
        if live is None:
            return
        live.last_event_at = self._session.now
        if event["type"] in ("progress", "epoch") and live.lost_report is None:
            live.note_life(self._session.now, event.get("saves_bytes", 0))
        if event["type"] == "exited":
            self._handle_exit(live, event)
        elif event["type"] == "launch_failed":
            live.ranks.clear()
            why = f"could not be started on node {live.start.placement.node}: {event['detail']}"
            self._fail(live, "launch_failed", "lost", why)
            self._end(live)
        elif not live.is_exiting:
            self._handle_report(live, event)

    def _handle_report(self, live: Attempt, event: dict[str, Any]) -> None:
        kind, identity = event["type"], live.identity
        if kind == "failed":
            if event.get("reason") == "lost" and live.start.placement.nodes:
                # Whether a node was lost, which uses up no retry, is known once the lost rank's exit is reported.
                until = self._session.now + NODE_LOSS_S
                live.lost_report = event
                live.deadline = until if live.deadline is None else min(live.deadline, until)
            else:
                self._fail_as_reported(live, event)
            return
        outcome = live.event_type(kind)
        if kind == "cancelled" and live.intent is None:  # killed, for which inline has no other way
            self._handle_death(live, {**event, "rank": 0, "outcome": None, "detail": "was killed"})
            return
        if kind in ("finished", "pruned", "cancelled", "stopped"):
            goes_on = outcome == "paused" or (outcome == "stopped" and live.intent is Intent.WIDEN)
            live.end(kind, outcome, Decision(goes_on), self._session.now + LINGER_S)
        elif not live.advance(kind):
            log.warning("%s: dropped a %r event of an attempt that is %s", identity.member, kind, live.phase)
            return
        if kind == "progress" and not (self._is_progress_due(live) or event.get("metrics")):
            return
        member = self._state.members[live.member]
        self._session.log_report(outcome, {**event, "checkpoint": member.checkpoint})
        if kind == "started" and identity.first_epoch is None and event.get("first_epoch") is not None:
            live.identity = dataclasses.replace(identity, first_epoch=event["first_epoch"])
            self._log("member", **live.identity.as_dict())
        elif kind == "epoch" and "unranked" in event:  # a retry of the epoch would report the same
            self._fail(
                live, "failed", "error", f"epoch {event['epoch'] + 1}: {event['unranked']}", is_retry_useful=False
            )
            self._actions.append(Send(live.member, "cancel"))
        elif kind == "epoch" and self._awaits_pruner and live.phase is not AttemptPhase.STOPPING:
            live.is_being_pruned = event["prune_decision"] == "prune"
            self._actions.append(Send(live.member, event["prune_decision"]))
        elif kind in ("checkpoint", "finished"):
            kept = [name for name, _ in member.list_kept()]
            self._actions.append(RemoveCheckpoints(live.member, kept, live.number))
            self._compare_weights(live, event)
        elif kind == "moved":
            live.record_move(event["cohort"])
            self._session.placement_due = True  # the feeder that it left may have no reader now
        if kind in ("finished", "pruned", "cancelled", "stopped") and outcome not in ("stopped", "paused"):
            self.costs.end_trial(live, outcome, event.get("metrics") or {})

    def _is_progress_due(self, live: Attempt) -> bool:
        """Whether the steps of a member are logged now: the less often, the older the run and the more members."""
        now_s = self._session.now
        interval_s = max(report_interval_s(now_s - self._session.began), len(self._live) / PROGRESS_PER_S)
        if interval_s > 1.0 and now_s - live.progress_at < interval_s:
            return False
        live.progress_at = now_s
        return True

    def _fail_as_reported(self, live: Attempt, event: Mapping[str, Any]) -> None:
        self._fail(
            live,
            "failed",
            event.get("reason", "error"),
            event.get("error", ""),
            event.get("retry", True),
            rank=event.get("rank", 0),
            position=(event["epoch"], event["step"]) if "step" in event else None,
            gpu_lost=event.get("gpu_lost", False),
        )

    def handle_bad_record(self, event: dict[str, Any]) -> None:
        """Handle a record that ends or hangs its process, found by a feeder or by a second attempt."""
        is_known = (event["split"], event["index"]) in self._state.bad_records
        self._session.log_report("bad_record", event)
        if event.get("member") is not None:
            self.failures.excuse_last(event["member"])
        if not is_known:
            record = {key: event[key] for key in ("split", "index", "code")}
            self._actions += [
                Send(live.member, "bad_record", record) for live in self._live.values() if not live.is_exiting
            ]

    def _handle_exit(self, live: Attempt, event: dict[str, Any]) -> None:
        now_s = self._session.now
        live.ranks.discard(event["rank"])
        live.advance("rank_exited")
        if live.lost_report is not None and not live.is_exiting:
            self._explain_loss(live, live.lost_report, event)
        elif not live.is_exiting:
            has_lost_gpu = event.get("gpu_lost", False)  # then nobody needs to report why
            if event["rank"] > 0 and event["outcome"] == "failed" and not has_lost_gpu:
                note = event.get("note")
                rank_0_lost = note is not None and note["reason"] == "lost"
                # Rank 0 notices and reports why, unless it is rank 0 that the others have lost.
                live.deadline, live.kill_reason = now_s if rank_0_lost else now_s + LINGER_S, "error"
            elif event["rank"] == 0 or event["outcome"] is None or has_lost_gpu:
                self._handle_death(live, event)
                self._actions.append(Kill(live.member))
        if not live.ranks:
            self._end(live)

    def _explain_loss(self, live: Attempt, report: Mapping[str, Any], event: dict[str, Any]) -> None:
        """A rank exited after one has reported that it lost another: it is the lost one, or lost that as well."""
        note = event.get("note")
        if event["outcome"] is None or any(event.get(name) for name in _LOSSES):
            self._handle_death(live, event)
            self._actions.append(Kill(live.member))
        elif note is not None and note["reason"] != "lost":
            self._fail_as_reported(live, note)
        elif not live.ranks:
            self._fail_as_reported(live, report)

    def _handle_death(self, live: Attempt, event: dict[str, Any]) -> None:
        """A rank on which the others depend exited, and no rank reported an outcome."""
        member = live.member
        if live.intent is Intent.CANCEL:
            live.end("died", "cancelled", Decision(False))
            self._log("cancelled", member=member, attempt=live.number)
            self._actions.append(EndTrial(live.identity.number, "cancelled"))
            return
        is_late = live.kill_reason or (live.intent is Intent.LEAVE and event.get("node_lost"))
        if live.phase is AttemptPhase.STOPPING and is_late:
            # It was killed before it had written a checkpoint: it resumes from its last one.
            outcome = live.event_type("stopped")
            live.end("died", outcome, Decision(outcome == "paused"))
            self._log(outcome, member=member, attempt=live.number)
            return
        failed = event["outcome"] == "failed"
        reason = live.kill_reason or event.get("reason") or ("error" if failed else "lost")
        note = event.get("note") if live.kill_reason == "error" else None
        why = live.describe_failure(event, self._run_dir.log(member), self._hang_timeout_s)
        for split, index in event.get("preparing", ()):
            why += f" (it was preparing sample {index} of {split})"
        failure = note or {"error": why, "reason": reason, "retry": True}
        line = f"attempt {live.number}: failed ({failure['reason']}): {failure['error']}"
        self._actions.append(AppendMemberLog(member, line))
        lost = {name: event.get(name, False) for name in _LOSSES}
        rank = failure.get("rank", event["rank"])
        lost["was_killed"] = event.get("node_short", False)
        self._fail(live, "died", failure["reason"], failure["error"], failure["retry"], rank=rank, **lost)

    def _fail(
        self,
        live: Attempt,
        event: str,
        reason: str,
        error: str,
        is_retry_useful: bool = True,
        *,
        rank: int = 0,
        was_killed: bool = False,
        **causes: Any,
    ) -> None:
        """End an attempt by a failure; `event` is as in `TRANSITIONS`, `causes` are further fields of the
        `Failure`.
        """
        placement, member = live.start.placement, live.member
        node, has_more_memory = placement.find_node(rank), False
        if reason == "oom":
            together = sum(other.start.placement.count_ranks(node) > 0 for other in self._live.values())
            memory_gb = {available.name: available.memory_gb for available in self._session.nodes.list_potential()}
            has_more_memory = self.failures.relieve(
                placement, error, together, memory_gb, rank, may_grow=is_retry_useful, was_killed=was_killed
            )
            live.identity = self.failures.grants.apply(live.identity)
        decision = self.failures.decide(
            Failure(
                reason=reason,
                member=member,
                node=node,
                reached=checkpoint_position(self._state.members[member]),
                is_retry_useful=is_retry_useful,
                has_more_memory=has_more_memory,
                error=error,
                **causes,
            )
        )
        live.end(event, "failed", decision, self._session.now + LINGER_S)
        who = {"member": member, "attempt": live.number, "node": node}
        state = self._state.members[member]
        trained = state.trained if state.checkpoint is not None and not decision.retry else None
        self._log("failed", **who, error=error, reason=reason, retry=decision.retry or trained is not None)
        if reason == "disk" and decision.retry:
            log.warning(
                "%s: %s; it goes on from its last checkpoint when there is room, and tries in %.0f s%s",
                member,
                error,
                decision.wait_s,
                KEEPS_LESS if self._session.keep_checkpoints == "all" else "",
            )
        if live.identity.workers > 1:
            self._actions.append(Kill(member))  # the other ranks would wait in a collective
        if trained is not None:  # it was evaluated again: what it had finished with still holds
            changed = {"attempt": live.number, "checkpoint": state.checkpoint, "outdated": error}
            self._session.log_report("finished", {**to_dict(trained), **changed})
            self.costs.end_trial(live, "finished", trained.metrics or {})
        elif not decision.retry:
            self._actions.append(EndTrial(live.identity.number, state.state, dict(state.metrics)))

    def _end(self, live: Attempt) -> None:
        """The last process of an attempt has exited: free its place."""
        self._live.free(live.member)
        self._actions.append(RemoveAttemptFiles(live.member, live.number))
        self._session.placement_due = True
        self.costs.expect(live)
        decision, intent = live.decision, live.intent
        if decision.retry and live.outcome == "stopped":
            before, live.identity = live.identity.workers, live.widened_identity()
            epoch = self._state.members[live.member].epoch
            self._log("member", **live.identity.as_dict(), widened={"from": before, "epoch": epoch})
        if intent is Intent.CANCEL and (decision.retry or live.outcome == "stopped"):
            self._session.cancel(live.identity)
        elif decision.retry and intent is Intent.PAUSE:
            self._session.waitlist.add_paused((live.identity, live.cohort))
            if live.outcome != "paused":
                self._log("paused", member=live.member, attempt=live.number)
        elif decision.retry:
            self._session.waitlist.defer((live.identity, live.cohort), self._session.now + decision.wait_s)
            if live.outcome == "paused":
                self._log("resumed", member=live.member, attempt=live.number)
            self._return_due()
        self._session.remove_leftovers(live.member)

    def _compare_weights(self, live: Attempt, event: Mapping[str, Any]) -> None:
        """Remark, once a member, that its weights after some training are those of another one."""
        digest = event.get("weights_sha256")
        if digest is None or digest == _NO_WEIGHTS or not (event.get("epoch") or event.get("step")):
            return
        first = self._first_with.setdefault(digest, live.identity)
        if live.member not in {first.member, *self._equal}:
            from ensemble.controller.equal_weights import explain_equal_weights

            self._equal.add(live.member)
            if (text := explain_equal_weights(live.identity, first)) is not None:
                self._log("remark", member=live.member, attempt=live.number, text=text)

    def _return_due(self) -> None:
        """Return the members whose wait for a retry is over; once the run stops, all."""
        until = self._session.now if self._session.stop_reason is None else math.inf
        self._session.placement_due |= self._session.waitlist.return_due(until)

    def watch(self) -> None:
        """Kill attempts that hang or have not ended in time; return members whose wait is over; measure costs."""
        now_s = self._session.now
        self._return_due()
        self.costs.measure_due()
        for live in self._live.values():
            if live.deadline is not None and now_s >= live.deadline:
                live.deadline, live.kill_reason = None, live.kill_reason or "killed"
                self._actions.append(Kill(live.member))
            elif (
                not live.is_exiting
                and live.kill_reason is None
                and now_s - live.last_event_at > self._hang_timeout_s
            ):
                live.kill_reason = "hang"
                self._actions.append(Kill(live.member))
