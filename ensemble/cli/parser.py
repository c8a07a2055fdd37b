"""The options of the command `ensemble`, and how a mistake in them is answered."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ensemble.cli import control_commands, run_commands
from ensemble.cli.arguments import changed_code, group_read, json_option, path
from ensemble.cli.bench import add_studies
from ensemble.cli.run_commands import EXIT_FAILED
from ensemble.interrupts import Terminated, exit_in_order, leave

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status: 0, 1 for a failed run, 2 for a mistake, 128 + n for signal n.

    Without arguments those of the process are taken, which is then the command's, and is left at its end.
    """
    if arguments is None:
        from ensemble.meter import count_whole_process

        count_whole_process()
        leave(_run(sys.argv[1:]))
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # it may be Latin-1, and names may be no text at all
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
        from ensemble.reporting.text import visible

        print("ensemble:", visible(" ".join(str(error).split())), file=sys.stderr)
        return status


def _status_of(error: Exception) -> int | None:
    """The exit status for an error that the user is to see as one line; None for a fault of ours."""
    from ensemble.bench.launch.ranks import RanksError
    from ensemble.comm import CommunicatorError
    from ensemble.spec import SpecError
    from ensemble.store.files import StoreError
    from pipelines.errors import PipelineError

    if isinstance(error, (SpecError, StoreError, PipelineError)):
        return EXIT_USAGE
    if "ensemble.combine" in sys.modules:  # else none of its errors can have come
        from ensemble.combine import CombineError

        if isinstance(error, CombineError):
            return EXIT_USAGE
    if isinstance(error, (RanksError, CommunicatorError)):
        return EXIT_FAILED
    return EXIT_FAILED if isinstance(error, OSError) and error.filename is not None else None


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ensemble", description="Train an ensemble or a hyperparameter search on one shared data pipeline."
    )
    added_to = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, do: Callable[[argparse.Namespace], int], says: str) -> argparse.ArgumentParser:
        added = added_to.add_parser(name, help=says, description=says)
        added.set_defaults(do=do)
        json_option(added)
        return added

    def running(added: argparse.ArgumentParser, *, executor: str | None) -> None:
        from ensemble.executors import EXECUTORS

        shown = f" (default: {executor})" if executor else " (default: as before)"
        added.add_argument(
            "--executor", choices=list(EXECUTORS), default=executor, help="where members run" + shown
        )

    demo = command(
        "demo", run_commands.demo, "Train eight small models on handwritten digits; needs no data and a minute."
    )
    demo.add_argument("--run-dir", help="where the run is kept (default: runs/demo, made anew)")
    running(demo, executor="ray")
    changed_code(demo)
    group_read(demo)
    _settings(demo)

    run = command(
        "run", run_commands.run, "Run what a spec file declares: a file that defines spec(**options) -> Ensemble."
    )
    run.add_argument("spec", metavar="SPEC.py", type=path)
    run.add_argument("--run-dir", help="where the run is kept (default: runs/NAME); one that was stopped goes on")
    running(run, executor="ray")
    changed_code(run)
    group_read(run)
    _settings(run)

    submit = command("submit", run_commands.submit, "Run what a spec file declares as a job on a Ray cluster.")
    submit.add_argument("spec", metavar="SPEC.py", type=path)
    submit.add_argument("--address", required=True, metavar="URL", help="such as http://HEAD:8265")
    submit.add_argument("--run-dir", help="which every node sees by that path (default: runs/NAME from here)")
    submit.add_argument("--name", help="of which there is one job at a time (default: the file's, without .py)")
    submit.add_argument("--working-dir", help="what travels: spec and imports (default: the spec's directory)")
    changed_code(submit)
    submit.add_argument("--follow", action="store_true", help="print what it says until it ends, with its status")
    _settings(submit)

    for name, do, says in (
        ("status", run_commands.status, "Show a run's members."),
        ("logs", control_commands.logs, "Print what a member, or each of them, said."),
        ("stop", control_commands.stop, "Let all members write a checkpoint and end the run; `resume` goes on."),
        ("cancel", control_commands.ask, "End a member, or all of them, for good."),
        ("pause", control_commands.ask, "Let a member, or all of them, write a checkpoint and give up its place."),
        (
            "resume",
            run_commands.resume,
            "Go on with a run that was stopped or killed, or with what is paused in it.",
        ),
        ("report", run_commands.report, "Write a run's report and print where it is."),
    ):
        added = command(name, do, says)
        added.set_defaults(command=name)
        added.add_argument("run_dir", metavar="RUN_DIR")
        if name in ("logs", "cancel", "pause", "resume"):
            added.add_argument("member", nargs="?", help="such as member-0 (default: all)")
        if name == "logs":
            added.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")
        if name == "resume":
            running(added, executor=None)
            changed_code(added, fresh=False)

    add = command(
        "add", control_commands.add, "Add a member to a run in progress; it joins at the boundary of an epoch."
    )
    add.add_argument("run_dir", metavar="RUN_DIR")
    add.add_argument(
        "params", nargs="*", metavar="NAME=VALUE", help="its hyperparameters; a value is JSON or text"
    )
    for field in control_commands.MEMBER_FIELDS:
        add.add_argument(f"--{field.replace('_', '-')}", dest=field, metavar="VALUE", help=f"Member.{field}")

    command("doctor", run_commands.doctor, "Say what this machine offers, and why not where it does not.")

    bench = added_to.add_parser("bench", help="Studies that can be repeated anywhere.")
    add_studies(bench)
    return parser


def _settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the spec; NAME=@FILE reads its value from a file, where the run starts",
    )
