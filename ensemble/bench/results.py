"""What `ensemble bench NAME` needs to know of a study: its options, and what it came to."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
# Gets a line of progress.
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a study found.

    Attributes:
        tables: for people, one below the other: a title, "" for none, and rows with the same keys each.
        rows: for programs; they may have more keys, and differ in them.
        findings: what follows, a line each.
        draw: writes the plot, one HTML file that needs no network.
    """

    tables: Sequence[tuple[str, Rows]]
    rows: Rows
    findings: Sequence[str]
    draw: Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Study:
    """One study of `ensemble bench`.

    Attributes:
        name: the word in the command line.
        says: in the list of studies, a few words; description: at the head of its help.
        add_options: its own; `--json` and `--plot` are there already.
        run: does it; None where another process shows what came of it. What the user is to mend is raised as
            `SpecError`. Its heavy imports are inside.
    """

    name: str
    says: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Say], Outcome | None]
