"""`ensemble bench energy`: whether the account of energy can be trusted (`ensemble.bench.energy`).

A further part is a function here that returns a `PartOutcome`, its options, and a line in `PARTS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, milliseconds, option, path, words
from ensemble.spec.validation import check_choice

if TYPE_CHECKING:
    from ensemble.bench.energy.parts import PartOutcome

ATTRIBUTION, SHAPLEY, SHARING, OVERHEAD = "attribution", "shapley", "sharing", "overhead"
#: Those that need neither data nor a GPU.
DEFAULT = (ATTRIBUTION, SHAPLEY, SHARING, OVERHEAD)
STEPS = ("model", "emulated")


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--parts", ",".join(DEFAULT), f"what is studied, of {', '.join(PARTS)}", type=words)
    option(parser, "--repeats", 3, "medians of that many runs", type=count)

    part = parser.add_argument_group("part 'attribution'")
    option(part, "--seconds", 4, "of a run on the synthetic node", type=count)

    part = parser.add_argument_group("part 'shapley'")
    shown = "seconds of the window of each coalition (default: 2, with --gpu 60)"
    option(part, "--window-s", None, shown, type=count)
    shown = "three members that train on this machine's first GPU, instead of a synthetic node"
    option(part, "--gpu", False, shown, action="store_true")
    option(part, "--cool-s", 20, "seconds without load before each window, with --gpu", type=float)
    shown = "keeps each window's energy as soon as it is measured, and has those that were measured before"
    option(part, "--run-dir", None, shown, type=path, metavar="DIR")
    shown = "measure for at most so many seconds now, and the rest with another call"
    option(part, "--most-s", None, shown, type=count, metavar="SECONDS")
    _add_sharing_options(parser)
    _add_overhead_options(parser)


def _add_sharing_options(parser: argparse.ArgumentParser) -> None:
    part = parser.add_argument_group("part 'sharing'")
    shown = "a tar archive of JPEG photographs (default: parts of the two that come with scikit-learn)"
    option(part, "--data", None, shown, type=path, metavar="FILE")
    option(part, "--members", 4, "members that train at once", type=count)
    option(part, "--cores", None, "pin everything to that many cores (default: no pinning)", type=count)
    shown = "members' steps: model, a small net, and emulated, an accelerator that uses no CPU"
    option(part, "--steps", "model,emulated", shown, type=words)
    option(part, "--step-ms", 100.0, "milliseconds of the emulated accelerator for a batch", type=milliseconds)
    option(part, "--samples", 1000, "that each member consumes at least, on both sides; whole epochs", type=count)


def _add_overhead_options(parser: argparse.ArgumentParser) -> None:
    part = parser.add_argument_group("part 'overhead'")
    option(part, "--metered-members", 64, "members that report their usage every second", type=count)
    option(part, "--metered-s", 30, "seconds of each of two measurements", type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from ensemble.bench.energy.parts import join_parts

    for part in options.parts:
        check_choice("--parts", part, tuple(PARTS))
    for step in options.steps:
        check_choice("--steps", step, STEPS)
    return join_parts({name: study(options, report) for name, study in PARTS.items() if name in options.parts})


def _study_attribution(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import attribution_study

    return attribution_study.study(options.seconds, options.repeats, report)


def _study_shapley(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import splits
    from ensemble.bench.energy.coalitions import Bed, SyntheticBed
    from ensemble.bench.energy.gpu_bed import GpuBed

    opened: AbstractContextManager[Bed] = GpuBed.open(options.cool_s) if options.gpu else SyntheticBed.open()
    with opened as bed:
        seconds = options.window_s or (60 if options.gpu else 2)
        kept = None if options.run_dir is None else Path(options.run_dir)
        return splits.study(bed, seconds, options.repeats, kept, options.most_s, report)


def _study_sharing(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import sharing

    return sharing.outcome(
        options.data,
        members=options.members,
        cores=options.cores,
        steps=options.steps,
        step_ms=options.step_ms,
        samples=options.samples,
        repeats=options.repeats,
        report=report,
    )


def _study_overhead(options: argparse.Namespace, report: Report) -> PartOutcome:
    from ensemble.bench.energy import overhead

    return overhead.study(options.metered_members, options.metered_s, report)


PARTS: dict[str, Callable[[argparse.Namespace, Report], PartOutcome]] = {
    ATTRIBUTION: _study_attribution,
    SHAPLEY: _study_shapley,
    SHARING: _study_sharing,
    OVERHEAD: _study_overhead,
}

STUDY = Study(
    name="energy",
    summary="whether the account of energy can be trusted",
    description=(
        "Attributed joules beside the true ones on a node whose power is known; three ways to share a node's "
        "energy beside the Shapley value; one shared pipeline beside own ones; what the account costs. "
        "As it is it needs neither data nor a GPU, and some six minutes."
    ),
    add_options=add_options,
    run=run,
)
