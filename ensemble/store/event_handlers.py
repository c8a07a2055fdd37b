"""Builds a run's state from its event log, one event at a time; no file, clock or process is used.

A member's life: waiting -> placed -> running -> finished | pruned | stopped | failed | cancelled, or paused,
which holds no place. A `run_started` sets to waiting what was placed, running, stopped or paused, and what
failed for a reason that may be mended.
"""

from __future__ import annotations

from msgspec.structs import replace

import ensemble.events as events
from ensemble.events import Event
from ensemble.spec.identity import find_first_own_epoch
from ensemble.store.errors import StoreError
from ensemble.store.event_log import add_files
from ensemble.store.member import ENDED, OUTDATED, Exclusion, MemberState, Span, drop_missing
from ensemble.store.reopening import evaluate_again, give_more_epochs, reopen_member
from ensemble.store.state import RunState


def apply_event(run: RunState, event: Event) -> None:
    """Updates a run's state by its next event; an event of an unknown type changes only the time."""
    if isinstance(event, events.RunStarted) and run.updated is not None:
        run.idle_s += event.t - run.updated
        for member in run.members.values():  # nothing was at work meanwhile
            member.close_span(run.updated, "waiting")
    if not isinstance(event, events.CodeSaved):  # then a run need not have been at work
        run.updated = event.t
        run.started = event.t if run.started is None else run.started
    if isinstance(event, events.AttemptEvent):
        member = run.member(event.member)
        if event.attempt is None or event.attempt >= member.attempt:  # not a late one, of an earlier attempt
            _apply_to_member(run, member, event)
    else:
        _apply_to_run(run, event)


def _apply_to_run(run: RunState, event: Event) -> None:
    """Applies an event that is about no attempt of a member; the frequent types are compared first."""
    match event:
        case events.Unknown(kind="packed"):
            raise StoreError(
                "the files of its members are in packs (packs/*.zip), which only ray-ensemble from before 1.0.0 "
                "reads: use that version, or train it again in another directory"
            )
        case events.Usage() | events.Unknown():
            pass
        case events.Power():
            run.node(event.node).watts = event.watts
        case events.Feeder():
            _update_feeder(run, event)
        case events.MemberDeclared():
            _declare_member(run, event)
        case events.CodeSaved():
            add_files(run.files, event)
        case events.BaseMade():
            run.base = event
        case events.RunStarted():
            _start_run(run, event)
        case events.RunFinished() | events.RunStopped():
            _end_run(run, event)
        case events.ResourcesAwaited():
            run.missing = event.missing
        case events.MemoryAwaited():
            run.awaited_memory = event.detail
        case events.NodeChanged():
            _change_node(run, event)
        case events.NodeHealth():
            run.node(event.node).health = event
        case events.NodeUnusable():
            run.unusable[event.node] = event
            _exclude(run, event)
        case events.NodeDraining() | events.NodeLost():
            _exclude(run, event)
        case events.BadRecord():
            run.bad_records.setdefault((event.split, event.index), event)
        case events.SampleDifference():
            _note_difference(run, event)
        case events.GpuQuarantined():
            run.quarantined[event.gpu] = event
        case events.FeederLost() | events.SharingEnded():
            run.unshared[event.node, event.cohort] = event
        case events.FeederRestarted():
            run.unshared.pop((event.node, event.cohort), None)
        case events.Rehearsing():
            run.rehearsing = event.of
        case events.Rehearsed():
            run.rehearsing = None
            run.rehearsed.append(event)
        case events.Measuring():
            run.measuring |= set(event.members)
        case events.Unmeasured():
            run.measuring -= set(event.members)
        case events.Profiled():
            run.profiles[event.shape, event.device] = event
            run.measuring -= set(event.members)
        case events.Planned():
            run.planned = event
        case events.MemoryIncrease():
            run.memory_increases.append(event)
        case events.Combining():
            run.combining = event.members
        case events.Combined():
            run.combined, run.combining, run.has_newer_results = event, 0, False


def _exclude(run: RunState, event: events.NodeUnusable | events.NodeDraining | events.NodeLost) -> None:
    """Takes note of why nothing is placed on a node, and since when: a repeated event does not change that."""
    node, detail, until = run.node(event.node), "", None
    match event:
        case events.NodeUnusable(retry_s=None):
            kind, detail = "unusable", event.detail
        case events.NodeUnusable(retry_s=retry_s):
            kind, detail, until = "resting", event.detail, event.t + (retry_s or 0.0)
        case events.NodeDraining():
            kind, until = "draining", event.deadline
        case events.NodeLost():
            kind, detail = "lost", event.detail
    since = node.excluded[kind].since if kind in node.excluded else event.t
    node.excluded[kind] = Exclusion(since, detail, until)
    node.is_held = node.is_held and kind != "lost"


def _change_node(run: RunState, event: events.NodeChanged) -> None:
    node, offers = run.node(event.node), event.cpus or event.gpus
    run.has_gpus |= bool(event.gpus)
    node.is_held = bool(offers)
    if offers:
        node.excluded = {}
    if offers or node.info is None:  # else it was given back
        node.info = event
    if offers:
        run.unusable.pop(event.node, None)


