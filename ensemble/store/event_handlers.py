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

from collections.abc import Callable, Iterable

from ensemble.store.member import ENDED, Event, MemberState, Span
from ensemble.store.state import RunState


def fold(events: Iterable[Event]) -> RunState:
    """Returns the state after these events, the first of which is the log's first."""
    state = RunState()
    for event in events:
        apply_event(state, event)
    return state


def apply_event(run: RunState, event: Event) -> None:
    """Updates a run's state by its next event; an event of an unknown type changes only the time."""
    if event["type"] == "run_started" and run.updated is not None:
        run.idle_s += event["t"] - run.updated  # negative where an older log has the clock set back
    run.updated = event["t"]
    if (handle_run := RUN_HANDLERS.get(event["type"])) is not None:
        handle_run(run, event)
    elif (handle_member := MEMBER_HANDLERS.get(event["type"])) is not None:
        member = run.member(event)
        if event.get("attempt", member.attempt) >= member.attempt:  # else: a late event of an earlier attempt
            handle_member(run, member, event)


def _on_run_started(run: RunState, event: Event) -> None:
    run.header, run.ended = event, None
    run.started = event["t"] if run.started is None else run.started
    run.starts += 1
    run.name, run.run_id = event.get("name", run.name), event.get("run_id", run.run_id)
    run.executor, run.mode = event.get("executor", run.executor), event.get("mode", run.mode)
    run.objective = event.get("objective", run.objective)
    run.direction = event.get("direction", run.direction)
    run.epochs, run.declared = event.get("epochs", run.epochs), event.get("members", run.declared)
    run.usage.clear()  # process ids start over
    run.unshared.clear()
    run.bad_records.clear()  # it may be mended by now
    run.planned = None
    run.measuring.clear()
    code = event.get("code")
    back = {member.id for member in run.members.values() if member.is_resumable(code)}
    run.trail = [known for known in run.trail if known["type"] != "failed" or known["member"] not in back]
    for member in run.members.values():
        member.failures = 0
        if member.id in back:
            member.end("waiting", event["t"])
            member.node, member.devices, member.cohort, member.feeder = None, [], None, None
        if member.state not in ENDED:
            member.code = code


def _on_run_ended(run: RunState, event: Event) -> None:
    run.ended = event
    run.unshared = {key: e for key, e in run.unshared.items() if e["type"] == "sharing_ended"}
    run.measuring.clear()
    for member in run.members.values():
        if member.state in ("placed", "running"):
            member.end("stopped", event["t"])


def _on_node(run: RunState, event: Event) -> None:
    run.node(event["node"]).info = event


def _on_power(run: RunState, event: Event) -> None:
    run.node(event["node"]).watts = event.get("watts")


def _on_usage(run: RunState, event: Event) -> None:
    node, role, cpu_s = event["node"], event["role"], event.get("cpu_s")
    if cpu_s is None:
        return
    key = (node, event.get("pid"), role)
    last = run.usage.get(key)
    new = cpu_s - last["cpu_s"] if last and last["cpu_s"] <= cpu_s else cpu_s  # less than before: another process
    run.usage[key] = event
    run.cpu_s[role] = run.cpu_s.get(role, 0.0) + new
    if event.get("member") is not None:
        member = run.member(event)
        member.cpu_s[role] = member.cpu_s.get(role, 0.0) + new


def _on_feeder(run: RunState, event: Event) -> None:
    key = (event["node"], event["cohort"])
    before = run.feeders.get(key, {})
    run.feeders[key] = event = dict(event)
    # One that takes another's place has no levels yet, and at the end the nodes part before they are stopped.
    event["fullness"] = event.get("fullness") or before.get("fullness") or {}
    if (before.get("group") or {}).get("design") and not (event.get("group") or {}).get("generation"):
        event["group"] = (event.get("group") or {}) | {name: before["group"][name] for name in _GROUP}


