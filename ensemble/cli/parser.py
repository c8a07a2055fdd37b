"""The command line of `ensemble`: parses the arguments, runs the command, reports errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ensemble import __version__
from ensemble.cli.arguments import Command, add_json_option
from ensemble.cli.console import json_alone
from ensemble.cli.run_commands import EXIT_FAILED, EXIT_RESUMABLE
from ensemble.interrupts import Terminated, exit_at_once, exit_on_signals, exit_process
from pipelines.errors import PipelineError, unknown_name
from pipelines.providers import Providers

EXIT_STATUSES = """\
exit status:
  0  done
  1  no member finished, or the command failed
  2  a usage error, or a declaration that cannot run: one line says which; nothing was started
  3  some members failed, or those that finished could not be combined (an error of the function combine=, or in
     the predictions): they are trained, and there is no combined model; 0 with --allow-failed; or an error ended
     the run when some members had finished, such as one of the function constraints= of a search
  75 the cluster does not answer any more, or the run has ended and its mirror is incomplete:
     `ensemble resume RUN_DIR` continues the run, or completes the mirror
  128 + n  ended by signal n, such as 130 by Ctrl-C
"""
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130

COMMANDS = Providers(
    "commands",
    {
        "demo": "ensemble.cli.run_commands:DEMO",
        "run": "ensemble.cli.run_commands:RUN",
        "submit": "ensemble.cli.submit_command:SUBMIT",
        "status": "ensemble.cli.view_commands:STATUS",
        "summary": "ensemble.cli.view_commands:SUMMARY",
        "nodes": "ensemble.cli.inspect_commands:NODES",
        "logs": "ensemble.cli.control_commands:LOGS",
        "stop": "ensemble.cli.control_commands:STOP",
        "cancel": "ensemble.cli.control_commands:CANCEL",
        "pause": "ensemble.cli.control_commands:PAUSE",
        "resume": "ensemble.cli.run_commands:RESUME",
        "report": "ensemble.cli.dashboard:REPORT",
        "fetch": "ensemble.cli.view_commands:FETCH",
        "verify": "ensemble.cli.verify:VERIFY",
        "list": "ensemble.cli.inspect_commands:LIST",
        "usage": "ensemble.cli.inspect_commands:USAGE",
        "compare": "ensemble.cli.inspect_commands:COMPARE",
        "add": "ensemble.cli.control_commands:ADD",
        "export": "ensemble.cli.artifact_commands:EXPORT",
        "predict": "ensemble.cli.artifact_commands:PREDICT",
        "distill": "ensemble.cli.distill_command:DISTILL",
        "dashboard": "ensemble.cli.dashboard:DASHBOARD",
        "doctor": "ensemble.cli.doctor:DOCTOR",
    },
)


def main(
    arguments: Sequence[str] | None = None, parser: Callable[[], argparse.ArgumentParser] | None = None
) -> int:
    """Run a command.

    Args:
        arguments: of the command; None takes those of this process, and ends it when the command has ended.
            What it prints besides the JSON of `--json -` then goes to standard error.
        parser: makes the parser of other commands; what it parses has `do`, which runs the command.

    Returns:
        The exit status, see `EXIT_STATUSES`.
    """
    if arguments is None:
        with exit_at_once():
            from ensemble.executors.native_output import separate_stderr
            from ensemble.meter import count_whole_process

        count_whole_process()
        separate_stderr()
        exit_process(_run(sys.argv[1:], parser or _find_parser(sys.argv[1:])))
    return _run(arguments, parser or _find_parser(arguments))


def _find_parser(arguments: Sequence[str]) -> Callable[[], argparse.ArgumentParser]:
    """What makes the parser: of one command where the first argument names it, which alone is imported then."""
    named = arguments[0] if arguments else ""
    return functools.partial(make_command_parser, named if COMMANDS.find(named) is not None else None)


def _run(arguments: Sequence[str], make_command_parser: Callable[[], argparse.ArgumentParser]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # it may be Latin-1, and file names may be no valid text
    try:
        exit_on_signals()
        options = make_command_parser().parse_args(arguments)
        with _warnings_in_one_line(), json_alone(options):
            return int(options.do(options))
    except KeyboardInterrupt as error:
        if not error.args:  # else the message about the run has been printed
            print("ensemble: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Terminated as error:
        if not error.reported:
            print("ensemble: terminated", file=sys.stderr)
        return int(error.code or 0)
    except BrokenPipeError:  # the reader of standard output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        status = _find_exit_status(error)
        if status is None:
            raise
        from ensemble.reporting.text import visible

        print("ensemble:", visible(" ".join(str(error).split())), file=sys.stderr)
        return status


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """A warning of ray-ensemble itself is printed as an error is, without a line of its source."""
    usual, own = warnings.formatwarning, Path(__file__).parents[2]

    def describe(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
        parts = Path(filename).parts[len(own.parts) :] if Path(filename).is_relative_to(own) else ()
        if parts[:1] in (("ensemble",), ("pipelines",)):
            return f"ensemble: {' '.join(str(message).split())}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = describe
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _find_exit_status(error: Exception) -> int | None:
    """The exit status for an error that is reported in one line; None for an error of ray-ensemble itself."""
    from ensemble.comm import CommunicatorError
    from ensemble.executors import ClusterLostError
    from ensemble.spec import SpecError
    from ensemble.store.files import StoreError

    if isinstance(error, (SpecError, StoreError, PipelineError)):
        return EXIT_USAGE
    if "ensemble.combine" in sys.modules:  # else it has raised none
        from ensemble.combine import CombineError

        if isinstance(error, CombineError):
            return EXIT_USAGE
    if isinstance(error, ClusterLostError):
        return EXIT_RESUMABLE
    if isinstance(error, CommunicatorError):
        return EXIT_FAILED
    return EXIT_FAILED if isinstance(error, OSError) and error.filename is not None else None


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, which points to the help of the command that was called."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As usual, but arguments that a command does not know are its error, and not that of `ensemble`.

        Hyperparameters (`params`) may also follow an option, where argparse knows them no more. What follows
        `--dry-run` may be SPEC.py.
        """
        words = list(sys.argv[1:] if args is None else args)
        option = self._option_string_actions.get("--dry-run")
        for i, word in enumerate(words if option is not None and option.nargs == "?" else ()):
            is_dry_run = word.startswith("--dry") and "--dry-run".startswith(word)
            if is_dry_run and words[i + 1 : i + 2] not in (["quick"], ["full"]):
                words[i] = "--dry-run=quick"
        options, unknown = super().parse_known_args(words, namespace)
        if "params" in options and not any(word_left.startswith("-") for word_left in unknown):
            options.params, unknown = [*options.params, *unknown], []
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, unknown_name("there is no", str(value), list(action.choices)))

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def make_command_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one of them, which alone is imported."""
    parser = Parser(
        prog="ensemble",
        description="Train an ensemble or a hyperparameter search on one shared data pipeline.",
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"ray-ensemble {__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=version)
    parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS.names() if only is None else [only]:
        command = _load_command(name)
        added = parsers.add_parser(name, help=command.text, description=command.text)
        added.set_defaults(do=command.run, command=name)
        if command.has_json:
            add_json_option(added)
        command.add_arguments(added)
    return parser


def _load_command(name: str) -> Command:
    """A command of the table; one that cannot be imported says why in the help, and when it is run."""
    try:
        command: Command = COMMANDS.load(name)
    except PipelineError as error:
        reason = error

        def refuse(options: argparse.Namespace) -> int:
            raise reason

        return Command(refuse, f"cannot be used: {error}".replace("%", "%%"))
    return command
