"""The end of a run: its members become one model, what it used is counted, the report is written.

What the members learnt is on the disk by then, so whatever fails here is noted and the run has not failed: all of
it can be made again from the log.
"""

from __future__ import annotations

import logging
from typing import Any

from ensemble.spec import Ensemble
from ensemble.store import RunDir, RunState, project, read_events

log = logging.getLogger(__name__)


class Conclusion:
    """What is done once no member trains any more.

    Attributes:
        notes: what could not be done, a line each.
    """

    def __init__(self, run_dir: RunDir, ensemble: Ensemble) -> None:
        self.notes: list[str] = []
        self._run_dir, self._ensemble = run_dir, ensemble

    def combined(self, state: RunState) -> dict[str, Any] | None:
        """The fields of the `combined` event; None where there is nothing to combine, or it fails."""
        if self._ensemble.valid is None or not any(m.state == "finished" for m in state.members.values()):
            return None
        from ensemble.combine import combine

        try:
            return combine(self._run_dir, state, self._ensemble)
        except Exception as error:
            self._note("the members could not be combined", error)
            return None

    def write_up(self) -> None:
        """Write the ledger, the report and, unless a searcher kept it all along, the Optuna study."""
        try:
            from ensemble.meter import ledger
            from ensemble.store.files import write_json
            from ensemble.watch.report import write_report

            write_json(self._run_dir.ledger, ledger(read_events(self._run_dir.events)).as_dict())
            write_report(self._run_dir)
        except Exception as error:
            self._note("the report could not be written", error)
        if self._ensemble.search is not None:
            return
        try:
            project(read_events(self._run_dir.events), self._run_dir.journal)
        except Exception as error:
            self._note("the Optuna study could not be written", error)

    def _note(self, what: str, error: Exception) -> None:
        self.notes.append(f"{what}: {error}")
        log.warning("%s: %s", what, error, exc_info=log.isEnabledFor(logging.DEBUG))
