"""Types of command-line options, and options that several commands have."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def samples(text: str) -> int:
    """A number of samples for a report."""
    if not text.isdigit() or not 0 < int(text) <= 100:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 to 100, got {text!r}")
    return int(text)


def budget(text: str) -> dict[str, float]:
    """Limits of a search, as in hours=2,trials=100."""
    from ensemble.spec import SpecError
    from ensemble.spec.search import check_budget

    try:
        given = dict(each.split("=") for each in text.split(","))
        limits = {name: int(value) if name == "trials" else float(value) for name, value in given.items()}
        check_budget("--budget", limits)
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be as in hours=2,trials=100, got {text!r}") from None
    return limits


def size(text: str) -> int:
    """Bytes, as in 4096, 64KiB, 16M."""
    from pipelines.cache.folder import parse_size

    found = parse_size(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a size, as in 4KiB,16MiB; got {text!r}")
    return found


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
    """A file for `--json`; see `output`."""
    from ensemble.store.user_files import is_our_json

    return output(text, is_our_json, "the JSON of an earlier command")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add `--json`, which every command has."""
    text = "write the table as JSON to FILE; without FILE, or with '-', to standard output instead of the table"
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", type=json_output, help=text)


def add_run_options(parser: argparse.ArgumentParser, *, fresh: bool = True) -> None:
    """Add the options of commands that start or continue a run: about its code, and about members that failed.

    Args:
        parser: of a command that starts or continues a run.
        fresh: whether the command has `--fresh`.
    """
    modules = "" if fresh else " of modules that are not kept with the run; `ensemble run` uses edited code"
    parser.add_argument(
        "--accept-code",
        action="store_true",
        help=f"continue although members were trained with other code{modules}",
    )
    text = "continue although members were trained on other data; other data to evaluate on need it not"
    parser.add_argument("--accept-data", action="store_true", help=text)
    trust = "load code from files that their group may write, such as on a shared volume"
    parser.add_argument("--trust-group", action="store_true", help=trust)
    trust = (
        "load code from below this folder although anybody may write there, as on a file system without modes "
        "(WSL's /mnt/c, exFAT, SMB)"
    )
    parser.add_argument("--trust-folder", metavar="FOLDER", help=trust)
    allow = (
        "exit with 0 although some members failed or could not be combined, as long as one finished (otherwise 3)"
    )
    parser.add_argument("--allow-failed", action="store_true", help=allow)
    if fresh:
        parser.add_argument(
            "--fresh", action="store_true", help="start a new run, in a directory beside the old one's"
        )


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit what a run takes.

    Args:
        parser: of a command that starts or continues a run.
    """
    text = "let the members have so many GPUs together at most (default: as declared)"
    parser.add_argument("--max-gpus", type=int, metavar="N", help=text)
    text = "let the members have so many cores together at most (default: as declared)"
    parser.add_argument("--max-cpus", type=float, metavar="N", help=text)


def read_limits(options: argparse.Namespace) -> dict[str, float]:
    """The limits that the options of `add_limit_options` set."""
    limits = {"gpus": options.max_gpus, "cpus": options.max_cpus}
    return {name: value for name, value in limits.items() if value is not None}


def add_mirror_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where a run is mirrored.

    Args:
        parser: of a command that drives a run.
    """
    text = (
        "copy new and changed files of the run there while it goes on: s3://BUCKET/PATH, gs://..., file:///...; "
        "`ensemble fetch` brings it back; 'none' ends that (default: the address of before)"
    )
    parser.add_argument("--mirror", metavar="URL", help=text)


def add_notify_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that says who is told how the run has ended.

    Args:
        parser: of a command that drives a run.
    """
    told = (
        "tell a webhook when the run has ended, failed or was stopped: POST a JSON object to this address, or to "
        "the one in a file, which the list of processes does not show; may be repeated"
    )
    parser.add_argument("--notify", metavar="URL|@FILE", action="append", default=[], help=told)