def _start_run(run: RunState, event: events.RunStarted) -> None:
    run.header, run.ended = event, None
    add_files(run.files, event)
    if event.more_epochs is not None:
        give_more_epochs(run, event.more_epochs, event.t)
    if event.changed_splits or event.evaluated_again:
        evaluate_again(run, event.evaluated_again, event.t)
    for name, excesses in event.constraints.items():
        run.members[name].constraints = excesses
    run.starts += 1
    run.name, run.run_id = event.name or run.name, event.run_id or run.run_id
    run.executor, run.mode = event.executor or run.executor, event.mode or run.mode
    run.objective, run.direction = event.objective or run.objective, event.direction or run.direction
    run.epochs = run.epochs if event.epochs is None else event.epochs
    run.declared = run.declared if event.members is None else event.members
    run.unshared.clear()
    run.bad_records.clear()  # it may be mended by now
    run.unusable.clear()
    run.quarantined.clear()  # it may be reset by now
    run.planned = None
    run.measuring.clear()
    run.combining = run.failures_in_row = 0
    run.missing = run.awaited_memory = ""
    for node in run.nodes.values():
        node.is_held, node.health = False, None
        node.excluded.clear()
    code = event.code
    back = {member.id for member in run.members.values() if member.is_resumable(code)}
    for member in run.members.values():
        member.failures = 0
        if member.id in back:
            member.requeue(event.t)
        if member.state not in ENDED:
            member.go_on_with(code)


def _end_run(run: RunState, event: events.RunFinished | events.RunStopped) -> None:
    run.ended = event
    run.unshared = {key: e for key, e in run.unshared.items() if isinstance(e, events.SharingEnded)}
    run.measuring.clear()
    run.rehearsing = None
    run.missing = run.awaited_memory = ""
    for member in run.members.values():
        if member.state in ("placed", "running"):
            member.end("stopped", event.t)


def _note_difference(run: RunState, event: events.SampleDifference) -> None:
    """Takes note of samples that are not what their reader's own pipeline prepares."""
    run.differences[event.member, event.split] = event
    if event.member is None:
        return
    member = run.member(event.member)
    is_alone = event.action == "anew" or (event.action == "alone" and event.split == "train")
    member.is_alone = member.is_alone or is_alone
    if event.action in ("anew", "fails"):
        member.checkpoint = member.checkpoint_before = None  # of samples that it should not have seen


#: Of `group` in a `feeder` event.
_GROUP = ("generation", "nodes", "design", "preparers")


def _update_feeder(run: RunState, event: events.Feeder) -> None:
    key = (event.node, event.cohort)
    before = run.feeders.get(key)
    if before is not None:
        # One that takes another's place has no levels yet, and at the end the nodes part before they are stopped.
        group, new_group = before.group or {}, event.group or {}
        if group.get("design") and not new_group.get("generation"):
            new_group = new_group | {name: group[name] for name in _GROUP}
        event = replace(event, fullness=event.fullness or before.fullness, group=new_group or event.group)
    run.feeders[key] = event


#: Fields of `member` events that are the member's identity.
_IDENTITY = tuple(name for name in events.MemberDeclared.__struct_fields__ if name not in ("v", "t"))


def _declare_member(run: RunState, event: events.MemberDeclared) -> None:
    is_known = event.member in run.members
    member = run.member(event.member, event.number)
    before = member.identity
    member.identity = {name: getattr(event, name) for name in _IDENTITY}
    if any(before.get(name) != member.identity[name] for name in ("workers", "communicator", "compression")):
        member.plan = None  # it was for another exchange
    if event.number is not None:
        member.number = event.number
    member.first_epoch = member.first_epoch if event.first_epoch is None else event.first_epoch
    if not is_known:
        member.epoch = find_first_own_epoch(event.lineage)
    if event.widened and member.state == "stopped":
        member.state = "waiting"
    if is_known and member.state == "failed":  # it failed for good, and is declared otherwise now
        member.requeue(event.t)
        member.code = run.header.code
    if not is_known:
        member.code = run.header.code
        run.declared += event.added


