"""`ensemble bench`: runs a study with its own options and prints, writes and draws its outcome.

A further study is a file in `ensemble/cli/studies` and a line here.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from ensemble.bench.results import Study
from ensemble.cli.arguments import add_json_option, option, page_output
from ensemble.cli.studies import energy, fabric, pipelines

#: What a user measures on machines of his own; studies that answer questions of papers are in `benchmarks`.
STUDIES: tuple[Study, ...] = tuple(each.STUDY for each in (pipelines, fabric, energy))


def add_studies(parser: argparse.ArgumentParser, known: Sequence[Study] = STUDIES) -> None:
    """Add a subcommand for each study; its `do` runs it."""
    studies = parser.add_subparsers(title="studies", metavar="STUDY", required=True)
    for study in known:
        added = studies.add_parser(study.name, help=study.summary, description=study.description)
        added.set_defaults(do=functools.partial(run, study))
        study.add_options(added)
        option(added, "--plot", None, "also draw a plot into FILE, a page", type=page_output, metavar="FILE")
        add_json_option(added)


def run(study: Study, options: argparse.Namespace) -> int:
    """Run a study, print its tables, write its rows and its plot; returns the exit status."""
    from ensemble.bench import charts
    from ensemble.cli.console import format_rows, print_lines, write_json

    is_wanted = options.plot not in (None, "-")
    draws = is_wanted and charts.is_plotly_installed()
    if is_wanted and not draws:
        print("no plot: that needs plotly; pip install 'ray-ensemble[bench]'", file=sys.stderr)
    outcome = study.run(options, lambda line: print(line, file=sys.stderr, flush=True))
    if outcome is None:
        return 0
    for title, rows in ((title, rows) for title, rows in outcome.tables if rows and options.json != "-"):
        print_lines(options, *[title] * bool(title), format_rows(rows))
    write_json(options, outcome.rows)
    for line in outcome.findings:
        print(line, file=sys.stderr)
    if draws and not outcome.panels:
        print("no plot: there is nothing to draw yet", file=sys.stderr)
    elif draws:
        charts.write(outcome.title, outcome.notes, outcome.panels, Path(options.plot))
        print(f"plot: {options.plot}", file=sys.stderr)
    return 0
