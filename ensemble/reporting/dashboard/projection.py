"""The documents of a run that the page draws, from the events of its log. The report has the same ones, frozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ensemble.events import CodeSaved, Epoch, Power, RequestAnswered, RunStarted, Started, StepsDone
from ensemble.meter import LedgerView
from ensemble.reporting.dashboard import rows
from ensemble.reporting.dashboard.member_log import excerpt
from ensemble.reporting.dashboard.rows import describe_curves
from ensemble.reporting.dashboard.run_section import describe_run, describe_tables
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections.notices import Notice, NoticeCollector, group_notices
from ensemble.reporting.time_left import TimeLeftEstimator
from ensemble.store.event_handlers import apply_event
from ensemble.store.folding import EVENT_ERRORS, make_event_error
from ensemble.store.state import RunState

if TYPE_CHECKING:
    from ensemble.events import Event
    from ensemble.store.rundir import RunDir

VERSION = 2
MOST_ANSWERS = 100
#: Types of events after which the documents of predictions and of hyperparameters are others.
STALE_AFTER = {
    "quality": frozenset(("finished", "combined", "run_started")),
    "importances": frozenset(("finished", "pruned", "run_started")),
}


class RunView:
    """The documents of one run, from its events.

    Attributes:
        state: the fold.
        offset: bytes of the log that it has seen.
        driver: what is wrong with the process that drives the run, in words; the caller sets it.
        stamps: of each further document a number that grows when it becomes another one.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir, self.state, self.offset = run_dir, RunState(), 0
        self.driver: str | None = None
        self.stamps = {"curves": 0, "quality": 0, "importances": 0}
        self._used, self._estimator = LedgerView(), TimeLeftEstimator()
        self._power = dict[str, Power]()
        self._collector, self._notices = NoticeCollector(), list[Notice]()
        self._answers, self._info = list[dict[str, Any]](), dict[str, Any]()
        self._excerpts: dict[tuple[str, int], str] = {}  # of logs of members that failed, by member and attempt

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
        apply_event(self.state, event)
        self._notices += self._collector.apply(event)
        self.stamps["curves"] += isinstance(event, Epoch | Started) or (
            isinstance(event, StepsDone) and bool(event.metrics)
        )
        for name, types in STALE_AFTER.items():
            self.stamps[name] += event.type in types
        if isinstance(event, Power):
            self._power[event.node] = event
        elif isinstance(event, CodeSaved):
            self._info |= event.info or {}
        elif isinstance(event, RequestAnswered):
            names = ("request", "verb", "member", "done", "message")
            self._answers.append({name: getattr(event, name) for name in names})

    def project(self) -> RunProjection:
        return RunProjection(self.state, self._used.read(), self.driver)

    def state_document(self) -> dict[str, Any]:
        """All but the curves, the tables and the analyses."""
        state, run = self.state, self.project()
        return {
            "v": VERSION,
            "offset": self.offset,
            "now": state.updated,
            "stamps": dict(self.stamps),
            "run": self._describe_run(run),
            "members": {
                "columns": list(rows.FIELDS),
                "rows": {name: rows.member_row(run, member) for name, member in state.members.items()},
            },
            "spans": {name: rows.list_spans(member) for name, member in state.members.items()},
            "nodes": rows.list_nodes(run, self._power),
            "notices": group_notices(self._notices),
            "cost": rows.describe_cost(run),
            "answers": self._answers[-MOST_ANSWERS:],
        }

    def curves_document(self) -> dict[str, Any]:
        return describe_curves(self.state)

    def tables_document(self) -> dict[str, Any]:
        return describe_tables(self.project())

    def _describe_run(self, run: RunProjection) -> dict[str, Any]:
        left_s = self._estimator.estimate(self.state) if run.is_driven else None
        described = describe_run(self.run_dir.path.name, run, left_s, self._info)
        for failure in described["failures"]:
            key = (failure["members"][0], failure["attempt"])
            if key not in self._excerpts:
                self._excerpts[key] = excerpt(self.run_dir, key[0])
            failure["log"] = self._excerpts[key]
        return described
