"""`ensemble bench`: the studies, each with options of its own, and one way to show what they came to.

A further study is a file in `ensemble/cli/studies` and a line here.
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

from ensemble.bench.results import Study
from ensemble.cli.arguments import json_option, option, output
from ensemble.cli.studies import compression, fabric, pipelines, precision, scaling, schedule

STUDIES: tuple[Study, ...] = (
    pipelines.STUDY,
    fabric.STUDY,
    precision.STUDY,
    compression.STUDY,
    scaling.STUDY,
    schedule.STUDY,
)  # fmt: skip


def add_studies(parser: argparse.ArgumentParser) -> None:
    """The words after `ensemble bench`; a study's options have `do`, which runs it."""
    studies = parser.add_subparsers(title="studies", metavar="STUDY", required=True)
    for study in STUDIES:
        added = studies.add_parser(study.name, help=study.says, description=study.description)
        added.set_defaults(do=functools.partial(run, study))
        study.add_options(added)
        page = f"bench-{study.name}.html"
        option(added, "--plot", page, "where the plot goes; '-' for none", type=output, metavar="FILE")
        json_option(added)


def run(study: Study, options: argparse.Namespace) -> int:
    """Run a study, show its tables, write its rows and its plot; returns the exit status."""
    from ensemble.cli.console import say, show, table, write_json

    outcome = study.run(options, lambda line: print(line, file=sys.stderr, flush=True))
    if outcome is None:
        return 0
    for title, rows in outcome.tables if options.json != "-" else ():
        say(options, *[title] * bool(title))
        show(table(rows))
    write_json(options, outcome.rows)
    for line in outcome.findings:
        print(line, file=sys.stderr)
    if options.plot != "-":
        outcome.draw(Path(options.plot))
        print(f"plot: {options.plot}", file=sys.stderr)
    return 0
