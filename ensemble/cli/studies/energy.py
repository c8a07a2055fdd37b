"""`ensemble bench energy`: whether the account of energy can be trusted (`ensemble.bench.energy`).

A further part is a function here that returns a `PartOutcome`, its options, and a line in `PARTS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, option, words
from ensemble.spec.validation import check_choice

if TYPE_CHECKING:
    from ensemble.bench.energy.parts import PartOutcome

ATTRIBUTION = "attribution"
#: Those that need neither data nor a GPU.
DEFAULT = (ATTRIBUTION,)


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--parts", ",".join(DEFAULT), f"what is studied, of {', '.join(PARTS)}", type=words)
    option(parser, "--repeats", 3, "medians of that many runs", type=count)

    part = parser.add_argument_group("part 'attribution'")
    option(part, "--seconds", 8, "of a run on the synthetic node", type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from ensemble.bench.energy.parts import join_parts

    for part in options.parts:
        check_choice("--parts", part, tuple(PARTS))
    return join_parts({name: study(options, report) for name, study in PARTS.items() if name in options.parts})


def _study_attribution(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import attribution

    return attribution.study(options.seconds, options.repeats, report)


PARTS: dict[str, Callable[[argparse.Namespace, Report], PartOutcome]] = {ATTRIBUTION: _study_attribution}

STUDY = Study(
    name="energy",
    summary="whether the account of energy can be trusted",
    description=(
        "Attributed joules beside the true ones on a node whose power is known. As it is it needs neither data "
        "nor a GPU."
    ),
    add_options=add_options,
    run=run,
)
