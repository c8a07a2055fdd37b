"""`python -m benchmarks peers`: the same models on the same photographs here and by what else there is.

Real training, no emulated steps: CPU-seconds, samples per second and memory of whole process trees.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.options import check_names, count, counts, option, words
from benchmarks.results import Outcome, Report, Study

_CASES = ("equal", "unlike", "late")


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    shown = "a tar archive of JPEG photographs (default: generated ones)"
    option(parser, "--data", None, shown, metavar="FILE")
    option(parser, "--members", "4,8,16", "that train at once", type=counts)
    option(parser, "--cases", "equal", f"of {', '.join(_CASES)}: speeds, and starts", type=words)
    option(parser, "--systems", None, "which (default: all)", type=words)
    option(parser, "--epochs", 4, "of each member", type=count)
    option(parser, "--repeats", 3, "medians of that many runs of each, in turn", type=count)
    shown = (
        "an environment for the other systems, made where it is not there; some 2 GB (default: a temporary one)"
    )
    option(parser, "--environment", None, shown, metavar="DIR")


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.peers import measure
    from benchmarks.peers.training import Photographs
    from benchmarks.results import outcome_of
    from benchmarks.sc18.config import write_photographs

    systems = options.systems or list(measure.SYSTEMS)
    check_names("--systems", systems, measure.SYSTEMS)
    check_names("--cases", options.cases, _CASES)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        data = options.data or f"{folder}/photographs.tar"
        if options.data is None:
            report(write_photographs(Path(data)))
        environment = measure.Environment(Path(options.environment or f"{folder}/environment"), systems, report)
        classes = Photographs(data).classes
        common = {"data": str(Path(data).resolve()), "epochs": options.epochs, "classes": classes}
        rows = []
        for case in options.cases:
            for members in options.members:
                report(f"peers: {case}, {members} members")
                rows += measure.run_case(case, members, systems, common, environment, options.repeats)
    findings = [
        f"{system}: {measure.ratio(rows, system, measure.OURS, 'cpu_s'):.2f} times the CPU-seconds, "
        f"{measure.ratio(rows, system, measure.OURS, 'seconds'):.2f} times the time of {measure.OURS}"
        for system in systems
        if system != measure.OURS
    ]
    return outcome_of(rows, findings=findings)


STUDY = Study(
    name="peers",
    summary="the same models on the same photographs by other systems",
    description="Members on one pipeline beside DataLoaders, Ray Tune, TensorSocket, SPDL, Grain, litdata, MDS.",
    add_options=add_options,
    run=run,
)
