"""The command line of `ensemble`: parses the arguments, runs the command, reports errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ensemble import __version__
from ensemble.cli import (
    artifact_commands,
    control_commands,
    dashboard,
    inspect_commands,
    run_commands,
    verify,
    view_commands,
)
from ensemble.cli.arguments import (
    add_json_option,
    add_limit_options,
    add_mirror_option,
    add_notify_option,
    add_run_options,
    budget,
    count,
    path,
    samples,
)
from ensemble.cli.run_commands import EXIT_FAILED, EXIT_RESUMABLE
from ensemble.interrupts import Terminated, exit_at_once, exit_on_signals, exit_process

EXIT_STATUSES = """\
exit status:
  0  done
  1  no member finished, or the command failed
  2  a usage error, or a declaration that cannot run: one line says which; nothing was started
  3  some members failed, or those that finished could not be combined (an error of the function combine=, or in
     the predictions): they are trained, and there is no combined model; 0 with --allow-failed
  75 the cluster does not answer any more, and `ensemble resume RUN_DIR` continues the run; or the run has ended
     and its mirror is not complete, which the same completes
  128 + n  ended by signal n, such as 130 by Ctrl-C
"""
EXIT_USAGE, EXIT_INTERRUPTED = 2, 130


def main(
    arguments: Sequence[str] | None = None, make_parser: Callable[[], argparse.ArgumentParser] | None = None
) -> int:
    """Run a command.

    Args:
        arguments: of the command; None takes those of this process, and ends it when the command has ended.
        make_parser: of other commands than those of `ensemble`; what it parses has `do`, which runs the command.

    Returns:
        The exit status, see `EXIT_STATUSES`.
    """
    if arguments is None:
        with exit_at_once():
            from ensemble.executors.native_output import separate_stderr
            from ensemble.meter import count_whole_process

        count_whole_process()
        separate_stderr()
        exit_process(_run(sys.argv[1:], make_parser or _make_parser))
    return _run(arguments, make_parser or _make_parser)


def _run(arguments: Sequence[str], make_parser: Callable[[], argparse.ArgumentParser]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # it may be Latin-1, and file names may be no valid text
    try:
        exit_on_signals()
        options = make_parser().parse_args(arguments)
        with _warnings_in_one_line():
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
    from pipelines.errors import PipelineError

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
        found, unknown = super().parse_known_args(words, namespace)
        if "params" in found and not any(each.startswith("-") for each in unknown):
            found.params, unknown = [*found.params, *unknown], []
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="ensemble",
        description="Train an ensemble or a hyperparameter search on one shared data pipeline.",
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"ray-ensemble {__version__}, Python {platform.python_version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(
        name: str, do: Callable[[argparse.Namespace], int], text: str, *, json: bool = True
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(do=do)
        if json:
            add_json_option(added)
        return added

    def add_executor(added: argparse.ArgumentParser, *, executor: str | None) -> None:
        from ensemble.executors import EXECUTORS

        shown = f" (default: {executor})" if executor else " (default: the same as before)"
        added.add_argument(
            "--executor", choices=list(EXECUTORS), default=executor, help="what runs the members" + shown
        )

    for name, do, text, usual in (
        (
            "demo",
            run_commands.demo,
            "Train eight small models on handwritten digits. Takes about a minute and needs no data.",
            "runs/demo, which is replaced",
        ),
        (
            "run",
            run_commands.run,
            "Run a spec file, a Python file with spec(**options) -> Ensemble; continues a run that was stopped.",
            "runs/NAME, with the name of the ensemble",
        ),
    ):
        added = command(name, do, text)
        if name == "run":
            added.add_argument("spec", metavar="SPEC.py", type=path)
            text = (
                "show what the run would do, need and cost, from one batch and a few steps; writes nothing; 'full'"
                " also prepares all records of all splits"
            )
            added.add_argument("--dry-run", nargs="?", const="quick", choices=("quick", "full"), help=text)
        added.add_argument("--run-dir", help=f"run directory (default: {usual})")
        add_executor(added, executor="ray")
        add_run_options(added)
        add_limit_options(added)
        add_notify_option(added)
        add_mirror_option(added)
        group_read = "let the group of the run directory read it (default: only its owner)"
        added.add_argument("--group-read", action="store_true", help=group_read)
        dashboard.add_page_options(added)
        text = "switch on the dashboard of the Ray that is started for the run, on loopback"
        added.add_argument("--ray-dashboard", action="store_true", help=text)
        _add_settings(added)

    submit = command("submit", run_commands.submit, "Run a spec file as a job on a Ray cluster.")
    submit.add_argument("spec", metavar="SPEC.py", type=path)
    submit.add_argument(
        "--address",
        required=True,
        metavar="URL",
        help="address of the cluster's job server, such as http://HEAD:8265",
    )
    submit.add_argument(
        "--run-dir", help="run directory, with the same path on every node (default: runs/NAME in this directory)"
    )
    submit.add_argument(
        "--name", help="name of the job, of which one runs at a time (default: the file's name without .py)"
    )
    submit.add_argument(
        "--working-dir",
        help="directory with the spec and its imports, copied to the cluster (default: the spec's)",
    )
    add_run_options(submit)
    add_limit_options(submit)
    add_mirror_option(submit)
    dashboard.add_page_options(submit)
    submit.add_argument(
        "--follow", action="store_true", help="print the job's output until it ends, and exit with its status"
    )
    _add_settings(submit)

    for name, do, text in (
        ("status", view_commands.status, "Show the state of a run and of its members."),
        ("nodes", view_commands.nodes, "Show the nodes of a run, what has failed there, and why one is left out."),
        ("logs", control_commands.logs, "Print the output of a member, or of all members."),
        (
            "stop",
            control_commands.stop,
            "Stop a run: all members write a checkpoint and end. `ensemble resume` continues it.",
        ),
        ("cancel", control_commands.send_request, "End a member, or all members, permanently."),
        (
            "pause",
            control_commands.send_request,
            "Pause a member, or all members: it writes a checkpoint and frees its resources.",
        ),
        (
            "resume",
            run_commands.resume,
            "Continue a run that was stopped or killed, or members that are paused.",
        ),
        ("report", view_commands.report, "Write the report of a run and print its path."),
    ):
        added = command(name, do, text)
        added.set_defaults(command=name)
        added.add_argument("run_dir", metavar="RUN_DIR")
        if name in ("logs", "cancel", "pause", "resume"):
            added.add_argument("member", nargs="?", help="name of a member, such as member-0 (default: all)")
        if name == "status":
            added.epilog = "A number beside a state, as in finished (2), says how often the member was started."
            added.add_argument("--watch", action="store_true", help="show its progress until it ends, or Ctrl-C")
        if name == "report":
            text = (
                "show so many samples of the data (at most 100), the most wrong, the most unsure and those on "
                "which members disagree most, with pictures up to 8 MiB; without it the report has none"
            )
            added.add_argument("--samples", type=samples, metavar="N", help=text)
        if name == "logs":
            added.add_argument("--follow", "-f", action="store_true", help="continue until the run ends")
            text = "begin with the last N lines of each member"
            added.add_argument("--lines", "-n", type=count, metavar="N", help=text)
        if name == "resume":
            text = "train the members, those that have finished, too, to N epochs in all, more than were declared"
            added.add_argument("--epochs", type=count, metavar="N", help=text)
            text = "let a search use so much in all, as in hours=2,cpu_hours=8 (also trials=N, energy_kj=X)"
            added.add_argument("--budget", type=budget, metavar="LIMITS", help=text)
            add_executor(added, executor=None)
            add_run_options(added, fresh=False)
            add_limit_options(added)
            add_notify_option(added)
            add_mirror_option(added)

    text = "Bring a run back from the address to which --mirror copied it."
    view_commands.add_fetch_options(command("fetch", view_commands.fetch_run, text))

    text = "Compare the files of a run with the digests in its log, and list what is whole, damaged or missing."
    verified = command("verify", verify.verify_run, text)
    verified.add_argument("run_dir", metavar="RUN_DIR")
    text = "list all files instead: their sizes, what they hold, and whose data"
    verified.add_argument("--contents", action="store_true", help=text)

    text = "List the runs in a folder, the newest first: their state, best value, CPU time, energy and duration."
    listed = command("list", inspect_commands.list_runs, text)
    listed.add_argument("folder", nargs="?", default="runs", type=path, help="folder (default: %(default)s)")
    text = "Sum what the runs in a folder have used: CPU-hours, GPU-hours, kWh, emissions and price."
    used = command("usage", inspect_commands.usage, text)
    used.add_argument("folder", nargs="?", default="runs", type=path, help="folder (default: %(default)s)")
    text = "what they are summed by: user, month, run, or several (default: user)"
    used.add_argument("--by", nargs="+", default=["user"], choices=("user", "month", "run"), help=text)
    used.add_argument(
        "--csv", metavar="FILE", help="write the sums there, with all their digits; - for standard output"
    )
    text = (
        "Compare runs: differences of their declarations, figures of the same samples with 95 %% intervals of "
        "their differences, cost."
    )
    compared = command("compare", inspect_commands.compare, text)
    compared.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="two runs or more; each is compared with the first"
    )
    text = "show the time until the objective reached this value (default: the best that all have reached)"
    compared.add_argument("--quality", type=float, metavar="VALUE", help=text)

    add = command(
        "add",
        control_commands.add,
        "Add a member to a run in progress, or with --from a clone of one of its members: its declaration with "
        "the hyperparameters and options given here. It joins the stream at the start of the stream's next epoch.",
    )
    add.add_argument("run_dir", metavar="RUN_DIR")
    add.add_argument("--from", dest="source", metavar="MEMBER", help="the member that is cloned")
    text = "start with the weights of that member's last checkpoint; the optimizer and the epochs start anew"
    add.add_argument("--warm", action="store_true", help=text)
    add.add_argument("params", nargs="*", metavar="NAME=VALUE", help="hyperparameters; a value is JSON or text")
    for field in control_commands.MEMBER_FIELDS:
        add.add_argument(f"--{field.replace('_', '-')}", dest=field, metavar="VALUE", help=f"Member.{field}")

    text = "Export the combined, calibrated model of a run as a folder that predicts with torch alone."
    artifact_commands.add_export_options(command("export", artifact_commands.export, text))
    text = "Predict with an artifact or a run for all records of a data set, to a Parquet file."
    artifact_commands.add_predict_options(command("predict", artifact_commands.predict, text))

    distill = command(
        "distill",
        run_commands.distill,
        "Train one model on what the ensemble of a run predicts, as a run of its own, and show what is lost.",
    )
    distill.add_argument("run_dir", metavar="RUN_DIR")
    text = "run directory of the student (default: RUN_DIR-distilled); a run that it has there is continued"
    distill.add_argument("--run-dir", dest="run_dir_to", metavar="DIR", help=text)
    distill.add_argument("--member", help="member whose declaration the student takes (default: the best)")
    text = "a hyperparameter that differs; a value is JSON or text"
    distill.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "a Python file with model(params) -> nn.Module (default: the recipe's model)"
    distill.add_argument("--model", type=path, metavar="FILE.py", help=text)
    distill.add_argument("--epochs", type=count, metavar="N", help="epochs of the student (default: the member's)")
    text = "temperature of the probabilities that are compared (default: 2); not for regression"
    distill.add_argument("--temperature", type=float, help=text)
    text = (
        "weight of the distance to the ensemble, from 0 to 1 (default: 0.5); the recipe's loss has one minus that"
    )
    distill.add_argument("--weight", type=float, help=text)
    text = "start a new student, in a directory beside the one that is there"
    distill.add_argument("--fresh", action="store_true", help=text)
    add_executor(distill, executor=None)
    add_run_options(distill, fresh=False)

    text = "Serve the live page of a run, or of all runs in a folder, whichever process runs them."
    dashboard.add_options(command("dashboard", dashboard.dashboard, text, json=False))

    text = "Show what this machine offers, and why anything is missing."
    command("doctor", view_commands.doctor, text)

    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set an option of the spec; NAME=@FILE reads the value from a file where the run starts",
    )
