"""Shows runs in a notebook: tables of HTML, one of which is kept up to date while a cell waits for a run.

IPython is used where the program runs in it already, and never imported otherwise.
"""

from __future__ import annotations

import html
import logging
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.columns import list_columns
from ensemble.reporting.progress import Progress, head_line
from ensemble.reporting.ranking import best_member, rank_members
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections import quality
from ensemble.reporting.status import describe_lost_controller, status_head
from ensemble.reporting.time_left import fraction_done

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunDir, RunState

log = logging.getLogger(__name__)

REDRAW_S = 1.0
SHOWN = 30  # members in a table
COLUMNS = ("member", "hyperparameters", "state", "epoch", "metric", "samples_per_s", "error")
BAR_AT = 4  # of these


def is_notebook() -> bool:
    """Whether this program runs in a notebook or another front end of Jupyter's, which can show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class _Cell:
    """A view of `Progress` in a notebook's cell; outside of a notebook it shows nothing."""

    interval_s = REDRAW_S

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, state: RunState, left_s: float | None) -> None:
        """Draw the state, in the place of the one before."""
        if not is_notebook():
            return
        display = sys.modules["IPython"].display
        content = display.HTML(progress_html(state, left_s))
        try:
            if self._handle is None:
                self._handle = display.display(content, display_id=True)
            else:
                self._handle.update(content)
        except Exception as error:  # the run goes on without it
            log.debug("the progress could not be shown: %s", error, exc_info=True)

    def close(self) -> None:
        """Leave the last drawing as it is."""
        self._handle = None


def watch() -> Progress:
    """The progress of a run as a table in a notebook's cell, used in the thread of the cell."""
    return Progress(view=_Cell())


def progress_html(state: RunState, left_s: float | None = None) -> str:
    """The head line of a run and a table of its members, those in training first."""
    order = {"running": 0, "placed": 1, "failed": 2, "waiting": 4}
    members = sorted(state.members.values(), key=lambda member: (order.get(member.state, 3), member.number))
    return _describe(head_line(state, left_s), state, sorted(members[:SHOWN], key=lambda member: member.number))


def run_html(run_dir: RunDir) -> str:
    """How the run in a directory stands, and a table of its members."""
    from ensemble.store import RunStatus

    state = RunStatus.load(run_dir).state
    gone = describe_lost_controller(run_dir, state)
    members = list(state.members.values())[:SHOWN]
    return _describe(status_head(RunProjection(state, driver=gone)), state, members)


def result_html(run_dir: RunDir) -> str:
    """A table of a run's members, the best first, and the figures of the combined model."""
    from ensemble.store import RunStatus

    state = RunStatus.load(run_dir).state
    lines = [f"{label}: {line}" if label else line for label, line in quality.describe_figures(state)]
    return _describe(status_head(RunProjection(state)), state, rank_members(state)[:SHOWN], lines)


def _describe(head: str, state: RunState, members: Sequence[MemberState], lines: Iterable[str] = ()) -> str:
    best = best_member(state)
    rows = []
    columns = list(list_columns(RunProjection(state), members, dict.fromkeys(COLUMNS, 0)))
    for member, *cells in zip(members, *(column.cells for column in columns), strict=True):
        done = 100 * fraction_done(state, member)
        bar = f'<progress max="100" value="{done:.0f}" style="width:8em"></progress>'
        tags = [f"<td>{_escape(cell)}</td>" for cell in cells]
        tags.insert(BAR_AT, f"<td>{bar}</td>")
        style = ' style="font-weight:bold"' if best is not None and member.id == best.id else ""
        rows.append(f"<tr{style}>{''.join(tags)}</tr>")
    names = [column.head for column in columns]
    names.insert(BAR_AT, "")
    heads = "".join(f"<th>{_escape(name)}</th>" for name in names)
    more = len(state.members) - len(members)
    below = [*lines, *([f"and {text.count(more, 'more member')}"] if more > 0 else [])]
    return (
        f"<div><p>{_escape(head)}</p><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + "".join(f"<p>{_escape(line)}</p>" for line in below)
        + "</div>"
    )


def _escape(value: str) -> str:
    return html.escape(text.visible(value))
