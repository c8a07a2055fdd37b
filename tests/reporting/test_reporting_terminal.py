"""What users' code says, on a terminal: it is shown and not obeyed, in whatever characters the terminal has."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_events as runs
from event_dicts import apply_event, fold

from ensemble.reporting import Progress
from ensemble.reporting.terminal import PlainConsole
from ensemble.reporting.text import visible
from ensemble.store import RunState

OBJECTIVE = "acc[/x][bold]:smile:"
ERROR = "ValueError: \x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\x9b1m \u202eolleh\r\x07 caf\udce9"
SHOWN = r"ValueError: red \x9b1m \u202eolleh\r\x07 caf"


def strange() -> list[dict[str, object]]:
    """A run whose objective looks like markup, and of which an error holds commands for terminals."""
    events = []
    for event in runs.list_run():
        if event["type"] == "run_started":
            event = event | {"objective": OBJECTIVE}
        if event.get("metrics") and event["type"] != "combined":
            event = event | {"metrics": {OBJECTIVE: event["metrics"]["accuracy"]}}
        if event["type"] == "failed":
            event = event | {"error": ERROR}
        events.append(event)
    return events


def test_commands_for_terminals_become_visible_or_go() -> None:
    assert visible(ERROR) == SHOWN + "\udce9"
    assert visible("a\tb\nä·✓") == "a\tb\nä·✓"


def test_a_table_shows_names_as_they_are() -> None:
    from rich.table import Table

    stream = io.StringIO()
    table = Table(OBJECTIVE)
    table.add_row("[/y]\x1b[31m:x:")
    PlainConsole(file=stream, width=80, force_terminal=True).print(table)
    assert OBJECTIVE in stream.getvalue() and "[/y]:x:" in stream.getvalue()
    assert "\x1b[31m" not in stream.getvalue()


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
    said = "".join(stream.getvalue().split())
    assert "ValueError:red" in said and r"\x9b1m\u202eolleh" in said  # rich leaves out carriage returns and bells
    assert "\x1b[2J" not in said and "\x9b" not in said and "\x07" not in said


def test_commands_show_such_a_run_also_where_output_is_not_utf_8(tmp_path: Path) -> None:
    run_dir = runs.write_run(tmp_path, strange())
    assert fold(strange()).objective == OBJECTIVE
    code = f"""
from ensemble.cli.parser import main
for command in ("status", "logs", "report"):
    assert main([command, {str(run_dir)!r}]) == 0, command
assert main(["resume", {str(run_dir)!r}]) == 2, "its files are gone"
"""
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=False, timeout=300
    )
    said = done.stdout.decode("latin-1")
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr.decode("latin-1")
    assert OBJECTIVE in said and "ValueError: red " in said
    assert not any(ord(letter) < 32 and letter != "\n" for letter in said)
