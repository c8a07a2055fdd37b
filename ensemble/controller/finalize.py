"""The end of a run: combines the members, writes the report and the ledger.

The members' results are on the disk by then, and everything made here can be made again from the log. Therefore an
error here is noted, and `ensemble report` or `ensemble resume` writes what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Event
from ensemble.spec import Ensemble
from ensemble.store import RunDir, RunState, WriteError, read_events
from pipelines.providers import import_object

if TYPE_CHECKING:
    from ensemble.combine.per_class import PerClass
    from ensemble.combine.uncertainty import Quantified

log = logging.getLogger(__name__)


class Finalizer:
    """Combines and reports when no member trains any more; `notes` has a line for each thing that could not be
    done.
    """

    def __init__(self, run_dir: RunDir, ensemble: Ensemble | None = None) -> None:
        self.notes: list[str] = []
        self.lacks_room = False
        self._run_dir, self._given = run_dir, ensemble
        self._per_class: dict[str, PerClass] = {}

    @functools.cached_property
    def _ensemble(self) -> Ensemble:
        return self._given or self._run_dir.load_ensemble()

    def combine_members(self, state: RunState) -> dict[str, Any] | None:
        """The fields of the `combined` event; None where no member finished.

        They may say why there is no combination; `failed` is True where an error was noted, so that the members
        are to be combined again.
        """
        state = state.as_finished()
        if not any(m.state == "finished" for m in state.members.values()):
            return None
        from ensemble.combine import combine_samples, describe_method, refuse

        try:
            combined, shown = combine_samples(self._run_dir, state, self._ensemble)
        except Exception as error:
            self._note("the members could not be combined", error)
            combined, shown = refuse(describe_method(self._ensemble.combine), " ".join(str(error).split()), {})
            combined["failed"] = True
        combined["classes"] = self._find_classes(shown)
        try:
            self._per_class = self._measure_classes(shown, combined)
        except Exception as error:
            self._note("the figures of each class could not be computed", error)
        return combined

    def _find_classes(self, shown: Quantified | None) -> list[str] | None:
        """The names that the data have for the classes or labels; None where they have none."""
        from ensemble.spec.class_names import find_known_classes

        if shown is None:
            return None
        try:
            names = find_known_classes(self._ensemble, shown.task)
        except Exception as error:  # the data may be elsewhere
            log.info("the names of the classes are not known: %s", error)
            return None
        return list(names) if len(names) == shown.values.shape[-1] else None

    def _measure_classes(self, shown: Quantified | None, combined: dict[str, Any]) -> dict[str, PerClass]:
        """The figures of each class, of the combined model and of the best member; empty where there are none."""
        from ensemble.combine.per_class import compute_per_class
        from ensemble.spec.task import LABELS

        if shown is None or shown.target is None or shown.task.kind not in LABELS:
            return {}
        more = (shown.target, combined["classes"], shown.split)
        models = {"ensemble": shown.values, "best": shown.best}
        return {of: compute_per_class(shown.task, own, *more) for of, own in models.items() if own is not None}

    def write_report(self, ending: Event) -> None:
        """Write the report, before the last event is logged, which says what could not be written."""
        events = [*read_events(self._run_dir.events), ending]
        for path in self._run_dir.list_results():
            path.unlink(missing_ok=True)  # of an earlier session; what cannot be written now is to be missing
        self._write_report(events)

    def write_missing(self, state: RunState, missing: Sequence[str]) -> None:
        """Write those results of a run that has ended which are missing, by their names."""
        run_dir, events = self._run_dir, read_events(self._run_dir.events)
        if run_dir.report.name in missing:
            self._write_report(events)
        if {*missing} - {run_dir.report.name}:
            from ensemble.combine.per_class import read_per_class

            with contextlib.suppress(Exception):  # there are none, or the predictions cannot be read
                self._per_class = read_per_class(run_dir, state)
            self.write_ledger()

    def _write_report(self, events: Sequence[Event]) -> None:
        try:
            if self._run_dir.report in self._run_dir.list_results():
                import_object("ensemble.reporting.report:write_report")(self._run_dir, events)
        except Exception as error:
            self._note("the report could not be written", error)

    def write_ledger(self) -> None:
        """Write the ledger of what the run has used, and what that amounts to, from the whole log; its rows as a
        table, too. Beside it the results of the members and all their epochs.
        """
        from ensemble.reporting.results import format_metrics, make_results
        from ensemble.reporting.run_projection import RunProjection
        from ensemble.reporting.sections.cost import run_impact
        from ensemble.store.files import write_bytes, write_json

        try:
            events = read_events(self._run_dir.events)
            run = RunProjection.from_events(events)
            state, used = run.state, run.ledger
            impact = run_impact(state, used)
            write_json(self._run_dir.ledger, used.as_dict() | {"impact": impact.as_dict()})
            write_bytes(self._run_dir.ledger_csv, used.as_csv().encode())
            write_bytes(self._run_dir.metrics_csv, format_metrics(state).encode())
            write_json(self._run_dir.results, make_results(run, self._per_class))
        except Exception as error:
            self._note("the ledger or the results could not be written", error)

    def note_missing(self, line: str) -> None:
        """Note what a logger has not written."""
        self.notes.append(f"the logger {line}")
        log.warning("the logger %s", line)

    def _note(self, what: str, error: Exception) -> None:
        self.notes.append(f"{what}: {error}")
        self.lacks_room = self.lacks_room or isinstance(error, WriteError | OSError)
        log.warning("%s: %s", what, error, exc_info=log.isEnabledFor(logging.DEBUG))