def _apply_to_member(run: RunState, member: MemberState, event: events.AttemptEvent) -> None:
    """Applies an event of a member's present attempt, or of a new one; the frequent types are compared first."""
    t = event.t
    match event:
        case events.StepsDone():
            member.state = "running" if member.state == "placed" else member.state
            member.epoch, member.step = event.epoch, event.step
            member.steps = event.steps or member.steps
            member.samples_per_s = event.samples_per_s or member.samples_per_s
            if event.metrics:
                member.drop_evaluations_from(event.epoch, event.step)  # a resume repeats that at its checkpoint
                member.evaluations.append(replace(event, metrics=drop_missing(event.metrics)))
        case events.Epoch():
            run.failures_in_row = 0
            member.end_epoch(event)
        case events.Checkpoint():
            member.add_checkpoint(event)
        case events.Placed():
            _place(run, member, event)
        case events.Started():
            _start_attempt(run, member, event)
        case events.Moved():
            member.cohort, member.feeder = event.cohort, event.feeder
            if member.spans and (last := member.spans[-1]).ended is None:
                member.close_span(t, "moved")
                member.spans.append(
                    Span(last.attempt, last.node, last.devices, member.cohort, t, started=t, device=last.device)
                )
        case events.Damaged():
            _leave_out_damaged(run, member, event)
        case events.CheckpointReduced():
            member.reduce_checkpoint(event)
        case events.ExchangeMeasured():
            member.plan = {"tuned": event.tuned, "rates": event.rates, "auto": event.auto}
        case events.Finished():
            run.failures_in_row = 0
            member.end("finished", t)
            member.weights_sha256 = event.weights_sha256
            member.predictions, member.files = event.predictions, event.files
            if event.checkpoint is not None:  # the event about it may have been lost
                member.add_checkpoint(event.checkpoint)
            member.checkpoint_before = None
            member.metrics = drop_missing(event.metrics or {}) or member.metrics
            member.kept, member.early_stopping = event.kept, event.early_stopping
            member.constraints = event.constraints
            member.trained, member.outdated = None, event.outdated
            run.has_newer_results |= member.result is not None
            member.result = None
            if event.outdated is not None:
                member.remarks.append(f"{OUTDATED}: {event.outdated}")
            run.finished[member.id] = event
        case events.Remark():
            member.remarks += [event.text] if event.text not in member.remarks else []
        case events.Cost():
            member.cost = event
        case events.Pruned() | events.Cancelled():
            member.end("pruned" if isinstance(event, events.Pruned) else "cancelled", t)
            member.checkpoint_before = None
            member.return_to_result(f"it was {member.state}")
        case events.Stopped() | events.Paused():
            member.end("stopped" if isinstance(event, events.Stopped) else "paused", t)
            member.epoch = member.epoch if event.epoch is None else event.epoch
            member.step = member.step if event.step is None else event.step
        case events.Resumed():
            member.requeue(t)
        case events.Failed():
            run.failures_in_row += 1
            if (name := event.node or member.node) is not None:
                failures, cause = run.node(name).failures, event.reason or "unknown"
                failures[cause] = failures.get(cause, 0) + 1
            member.failures += 1
            member.error, member.reason = event.error, event.reason
            member.close_span(t, "failed")
            member.end("waiting" if event.retry else "failed", t)
            if member.state == "failed":
                member.checkpoint_before = None
                member.return_to_result(f"{event.reason}: {event.error}")


def _place(run: RunState, member: MemberState, event: events.Placed) -> None:
    attempt = member.attempts if event.attempt is None else event.attempt
    run.measuring.discard(member.id)
    member.close_span(event.t, "replaced")
    member.state, member.attempt = "placed", attempt
    member.attempts = max(member.attempts, attempt) + 1
    member.node, member.devices, member.nodes = event.node, event.devices, event.nodes
    member.cohort, member.feeder = event.cohort, event.feeder
    for name in dict.fromkeys(event.nodes or [event.node]):
        run.node(name).attempts += 1
    if event.first_epoch is not None:
        member.first_epoch = member.identity["first_epoch"] = event.first_epoch
    member.spans.append(Span(attempt, event.node, event.devices, event.cohort, event.t, device=event.device))


def _leave_out_damaged(run: RunState, member: MemberState, event: events.Damaged) -> None:
    """A file of a member is damaged: it goes on from the checkpoint before, or begins anew."""
    last = member.checkpoint
    member.drop_checkpoint(event.file)
    if member.result is not None and member.result.checkpoint is None:
        member.result = run.combined = None
    if event.file.startswith("files/"):  # only its function makes it, perhaps in its first epoch
        member.checkpoint, member.checkpoint_before, member.is_checkpoint_removed = None, None, False
    if last is not member.checkpoint and not member.is_checkpoint_removed:
        what = "starts again from epoch 1" if member.checkpoint is None else "goes on from the checkpoint before"
        member.remarks.append(f"it {what}: {event.error}")
    if member.is_checkpoint_removed:
        member.predictions = None  # nothing needs them: it takes no part in a later combination
    elif member.state == "finished":
        reopen_member(run, member, event.t)
        member.go_on_with(event.code or run.header.code)


def _start_attempt(run: RunState, member: MemberState, event: events.Started) -> None:
    if member.state not in ENDED:
        member.state = "running"
    epoch, last = event.epoch or 0, event.last_epoch
    member.drop_epochs_from(epoch, event.step or 0)  # what came after its checkpoint is trained again
    if last and last["epoch"] not in [epoch_event.epoch for epoch_event in member.history[-1:]]:
        # its epoch event got lost with a controller that was killed; the checkpoint knew it
        known_fields = {"t": event.t, "member": event.member, "attempt": event.attempt, **last}
        run.failures_in_row = 0
        member.end_epoch(events.select_fields(events.Epoch, known_fields))
    member.epoch, member.step = epoch, event.step or 0
    if member.spans:
        member.spans[-1].started = event.t
