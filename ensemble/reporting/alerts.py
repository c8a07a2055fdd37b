"""Alerts: what of a run somebody wants to know who does not look at it. Pure: events in, alerts out.

    reader, gate = AlertReader(), AlertGate()
    for event in events:
        gate.add(reader.read(event))
    gate.add(reader.look(now))
    while (alert := gate.next(now)) is not None:
        send(alert)
        gate.confirm(alert, now)

A reader says each thing once of each member; the gate joins those that have one cause, and lets none of it pass
twice within a minute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from ensemble.events import AttemptEvent, Epoch, Event, Failed, Placed, RunFinished, RunStarted, Started, StepsDone
from ensemble.meter import LedgerView
from ensemble.reporting import text
from ensemble.search.budget import RESERVE, UNITS, measure_budget
from ensemble.store.event_handlers import EVENT_ERRORS, apply_event
from ensemble.store.state import RunState

KINDS = ("run_failed", "run_ended", "run_stopped", "run_lost", "failed", "diverged", "stalled", "budget")
LEAST_STALL_S = 60.0  # without a step, however short an epoch is
SPACING_S = 60.0  # between two alerts of one cause
FAR = 10.0  # times a member's least training loss, from which on it has diverged, if its first was less, too
LONGEST = 1000  # characters of a text
BUDGET_S = 15.0  # between two looks at what of a budget is used
LEVELS = (0.8, 1.0)  # of a budget
_NUMBERS = re.compile(r"\d+(?:\.\d+)?")  # such as steps and learning rates: causes that differ by them are one


@dataclass(frozen=True)
class Alert:
    """One thing that somebody is told.

    Attributes:
        kind: of `KINDS`.
        cause: alerts of one cause are joined.
        what: of whom it is said apart.
        t: Unix seconds.
        who: the members.
        once: whether nothing of this cause is ever said again.
    """

    kind: str
    cause: str
    what: str
    t: float
    who: tuple[str, ...] = ()
    once: bool = False

    @property
    def text(self) -> str:
        """What it says, for people."""
        many = f"{len(self.who)} × " if len(self.who) > 1 else ""
        names = f"{text.names(self.who)}: " if self.who else ""
        said = text.visible(f"{names}{many}{' '.join(self.what.split())}")
        return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"

    def as_message(self, run: str, page: str | None) -> dict[str, Any]:
        """What is sent.

        Args:
            run: its name.
            page: address of the live page.
        """
        time = datetime.fromtimestamp(self.t, UTC).isoformat(timespec="seconds")
        found = {"run": run, "kind": self.kind, "text": f"{run}: {self.text}", "members": list(self.who)}
        return found | {"time": time, **({} if page is None else {"page": page})}


class AlertReader:
    """Finds the alerts of a run in its events.

    Attributes:
        state: the run's state after the events so far.

    Args:
        stalled_after: see `ensemble.spec.Notify`.
        state, used: of a run that is folded elsewhere; then `find` is called in place of `read`.
    """

    def __init__(
        self, stalled_after: float = 5.0, state: RunState | None = None, used: LedgerView | None = None
    ) -> None:
        self.state, self._used = state or RunState(), used or LedgerView()
        self._stalled_after = stalled_after
        self._moved: dict[str, float] = {}  # when members that are at work made their last step
        self._stalled, self._diverged = set[str](), set[str]()
        self._first: dict[str, float] = {}  # training loss of each member
        self._least: dict[str, float] = {}
        self._levels: dict[str, float] = {}  # of the budget that were said
        self._budget_at = 0.0

    def read(self, event: Event) -> list[Alert]:
        """Applies the next event, and returns its alerts."""
        try:
            self._used.apply(event)
            apply_event(self.state, event)
        except EVENT_ERRORS:  # a line of the log that makes no sense is said elsewhere
            return []
        return self.find(event)

    def find(self, event: Event) -> list[Alert]:
        """Returns the alerts of an event that was applied."""
        if isinstance(event, RunStarted):
            self._moved.clear()
        if isinstance(event, AttemptEvent):
            self._note_step(event)
        if isinstance(event, Failed) and not event.retry:
            kind = "diverged" if event.reason == "nan" else "failed"
            what = f"failed ({event.reason or 'error'}): {event.error or 'no message'}"
            return [Alert(kind, _NUMBERS.sub("#", what), what, event.t, (event.member,))]
        if isinstance(event, Epoch):
            return self._find_divergence(event)
        return self.describe_end() if event is self.state.ended else []

    def describe_end(self) -> list[Alert]:
        """Returns that the run has ended, if it has."""
        ended, cause = self.state.ended, f"end of start {self.state.starts}"
        if ended is None:
            return []
        counts = dict.fromkeys(member.state for member in self.state.members.values())
        states = {state: sum(each.state == state for each in self.state.members.values()) for state in counts}
        how = ", ".join(f"{many} {state}" for state, many in states.items()) or "no members"
        if not isinstance(ended, RunFinished):
            return [
                Alert(
                    "run_stopped",
                    cause,
                    f"stopped ({ended.reason or 'no reason given'}): {how}",
                    ended.t,
                    (),
                    True,
                )
            ]
        kind, word = (
            ("run_ended", "ended") if states.get("finished") else ("run_failed", "failed, no member finished")
        )
        return [Alert(kind, cause, f"{word}: {how}", ended.t, (), True)]

    def describe_loss(self, now: float) -> list[Alert]:
        """Returns that the process that drove the run is gone."""
        if self.state.ended is not None:
            return []
        what = "the process that drives the run is gone; `ensemble resume` goes on"
        return [Alert("run_lost", f"loss of start {self.state.starts}", what, now, (), True)]

    def look(self, now: float) -> list[Alert]:
        """Returns the alerts that come with time, in Unix seconds: who makes no step, what of a budget is used."""
        if self.state.ended is not None:
            return []
        found = []
        for member, since in self._moved.items():
            usual_s = self._usual_epoch_s(member)
            if usual_s is None or member in self._stalled:
                continue
            if now - since > max(LEAST_STALL_S, self._stalled_after * usual_s):
                self._stalled.add(member)
                what = f"no step for more than {self._stalled_after:g} times its usual epoch"
                found.append(Alert("stalled", "stalled", what, now, (member,)))
        if self.state.header.budget and now >= self._budget_at:
            self._budget_at = now + BUDGET_S
            found += self._find_used_budget(self.state.header.budget, now)
        return found

    def _note_step(self, event: AttemptEvent) -> None:
        if isinstance(event, Placed | Started | StepsDone | Epoch):
            self._moved[event.member] = event.t
            self._stalled.discard(event.member)
        member = self.state.members.get(event.member)
        if member is None or member.state != "running":
            self._moved.pop(event.member, None)

    def _usual_epoch_s(self, member: str) -> float | None:
        known = self.state.members.get(member)
        took = [epoch.wall_s for epoch in known.history[-5:] if epoch.wall_s] if known is not None else []
        return median(took) if took else None

    def _find_divergence(self, event: Epoch) -> list[Alert]:
        member, loss, where = event.member, event.train_loss, f"after epoch {event.epoch + 1}"
        objective = self.state.objective
        if member in self._diverged:
            return []
        what = None
        if event.metrics.get(objective, 0.0) is None:  # the log's word for NaN and infinities
            what = f"diverged: {objective} is not a number {where}"
        elif loss is not None and math.isfinite(loss):
            least = min(loss, self._least.get(member, math.inf))
            first = self._first.setdefault(member, loss)
            if (
                0 < FAR * least < loss and first < loss
            ):  # one that has fitted its data goes up and down far below it
                what = f"diverged: a training loss of {loss:.3g} {where}, {FAR:g} times its least"
            self._least[member] = least
        if what is None:
            return []
        self._diverged.add(member)
        return [Alert("diverged", "diverged", what, event.t, (member,))]

    def _find_used_budget(self, budget: Mapping[str, float], now: float) -> list[Alert]:
        found = []
        for limit in measure_budget(budget, self.state, self._used.read().run, now):
            share = 0.0 if limit.used is None or limit.name == "trials" else limit.used / (limit.limit or 1.0)
            level = max(
                (each for each in LEVELS if share >= each * (1 - RESERVE if each == 1 else 1)), default=0.0
            )
            if level > self._levels.get(limit.name, 0.0):
                self._levels[limit.name] = level
                what = f"{level:.0%} of the budget of {UNITS[limit.name]} is used: {limit}"
                cause = f"{limit.name} {level:.0%} of {limit.limit:g}"
                found.append(Alert("budget", cause, what, now, (), True))
        return found


class AlertGate:
    """Holds alerts until they may pass.

    Args:
        kept: `keep()` of an earlier gate.
        spacing_s: between two alerts of one cause.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None, spacing_s: float = SPACING_S) -> None:
        kept = kept or {}
        self._sent: dict[str, float] = dict(kept.get("sent", {}))
        self._held = [Alert(**each | {"who": tuple(each["who"])}) for each in kept.get("held", ())]
        self._spacing_s = spacing_s

    def keep(self) -> dict[str, Any]:
        """What the gate of a later process begins with, as JSON holds it."""
        return {"sent": self._sent, "held": [asdict(each) for each in self._held]}

    def add(self, alerts: Iterable[Alert]) -> None:
        """Takes alerts, but for those that are never said again."""
        for each in alerts:
            if not (
                each.once and (each.cause in self._sent or any(each.cause == held.cause for held in self._held))
            ):
                self._held.append(each)

    def next(self, now: float) -> Alert | None:
        """The next alert that may pass, with all of its cause that have come meanwhile; None if none may.

        Args:
            now: Unix seconds; infinity: nothing is held back any longer.
        """
        for each in self._held:
            if now - self._sent.get(each.cause, -math.inf) >= self._spacing_s:
                same = [other for other in self._held if other.cause == each.cause]
                who = tuple(dict.fromkeys(name for other in same for name in other.who))
                return Alert(each.kind, each.cause, each.what, same[-1].t, who, each.once)
        return None

    def confirm(self, alert: Alert, now: float) -> None:
        """Notes that it was sent."""
        self._sent[alert.cause] = now
        self._held = [each for each in self._held if each.cause != alert.cause]
