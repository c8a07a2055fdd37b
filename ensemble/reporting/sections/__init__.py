"""The sections of the report and of the closing summary, one file for each topic.

Each file has one or both of these functions; a new section is a file here and a line in the list that is named:

- `compose(data: ReportData) -> Content`: the section's HTML or figures, None where there is nothing to show;
  listed in `SECTIONS` of `ensemble.reporting.report`.
- `summarize(state: RunState, ledger: Ledger) -> list[Line]`: its lines in the closing summary; listed in
  `SUMMARIES` of `ensemble.reporting.summary`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.reporting.page import Panel

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from ensemble.meter import Ledger
    from ensemble.reporting.scores import Scores
    from ensemble.store import RunState
    from ensemble.store.member import Event

log = logging.getLogger(__name__)

#: HTML, or figures side by side; None: no section.
Content = str | Sequence[Panel] | None
#: A label, empty where it is that of the line before, and a text.
Line = tuple[str, str]


@dataclass(frozen=True)
class ReportData:
    """All that is known of a run, which every section is composed from.

    Attributes:
        events: the event log.  state: its fold.  ledger: CPU time and energy.
        scores: metrics of the members' saved predictions.
    """

    events: Sequence[Event]
    state: RunState
    ledger: Ledger
    scores: Scores


def draw(make: Callable[..., go.Figure | str], *args: Any) -> go.Figure | str:
    """Returns `make(*args)`, or the reason why it failed: one figure that fails takes no other with it."""
    try:
        return make(*args)
    except Exception as error:
        return explain_failure(make.__name__, error)


def explain_failure(part: str, error: Exception) -> str:
    """Logs that a part of the report failed, and returns the sentence that stands in its place."""
    detail = error if log.isEnabledFor(logging.DEBUG) else None
    log.warning("the report's %s failed: %s: %s", part, type(error).__name__, error, exc_info=detail)
    return f"It cannot be shown: {type(error).__name__}: {error}."
