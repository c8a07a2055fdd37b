"""Whether the account of energy can be trusted, on a node whose power is known and on a real GPU.

`python -m benchmarks attribution`: attributed joules beside the true ones.

`python -m benchmarks shapley`: three ways to share a node's energy beside the Shapley value.
"""

from __future__ import annotations

import argparse

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, milliseconds_each, option, seconds


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


def _add_sc18_options(parser: argparse.ArgumentParser) -> None:
    shown = "a tar archive of JPEG photographs (default: parts of scikit-learn's two photographs)"
    option(parser, "--data", None, shown, metavar="FILE")
    option(parser, "--members", 4, "members, each with an emulated accelerator", type=count)
    option(parser, "--cores", None, "to which everything is pinned together (default: no pinning)", type=count)
    option(parser, "--step-ms", "20,60,120,240", "of the accelerators, a batch of 32", type=milliseconds_each)
    option(parser, "--samples", 1000, "that each member consumes at least; whole epochs", type=count)
    option(parser, "--repeats", 3, "medians of that many runs", type=count)
    option(parser, "--accelerator-w", 235, "watts of an accelerator that computes, in the model", type=count)


def _study_sc18(options: argparse.Namespace, report: Report) -> Outcome:
    import dataclasses
    import tempfile
    from pathlib import Path

    from benchmarks.energy import sc18
    from ensemble.bench.energy.sharing import write_photographs

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = options.data or str(Path(folder, "photographs.tar"))
        if options.data is None:
            report(write_photographs(Path(data)))
        given = {name: getattr(options, name) for name in ("members", "cores", "samples", "repeats")}
        node = dataclasses.replace(sc18.TITAN, accelerator_w=options.accelerator_w)
        return sc18.study(data, **given, steps_ms=options.step_ms, node=node, report=report)


SC18 = Study(
    name="sc18",
    summary="mean power of a shared pipeline, modelled of SC18's nodes",
    description=(
        "One shared pipeline beside a pipeline each at equal work, with emulated accelerators: measured CPU time "
        "and speed, and the mean power that SC18's nodes would draw by a model of published watts; four minutes "
        "on two cores."
    ),
    add_options=_add_sc18_options,
    run=_study_sc18,
)
