"""The command `ensemble`: what can be asked for, and how a mistake is answered; `ensemble.commands` does it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ensemble import commands
from ensemble.commands import EXIT_FAILED
from ensemble.interrupts import Terminated, exit_in_order

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed run, 2 for a mistake, 128 + n for signal n."""
    try:
        options = _parser().parse_args(arguments)
        exit_in_order()
        return int(options.do(options))
    except KeyboardInterrupt as error:
        if not error.args:  # else it has been said what became of the run
            print("ensemble: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Terminated as error:
        if not error.said:
            print("ensemble: terminated", file=sys.stderr)
        return int(error.code or 0)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        status = _status_of(error)
        if status is None:
            raise
        print("ensemble:", " ".join(str(error).split()), file=sys.stderr)
        return status


def _status_of(error: Exception) -> int | None:
    """The exit status for an error that the user is to see as one line; None for a fault of ours."""
    from ensemble.spec import SpecError
    from ensemble.store.errors import StoreError
    from pipelines.errors import PipelineError

    if isinstance(error, (SpecError, StoreError, PipelineError)):
        return EXIT_USAGE
    return EXIT_FAILED if isinstance(error, OSError) and error.filename is not None else None


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part.strip()) for part in text.split(",")]


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds, got {text!r}")
    return value


def _milliseconds_each(text: str) -> list[float]:
    return [_milliseconds(part.strip()) for part in text.split(",")]


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _output(text: str) -> str:
    """A file to be written at the end: whether that can be is found out before hours of training."""
    path = Path(text)
    if text != "-" and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: it is a directory, or in none that exists")
    return text


def _json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=_output,
        help="write the table's rows as JSON; '-': to standard output, in place of the table",
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ensemble", description="Train an ensemble or a hyperparameter search on one shared data pipeline."
    )
    added_to = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, do: Callable[[argparse.Namespace], int], says: str) -> argparse.ArgumentParser:
        added = added_to.add_parser(name, help=says, description=says)
        added.set_defaults(do=do)
        _json_option(added)
        return added

    def running(added: argparse.ArgumentParser, *, executor: str | None) -> None:
        from ensemble.execute import EXECUTORS

        shown = f" (default: {executor})" if executor else " (default: as before)"
        added.add_argument(
            "--executor", choices=list(EXECUTORS), default=executor, help="where members run" + shown
        )

    demo = command(
        "demo", commands.demo, "Train eight small models on handwritten digits; needs no data and a minute."
    )
    demo.add_argument("--run-dir", help="where the run is kept (default: runs/demo, made anew)")
    running(demo, executor="ray")
    _settings(demo)

    run = command(
        "run", commands.run, "Run what a spec file declares: a file that defines spec(**options) -> Ensemble."
    )
    run.add_argument("spec", metavar="SPEC.py")
    run.add_argument("--run-dir", help="where the run is kept (default: runs/NAME); one that was stopped goes on")
    running(run, executor="ray")
    _settings(run)

    for name, do, says in (
        ("status", commands.status, "Show a run's members."),
        ("stop", commands.stop, "Let all members write a checkpoint and end the run; `resume` goes on."),
        ("resume", commands.resume, "Go on with a run that was stopped or killed."),
        ("report", commands.report, "Write a run's report and print where it is."),
        ("logs", commands.logs, "Print what a member, or each of them, said."),
    ):
        added = command(name, do, says)
        added.add_argument("run_dir", metavar="RUN_DIR")
        if name == "logs":
            added.add_argument("member", nargs="?", help="such as member-0 (default: all)")
        if name == "resume":
            running(added, executor=None)

    command("doctor", commands.doctor, "Say what this machine offers, and why not where it does not.")

    bench = added_to.add_parser("bench", help="Studies that can be repeated anywhere.")
    studies = bench.add_subparsers(title="studies", metavar="STUDY", required=True)
    _bench_pipelines_options(studies.add_parser("pipelines", help="what one shared pipeline saves"))
    return parser


def _bench_pipelines_options(parser: argparse.ArgumentParser) -> None:
    def option(name: str, default: Any, says: str, **more: Any) -> None:
        shown = "" if default in (None, False) else " (default: %(default)s)"
        parser.add_argument(name, default=default, help=says + shown, **more)

    parser.description = "What one shared pipeline saves: every combination of the lists given, in one table."
    parser.set_defaults(do=commands.bench_pipelines)
    option("--data", None, "a tar archive of JPEG photographs", required=True, metavar="FILE")
    shown = "how many read at once, as in 1,4,16 (default: 1,4,16; with hosts one and four on each)"
    option("--members", None, shown, type=_counts)
    shown = (
        "which to compare: bare ring, node, independent; with hosts also single, multi, all, auto (default: those)"
    )
    option("--designs", None, shown, type=_words)
    option("--peers", False, "add the design 'dataloader': a plain torch DataLoader a member", action="store_true")
    option("--prep-workers", "1", "preparation processes, of a node or of each independent member", type=_counts)
    option("--batch-size", 32, "samples of a batch", type=_count)
    option("--samples", 5000, "that each member takes at least, after its first batch; whole epochs", type=_count)
    option("--samples-alone", 1000, "the same where each member prepares for itself, which is slow", type=_count)
    option("--size", 224, "pixels of a side", type=_count)
    steps = ("emulated", "model")
    option("--step", "emulated", "a member's compute: an emulated accelerator or a real model", choices=steps)
    shown = "emulated accelerator: wait that long after each batch, using no CPU, as in 0,10,60 (default: 0)"
    option("--step-ms", None, shown, type=_milliseconds_each)
    option("--cores", None, "pin everything to that many cores, as in 1,2 (default: no pinning)", type=_counts)
    option("--hosts", 1, "nodes: hosts in network namespaces on this machine (needs root)", type=_count)
    option("--link", None, "rate of the hosts' links, as in 1gbit,10gbit (default: unlimited)", type=_words)
    shown = "bytes of a frame's payload on the hosts' links; 9000 for jumbo frames (default: 1500)"
    option("--mtu", None, shown, type=_count)
    shown = "nodes that prepare, in the designs single and multi (default: one; all)"
    option("--preparers", None, shown, type=_count)
    option("--repeats", 5, "medians of that many runs; one run where each member prepares for itself", type=_count)
    option("--plot", "bench-pipelines.html", "where the plot goes; '-' for none", type=_output, metavar="FILE")
    _json_option(parser)


def _settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the spec")


if __name__ == "__main__":
    sys.exit(main())
