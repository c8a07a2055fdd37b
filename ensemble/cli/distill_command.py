"""The command `distill`: trains one model on what the ensemble of a run predicts."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.cli.arguments import Command, add_executor, add_run_dir, add_shared, count, path
from ensemble.cli.console import print_lines, write_json
from ensemble.cli.run_commands import EXIT_FAILED, apply_trust, run_to_end
from ensemble.spec import SpecError

if TYPE_CHECKING:
    from ensemble.run import Run


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    text = "run directory of the student (default: RUN_DIR-distilled); a run that it has there is continued"
    parser.add_argument("--run-dir", dest="run_dir_to", metavar="DIR", help=text)
    parser.add_argument("--member", help="member whose declaration the student takes (default: the best)")
    text = "a hyperparameter that differs; a value is JSON or text"
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help=text)
    text = "a Python file with model(params) -> nn.Module (default: the recipe's model)"
    parser.add_argument("--model", type=path, metavar="FILE.py", help=text)
    parser.add_argument("--epochs", type=count, metavar="N", help="epochs of the student (default: the member's)")
    text = "temperature of the probabilities that are compared (default: 2); not for regression"
    parser.add_argument("--temperature", type=float, help=text)
    text = (
        "weight of the distance to the ensemble, from 0 to 1 (default: 0.5); the recipe's loss has one minus that"
    )
    parser.add_argument("--weight", type=float, help=text)
    text = "start a new student, in a directory beside the one that is there"
    parser.add_argument("--fresh", action="store_true", help=text)
    add_executor(parser)
    add_shared(parser, "--accept-code", "--trust-folder", "--allow-failed")


def distill(options: argparse.Namespace) -> int:
    """Train one model on what the ensemble of a run predicts, and show what is lost by that."""
    from ensemble.cli.control_commands import parse_params
    from ensemble.distillation import compare
    from ensemble.distillation import distill as start
    from ensemble.reporting.text import number
    from ensemble.spec.spec_file import import_file

    apply_trust(options)
    model = None
    if options.model is not None:
        model = getattr(import_file(Path(options.model)), "model", None)
        if not callable(model):
            raise SpecError(f"{options.model} defines no function model(params) -> nn.Module")
    arguments = {
        name: getattr(options, name)
        for name in ("member", "epochs", "temperature", "weight", "executor", "accept_code", "fresh")
    }
    student: list[Run] = []

    def begin(on_event: Callable[[dict[str, Any]], None]) -> Run:
        chosen = {name: value for name, value in arguments.items() if value is not None}
        params = parse_params(options.set)
        student.append(
            start(options.run_dir, options.run_dir_to, params=params, model=model, on_event=on_event, **chosen)
        )
        return student[0]

    status = run_to_end(begin, argparse.Namespace(**{**vars(options), "json": None}), show=options.json != "-")
    if status == EXIT_FAILED:
        return status
    rows = compare(options.run_dir, student[0].run_dir)
    for row in rows:
        figures = ", ".join(
            f"{name} {number(row[name])}"
            for name in row
            if name not in ("model", "split", "lost", "lost_intervals")
        )
        print_lines(options, f"{row['model']} ({row['split']}): {figures}")
    between = {name: f" ({low:+.4g} ... {high:+.4g})" for name, (low, high) in rows[2]["lost_intervals"].items()}
    lost = ", ".join(f"{name} {value:+.4g}{between.get(name, '')}" for name, value in rows[2]["lost"].items())
    note = ", in brackets 95 % intervals" if between else ""
    print_lines(options, f"the student against the ensemble{note}: {lost}")
    write_json(options, rows)
    return status


DISTILL = Command(
    distill,
    "Train one model on what the ensemble of a run predicts, as a run of its own, and show what is lost.",
    _add_options,
)
