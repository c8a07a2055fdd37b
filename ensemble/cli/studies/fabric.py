"""`ensemble bench fabric`: collectives and training over links and backends (`ensemble.bench.fabric`)."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, directory, option, sizes, words

if TYPE_CHECKING:
    from ensemble.bench.fabric.links import Link

_EMULATED = ["hosts=2,ranks=2,rate=1gbit", "hosts=2,ranks=2,rate=10gbit"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    add = functools.partial(option, parser)
    shown = "hosts in network namespaces on this machine (root): hosts=2,ranks=2,rate=1gbit, ranks of each; "
    shown += "also delay=5ms, mtu=9000, place=interleaved; may be given several times (default: 2 x 2 at 1gbit, "
    shown += "and at 10gbit)"
    add("--emulate", None, shown, action="append", metavar="LINK")
    shown = "ranks on this machine's loopback, 0 for none (default: 4; none where --emulate is given)"
    add("--ranks", None, shown, type=_ranks)
    add("--backends", None, "such as gloo,hierarchical (default: all that are available)", type=words)
    add("--collectives", None, "such as all_reduce,broadcast (default: all)", type=words)
    add("--sizes", None, "message sizes, as in 4KiB,16MiB (default: four, 4KiB to 16MiB)", type=sizes)
    add(
        "--nets",
        None,
        "for training, also inception (default: all but that one)",
        type=words,
    )
    add("--iterations", 20, "iterations of each case, at most", type=count)
    add("--parts", None, "parts: collectives, training, fusion (default: all)", type=words)
    shown = "this command is a rank of a job that srun, mpirun or torchrun has started on several machines: "
    shown += "a directory that all of them see, empty, for this job"
    add("--meet", None, shown, type=directory, metavar="DIR")
    add("--interface", "lo", "with --meet: the interface through which ranks connect")
    add("--rate", None, "with --meet: rate of a machine's link, as in 100gbit, for predictions")
    add("--full", False, "all sizes, fusion on every link, emulated nets on every backend", action="store_true")


def _ranks(text: str) -> int:
    return 0 if text == "0" else count(text)


def _links(options: argparse.Namespace) -> list[Link]:
    from ensemble.bench.fabric.links import Link, parse_link
    from ensemble.spec import SpecError

    if options.rate is not None:
        raise SpecError("--rate is for machines that are there, with --meet; else: --emulate rate=...")
    ranks = options.ranks if options.ranks is not None else 0 if options.emulate else 4
    emulated = options.emulate or ([] if options.ranks is not None else _EMULATED)
    links = [Link(ranks=ranks)] * bool(ranks) + [parse_link(text) for text in emulated]
    if not links:
        raise SpecError("nothing to measure: --ranks is 0 and there is no --emulate")
    return links


def run(options: argparse.Namespace, report: Report) -> Outcome | None:
    """See `Study`; returns None on all ranks of a job but the first."""
    from pathlib import Path

    from ensemble.bench.fabric import figures, study
    from ensemble.bench.fabric.links import existing_link
    from ensemble.bench.fabric.predict import COLLECTIVES
    from ensemble.bench.fabric.rows import NETS
    from ensemble.bench.launch.backends import check_backend, default_backends, unavailable_reason
    from ensemble.bench.launch.scheduled import scheduled_job
    from ensemble.spec import SpecError
    from ensemble.spec.validation import check_choice

    for name in options.backends or ():
        check_backend(name)
        if (reason := unavailable_reason(name)) is not None:
            raise SpecError(f"--backends {name}: {reason}")
    for given, known in (("collectives", COLLECTIVES), ("parts", study.PARTS), ("nets", [*NETS])):
        for name in getattr(options, given) or ():
            check_choice(f"--{given}", name, known)
    job = None
    if options.meet is not None:
        job = scheduled_job(str(Path(options.meet).resolve()), options.interface)
    is_silent = job is not None and job.rank > 0
    found = study.FabricStudy(
        links=[existing_link(job.interface, job.placement(), options.rate)] if job else _links(options),
        backends=options.backends or default_backends(),
        collectives=options.collectives or COLLECTIVES,
        sizes=options.sizes or (study.ALL_SIZES if options.full else study.SIZES),
        parts=options.parts or study.PARTS,
        nets=options.nets or study.USUAL_NETS,
        iterations=options.iterations,
        full=options.full,
        job=job,
        report=(lambda line: None) if is_silent else report,
    ).run()
    return None if is_silent else figures.make_outcome(*found)


STUDY = Study(
    name="fabric",
    summary="what a network does for collectives and for training",
    description="Collectives in the columns of nccl-tests, training and fusion, over links and backends.",
    add_options=add_options,
    run=run,
)
