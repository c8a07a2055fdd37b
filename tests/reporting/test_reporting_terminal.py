"""What is shown on a terminal: users' text is not obeyed, and the live table fits any width."""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from kit import run_events as runs
from kit.event_dicts import apply_event

from ensemble.reporting import Progress
from ensemble.reporting.text import visible
from ensemble.store import RunState

OBJECTIVE = "acc[/x][bold]:smile:"
ERROR = "ValueError: \x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\x9b1m \u202eolleh\r\x07 caf\udce9"
SHOWN = r"ValueError: red \x9b1m \u202eolleh\r\x07 caf"


def strange() -> list[dict[str, object]]:
    """A run whose objective looks like markup, and of which an error holds commands for terminals."""
    begin, *events = runs.list_run()
    for event in events:
        if event.get("metrics") and event["type"] != "combined":
            event["metrics"] = {OBJECTIVE: event["metrics"]["accuracy"]}
    failed = [event | {"error": ERROR} if event["type"] == "failed" else event for event in events]
    return [begin | {"objective": OBJECTIVE}, *failed]


def test_commands_for_terminals_become_visible_or_go() -> None:
    assert visible(ERROR) == SHOWN + "\udce9"
    assert visible("a\tb\nä·✓") == "a\tb\nä·✓"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress_obeys_no_error(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    ticks = iter(range(10**6))
    state = RunState()
    with Progress(stream, clock=lambda: float(next(ticks))) as progress:
        for event in strange():
            apply_event(state, event)
            progress.update(state)
    shown = "".join(stream.getvalue().split())
    assert "ValueError:red" in shown and r"\x9b1m\u202eolleh" in shown  # rich drops carriage returns and bells
    assert "\x1b[2J" not in shown and "\x9b" not in shown and "\x07" not in shown


def test_commands_show_such_a_run_also_where_output_is_not_utf_8(tmp_path: Path) -> None:
    run_dir = runs.write_run(tmp_path, strange())
    code = f"""
from ensemble.cli.parser import main
for command in ("status", "logs", "report"):
    assert main([command, {str(run_dir)!r}]) == 0, command
assert main(["resume", {str(run_dir)!r}]) == 2, "its files are gone"
"""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=300)
    said = done.stdout.decode("latin-1")
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode("latin-1")
    assert OBJECTIVE in said and "ValueError: red " in said
    assert not any(ord(letter) < 32 and letter != "\n" for letter in said)


WAIT_S = 300.0  # only ends a test that hangs
ROWS = 24
#: Draws a run of 30 members, half of it, then the rest once a line has come, then waits for Ctrl-C.
SCRIPT = """
import os, sys, time
from kit.event_dicts import apply_event
from kit.run_events import list_run
from ensemble.reporting import Progress
from ensemble.store import RunState
events, state = list_run(30), RunState()
half = len(events) // 2
with Progress(sys.stdout) as progress:
    progress._view.interval_s = 0.0
    for event in events[:half]:
        apply_event(state, event)
    for _ in range(3):
        progress.update(state)
    os.write(2, b"drawn")
    input()
    for event in events[half:]:
        apply_event(state, event)
    progress.update(state)
    os.write(2, b"drawn")
    time.sleep(600)
"""


class Screen:
    """What a terminal shows: lines, cursor, and how often a line ran over the right edge."""

    def __init__(self, columns: int) -> None:
        self.columns, self.lines, self.row, self.column = columns, [""], 0, 0
        self.overruns, self.has_cursor = 0, True

    def resize(self, columns: int) -> None:
        """Breaks the lines anew, as tmux and most terminals do."""
        broken = [[line[at : at + columns] for at in range(0, len(line), columns)] or [""] for line in self.lines]
        self.row = sum(map(len, broken[: self.row])) + self.column // columns
        self.column, self.columns = self.column % columns, columns
        self.lines = [part for parts in broken for part in parts]

    def feed(self, text: str) -> None:
        for sequence, letter in re.findall(r"\x1b\[([0-?]*[A-Za-z])|([^\x1b])", text):
            number = int(re.sub(r"\D", "", sequence) or 1)
            if letter == "\r":
                self.column = 0
            elif letter == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif letter:
                self.overruns += self.column >= self.columns
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
                self.column += 1
            elif sequence.endswith("A"):
                self.row = max(0, self.row - number)
            elif sequence.endswith("K"):
                self.lines[self.row] = ""
            elif sequence.endswith("H"):
                self.row = self.column = 0
            elif sequence.endswith("J"):
                self.lines = [""] * len(self.lines)
            elif sequence in ("?25l", "?25h"):
                self.has_cursor = sequence.endswith("h")
            else:
                assert sequence.endswith("m"), f"the table needs no {sequence!r}"

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).strip()


class Session:
    def __init__(self, columns: int) -> None:
        self.screen, self._decoder = Screen(columns), codecs.getincrementaldecoder("utf-8")()
        self.own, self.other = os.openpty()
        self.resize(columns)
        self.modes = termios.tcgetattr(self.other)
        known = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=self.other, stderr=subprocess.PIPE,
            env=known | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "screen-256color"}, text=True,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        )  # fmt: skip

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.own)
        os.close(self.other)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.own, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        self.screen.resize(columns)

    def read(self) -> None:
        assert self.process.stderr is not None
        said, until = self.process.stderr.fileno(), time.monotonic() + WAIT_S
        while said not in (ready := select.select([said, self.own], [], [], 0.1)[0]) or self.own in ready:
            assert time.monotonic() < until, self.screen.text
            if self.own in ready:
                self.screen.feed(self._decoder.decode(os.read(self.own, 2**16)))
        os.read(said, 2**16)


@pytest.mark.parametrize(("columns", "after"), [(40, 40), pytest.param(80, 40, marks=pytest.mark.more), (200, 80)])
def test_the_table_fits_any_width_also_when_it_changes_and_ctrl_c_leaves_the_terminal_as_it_was(
    columns: int, after: int, tmp_path: Path
) -> None:
    with Session(columns) as shown:
        shown.read()
        first = shown.screen.text
        first = first[first.index("digits ·") :]  # above it stands who failed
        assert first.count("/30 finished") == 1 and "best member" in first and len(first.splitlines()) < ROWS
        assert ("samples/s" in first.partition("member  ")[2]) == (columns >= 80)
        assert not shown.screen.has_cursor
        shown.resize(after)
        assert shown.process.stdin is not None  # no terminal: it would echo the line
        shown.process.stdin.write("\n")
        shown.process.stdin.flush()
        shown.read()
        assert shown.screen.text.count("/30 finished") == 1, "the earlier table is gone"
        os.write(shown.own, b"\x03")
        assert shown.process.wait(WAIT_S) != 0
        shown.read()
        assert shown.screen.has_cursor and shown.screen.column == 0, "the prompt begins a line"
        assert shown.screen.overruns == 0
        assert termios.tcgetattr(shown.other) == shown.modes
