"""Projects a run into the documents that the page draws, and into changes of them while the run goes on.

    view = RunView(run_dir)
    for events, offset in read_batches(run_dir.events):
        view.apply(events, offset)
    view.state_document()       # all of it
    view.take_change()          # what has changed since; None if nothing

A change holds the present rows of whatever events have touched, so applying one twice is harmless, and one that
was missed is made again from the events (`change_since`). Figures of cost take long in a large run: they are
computed at most every two seconds, and for a small share of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ensemble.events import AttemptEvent, Epoch, MemberDeclared, Power, RequestAnswered, RunStarted, Started
from ensemble.meter import Ledger, LedgerView
from ensemble.reporting.dashboard import rows
from ensemble.reporting.dashboard.curves import Curves
from ensemble.reporting.dashboard.member_log import excerpt
from ensemble.reporting.dashboard.progress import list_improvements, plot_progress
from ensemble.reporting.dashboard.run_section import describe_run
from ensemble.reporting.dashboard.streams import StreamRates, describe_streams
from ensemble.reporting.dashboard.tables import describe_tables
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections.notices import Notice, NoticeCollector, group_notices
from ensemble.reporting.time_left import TimeLeftEstimator
from ensemble.store.event_handlers import apply_event
from ensemble.store.folding import EVENT_ERRORS, make_event_error
from ensemble.store.state import RunState

if TYPE_CHECKING:
    from ensemble.events import Event
    from ensemble.store.rundir import RunDir

VERSION = 1
COST_EVERY_S = 2.0
PROGRESS_EVERY_S = 1.0
#: Times as long as computing it took, until what is computed from all members is computed again.
PAUSE = 60.0

#: Types of events after which the analyses of predictions and hyperparameters are another.
OF_ANALYSES = {
    "quality": frozenset(("finished", "combined", "run_started")),
    "importances": frozenset(("finished", "pruned")),
}
_OF_SPANS = frozenset(
    ("placed", "started", "moved", "finished", "pruned", "stopped", "paused", "resumed", "cancelled", "failed")
)
_OF_NODES = frozenset(("node", "power", "gpu_quarantined", "node_lost", "node_draining"))
_OF_STREAMS = frozenset(("feeder", "feeder_lost", "feeder_restarted", "sharing_ended", "bad_record"))
_OF_ALL_MEMBERS = frozenset(("run_started", "run_finished", "run_stopped"))


@dataclass
class Touched:
    """What events have touched: names of the sections that are sent whole, and members by name."""

    sections: set[str] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    spans: set[str] = field(default_factory=set)
    all_members: bool = False
    analyses: set[str] = field(default_factory=set)
    answers: list[dict[str, Any]] = field(default_factory=list)

    def note(self, event: Event) -> None:
        """Adds what an event touches."""
        kind = event.type
        self.sections |= {"run", "cost", "progress"}
        if isinstance(event, AttemptEvent | MemberDeclared):
            self.members.add(event.member)
            if kind in _OF_SPANS:
                self.spans.add(event.member)
        elif kind in _OF_NODES:
            self.sections.add("nodes")
        elif kind in _OF_STREAMS:
            self.sections.add("streams")
        elif kind in _OF_ALL_MEMBERS:
            self.all_members = True
            self.sections |= {"nodes", "streams"}
        elif isinstance(event, RequestAnswered):
            self.answers.append(
                {name: getattr(event, name) for name in ("request", "verb", "member", "done", "message")}
            )
        self.analyses |= {name for name, kinds in OF_ANALYSES.items() if kind in kinds}


@dataclass
class Pace:
    """When something is computed again: `every_s` at the least, and so that it takes a small share of the time."""

    every_s: float = 0.0
    next: float = 0.0

    def note(self, began: float, ended: float) -> None:
        """Notes that it was computed."""
        self.next = ended + max(self.every_s, PAUSE * (ended - began))


class RunView:
    """The documents of one run, from its events.

    Attributes:
        state: the fold.
        offset: bytes of the log that it has seen.
        log: names the log, so that a page notices when another one has taken its place; the caller sets it.
        driver: what is wrong with the process that drives the run, in words; the caller sets it.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, run_dir: RunDir, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run_dir, self._clock = run_dir, clock
        self.state, self.offset, self.log = RunState(), 0, ""
        self.driver: str | None = None
        self._used, self._estimator = LedgerView(), TimeLeftEstimator()
        self._curves, self._power, self._rates = Curves(), dict[str, Power](), StreamRates()
        self._collector, self._notices = NoticeCollector(), list[Notice]()
        self._ledger: Ledger | None = None
        self._cost: dict[str, Any] | None = None
        self._ledger_offset = -1  # of the log behind the events that it has seen
        self._paces = {"run": Pace(), "cost": Pace(COST_EVERY_S), "progress": Pace(PROGRESS_EVERY_S)}
        self._said_driver: str | None = None
        self._excerpts: dict[tuple[str, int], str] = {}  # of logs of members that failed, by member and attempt
        self._touched = Touched()
        self._start_change()

    def _start_change(self) -> None:
        self._touched = Touched()
        self._new_notices: list[Notice] = []

    def apply(self, events: Iterable[Event], offset: int) -> None:
        """Applies the next events of the log.

        Args:
            offset: of the log behind them.
        """
        for event in events:
            try:
                self._apply(event)
            except EVENT_ERRORS as error:
                raise make_event_error(event, error) from error
        self.state.finished.clear()
        self.offset = offset

    def _apply(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._estimator = TimeLeftEstimator()  # what lay between is no pace
        self._used.apply(event)
        self._curves.apply(self.state, event)  # before the fold: it compares with the member's attempt
        apply_event(self.state, event)
        self._rates.apply(event)
        if isinstance(event, Power):
            self._power[event.node] = event
        self._add_notices(event)
        self._touched.note(event)

    def _add_notices(self, event: Event) -> None:
        found = self._collector.apply(event)
        self._notices += found
        self._new_notices += found

    # -- documents ------------------------------------------------------------------------------------------------

    def state_document(self) -> dict[str, Any]:
        """All but the curves and the analyses; also what a change would tell next is in it."""
        members = self.state.members
        cost = self._describe_cost()  # the figures of the run are of the same account
        return {
            "v": VERSION,
            "offset": self.offset,
            "log": self.log,
            "now": self.state.updated,
            "run": self._describe_run(),
            "members": {"columns": list(rows.COLUMNS), "rows": self._member_rows(members)},
            "spans": {name: rows.list_spans(member) for name, member in members.items()},
            "nodes": self._list_nodes(),
            "streams": describe_streams(self.state, self._rates),
            "notices": group_notices(self._notices),
            "cost": cost,
            "progress": self._plot_progress(),
        }

    def curves_document(self) -> dict[str, Any]:
        """The figures of every epoch."""
        return {"offset": self.offset, **self._curves.describe()}

    def tables_document(self) -> dict[str, Any]:
        """Further columns of members, and tables of what was used."""
        known = self._ledger if self._ledger_offset == self.offset else None
        return describe_tables(self.state, known or self._used.read())

    def _member_rows(self, names: Iterable[str]) -> dict[str, list[Any]]:
        members, run = self.state.members, self.project()
        return {name: rows.member_row(run, members[name]) for name in names if name in members}

    def project(self) -> RunProjection:
        """What is known of the run; what was used may be some seconds old."""
        return RunProjection(self.state, self._ledger or self._used.read(), self.driver)

    def _list_nodes(self) -> list[dict[str, Any]]:
        return rows.list_nodes(self.project(), self._power)

    def _describe_run(self) -> dict[str, Any]:
        began = self._clock()
        left = self._estimator.estimate(self.state)
        found = describe_run(self.run_dir.path.name, self.project(), left)
        for failure in found["failures"]:
            key = (failure["members"][0], failure["attempt"])
            if key not in self._excerpts:
                self._excerpts[key] = excerpt(self.run_dir, key[0])
            failure["log"] = self._excerpts[key]
        self._paces["run"].note(began, self._clock())
        return found

    def _plot_progress(self) -> dict[str, Any]:
        began, state = self._clock(), self.state
        steps = list_improvements(self._curves.series(state.objective), state.direction)
        end = state.ended.t if state.ended is not None else state.updated
        found = plot_progress(steps, state.objective, state.started, end)
        self._paces["progress"].note(began, self._clock())
        return found

    def _describe_cost(self) -> dict[str, Any]:
        """What was used so far; computed anew if something has happened since."""
        if self._cost is not None and self._ledger_offset == self.offset:
            return self._cost
        began = self._clock()
        self._ledger, self._ledger_offset = self._used.read(), self.offset
        self._cost = rows.describe_cost(self.project())
        self._paces["cost"].note(began, self._clock())
        return self._cost

    # -- changes --------------------------------------------------------------------------------------------------

    @property
    def has_change(self) -> bool:
        """Whether `take_change` would return one now; what is computed from all members may become due without
        another event.
        """
        return bool(self._list_due(self._touched)) or self.driver != self._said_driver

    def _list_due(self, touched: Touched) -> set[str]:
        """The sections that are sent now; members are one."""
        now = self._clock()
        urgent = touched.all_members or self.driver != self._said_driver
        waiting = {
            name for name, pace in self._paces.items() if now < pace.next and not (urgent and name != "cost")
        }
        due = touched.sections - waiting
        return due | {"members"} if touched.members or touched.answers or touched.analyses else due

    def take_change(self) -> dict[str, Any] | None:
        """What has changed since the last call; None if nothing has that is due."""
        if self.driver != self._said_driver:
            self._touched.all_members = True  # what trained does so no more, or again
            self._touched.sections |= {"run", "nodes", "streams"}
        due = self._list_due(self._touched)
        if not due:
            return None
        change = self._compose(self._touched, due)
        change |= _list("epochs", self._curves.take())
        change |= _list("notices", group_notices(self._notices, self._new_notices))
        later = self._touched.sections - due
        self._start_change()
        self._touched.sections = later
        self._said_driver = self.driver
        return change

    def change_since(self, events: Sequence[Event]) -> dict[str, Any]:
        """A change for a page that has seen everything before these events, the last ones that were applied."""
        touched, names = Touched(), dict[str, None]()
        for event in events:
            touched.note(event)
            if isinstance(event, Epoch | Started):
                names[event.member] = None
        first = events[0].t if events else 0.0
        # Figures of cost that were sent while the page was away are in no later change.
        change = self._compose(touched, touched.sections | {"run", "cost", "progress"})
        change |= _list("epochs", self._curves.replay(names))
        begin = self.state.started or 0.0
        missed = [notice for notice in self._notices if begin + notice.at_s >= first - 1e-3]
        return change | _list("notices", group_notices(self._notices, missed))

    def _compose(self, touched: Touched, due: Collection[str]) -> dict[str, Any]:
        members: Mapping[str, Any] = self.state.members
        change: dict[str, Any] = {"offset": self.offset, "now": self.state.updated}
        if "cost" in due:
            change["cost"] = self._describe_cost()
        changed = members if touched.all_members else touched.members
        if changed:
            change["members"] = self._member_rows(changed)
        moved = members if touched.all_members else touched.spans
        if moved:
            change["spans"] = {name: rows.list_spans(members[name]) for name in moved if name in members}
        makers: dict[str, Callable[[], Any]] = {
            "run": self._describe_run,
            "nodes": self._list_nodes,
            "progress": self._plot_progress,
            "streams": lambda: describe_streams(self.state, self._rates),
        }
        change |= {name: make() for name, make in makers.items() if name in due}
        return change | _list("answers", touched.answers) | _list("stale", sorted(touched.analyses))


def _list(name: str, found: Sequence[Any]) -> dict[str, Any]:
    return {name: list(found)} if found else {}
