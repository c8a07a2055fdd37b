"""Builds a run's state from its event log, one event at a time.

    state = fold(read_events(run_dir.events))

`apply_event` is one step of the fold. A controller applies each event that it appends to the log, so its own state
and the state that a later reader computes are the same. Nothing here uses a file, a clock or a process.

A member's life: waiting -> placed -> running -> finished | pruned | stopped | failed | cancelled. `failed` with
`retry` is waiting again. A run that was stopped or killed has members that were placed, running or stopped. A
later `run_started` sets them to waiting, their checkpoints kept, and likewise those that failed for another reason
than a loss that is not a number. A member that waits, is placed or runs may be `paused`: it then holds no place.
`resumed`, or a `run_started`, sets it to waiting.
"""

from __future__ import annotations

from collections.abc import Iterable

from ensemble.store.log_lines import UNREADABLE, VERSION, add_files
from ensemble.store.member import ENDED, Event, MemberState, Span
from ensemble.store.state import RunState


def fold(events: Iterable[Event]) -> RunState:
    """Returns the state after these events, the first of which is the log's first.

    One that is of no use, such as after a byte of it has changed, is left out and noted in `holes`.
    """
    state = RunState()
    for event in events:
        try:
            apply_event(state, event)
        except EVENT_ERRORS as error:
            leave_out(state, event, error)
    return state


#: What an event of another form than is written here may raise: of a damaged log, or of another version's.
EVENT_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def leave_out(run: RunState, event: Event, error: Exception) -> Event:
    """Takes note of an event of a log that could not be applied.

    Args:
        error: one of `EVENT_ERRORS`.

    Returns:
        What stands for it, as for a part of the log that cannot be read.
    """
    what = f"{event.get('type')!r:.40}", f"{type(error).__name__}: {error}"
    hole = {"v": VERSION, "t": event.get("t", 0.0), "type": UNREADABLE, "event": what[0], "error": what[1]}
    run.holes.append(hole)
    return hole


#: Types of events about one attempt of a member; one that comes late, of an earlier attempt, is left out.
OF_ATTEMPTS = frozenset(
    (
        "placed",
        "started",
        "progress",
        "moved",
        "plan",
        "epoch",
        "checkpoint",
        "finished",
        "pruned",
        "cost",
        "damaged",
        "checkpoint_reduced",
    )
) | frozenset(("stopped", "paused", "resumed", "cancelled", "failed"))


#: Those that only an attempt reports that was placed.
_OF_PLACED = frozenset(("started", "progress", "moved", "plan", "epoch", "checkpoint", "finished", "pruned"))

#: Those at whose time a run need not have been at work.
_TIMELESS = frozenset((UNREADABLE, "code_saved"))


def apply_event(run: RunState, event: Event) -> None:
    """Updates a run's state by its next event; an event of an unknown type changes only the time."""
    if event["type"] == "run_started" and run.updated is not None:
        run.idle_s += event["t"] - run.updated  # negative where an older log has the clock set back
    if event["type"] == "usage" and event.get("until") is not None:  # of a killed process, logged by a later start
        run.updated = max(run.updated or 0.0, min(event["t"], event["until"]))
    elif event["type"] not in _TIMELESS:
        run.updated = event["t"]
        run.started = event["t"] if run.started is None else run.started  # `run_started` may be lost
    if event["type"] in OF_ATTEMPTS:
        member = run.member(event)
        if event.get("attempt", member.attempt) >= member.attempt:
            _apply_to_member(run, member, event)
    else:
        _apply_to_run(run, event)


