"""`python -m benchmarks STUDY`: runs a study, prints its tables and findings, and writes its rows."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks import batches, compression, fabric, fleet, order, peers, precision, sc18, what_it_buys
from benchmarks.options import option
from benchmarks.results import Rows, Study
from ensemble.cli import parser as cli
from ensemble.cli.arguments import add_json_option
from ensemble.cli.console import find_width, print_lines, write_json
from ensemble.reporting.tables import NARROWEST, Column, lay_out
from ensemble.reporting.text import number
from ensemble.spec import SpecError
from pipelines.fingerprint import OURS

#: Packages whose modules have other names.
INSTALLED_AS = {"PIL": "pillow", "cv2": "opencv-python-headless", "sklearn": "scikit-learn", "yaml": "pyyaml"}

STUDIES = tuple(
    module.STUDY for module in (sc18, precision, batches, compression, fabric, fleet, what_it_buys, peers, order)
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all studies."""
    parser = cli.Parser(prog="python -m benchmarks", description="Studies that answer the questions of papers.")
    studies = parser.add_subparsers(title="studies", metavar="STUDY", required=True)
    for study in STUDIES:
        own = studies.add_parser(study.name, help=study.summary, description=study.description)
        own.set_defaults(do=functools.partial(run, study))
        study.add_options(own)
        option(own, "--record", None, "also keep command, machine, seconds and rows in FILE", metavar="FILE")
        add_json_option(own)
    return parser


def run(study: Study, options: argparse.Namespace) -> int:
    """Run a study, print its tables and write its rows; returns the exit status."""
    began_s = time.monotonic()
    try:
        outcome = study.run(options, lambda line: print(line, file=sys.stderr, flush=True))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in OURS:
            raise
        needed = INSTALLED_AS.get(error.name.partition(".")[0], error.name.partition(".")[0])
        raise SpecError(
            f"the study {study.name!r} needs {needed}, which is not installed: pip install {needed}"
        ) from None
    for title, rows in outcome.tables:
        if rows and options.json != "-":
            columns = [make_column(name, [row[name] for row in rows]) for name in rows[0]]
            print_lines(options, *[title] * bool(title), *lay_out(columns, find_width()))
    write_json(options, outcome.rows)
    for line in outcome.findings:
        print(line, file=sys.stderr)
    if options.record is not None:
        write_record(Path(options.record), study.name, time.monotonic() - began_s, outcome.rows)
    return 0


def make_column(name: str, values: Sequence[object]) -> Column:
    """A column of a table; numbers have four digits."""
    cells = [number(value, 4) if isinstance(value, float) or value is None else str(value) for value in values]
    return Column(name, cells, not any(isinstance(value, str) for value in values), folds_to=NARROWEST)


def write_record(path: Path, name: str, seconds: float, rows: Rows) -> None:
    """Write what the pages of studies show (docs/_site/figures.py): one row a line."""
    words = sys.argv[sys.argv.index(name) :] if name in sys.argv else [name]
    at = words.index("--record") if "--record" in words else len(words)
    command = shlex.join(["python", "-m", "benchmarks", *words[:at], *words[at + 2 :]])
    head = {"command": command, "machine": describe_machine(), "seconds": round(seconds, 1)}
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def describe_machine() -> str:
    """The cores that this process may use, the processor, and torch's version."""
    from pipelines.environment.processor import find_processor

    cores = f"{len(os.sched_getaffinity(0))} cores of {find_processor()}"
    return f"{cores}, {platform.system()}, torch {metadata.version('torch')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study; see `ensemble.cli.parser.main`."""
    return cli.main(arguments, make_parser)


if __name__ == "__main__":
    sys.exit(main())
