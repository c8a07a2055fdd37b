"""Shows a run to people: live progress, status, the closing summary, and the report as one HTML file.

Everything shown is derived from the run's state (the fold of its event log), its ledger and its saved
predictions; nothing here is measured or decided. A figure that was estimated says so wherever it is shown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import find_attribute

if TYPE_CHECKING:
    from ensemble.reporting.progress import Progress as Progress
    from ensemble.reporting.report import write_report as write_report
    from ensemble.reporting.run_projection import RunProjection as RunProjection
    from ensemble.reporting.status import describe_lost_controller as describe_lost_controller
    from ensemble.reporting.status import status_head as status_head
    from ensemble.reporting.status import status_lines as status_lines
    from ensemble.reporting.status import status_notes as status_notes
    from ensemble.reporting.status import status_rows as status_rows
    from ensemble.reporting.summary import summary_text as summary_text

_HOMES = {
    "Progress": "ensemble.reporting.progress",
    "RunProjection": "ensemble.reporting.run_projection",
    "describe_lost_controller": "ensemble.reporting.status",
    "status_head": "ensemble.reporting.status",
    "status_lines": "ensemble.reporting.status",
    "status_notes": "ensemble.reporting.status",
    "status_rows": "ensemble.reporting.status",
    "summary_text": "ensemble.reporting.summary",
    "write_report": "ensemble.reporting.report",
}


def __getattr__(name: str) -> Any:
    return find_attribute(__name__, _HOMES, name)