def _apply_to_run(run: RunState, event: Event) -> None:
    """Applies an event that is about no attempt of a member; the frequent types are compared first."""
    match event["type"]:
        case "unreadable":
            run.holes.append(event)
        case "code_saved":
            add_files(run.files, event)
            run.info = event.get("info") or run.info
        case "power":
            run.node(event["node"]).watts = event.get("watts")
        case "feeder":
            _update_feeder(run, event)
        case "member":
            _declare_member(run, event)
        case "run_started":
            _start_run(run, event)
        case "run_finished" | "run_stopped":
            _end_run(run, event)
        case "resources":
            run.missing = event["missing"]
        case "memory_awaited":
            run.awaited_memory = event["detail"]
        case "node":
            node = run.node(event["node"])
            run.has_gpus |= bool(event.get("gpus"))
            if event.get("cpus") or event.get("gpus") or not node.info:  # else it was given back
                node.info = event
            if event.get("cpus") or event.get("gpus"):
                run.unusable.pop(event["node"], None)
        case "node_unusable":
            run.unusable[event["node"]] = event
        case "bad_record":
            run.bad_records.setdefault((event["split"], event["index"]), event)
        case "sample_difference":
            _note_difference(run, event)
        case "gpu_quarantined":
            run.quarantined[event["gpu"]] = event
        case "feeder_lost" | "sharing_ended":
            run.unshared[event["node"], event["cohort"]] = event
        case "feeder_restarted":
            run.unshared.pop((event["node"], event["cohort"]), None)
        case "measuring":
            run.measuring |= set(event["members"])
        case "unmeasured":
            run.measuring -= set(event["members"])
        case "profile":
            run.profiles[event["shape"], event["device"]] = event
            run.measuring -= set(event["members"])
        case "planned":
            run.planned = event
        case "memory_increase":
            run.memory_increases.append(event)
        case "combining":
            run.combining = event["members"]
        case "combined":
            _combine_members(run, event)


def _combine_members(run: RunState, event: Event) -> None:
    for name in ("method", "members", "split") if event.get("metrics") else ():
        event[name]  # raises for an event that is damaged, before it is known
    run.combined, run.combining = event, 0


def give_more_epochs(run: RunState, more_epochs: Event, t: float) -> None:
    """Gives members more epochs; those that have finished wait to be trained further.

    A second call with the same arguments changes nothing.

    Args:
        more_epochs: the field of that name of a `run_started` event: `epochs`, and `members`, name -> epochs
            before.
        t: Unix seconds.
    """
    for name, before in more_epochs["members"].items():
        member = run.members[name]
        member.identity["epochs"] = more_epochs["epochs"]
        member.identity["epochs_before"] = member.identity.get("epochs_before") or before
        if member.state == "finished":
            reopen_member(run, member, t)
    run.combined = None  # it was of the members as they had finished


def _start_run(run: RunState, event: Event) -> None:
    run.header, run.ended = event, None
    add_files(run.files, event)
    run.holes = [{**hole, "is_known": True} for hole in run.holes]
    if event.get("more_epochs"):
        give_more_epochs(run, event["more_epochs"], event["t"])
    run.starts += 1
    run.name, run.run_id = event.get("name", run.name), event.get("run_id", run.run_id)
    run.executor, run.mode = event.get("executor", run.executor), event.get("mode", run.mode)
    run.objective = event.get("objective", run.objective)
    run.direction = event.get("direction", run.direction)
    run.epochs, run.declared = event.get("epochs", run.epochs), event.get("members", run.declared)
    run.unshared.clear()
    run.bad_records.clear()  # it may be mended by now
    run.unusable.clear()
    run.quarantined.clear()  # it may be reset by now
    run.planned = None
    run.measuring.clear()
    run.combining = 0
    run.missing = run.awaited_memory = ""
    code = event.get("code")
    back = {member.id for member in run.members.values() if member.is_resumable(code)}
    run.decision_events = [
        known for known in run.decision_events if known["type"] != "failed" or known["member"] not in back
    ]
    for member in run.members.values():
        member.failures = 0
        if member.id in back:
            member.requeue(event["t"])
        if member.state not in ENDED:
            member.go_on_with(code)


def _end_run(run: RunState, event: Event) -> None:
    run.ended = event
    run.unshared = {key: e for key, e in run.unshared.items() if e["type"] == "sharing_ended"}
    run.measuring.clear()
    run.missing = run.awaited_memory = ""
    for member in run.members.values():
        if member.state in ("placed", "running"):
            member.end("stopped", event["t"])


