"""Shows the live progress of a run: a table on a terminal, few plain lines in a file or a pipe.

Either way it draws at most a few times a second, whatever the rate of events, so that watching a run costs it
nothing that would show in its ledger.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from ensemble.reporting import text
from ensemble.reporting.columns import list_columns
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections.notices import describe
from ensemble.reporting.sections.training import group_causes
from ensemble.reporting.status import ATTEMPTS
from ensemble.reporting.tables import NARROWEST, Column, lay_out
from ensemble.reporting.time_left import TimeLeftEstimator, describe_time_left, fraction_done, member_epochs
from ensemble.store.member import ENDED

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState

REDRAW_S = 0.5  # a drawing of 30 rows takes about 13 ms of CPU
LINES_S = 1.0  # between two bursts of plain lines
COLUMNS = {"member": 0, "state": 0, "epoch": 0, "metric": 0, "rate": 2, "left_s": 1}  # and a bar
BAR = 20  # columns of a bar that is full
HEAD_LINES = 3  # at most
BURST = 3  # failures shown line by line; the others in one line
NAMED = 8  # members in a line
ASKED_FOR = ("paused", "stopped", "cancelled")
# Of lines on the whole run, in a file or a pipe: the interval grows with the age of the run.
STARTED_S = 30.0  # until the first one, where members are still starting
LEAST_S, MOST_S = 2.0, 900.0
PART, PART_ENDED = 0.5, 0.1  # of the age; where members have ended
STYLES = {
    "running": "cyan",
    "placed": "dim",
    "waiting": "dim",
    "finished": "green",
    "pruned": "yellow",
    "paused": "magenta",
    "stopped": "magenta",
    "cancelled": "magenta",
    "failed": "red",
}


class Progress:
    """Shows a run's state as it grows.

        progress = Progress()
        for event in events:
            apply_event(state, event)
            progress.update(state)
        progress.close()

    Args:
        stream: where to; standard error unless given. A terminal gets a live table, anything else plain lines.
        clock: seconds, monotonic.
        view: draws instead of these two.

    Attributes:
        is_drawn: whether the state of the last `update` was drawn; else another call or `close` does it.
    """

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic, view: Any = None
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._drawn: float | None = None
        self._state: RunState | None = None
        self.is_drawn = True
        self._combining = False
        self._estimator = TimeLeftEstimator()
        self._view = view
        if view is None:
            drawable = self._stream.isatty() and (self._stream.encoding or "utf-8").lower().startswith("utf")
            self._view = _Table(self._stream) if drawable else _Lines(self._stream)

    @property
    def is_due(self) -> bool:
        """Whether the last drawing is an interval ago."""
        return self._drawn is None or self._clock() - self._drawn >= self._view.interval_s

    def update(self, state: RunState) -> None:
        """Draws the present state, unless the last drawing was less than an interval ago."""
        self._state, self.is_drawn = state, False
        begins = state.combining > 0 and not self._combining  # then no event comes until the end, for minutes
        self._combining = state.combining > 0
        if begins or self.is_due:
            self._draw()

    def close(self) -> None:
        """Draws the last state and restores the terminal; harmless when called twice."""
        if self._state is not None:
            self._draw()
            self._state = None
        self._view.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self) -> None:
        assert self._state is not None
        self._drawn, self.is_drawn = self._clock(), True
        self._view.draw(self._state, self._estimator.estimate(self._state))


def head_line(state: RunState, left_s: float | None) -> str:
    """Name, members by state, elapsed and left, total rate, best value: one line."""
    return " · ".join([state.name or "run", *describe_state(state, left_s)])


def describe_state(state: RunState, left_s: float | None) -> list[str]:
    """The parts of the head line behind the name."""
    run = RunProjection(state)
    parts = [f"{run.counts['finished']}/{run.counts.total()} finished"]
    parts += [f"{n} {name}" for name, n in run.counts.items() if name != "finished"]
    if state.combining and state.ended is None:
        parts.append(f"combining {text.count(state.combining, 'member')}")
    more = [describe_time_left(left_s)] if left_s is not None and state.ended is None else []
    more += [f"{text.number(run.samples_per_s)} samples/s"] if run.samples_per_s else []
    if run.best is not None:
        more.append(f"best {run.best.id} {state.objective} {text.score(run.best_value)}")
    if state.waits_for:
        more.append(f"waits for {state.waits_for}")
    return [", ".join(parts), text.clock(state.wall_s), *more]


class _Table:
    """A live table on a terminal, drawn only by `draw`."""

    interval_s = REDRAW_S

    def __init__(self, stream: TextIO) -> None:
        from ensemble.reporting.terminal import LiveLines

        self._live = LiveLines(stream)
        self._failures: dict[str, int] = {}
        self._said: dict[str, str] = {}

    def draw(self, state: RunState, left_s: float | None) -> None:
        self._live.begin()
        self._print_failures(state)
        console = self._live.console
        self._live.draw(table(state, left_s, console.height - 8, console.width))

    def _print_failures(self, state: RunState) -> None:
        failed = [m for m in state.members.values() if m.failures > self._failures.get(m.id, 0)]
        self._failures = {m.id: m.failures for m in state.members.values()}
        for member in failed[:BURST]:
            style = "yellow" if _is_retried(member) else "red"
            self._live.print(f"{member.id} {_describe_failure(member, self._said)}", style)
        if len(failed) > BURST:
            self._live.print(f"and {len(failed) - BURST} more failed", "yellow")

    def close(self) -> None:
        self._live.close()


def table(
    state: RunState, left_s: float | None, rows: int = 30, width: int | None = None
) -> list[tuple[str, str]]:
    """The head line over a table of at most `rows` members; what does not fit is counted below it.

    Returns:
        Lines with their styles.
    """
    shown, left_out = _select_members(state, max(3, rows))
    head = Column("", [head_line(state, left_s)], folds_to=NARROWEST, most_lines=HEAD_LINES)
    lines = [(line, "bold") for line in lay_out([head], width)[1:]] + [("", "")]
    columns = list(list_columns(RunProjection(state), shown, COLUMNS))
    columns.insert(3, Column("", ["━" * round(BAR * fraction_done(state, member)) for member in shown], spare=3))
    lines += zip(lay_out(columns, width), ["dim", *(STYLES[member.state] for member in shown)], strict=True)
    if left_out:
        lines.append(("and " + ", ".join(f"{n} {name}" for name, n in left_out.items()), "dim"))
    if any(member.attempts > 1 for member in shown):
        lines.append((ATTEMPTS, "dim"))
    stopped = _describe_stop(state)
    if stopped is not None:
        lines.append((" · ".join(stopped), "magenta"))
    return lines


def _select_members(state: RunState, rows: int) -> tuple[list[MemberState], Counter[str]]:
    """At most `rows` members, running ones first, then what failed and what ended last; the others' states.

    What does not fit on the terminal is cut off at its lower end.
    """
    members = state.members.values()
    urgency = {"running": 0, "placed": 1, "failed": 2, "waiting": 4}
    by_need = sorted(members, key=lambda m: (urgency.get(m.state, 3), -m.number if m.state in ENDED else m.number))
    return by_need[:rows], Counter(str(m.state) for m in by_need[rows:])


class _Lines:
    """A line for the start, each failure and what was asked for, and at growing intervals one on the whole run."""

    interval_s = LINES_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._seen: dict[str, tuple[str, int]] = {}
        self._first_with: dict[str, str] = {}
        self._begun = self._ended = self._measuring = self._combining = False
        self._rehearsing: str | None = None
        self._rehearsed = 0
        self._remarked: set[str] = set()
        self._shown_s: float | None = None  # of the run, at the last line on the whole of it
        self._shown_ended = 0

    def draw(self, state: RunState, left_s: float | None) -> None:
        lines: list[str] = []
        if not self._begun and state.name:
            self._begun = True
            epochs = sorted({member_epochs(state, member) for member in state.members.values()} or {state.epochs})
            much = f"{epochs[0]} to {epochs[-1]} epochs" if len(epochs) > 1 else text.count(epochs[0], "epoch")
            what = f"{text.count(state.declared, 'member')}, {much}"
            lines.append(f"{state.name}: {what}, executor {state.executor}")
        if state.rehearsing is not None and state.rehearsing != self._rehearsing:
            lines.append(f"rehearsing {state.rehearsing}: short epochs, and a resume from their checkpoints")
        self._rehearsing = state.rehearsing
        if _has_begun(state):  # else the error says what was refused
            found = state.rehearsed[self._rehearsed :]
            lines += [describe(one) for one in found if one.refused or one.remarks or one.failed]
            self._rehearsed = len(state.rehearsed)
        lines += self._describe_remarks(state)
        if state.measuring and not self._measuring:
            lines.append(f"measuring a few steps of {text.count(len(state.measuring), 'member')}")
        self._measuring = bool(state.measuring)
        lines += self._describe_changes(state)
        if self._is_due(state):
            counts, _, *others = describe_state(state, left_s)
            done = f"{100 * RunProjection(state).done:.0f} % trained"
            lines.append(" · ".join([counts, done, *others]))
        if state.combining and not self._combining:
            lines.append(f"combining {text.count(state.combining, 'member')}")
        self._combining = bool(state.combining)
        if state.ended is not None and not self._ended:
            how, hint = _describe_stop(state) or (f"run {RunProjection(state).word}", "")
            lines.append(" · ".join(part for part in (how, head_line(state, None), hint) if part))
        self._ended = state.ended is not None
        if lines:
            output = "".join(f"[{text.clock(state.wall_s)}] {text.visible(line)}\n" for line in lines)
            encoding = self._stream.encoding or "utf-8"
            self._stream.write(output.encode(encoding, "replace").decode(encoding))
            self._stream.flush()

    def _is_due(self, state: RunState) -> bool:
        """Whether it is time for a line on the whole run: sooner where members have ended since the last one."""
        states = Counter(member.state for member in state.members.values())
        ended, elapsed_s = sum(many for name, many in states.items() if name in ENDED), state.wall_s
        if not states["running"]:
            return False
        if self._shown_s is None:
            is_due = not states["placed"] or elapsed_s >= STARTED_S
        else:
            part = PART_ENDED if ended > self._shown_ended else PART
            is_due = elapsed_s - self._shown_s >= min(max(part * self._shown_s, LEAST_S), MOST_S)
        if is_due:
            self._shown_s, self._shown_ended = elapsed_s, ended
        return is_due

    def _describe_changes(self, state: RunState) -> list[str]:
        """Failures, and members that were paused, stopped or cancelled, since the last look."""
        failed: list[MemberState] = []
        changed: dict[str, list[str]] = {}
        for member in state.members.values():
            was, failures = self._seen.get(member.id, ("waiting", 0))
            self._seen[member.id] = (member.state, member.failures)
            if member.failures > failures:
                failed.append(member)
            elif member.state != was and member.state in ASKED_FOR:
                changed.setdefault(member.state, []).append(member.id)
        lines = [f"{member.id} {_describe_failure(member, self._first_with)}" for member in failed[:BURST]]
        if len(failed) > BURST:
            lines.append(f"failed, too: {text.names([member.id for member in failed[BURST:]], NAMED)}")
        return lines + [f"{how}: {text.names(members, NAMED)}" for how, members in changed.items()]

    def _describe_remarks(self, state: RunState) -> list[str]:
        """What members have remarked and no other has before."""
        new = {(m.id, one): one for m in state.members.values() for one in m.remarks if one not in self._remarked}
        self._remarked.update(new.values())
        return [f"{text.names([id for id, _ in keys], NAMED)}: {remark}" for remark, keys in group_causes(new)]

    def close(self) -> None:
        """Does nothing: the stream belongs to the caller."""


def _has_begun(state: RunState) -> bool:
    return any(member.attempts for member in state.members.values())


def _describe_stop(state: RunState) -> tuple[str, str] | None:
    """Why a run was stopped and how it goes on; None of one that was not."""
    reason = RunProjection(state).reason
    if reason is not None and not _has_begun(state) and any(one.refused for one in state.rehearsed):
        return "run stopped (its rehearsal refuses it)", ""  # the error says why
    return None if reason is None else (f"run stopped ({reason})", "`ensemble resume` goes on")


def _describe_failure(member: MemberState, first_with: dict[str, str]) -> str:
    """What the last failure was, an error only of the first member that had it; and whether it is tried again."""
    after = "; it will be tried again" if _is_retried(member) else ""
    after = "; it stays as it had finished" if member.unextended else after
    error = str(member.error)
    if (first := first_with.get(error)) is not None:
        error = "the same again" if first == member.id else f"as {first} did"
    first_with.setdefault(str(member.error), member.id)
    return f"failed ({member.reason}): {error}{after}"


def _is_retried(member: MemberState) -> bool:
    # When this is shown the member may have been placed again, or run.
    return member.state not in ("failed", "cancelled", "paused", "stopped")