def _on_bad_record(run: RunState, event: Event) -> None:
    run.bad_records.setdefault((event["split"], event["index"]), event)


def _on_feeder_lost(run: RunState, event: Event) -> None:
    run.unshared[event["node"], event["cohort"]] = event


def _on_feeder_restarted(run: RunState, event: Event) -> None:
    run.unshared.pop((event["node"], event["cohort"]), None)


_GROUP = ("generation", "nodes", "design", "preparers")


def _on_measuring(run: RunState, event: Event) -> None:
    run.measuring |= set(event["members"])


def _on_unmeasured(run: RunState, event: Event) -> None:
    run.measuring -= set(event["members"])


def _on_planned(run: RunState, event: Event) -> None:
    run.planned = event


def _on_profile(run: RunState, event: Event) -> None:
    run.profiles[event["shape"], event["device"]] = event
    run.measuring -= set(event["members"])


def _on_room(run: RunState, event: Event) -> None:
    run.rooms.append(event)


def _on_combined(run: RunState, event: Event) -> None:
    run.combined = event


def _on_member(run: RunState, event: Event) -> None:
    known = event["member"] in run.members
    member = run.member(event)
    member.identity = {key: value for key, value in event.items() if key not in ("v", "t", "type")}
    member.number = event["number"]
    member.first_epoch = event.get("first_epoch", member.first_epoch)
    if event.get("widened") and member.state == "stopped":
        member.state = "waiting"
    if known and member.state == "failed":  # it failed for good, and is declared otherwise now
        run.trail = [e for e in run.trail if e["type"] != "failed" or e["member"] != member.id]
        member.end("waiting", event["t"])
        member.node, member.devices, member.cohort, member.feeder = None, [], None, None
        member.code = run.header.get("code")
    if not known:
        member.code = run.header.get("code")
        run.trail.append(event)
        run.declared += bool(event.get("added"))


def _on_placed(run: RunState, member: MemberState, event: Event) -> None:
    run.measuring.discard(member.id)
    member.close_span(event["t"], "replaced")
    member.state, member.attempt = "placed", event["attempt"]
    member.attempts += 1
    member.node, member.devices = event["node"], list(event.get("devices") or [])
    member.cohort, member.feeder = event.get("cohort"), event.get("feeder")
    if event.get("first_epoch") is not None:
        member.first_epoch = member.identity["first_epoch"] = event["first_epoch"]
    member.spans.append(Span(event["attempt"], event["node"], member.devices, member.cohort, event["t"]))


def _on_waiting(run: RunState, member: MemberState, event: Event) -> None:
    member.waits_for = event.get("detail")


def _on_started(run: RunState, member: MemberState, event: Event) -> None:
    member.waits_for = None
    if member.state not in ENDED:
        member.state = "running"
    epoch, step = event.get("epoch", 0), event.get("step", 0)
    member.drop_epochs_from(epoch)  # what came after its checkpoint is trained again
    last = event.get("last_epoch")
    if last and last["epoch"] not in [known["epoch"] for known in member.history[-1:]]:
        # its epoch event got lost with a controller that was killed; the checkpoint knew it
        _on_epoch(
            run, member, {**{key: event[key] for key in ("t", "member", "attempt")}, **last, "type": "epoch"}
        )
    member.epoch, member.step = epoch, step
    if member.spans:
        member.spans[-1].started = event["t"]


def _on_progress(run: RunState, member: MemberState, event: Event) -> None:
    if member.state == "placed":
        member.state = "running"
    member.epoch, member.step = event["epoch"], event["step"]
    member.steps = event.get("steps", member.steps)
    member.samples_per_s = event.get("samples_per_s", member.samples_per_s)


def _on_moved(run: RunState, member: MemberState, event: Event) -> None:
    member.cohort, member.feeder = event.get("cohort"), event.get("feeder")
    if member.spans and member.spans[-1].ended is None:
        last = member.spans[-1]
        member.close_span(event["t"], "moved")
        member.spans.append(
            Span(last.attempt, last.node, last.devices, member.cohort, event["t"], started=event["t"])
        )