def _note_difference(run: RunState, event: Event) -> None:
    """Takes note of samples that are not what their reader's own pipeline prepares."""
    run.differences[event.get("member"), event["split"]] = event
    if event.get("member") is None:
        return
    member = run.member(event)
    is_alone = event["action"] == "anew" or (event["action"] == "alone" and event["split"] == "train")
    member.is_alone = member.is_alone or is_alone
    if event["action"] in ("anew", "fails"):
        member.checkpoint = member.checkpoint_before = None  # of samples that it should not have seen


#: Of `group` in a `feeder` event.
_GROUP = ("generation", "nodes", "design", "preparers")


def _update_feeder(run: RunState, event: Event) -> None:
    key = (event["node"], event["cohort"])
    before = run.feeders.get(key, {})
    run.feeders[key] = event = dict(event)
    # One that takes another's place has no levels yet, and at the end the nodes part before they are stopped.
    event["fullness"] = event.get("fullness") or before.get("fullness") or {}
    if (before.get("group") or {}).get("design") and not (event.get("group") or {}).get("generation"):
        event["group"] = (event.get("group") or {}) | {name: before["group"][name] for name in _GROUP}


def _declare_member(run: RunState, event: Event) -> None:
    known = event["member"] in run.members
    member = run.member(event)
    is_restored = known and not member.is_declared  # its declaration was lost with a part of the log
    before = member.identity
    member.identity = {key: value for key, value in event.items() if key not in ("v", "t", "type")}
    if any(before.get(name) != event.get(name) for name in ("workers", "communicator", "compression")):
        member.plan = None  # it was for another exchange
    member.number = event["number"]
    member.first_epoch = event.get("first_epoch", member.first_epoch)
    if event.get("widened") and member.state == "stopped":
        member.state = "waiting"
    if known and member.state == "failed":  # it failed for good, and is declared otherwise now
        run.decision_events = [e for e in run.decision_events if e["type"] != "failed" or e["member"] != member.id]
        member.requeue(event["t"])
        member.code = run.header.get("code")
    if not known or is_restored:
        member.code = run.header.get("code")
        run.decision_events.insert(_find_place(run, member) if is_restored else len(run.decision_events), event)
        run.declared += bool(event.get("added"))


def _find_place(run: RunState, member: MemberState) -> int:
    """The place of a declaration made again among the decision events: before what follows it, by number."""
    for place, event in enumerate(run.decision_events):
        if event["member"] == member.id or (event["type"] == "member" and event["number"] > member.number):
            return place
    return len(run.decision_events)


def _apply_to_member(run: RunState, member: MemberState, event: Event) -> None:
    """Applies an event of a member's present attempt, or of a new one; the frequent types are compared first."""
    t = event["t"]
    if event["type"] in _OF_PLACED and event.get("attempt", -1) >= member.attempts:  # `placed` was lost
        member.attempt, member.attempts = event["attempt"], event["attempt"] + 1
        member.state = "running"
    match event["type"]:
        case "progress":
            member.state = "running" if member.state == "placed" else member.state
            member.epoch, member.step = event["epoch"], event["step"]
            member.steps = event.get("steps", member.steps)
            member.samples_per_s = event.get("samples_per_s", member.samples_per_s)
        case "epoch":
            _end_epoch(run, member, event)
        case "checkpoint":
            member.add_checkpoint(event)
        case "placed":
            _place(run, member, event)
        case "started":
            _start_attempt(run, member, event)
        case "moved":
            member.cohort, member.feeder = event.get("cohort"), event.get("feeder")
            if member.spans and (last := member.spans[-1]).ended is None:
                member.close_span(t, "moved")
                member.spans.append(
                    Span(last.attempt, last.node, last.devices, member.cohort, t, started=t, device=last.device)
                )
        case "damaged":
            _leave_out_damaged(run, member, event)
        case "checkpoint_reduced":
            member.reduce_checkpoint(event)
        case "plan":
            member.plan = {key: event.get(key) for key in ("tuned", "rates", "auto")}
        case "finished":
            member.end("finished", t)
            member.weights_sha256 = event.get("weights_sha256")
            member.predictions = event.get("predictions")
            if event.get("checkpoint"):  # the event about it may have been lost
                member.add_checkpoint(event["checkpoint"])
            member.checkpoint_before = None
            member.metrics = _drop_missing(event.get("metrics") or {}) or member.metrics
            member.kept, member.early_stopping = event.get("kept"), event.get("early_stopping")
            run.decision_events.append(event)
        case "cost":
            member.cost = event
            run.decision_events.append(event)
        case "pruned" | "cancelled":
            member.end(event["type"], t)
            member.checkpoint_before = None
            run.decision_events.append(event)
        case "stopped" | "paused":
            member.end(event["type"], t)
            member.epoch, member.step = event.get("epoch", member.epoch), event.get("step", member.step)
        case "resumed":
            member.requeue(t)
        case "failed":
            member.failures += 1
            member.error, member.reason = event.get("error"), event.get("reason")
            member.close_span(t, "failed")
            member.end("waiting" if event.get("retry") else "failed", t)
            if member.state == "failed":
                member.checkpoint_before = None
                run.decision_events.append(event)


