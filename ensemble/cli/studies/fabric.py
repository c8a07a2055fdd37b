"""`ensemble bench fabric`: collectives and training over links and backends (`ensemble.bench.fabric`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, option, sizes, words

if TYPE_CHECKING:
    from ensemble.bench.fabric.links import Link

_EMULATED = ["hosts=2,ranks=2,rate=1gbit", "hosts=2,ranks=2,rate=10gbit"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    shown = "hosts in network namespaces on this machine (root): hosts=2,ranks=2,rate=1gbit, ranks of each host; "
    shown += "also mtu=9000, place=interleaved; may be given several times (default: 2 x 2 at 1gbit and at 10gbit)"
    parser.add_argument("--emulate", action="append", metavar="LINK", help=shown)
    shown = "ranks on this machine's loopback, 0 for none (default: 4; none where --emulate is given)"
    parser.add_argument("--ranks", type=_ranks, help=shown)
    option(parser, "--backends", None, "such as gloo,hierarchical (default: all that are available)", type=words)
    option(parser, "--collectives", None, "such as all_reduce,broadcast (default: all)", type=words)
    option(parser, "--sizes", None, "message sizes, as in 4KiB,16MiB (default: four, 4KiB to 16MiB)", type=sizes)
    option(parser, "--iterations", 20, "iterations of each case, at most", type=count)
    option(parser, "--parts", None, "parts: collectives, training, members, fusion (default: all)", type=words)
    shown = "this command is a rank of a job that srun, mpirun or torchrun has started on several machines: "
    shown += "a directory that all of them see, empty, for this job"
    option(parser, "--meet", None, shown, metavar="DIR")
    option(parser, "--interface", "lo", "with --meet: the interface through which ranks connect")
    option(parser, "--rate", None, "with --meet: rate of a machine's link, as in 100gbit, for predictions")
    option(parser, "--full", False, "all sizes, 1KiB to 64MiB, and fusion on every link", action="store_true")


def _ranks(text: str) -> int:
    return 0 if text == "0" else count(text)


def _links(options: argparse.Namespace) -> list[Link]:
    from ensemble.bench.fabric.links import Link, parse_link
    from ensemble.spec import SpecError

    if options.rate is not None:
        raise SpecError("--rate is for machines that are there, with --meet; else: --emulate rate=...")
    ranks = options.ranks if options.ranks is not None else 0 if options.emulate else 4
    links = [Link(ranks=ranks)] if ranks else []
    emulated = options.emulate or ([] if options.ranks is not None else _EMULATED)
    links += [parse_link(text) for text in emulated]
    if not links:
        raise SpecError("nothing to measure: --ranks is 0 and there is no --emulate")
    return links


def _directory(text: str) -> str:
    from pathlib import Path

    from ensemble.spec import SpecError

    if not Path(text).is_dir():
        raise SpecError(f"--meet {text}: there is no such directory")
    return str(Path(text).resolve())


def run(options: argparse.Namespace, report: Report) -> Outcome | None:
    """See `Study`; returns None on all ranks of a job but the first."""
    from ensemble.bench.fabric import figures, study
    from ensemble.bench.fabric.links import existing_link
    from ensemble.bench.fabric.predict import COLLECTIVES
    from ensemble.bench.launch.backends import check_backend, default_backends, unavailable_reason
    from ensemble.bench.launch.scheduled import scheduled_job
    from ensemble.spec import SpecError

    for name in options.backends or ():
        check_backend(name)
        if (reason := unavailable_reason(name)) is not None:
            raise SpecError(f"--backends {name}: {reason}")
    study.check_names(options.collectives or (), options.parts or ())
    job = None if options.meet is None else scheduled_job(_directory(options.meet), options.interface)
    links = _links(options) if job is None else [existing_link(job.interface, job.placement(), options.rate)]
    plan = study.FabricPlan(
        links=links,
        backends=options.backends or default_backends(),
        collectives=options.collectives or COLLECTIVES,
        sizes=options.sizes or (study.ALL_SIZES if options.full else study.SIZES),
        parts=options.parts or study.PARTS,
        iterations=options.iterations,
        seconds=10.0 if options.full else 1.0,
        rounds=5 if options.full else 3,
        fusion_everywhere=options.full,
        job=job,
    )
    silent = job is not None and job.rank > 0
    results = study.study(plan, (lambda line: None) if silent else report)
    return None if silent else figures.outcome(results)


STUDY = Study(
    name="fabric",
    summary="what a network does for collectives and for training",
    description="Collectives in the columns of nccl-tests, training and fusion, over links and backends.",
    add_options=add_options,
    run=run,
)