def _on_plan(run: RunState, member: MemberState, event: Event) -> None:
    member.plan = {key: event.get(key) for key in ("tuned", "rates", "auto")}


def _on_epoch(run: RunState, member: MemberState, event: Event) -> None:
    metrics = event.get("metrics") or {}
    if None in metrics.values():
        metrics = {name: value for name, value in metrics.items() if value is not None}
        event = {**event, "metrics": metrics}
    member.drop_epochs_from(event["epoch"])
    member.history.append(event)
    member.metrics, member.epoch, member.step = metrics, event["epoch"] + 1, 0
    member.samples_per_s = event.get("samples_per_s", member.samples_per_s)
    run.trail.append(event)


def _on_checkpoint(run: RunState, member: MemberState, event: Event) -> None:
    member.checkpoint = event


def _on_finished(run: RunState, member: MemberState, event: Event) -> None:
    member.end("finished", event["t"])
    member.weights_sha256 = event.get("weights_sha256")
    known = {name: value for name, value in (event.get("metrics") or {}).items() if value is not None}
    member.metrics = known or member.metrics
    run.trail.append(event)


def _on_pruned(run: RunState, member: MemberState, event: Event) -> None:
    member.end("pruned", event["t"])
    run.trail.append(event)


def _on_stopped(run: RunState, member: MemberState, event: Event) -> None:
    member.end("stopped", event["t"])
    member.epoch, member.step = event.get("epoch", member.epoch), event.get("step", member.step)


def _on_paused(run: RunState, member: MemberState, event: Event) -> None:
    member.end("paused", event["t"])
    member.epoch, member.step = event.get("epoch", member.epoch), event.get("step", member.step)


def _on_resumed(run: RunState, member: MemberState, event: Event) -> None:
    member.end("waiting", event["t"])
    member.node, member.devices, member.cohort, member.feeder = None, [], None, None


def _on_cancelled(run: RunState, member: MemberState, event: Event) -> None:
    member.end("cancelled", event["t"])
    run.trail.append(event)


def _on_failed(run: RunState, member: MemberState, event: Event) -> None:
    member.failures += 1
    member.error, member.reason = event.get("error"), event.get("reason")
    member.close_span(event["t"], "failed")
    member.end("waiting" if event.get("retry") else "failed", event["t"])
    if member.state == "failed":
        run.trail.append(event)


RUN_HANDLERS: dict[str, Callable[[RunState, Event], None]] = {
    "run_started": _on_run_started,
    "run_finished": _on_run_ended,
    "run_stopped": _on_run_ended,
    "node": _on_node,
    "power": _on_power,
    "usage": _on_usage,
    "feeder": _on_feeder,
    "bad_record": _on_bad_record,
    "feeder_lost": _on_feeder_lost,
    "feeder_restarted": _on_feeder_restarted,
    "sharing_ended": _on_feeder_lost,
    "profile": _on_profile,
    "planned": _on_planned,
    "measuring": _on_measuring,
    "unmeasured": _on_unmeasured,
    "room": _on_room,
    "combined": _on_combined,
    "member": _on_member,
}
MEMBER_HANDLERS: dict[str, Callable[[RunState, MemberState, Event], None]] = {
    "placed": _on_placed,
    "waiting": _on_waiting,
    "started": _on_started,
    "progress": _on_progress,
    "moved": _on_moved,
    "plan": _on_plan,
    "epoch": _on_epoch,
    "checkpoint": _on_checkpoint,
    "finished": _on_finished,
    "pruned": _on_pruned,
    "stopped": _on_stopped,
    "paused": _on_paused,
    "resumed": _on_resumed,
    "cancelled": _on_cancelled,
    "failed": _on_failed,
}
