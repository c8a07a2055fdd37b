"""`python -m benchmarks STUDY`: runs a study, prints, writes and draws its outcome as `ensemble bench` does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import everything
from ensemble.cli import parser as cli
from ensemble.cli.bench import add_studies


def make_parser() -> argparse.ArgumentParser:
    """The parser of all studies."""
    parser = cli.Parser(prog="python -m benchmarks", description="Studies that answer the questions of papers.")
    add_studies(parser, (*everything.PAPERS, everything.STUDY))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a study; see `ensemble.cli.parser.main`."""
    return cli.main(arguments, make_parser)


if __name__ == "__main__":
    sys.exit(main())
