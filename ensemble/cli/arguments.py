"""What options of the command line may be, each said in a line when it is not that."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any


def option(parser: argparse._ActionsContainer, name: str, default: Any, says: str, **more: Any) -> None:
    """Add an option whose help names its default."""
    shown = "" if default in (None, False) else " (default: %(default)s)"
    parser.add_argument(name, default=default, help=says + shown, **more)


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """Such integers, with commas between them."""
    return [count(part.strip()) for part in text.split(",")]


def milliseconds(text: str) -> float:
    """A duration."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds, got {text!r}")
    return value


def milliseconds_each(text: str) -> list[float]:
    """Durations, with commas between them."""
    return [milliseconds(part.strip()) for part in text.split(",")]


def words(text: str) -> list[str]:
    """Words, with commas between them."""
    return [part.strip() for part in text.split(",")]


def path(text: str) -> str:
    """A path, `~` the user's home: a shell leaves it alone behind `=`."""
    return os.path.expanduser(text)


def directory(text: str) -> str:
    """A directory that is there."""
    if not Path(text).expanduser().is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text}")
    return str(Path(text).expanduser())


def output(text: str) -> str:
    """A file to be written at the end: whether that can be is found out before hours of training."""
    path = Path(text).expanduser()
    if text != "-" and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a directory, or in none that exists")
    return text if text == "-" else str(path)


def json_option(parser: argparse.ArgumentParser) -> None:
    """Every command's `--json`."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        type=output,
        help="write the table's rows as JSON; without FILE, or with '-', to standard output in place of the table",
    )


def group_read(parser: argparse.ArgumentParser) -> None:
    """`--group-read`: who may look at the run."""
    parser.add_argument(
        "--group-read", action="store_true", help="let the group of the run directory read it (default: private)"
    )


def changed_code(parser: argparse.ArgumentParser, *, fresh: bool = True) -> None:
    """What is to be done where members of a run were trained with other code than now."""
    whose = "" if fresh else ", of modules that could not be kept with the run; `run` takes edited code"
    parser.add_argument(
        "--accept-code", action="store_true", help=f"go on with other code than members trained with{whose}"
    )
    says = "run code from what a group may write: of a volume that is shared on purpose"
    parser.add_argument("--trust-group", action="store_true", help=says)
    if fresh:
        parser.add_argument("--fresh", action="store_true", help="start anew, in a directory beside the run's")
