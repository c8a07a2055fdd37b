"""Whether the account of energy can be trusted, on a node whose power is known and on a real GPU.

`python -m benchmarks attribution`: attributed joules beside the true ones.

`python -m benchmarks shapley`: three ways to share a node's energy beside the Shapley value.
"""

from __future__ import annotations

import argparse

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, option, seconds


def _add_attribution_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--repeats", 3, "medians of that many runs", type=count)
    option(parser, "--seconds", 3, "of a run on the synthetic node", type=count)


def _study_attribution(options: argparse.Namespace, report: Report) -> Outcome:
    from benchmarks.energy import attribution

    return attribution.study(options.seconds, options.repeats, report)


ATTRIBUTION = Study(
    name="attribution",
    summary="attributed joules beside the true ones",
    description=(
        "Attributed joules beside the true ones, on a synthetic node whose power is known, of processors and of "
        "GPUs; a minute on two free cores."
    ),
    add_options=_add_attribution_options,
    run=_study_attribution,
)


def _add_shapley_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--repeats", 3, "medians of that many runs", type=count)
    shown = "seconds of the window of each coalition (default: 1, with --gpu 60)"
    option(parser, "--window-s", None, shown, type=count)
    shown = "three members that train on this machine's first GPU, instead of a synthetic node"
    option(parser, "--gpu", False, shown, action="store_true")
    option(parser, "--cool-s", 20.0, "seconds without load before each window, with --gpu", type=seconds)


def _study_shapley(options: argparse.Namespace, report: Report) -> Outcome:
    from benchmarks.energy import shapley
    from benchmarks.energy.beds import RealGpuBed

    with RealGpuBed(options.cool_s) if options.gpu else shapley.open_synthetic_bed() as bed:
        return shapley.study(bed, options.window_s or (60 if options.gpu else 1), options.repeats, report)


SHAPLEY = Study(
    name="shapley",
    summary="ways to share a node's energy beside the Shapley value",
    description=(
        "Three ways to share a node's energy between members beside the Shapley value, from the energy of all "
        "coalitions: on a synthetic node in half a minute, or on this machine's first GPU."
    ),
    add_options=_add_shapley_options,
    run=_study_shapley,
)
