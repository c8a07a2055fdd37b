"""`python -m benchmarks many`: what a tiny member costs beside its training, and how that grows with many.

Members are linear models of 16 features on 256 samples: nearly all that they cost is what the run does around
them. Each run is a process of its own, so that its CPU time is that of the process that drives it alone.
"""

from __future__ import annotations

import argparse

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, directory, option
from ensemble.spec.validation import check_choice


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--members", "200,1000", "members of a run, one run for each number", type=counts)
    option(parser, "--epochs", 1, "epochs of each member", type=count)
    shown = "inline, local, ray (of its own, or of RAY_ADDRESS), or memory: no processes, members only report"
    option(parser, "--executor", "local", shown)
    option(parser, "--folder", None, "where run directories are made and removed", type=directory, metavar="DIR")


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.many import measure

    check_choice("--executor", options.executor, ("inline", "local", "ray", "memory"))
    return measure.study(options, report)


STUDY = Study(
    name="many",
    summary="what a tiny member costs, and how that grows with their number",
    description=(
        "Trains hundreds to thousands of tiny members and shows, for each member: files and bytes in the run "
        "directory, CPU-seconds of the process that drives the run and of all others, bytes of the log; and what "
        "reading the run costs: status, the page's document, the list of runs."
    ),
    add_options=add_options,
    run=run,
)
