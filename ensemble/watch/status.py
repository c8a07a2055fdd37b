"""What `ensemble status` shows people: a line on the run, a row for each member, whether anybody still runs it."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from ensemble.store.events import is_locked
from ensemble.watch import text
from ensemble.watch.feeders import bottleneck_lines
from ensemble.watch.work import member_epochs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from ensemble.store import RunDir, RunState


def controller_gone(run_dir: RunDir, state: RunState) -> str | None:
    """A line that says so where the run has not ended but its controller has, None otherwise.

    The controller holds a lock on the log as long as it lives, so a free lock tells; where the file system has no
    locks, its process does. Of another machine's nothing is known here: None.
    """
    if state.ended is not None or state.header.get("host") != socket.gethostname():
        return None
    pid = state.header.get("pid")
    locked = is_locked(run_dir.events)
    if locked or (locked is None and _lives(pid)):
        return None
    return f"the controller (process {pid}) is gone; `ensemble resume {run_dir.path}` goes on"


def _lives(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (OSError, TypeError, ValueError):  # another user's; or nothing is known of it
        return True
    return True


def status_head(state: RunState, gone: bool) -> str:
    """Name, how it stands, executor, seconds at work, objective: one line."""
    how = "interrupted" if gone else "running" if state.started is not None else "not started"
    states = {member.state for member in state.members.values()}
    if how == "running" and "paused" in states and states.isdisjoint(("waiting", "placed", "running")):
        how = "paused; `ensemble resume` lets it go on"
    if state.ended is not None:
        how = "stopped" if state.ended["type"] == "run_stopped" else "finished"
        how += f" ({state.ended['reason']})" if state.ended.get("reason") else ""
    objective = f"objective {state.objective}, {state.direction}"
    return " · ".join(
        [state.name or "run", how, f"executor {state.executor}", text.clock(state.wall_s), objective]
    )


def status_failures(state: RunState, most: int = 10) -> str | None:
    """Why members failed, a line for each; None where none did."""
    failed = [member for member in state.members.values() if member.error]
    lines = []
    for member in failed[:most]:
        when = "failed" if member.state == "failed" else "failed before"
        lines.append(f"{member.id}: {when} ({member.reason}): {member.error}")
    more = [f"and {len(failed) - most} more"] if len(failed) > most else []
    return "\n".join(lines + more) or None


def status_feeders(state: RunState) -> str | None:
    """What holds the shared streams up, a line for each cohort; None while no feeder has told."""
    lines = bottleneck_lines(state)
    return "\n".join(f"bottleneck: {line}" for line in lines) or None


def status_table(state: RunState, rows: Sequence[dict[str, Any]], width: int) -> Table:
    """The rows of `status_rows` for a terminal of `width` columns; where it is narrow, nodes are left out."""
    from rich.console import Console

    whole = _table(state, rows, nodes=True)
    wide = Console(width=1000)
    return whole if wide.measure(whole).maximum <= width else _table(state, rows, nodes=False)


def _table(state: RunState, rows: Sequence[dict[str, Any]], *, nodes: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    joules = text.joules_head(row["energy_origin"] for row in rows)
    grid = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1))
    for name in ("member", "state"):
        grid.add_column(name, no_wrap=True)
    for name in ("epoch", state.objective, "samples/s", "CPU-s", joules):
        grid.add_column(name, justify="right")
    if nodes:
        grid.add_column("node", no_wrap=True)
    for row in rows:
        again = f" ({row['attempts']})" if row["attempts"] > 1 else ""
        epoch = f"{row['epoch']}/{member_epochs(state, state.members[row['member']])}"
        cpu_s, energy_j = row["cpu_s"], row["energy_j"]
        cells = [row["member"], row["state"] + again, epoch, text.score(row["metric"])]
        cells.append(text.number(row["samples_per_s"]))
        cells.append(text.ABSENT if cpu_s is None else text.number(round(cpu_s, 1)))
        told = f" {row['energy_origin']}" if joules == "J" else ""
        cells.append(text.ABSENT if energy_j is None else f"{energy_j:.0f}{told}")
        cells += [row["node"] or text.ABSENT] if nodes else []
        grid.add_row(*(Text(cell) for cell in cells))  # Text: no markup in names
    return grid
