"""Notices: what did not go as planned, by the event log: failures, restarts, skipped records, interruptions."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ensemble.events as events
from ensemble.events import Event
from ensemble.reporting import text
from ensemble.reporting.sections.training import group_causes
from ensemble.spec import functions
from ensemble.spec.splits import describe_overlap

if TYPE_CHECKING:
    from ensemble.store import RunState

MOST_NAMED = 12  # of those of whom a notice says the same
MOST_SAID = 80  # characters of an error that is said in full elsewhere


@dataclass(frozen=True)
class Notice:
    """One thing that a reader should know of.

    Attributes:
        at_s: seconds since the start.
        level: `error`, `warning` or `info`.
        text: what.
        who: what of `text` names the member, with its attempt or epoch; empty where it is of the run.
        cause: the rest of `text`, which notices of several members may have in common.
    """

    at_s: float
    level: str
    text: str
    who: str
    cause: str


def _where(event: Any) -> str:
    return f"{event.node}, stream group {event.cohort}"


_ACTIONS = {
    "none": "they differ by rounding only and are used",
    "alone": "so it prepares its own from the start",
    "anew": "so it begins again with batches of its own",
    "fails": "so it fails (verify_sharing='fail')",
    "renewed": "so the cache is filled again",
}
_LOGGERS = {"failing": "fails, the run goes on", "works": "works again", "ended": "has ended, the run goes on"}


def describe(event: Event) -> str:
    """An event of a run, its nodes or its streams as a sentence."""
    match event:
        case events.Unmeasured():  # the failure of a member itself says the whole of the error
            why = textwrap.shorten(event.error or "no message", MOST_SAID, placeholder=" ...")
            return f"{', '.join(event.members)}: not measured, placed by default estimates: {why}"
        case events.Rehearsed():
            found = [
                *event.refused,
                *event.remarks,
                *([f"not to its end: {event.failed}"] if event.failed else []),
            ]
            return f"rehearsal of {event.of}: {'; '.join(found)}"
        case events.BadRecord():
            which = f"sample {event.index} of {event.split} ({event.where})"
            return f"{which}: {event.reason}; it is left out from now on"
        case events.LoggerChanged():
            what = event.logger if event.logger == "mirror" else f"logger {event.logger}"
            return f"the {what} {_LOGGERS[event.state]}{f': {event.detail}' if event.detail else ''}"
        case events.GpuQuarantined():
            return f"{event.node}: GPU {event.gpu} is not used any more: {event.detail}"
        case events.NodeUnusable():
            again = f"; it is tried again after {event.retry_s:g} s" if event.retry_s is not None else ""
            return f"{event.node}: nothing can be started there: {event.detail}{again}"
        case events.FeederLost():
            return f"{_where(event)}: the feeder ended, its members prepare for themselves: {event.detail}"
        case events.SharingEnded(node=None):
            return f"nothing is shared, every member prepares its own batches: {event.detail}"
        case events.SharingEnded():
            return f"{_where(event)}: sharing ended for good, its members prepare for themselves: {event.detail}"
        case events.SampleDifference():
            return _describe_difference(event)
    raise TypeError(f"no text for {event.type}")


def _describe_difference(event: events.SampleDifference) -> str:
    where = f"epoch {event.epoch}, position {event.place} (sample {event.index})"
    if event.result == "left_out":
        return f"{event.member}: shared samples of {event.split} are not compared, {where}: {event.detail}"
    if event.member is None:
        who = f"samples of {event.split} kept in a cache differ from what the pipeline prepares"
    else:
        who = f"{event.member}: shared samples of {event.split} differ from what its own pipeline prepares"
    return f"{who}, {where}: {event.detail}; {_ACTIONS[event.action]}"


def describe_early_stop(member: str, epochs: int, stop: Mapping[str, Any]) -> str:
    """Returns why a member ended before its last epoch, as a sentence.

    Args:
        epochs: that it has trained.
        stop: the field `early_stopping` of its `finished` event.
    """
    if "reason" in stop:
        return f"{member}: ended after {epochs} of {stop['epochs']} epochs: {stop['reason']}"
    best, patience = stop["best"], text.count(stop["patience"], "epoch")
    why = f"{best['metric']} has not improved for {patience}"
    value = f"{text.score(best['value'])} in epoch {best['epoch'] + 1}"
    return f"{member}: stopped early after {epochs} of {stop['epochs']} epochs: {why} (best: {value})"


def describe_remarks(state: RunState) -> list[str]:
    """Returns what members have remarked, a line for each remark."""
    remarks = {(m.id, remark): remark for m in state.members.values() for remark in m.remarks}
    for one in state.members.values():
        if (result := one.result) is not None:
            until = f"until it has finished all {one.identity['epochs']} epochs"
            remarks[one.id, "result"] = f"it is {one.state}: {until}, its result is that of {result.epoch}"
    causes = group_causes(remarks)
    rehearsed = [one for one in state.rehearsed if one.code == state.header.code]
    return [describe(one) for one in rehearsed if one.refused or one.remarks or one.failed] + [
        f"{text.names([member for member, _ in keys], MOST_NAMED)}: {remark}" for remark, keys in causes
    ]


_REMEDIES: dict[str, Callable[[events.Remedy], str]] = {
    "alone": lambda event: "it prepares its own batches from its next epoch on",
    "move": lambda event: f"it reads stream group {event.cohort} from its next epoch on",
    "apart": lambda event: f"a stream of their own, stream group {event.cohort}, from the next epoch on",
    "widen": lambda event: f"it goes on with {event.workers} workers",
}


def _split(member: str, what: str) -> tuple[str, str]:
    """Returns whom a notice is of, and what it says of them: of one that does not begin with a member all."""
    more, colon, cause = what[len(member) :].partition(": ")
    return (member + more, cause) if member and colon and what.startswith(member) else ("", what)


def group_notices(notices: Sequence[Notice], of: Iterable[Notice] | None = None) -> list[dict[str, Any]]:
    """Returns notices as the page draws them: those that say the same of several members once, the newest last.

    Args:
        of: only groups that hold one of these.

    Returns:
        `key` of a group, which it keeps; `at_s` and `level` of its last notice; `text`; `who`: whom it is of,
        where there are several; `count`.
    """
    wanted = None if of is None else {(notice.level, notice.cause) for notice in of}
    causes = {at: (notice.level, notice.cause) for at, notice in enumerate(notices)}
    chosen = {at: cause for at, cause in causes.items() if wanted is None or cause in wanted}
    groups = []
    for (level, cause), places in sorted(group_causes(chosen), key=lambda notice: notice[1][-1]):
        last, many = notices[places[-1]], len(places)
        who = text.names([notices[at].who for at in places if notices[at].who], MOST_NAMED)
        words = {"text": last.text, "who": ""} if many == 1 else {"text": f"{many} × {cause}", "who": who}
        groups.append({"key": f"{level} {places[0]}", "at_s": last.at_s, "level": level, "count": many, **words})
    return groups


class NoticeCollector:
    """Finds the notices of a log while it grows."""

    def __init__(self) -> None:
        self._begin: float | None = None
        self._minimizes_energy = False
        self._feeders: dict[str, events.Feeder] = {}  # the last event of each
        self._attempts: Counter[str] = Counter()
        self._bad: set[tuple[str, int]] = set()

    def apply(self, event: Event) -> list[Notice]:
        """Returns the notices of the next event."""
        if self._begin is None or (isinstance(event, events.RunStarted) and not event.resumed):
            self._begin = event.t
        member = event.member if isinstance(event, events.MemberEvent) else ""
        return [
            Notice(event.t - self._begin, level, what, *_split(member, what))
            for level, what in self._describe(event)
        ]

    def _describe(self, event: Event) -> Iterator[tuple[str, str]]:
        """Yields (level, text)."""
        if isinstance(event, events.MemberEvent):
            yield from self._describe_member(event)
        else:
            yield from self._describe_run(event)

    def _describe_member(self, event: events.MemberEvent) -> Iterator[tuple[str, str]]:
        member = event.member
        match event:
            case events.Placed():
                self._attempts[member] += 1
            case events.Failed():
                after = "it will be tried again" if event.retry else "it is not tried again"
                after += "" if event.retry or event.reason == "nan" else " before a resume"
                why = f"({event.reason or 'error'}): {event.error or 'no message'}"
                level = "warning" if event.retry else "error"
                yield level, f"{member}, attempt {self._attempts[member]}: failed {why}; {after}"
            case events.Started() if self._attempts[member] > 1:
                epoch, step = event.epoch or 0, event.step or 0
                where = f"goes on at epoch {epoch + 1}, step {step}" if epoch or step else "starts again"
                yield "info", f"{member}, attempt {self._attempts[member]}: {where}"
            case events.Damaged():
                yield "warning", f"{member}: {event.error}: it goes on from undamaged files"
            case events.MemoryIncrease():
                amounts = [(event.memory_gb, "GiB"), (event.gpus_per_worker, "of a GPU")]
                more = " and ".join(f"{value:g} {unit}" for value, unit in amounts if value is not None)
                yield "info", f"{member} and members like it get {more} for each worker from now on"
            case events.Cost() if self._minimizes_energy and event.energy_origin == "estimated":
                self._minimizes_energy = False  # once is enough
                yield "info", f"the search minimizes estimated joules. {text.ESTIMATED}"
            case events.UnusedHyperparameters():
                yield "warning", f"{functions.describe_unused(event.params, event.meant)} ({member})"
            case events.Remark():
                yield "warning", f"{member}: {event.text}"
            case events.Finished() if event.early_stopping:
                yield "info", describe_early_stop(member, (event.epoch or 0) + 1, event.early_stopping)
            case events.Cancelled() | events.Paused() | events.Resumed():
                yield "info", f"{member}: {event.type}"
            case events.Epoch():
                where = f"{member}, epoch {event.epoch + 1}"
                if event.skipped_steps:
                    steps = text.count(event.skipped_steps, "step")
                    yield "info", f"{where}: {steps} skipped because gradients were not finite"
                if event.private_skipped:
                    yield (
                        "warning",
                        f"{where}: {text.count(event.private_skipped, 'record')} could not be prepared",
                    )
            case events.DeviceChanged():
                changed = f"{event.device} instead of {event.before}"
                yield "warning", f"{member}: trains on another device than before: {changed}"

    def _describe_run(self, event: Event) -> Iterator[tuple[str, str]]:
        match event:
            case events.Unmeasured() | events.FeederLost() | events.SharingEnded() | events.NodeUnusable():
                yield "warning", describe(event)
            case events.Rehearsed() if event.refused or event.remarks or event.failed:
                yield "warning", describe(event)
            case events.Remedy():
                what = _REMEDIES[event.what](event)
                yield "info", f"{', '.join(event.members)}: {what}, so that the run ends sooner"
            case events.Feeder():
                yield from self._describe_feeder(event)
            case events.BadRecord() if (event.split, event.index) not in self._bad:
                self._bad.add((event.split, event.index))
                yield "warning", describe(event)
            case events.SampleDifference():
                yield "info" if event.action == "none" else "warning", describe(event)
            case events.FeederRestarted():
                yield "info", f"{_where(event)}: another feeder took its place ({event.restarts}×)"
            case events.GpuQuarantined():
                yield "error", describe(event)
            case events.AgentReplaced():
                yield "warning", f"{event.node}: its agent ended, another took its place: {event.detail}"
            case events.NodeDraining():
                what = "the cluster drains it: its members write checkpoints and move to other nodes"
                yield "info", f"{event.node}: {what}"
            case events.CodeChanged():
                parts = ", ".join(event.changed) or "which parts is not known"
                earlier = f"; weights of the earlier code: {', '.join(event.trained)}" if event.trained else ""
                yield "warning", f"the code changed ({parts}){earlier}"
            case events.LoggerChanged() if event.state != "works":
                yield "warning", describe(event)
            case events.RequestAnswered() if event.done:
                whose = "" if event.by is None else f", asked for by {event.by}"
                several = text.count(len(event.members), "member") if event.members else "the run"
                yield "info", f"{event.verb} {event.member or several}{whose}: {event.message}"
            case events.Combined() if event.reason and event.left_out and not event.members:
                yield "warning", f"there is no combined model: {event.reason}"
            case events.RunStopped():
                yield "warning", f"the run was stopped ({event.reason or 'no reason given'})"
            case events.RunStarted():
                names = [event.second_objective, *(objective.name for objective in event.further_objectives)]
                self._minimizes_energy = self._minimizes_energy or "energy_j" in names
                if event.resumed:
                    yield "info", "the run was resumed"
                else:
                    yield from (("warning", describe_overlap(row)) for row in event.overlap)
                    rows = [[" ".join(row.split()) for row in table.splitlines()] for table in event.tables]
                    yield from (("info", "; ".join(table)) for table in rows)

    def _describe_feeder(self, event: events.Feeder) -> Iterator[tuple[str, str]]:
        where = _where(event)
        before = self._feeders.get(where, events.Feeder(node=event.node, cohort=event.cohort))
        self._feeders[where] = event
        if (more := event.skipped - before.skipped) > 0:
            yield "warning", f"{where}: {text.count(more, 'record')} could not be prepared, for every member"
        if (again := event.restarts - before.restarts) > 0:
            yield "warning", f"{where}: preparation workers restarted {again}×"
        if (alone := event.detached - before.detached) > 0:
            yield "info", f"{where}: a member kept the others waiting and now prepares its own batches, {alone}×"
