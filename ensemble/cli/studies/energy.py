"""`ensemble bench energy`: what sharing a pipeline saves, and what the account costs (`ensemble.bench.energy`)."""

from __future__ import annotations

import argparse

from ensemble.bench.results import Outcome, Report, Study, run_parts
from ensemble.cli.arguments import count, milliseconds, option, path, words
from ensemble.spec.validation import check_choice

SHARING, OVERHEAD = "sharing", "overhead"
MODEL, EMULATED = "model", "emulated"


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    option(parser, "--parts", f"{SHARING},{OVERHEAD}", "what is studied", type=words)

    part = parser.add_argument_group("part 'sharing'")
    option(part, "--repeats", 2, "runs of each side, of which medians are shown", type=count)
    shown = "a tar archive of JPEG photographs (default: parts of the two that come with scikit-learn)"
    option(part, "--data", None, shown, type=path, metavar="FILE")
    option(part, "--members", 4, "members that train at once", type=count)
    option(part, "--cores", None, "pin everything to that many cores (default: no pinning)", type=count)
    shown = "members' steps: model, a small net, and emulated, an accelerator that uses no CPU"
    option(part, "--steps", f"{MODEL},{EMULATED}", shown, type=words)
    shown = "milliseconds of the emulated accelerator for a batch"
    option(part, "--step-ms", 100.0, shown, type=milliseconds)
    shown = "samples that each member consumes at least, on both sides; whole epochs"
    option(part, "--samples", 500, shown, type=count)

    part = parser.add_argument_group("part 'overhead'")
    option(part, "--metered-members", 64, "members that report their usage every second", type=count)
    option(part, "--metered-s", 15, "seconds of each of two measurements", type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from ensemble.bench.energy import overhead, sharing

    for step in options.steps:
        check_choice("--steps", step, (MODEL, EMULATED))
    names = ("data", "members", "cores", "steps", "step_ms", "samples", "repeats")
    parts = {
        SHARING: lambda: sharing.outcome(**{name: getattr(options, name) for name in names}, report=report),
        OVERHEAD: lambda: overhead.study(options.metered_members, options.metered_s, report),
    }
    return run_parts(options.parts, parts, "The account of energy")


STUDY = Study(
    name="energy",
    summary="what one shared pipeline saves in energy, and what the account costs",
    description=(
        "One shared pipeline beside own ones, and what the account of energy costs on this machine. As it is it "
        "needs neither data nor a GPU, and some two minutes on two free cores."
    ),
    add_options=add_options,
    run=run,
)
