"""Mistakes in reports, the live page's command line, and its files with tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import run_events
from kit.mistakes import Mistake

from ensemble.reporting import write_report
from ensemble.reporting.dashboard.security import read_token_file
from ensemble.store import RunDir, StoreError


def read_token(mode: int = 0o600, owner: int = -1) -> Callable[[Path], str]:
    """What reads a token from a file of this mode and owner."""

    def read(folder: Path) -> str:
        file = folder / "token"
        file.write_text("a-token-of-some-length")
        file.chmod(0o600)
        assert read_token_file(file) == "a-token-of-some-length"
        file.chmod(mode)
        os.chown(file, owner, -1)
        return read_token_file(file)

    return read


def dashboard(*options: str) -> Callable[[Path], list[str]]:
    def arguments(folder: Path) -> list[str]:
        run_events.write_run(folder / "run", run_events.just_started())
        return ["dashboard", str(folder / "run"), *options]

    return arguments


def read_token_of_somebody_else(folder: Path) -> str:
    """Only root can give a file to somebody else; another user becomes somebody else."""
    if os.geteuid() == 0:
        return read_token(owner=65534)(folder)
    read_token()(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        return read_token_file(folder / "token")


ROWS = [
    Mistake(
        "a report of no run", lambda folder: write_report(RunDir(folder / "none")), StoreError, ("no run here",)
    ),
    *(
        Mistake(f"a token of mode {mode:o}", read_token(mode), StoreError, ("token", "can be read by others"))
        for mode in (0o644, 0o640, 0o606)
    ),
    Mistake(
        "a token of somebody else", read_token_of_somebody_else, StoreError, ("token", "belongs to another user")
    ),
    Mistake(
        "a prefix that is no path", dashboard("--prefix", "team"), 2, ("a path such as /team/run",), "command"
    ),
    Mistake("a prefix with a space", dashboard("--prefix", "/a b"), 2, ("a path such as /team/run",), "command"),
    Mistake("a prefix without a name", dashboard("--prefix", "/a"), 2, ("NAME:PORT",), "command"),
]
