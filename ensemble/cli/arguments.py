"""What a command is, types of command-line options, and options that several commands have."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Of the live page.
PORT = 8270


@dataclass(frozen=True)
class Command:
    """A command of `ensemble`, one of the table `COMMANDS`; another distribution adds one by an entry point.

    Attributes:
        run: takes the parsed options and returns the exit status.
        text: what it does, a sentence for the help.
        add_arguments: adds its arguments to a parser.
        has_json: whether it has `--json`.
    """

    run: Callable[[argparse.Namespace], int]
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    has_json: bool = True


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def budget(text: str) -> dict[str, float]:
    """Limits of a search, as in hours=2,trials=100."""
    from ensemble.spec import SpecError
    from ensemble.spec.limits import check_budget

    try:
        parts = dict(part.split("=") for part in text.split(","))
        limits = {name: int(value) if name == "trials" else float(value) for name, value in parts.items()}
        check_budget("--budget", limits)
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be as in hours=2,trials=100, got {text!r}") from None
    return limits


def size(text: str) -> int:
    """Bytes, as in 4096, 64KiB, 16M."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size_bytes = int(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if not size_bytes:
        raise argparse.ArgumentTypeError(f"must be a size, as in 4KiB,16MiB; got {text!r}")
    return size_bytes


def words(text: str) -> list[str]:
    """Words, separated by commas."""
    return [part.strip() for part in text.split(",")]


def path(text: str) -> str:
    """A path with `~` replaced by the user's home, which a shell does not do after `=`."""
    return os.path.expanduser(text)


def output(text: str, is_ours: Callable[[bytes], bool], what: str) -> str:
    """A file that can be written at the end; '-' for standard output or none."""
    from ensemble.store.errors import StoreError
    from ensemble.store.user_files import check_writable

    path = Path(text).expanduser()
    if text != "-" and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(
            f"cannot write {text!r}: it is a directory, or its directory does not exist"
        )
    if text == "-":
        return text
    try:
        check_writable(path, is_ours, what)
    except StoreError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return str(path)


def json_output(text: str) -> str:
    from ensemble.store.user_files import is_our_json

    return output(text, is_our_json, "the JSON of an earlier command")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which every command has."""
    text = "write the table as JSON to FILE; without FILE, or with '-', to standard output instead of the table"
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", type=json_output, help=text)


def port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, got {text!r}")
    return int(text)


_FLAG = {"action": "store_true"}
#: Options that several commands have, with what argparse is told of each.
SHARED: dict[str, dict[str, Any]] = {
    "--accept-code": {**_FLAG, "help": "continue although members were trained with other code"},
    "--accept-data": {
        **_FLAG,
        "help": "continue although members were trained on other data (not needed for other valid= or test=)",
    },
    "--trust-folder": {
        "metavar": "FOLDER",
        "help": "load code from below this folder although others may write there, as on a shared volume or a "
        "file system without modes (WSL's /mnt/c, exFAT, SMB)",
    },
    "--allow-failed": {
        **_FLAG,
        "help": "exit with 0 although some members failed or could not be combined, as long as one finished "
        "(otherwise 3)",
    },
    "--no-rehearsal": {
        **_FLAG,
        "help": "do not rehearse a member before the first epoch: whether it would resume is then not known",
    },
    "--fresh": {**_FLAG, "help": "start a new run, in a directory beside the old one's"},
    "--max-gpus": {
        "type": int,
        "metavar": "N",
        "help": "let all members together use at most N GPUs (default: as declared)",
    },
    "--max-cpus": {
        "type": float,
        "metavar": "N",
        "help": "let all members together use at most N cores (default: as declared)",
    },
    "--mirror": {
        "metavar": "URL",
        "help": "copy new and changed files of the run there while it goes on: s3://BUCKET/PATH, gs://..., "
        "file:///...; `ensemble fetch` brings it back; 'none' ends the copying (default: as before)",
    },
    "--notify": {
        "metavar": "URL|@FILE",
        "action": "append",
        "default": [],
        "help": "tell a webhook when the run has ended, failed or was stopped: POST a JSON object to this "
        "address, or to the one in a file, which the list of processes does not show; may be repeated",
    },
    "--set": {
        "action": "append",
        "default": [],
        "metavar": "NAME=VALUE",
        "help": "set an option of the spec; NAME=@FILE reads the value from a file where the run starts",
    },
    "--dashboard": {
        **_FLAG,
        "help": "serve a live page of the run until it has ended and, on a terminal, no browser is connected; "
        "`ensemble dashboard RUN_DIR`, started beside the run, has options for other hosts and proxies",
    },
    "--dashboard-port": {
        "type": port,
        "metavar": "PORT",
        "help": f"port of the live page (default: {PORT}, another one if it is taken); implies --dashboard",
    },
}


def add_shared(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Add options of the table `SHARED`."""
    for flag in flags:
        parser.add_argument(flag, **SHARED[flag])


def read_limits(options: argparse.Namespace) -> dict[str, float]:
    """The limits that `--max-gpus` and `--max-cpus` set."""
    limits = {"gpus": options.max_gpus, "cpus": options.max_cpus}
    return {name: value for name, value in limits.items() if value is not None}


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR")


def add_member(parser: argparse.ArgumentParser) -> None:
    """Add the run directory and a member."""
    add_run_dir(parser)
    parser.add_argument("member", nargs="?", help="name of a member, such as member-0 (default: all)")


def add_executor(parser: argparse.ArgumentParser, executor: str | None = None) -> None:
    """Add the executor; None: the default is the one of before."""
    from ensemble.executors import EXECUTORS

    text = f"what runs the members (default: {executor or 'the same as before'})"
    parser.add_argument("--executor", choices=EXECUTORS.names(), default=executor, help=text)
