"""`python -m benchmarks sc18`: what one shared data pipeline saves, after Pittman et al., SC18.

Members read from one pipeline, on a node or across nodes, beside a pipeline each; with emulated accelerators also
the mean power that SC18's nodes would draw, by a model of published watts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.options import count, counts, milliseconds_each, option, words
from benchmarks.results import Outcome, Report, Study
from ensemble.spec.validation import SpecError


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    shown = "a tar archive of JPEG photographs (default: generated ones)"
    option(parser, "--data", None, shown, metavar="FILE")
    shown = "members that read at once, as in 1,16 (default: 1,4,16; with hosts one and four on each)"
    option(parser, "--members", None, shown, type=counts)
    option(parser, "--cores", None, "pin everything to that many cores (default: no pinning)", type=count)
    option(parser, "--prep-workers", 1, "preparation processes, of a node or of each member alone", type=count)
    shown = "emulated accelerators: a timed wait for each batch of 32 that uses no CPU"
    option(parser, "--step-ms", "0", shown, type=milliseconds_each)
    option(parser, "--samples", 5000, "samples that each member consumes at least; whole epochs", type=count)
    shown = "the same where each member prepares for itself, which is slow"
    option(parser, "--samples-alone", 1000, shown, type=count)
    option(parser, "--repeats", 5, "medians of that many runs", type=count)

    shown = "bare ring, node, independent (default: those), dataloader; with hosts also single, multi, all, auto"
    option(parser, "--designs", None, shown, type=words)
    option(parser, "--hosts", 1, "nodes: hosts in network namespaces on this machine, as root", type=count)
    option(parser, "--link", None, "rate of the hosts' links, as in 1gbit (default: unlimited)")


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.sc18 import expected
    from benchmarks.sc18.config import Config, write_photographs
    from benchmarks.sc18.study import study

    if options.link is not None and options.hosts == 1:
        raise SpecError("--link is for several hosts: say how many with --hosts")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = options.data or str(Path(folder, "photographs.tar"))
        if options.data is None:
            report(write_photographs(Path(data)))
        names = ("cores", "prep_workers", "samples", "samples_alone", "link")
        base = Config(data=data, nodes=options.hosts, **{name: getattr(options, name) for name in names})
        rows = study(base, options.designs, options.members, options.step_ms, options.repeats, report)
    return expected.show_designs(rows)


STUDY = Study(
    name="sc18",
    summary="what one shared data pipeline saves",
    description="One shared pipeline beside a pipeline each: samples/s, CPU time, memory, modelled mean power.",
    add_options=add_options,
    run=run,
)