def _place(run: RunState, member: MemberState, event: Event) -> None:
    run.measuring.discard(member.id)
    member.close_span(event["t"], "replaced")
    member.state, member.attempt = "placed", event["attempt"]
    member.attempts = max(member.attempts, member.attempt) + 1
    member.node, member.devices = event["node"], list(event.get("devices") or [])
    member.nodes = list(event.get("nodes") or [])
    member.cohort, member.feeder = event.get("cohort"), event.get("feeder")
    if event.get("first_epoch") is not None:
        member.first_epoch = member.identity["first_epoch"] = event["first_epoch"]
    member.spans.append(Span(event["attempt"], event["node"], member.devices, member.cohort, event["t"]))
    member.spans[-1].device = event.get("device")


def _leave_out_damaged(run: RunState, member: MemberState, event: Event) -> None:
    """A file of a member is damaged: it goes on from the checkpoint before, or begins anew."""
    member.drop_checkpoint(event["file"])
    if member.is_checkpoint_removed:
        member.predictions = None  # nothing needs them: it takes no part in a later combination
    elif member.state == "finished":
        reopen_member(run, member, event["t"])
        member.go_on_with(event.get("code", run.header.get("code")))


def reopen_member(run: RunState, member: MemberState, t: float) -> None:
    """Lets a member that has finished wait to be trained further, or to save again what it had saved."""
    run.decision_events = [
        e for e in run.decision_events if e["type"] not in ("finished", "cost") or e["member"] != member.id
    ]
    member.cost = member.weights_sha256 = member.kept = None
    member.requeue(t)
    run.combined = None  # it was of the members as they had finished


def _start_attempt(run: RunState, member: MemberState, event: Event) -> None:
    if member.state not in ENDED:
        member.state = "running"
    epoch, step = event.get("epoch", 0), event.get("step", 0)
    member.drop_epochs_from(epoch)  # what came after its checkpoint is trained again
    last = event.get("last_epoch")
    if last and last["epoch"] not in [known["epoch"] for known in member.history[-1:]]:
        # its epoch event got lost with a controller that was killed; the checkpoint knew it
        who = {key: event[key] for key in ("t", "member", "attempt")}
        _end_epoch(run, member, {**who, **last, "type": "epoch"})
    member.epoch, member.step = epoch, step
    if member.spans:
        member.spans[-1].started = event["t"]


def _end_epoch(run: RunState, member: MemberState, event: Event) -> None:
    metrics = event.get("metrics") or {}
    if None in metrics.values() or "metrics" not in event:
        metrics = _drop_missing(metrics)
        event = {**event, "metrics": metrics}
    member.drop_epochs_from(event["epoch"])
    member.history.append(event)
    member.metrics, member.epoch, member.step = metrics, event["epoch"] + 1, 0
    member.samples_per_s = event.get("samples_per_s", member.samples_per_s)
    run.decision_events.append(event)


def _drop_missing(metrics: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value is not None}
