"""Shows a run to people: live progress, status, the closing summary, and the report as one HTML file.

Everything shown is derived from the run's state (the fold of its event log), its ledger and its saved
predictions; nothing here is measured or decided. A figure that was estimated says so wherever it is shown.
"""

from ensemble.reporting.progress import Progress
from ensemble.reporting.report import write_report
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.status import (
    SILENT_S,
    describe_lost_controller,
    status_head,
    status_json,
    status_lines,
    status_notes,
    status_rows,
)
from ensemble.reporting.summary import summary, summary_text

__all__ = [
    "SILENT_S",
    "Progress",
    "RunProjection",
    "describe_lost_controller",
    "status_head",
    "status_json",
    "status_lines",
    "status_notes",
    "status_rows",
    "summary",
    "summary_text",
    "write_report",
]
