"""The options of the studies `attribution` and `shapley`."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.bench.energy.parts import join_parts
from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, option, path, seconds
from ensemble.spec.validation import SpecError

if TYPE_CHECKING:
    from benchmarks.energy.coalitions import Bed


def _add_attribution_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--repeats", 3, "medians of that many runs", type=count)
    option(parser, "--seconds", 3, "of a run on the synthetic node", type=count)


def _study_attribution(options: argparse.Namespace, report: Report) -> Outcome:
    from benchmarks.energy import attribution_study

    return join_parts({"attribution": attribution_study.study(options.seconds, options.repeats, report)})


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
    shown = "keeps each window's energy as soon as it is measured, and has those that were measured before"
    option(parser, "--run-dir", None, shown, type=path, metavar="DIR")
    shown = "measure for at most so many seconds now, and the rest with another call; needs --run-dir"
    option(parser, "--most-s", None, shown, type=count, metavar="SECONDS")


def _study_shapley(options: argparse.Namespace, report: Report) -> Outcome:
    from benchmarks.energy import splits
    from benchmarks.energy.coalitions import SyntheticBed, open_run_dir
    from benchmarks.energy.gpu_bed import GpuBed

    window_s = options.window_s or (60 if options.gpu else 1)
    least_s = window_s + (options.cool_s if options.gpu else 0)
    kept = None if options.run_dir is None else Path(options.run_dir)
    if options.most_s is not None and kept is None:
        raise SpecError("--most-s needs --run-dir")
    if options.most_s is not None and options.most_s <= least_s:
        raise SpecError(
            f"--most-s {options.most_s} is too short for a window, which takes more than {least_s:g} s"
        )
    if kept is not None:
        open_run_dir(kept)
    opened: AbstractContextManager[Bed] = GpuBed.open(options.cool_s) if options.gpu else SyntheticBed.open()
    with opened as bed:
        return join_parts({"shapley": splits.study(bed, window_s, options.repeats, kept, options.most_s, report)})


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
