"""Shows runs in a notebook: tables of HTML, one of which is kept up to date while a cell waits for a run.

IPython is used where the program runs in it already, and never imported otherwise.
"""

from __future__ import annotations

import html
import logging
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.progress import head_line
from ensemble.reporting.ranking import best_member, metric, rank_members
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections import quality
from ensemble.reporting.status import describe_lost_controller, status_head
from ensemble.reporting.time_left import TimeLeft, TimeLeftEstimator, fraction_done, member_epochs

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunDir, RunState

log = logging.getLogger(__name__)

REDRAW_S = 1.0
SHOWN = 30  # members in a table


def is_notebook() -> bool:
    """Whether this program runs in a notebook or another front end of Jupyter's, which can show HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class LiveView:
    """A table of a run's members in a notebook's cell, drawn at most once a second; elsewhere it shows nothing.

    Used as a context: at its end the last state is drawn.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._drawn_at = -REDRAW_S
        self._state: RunState | None = None
        self._estimator = TimeLeftEstimator()

    @property
    def is_due(self) -> bool:
        """Whether `update` would draw now."""
        return is_notebook() and time.monotonic() - self._drawn_at >= REDRAW_S

    def update(self, state: RunState) -> None:
        """Draw the present state, at most once a second; called in the thread of the cell."""
        self._state = state
        if self.is_due:
            self._draw()

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not None and is_notebook():
            self._draw()
        self._handle = self._state = None

    def _draw(self) -> None:
        assert self._state is not None
        self._drawn_at = time.monotonic()
        content = progress_html(self._state, self._estimator.estimate(self._state))
        display = sys.modules["IPython"].display
        try:
            if self._handle is None:
                self._handle = display.display(display.HTML(content), display_id=True)
            else:
                self._handle.update(display.HTML(content))
        except Exception as error:  # the run goes on without it
            log.debug("the progress could not be shown: %s", error, exc_info=True)


def progress_html(state: RunState, left: TimeLeft | None = None) -> str:
    """The head line of a run and a table of its members, those in training first."""
    order = {"running": 0, "placed": 1, "failed": 2, "waiting": 4}
    members = sorted(state.members.values(), key=lambda member: (order.get(member.state, 3), member.number))
    return _describe(head_line(state, left), state, sorted(members[:SHOWN], key=lambda member: member.number))


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
    for member in members:
        done = 100 * fraction_done(state, member)
        bar = f'<progress max="100" value="{done:.0f}" style="width:8em"></progress>'
        cells = [
            member.id,
            text.hyperparameters(member.params),
            text.attempted(member.state, member.attempts),
            f"{member.epoch}/{member_epochs(state, member)}",
            None,
            text.score(metric(member, state.objective)),
            text.number(member.training_rate),
            "" if member.state != "failed" else f"{member.reason}: {member.error}",
        ]
        tags = (f"<td>{bar if cell is None else _escape(cell)}</td>" for cell in cells)
        style = ' style="font-weight:bold"' if best is not None and member.id == best.id else ""
        rows.append(f"<tr{style}>{''.join(tags)}</tr>")
    names = ("member", "hyperparameters", "state", "epoch", "", state.objective, "samples/s", "")
    heads = "".join(f"<th>{_escape(name)}</th>" for name in names)
    more = len(state.members) - len(members)
    below = [*lines, *([f"and {text.count(more, 'more member')}"] if more > 0 else [])]
    return (
        f"<div><p>{_escape(head)}</p><table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        + "".join(f"<p>{_escape(line)}</p>" for line in below)
        + "</div>"
    )


def _escape(given: str) -> str:
    return html.escape(text.visible(given))
