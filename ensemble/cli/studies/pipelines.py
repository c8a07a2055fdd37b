"""`ensemble bench pipelines`: what sharing one pipeline saves (`ensemble.bench.pipelines`)."""

from __future__ import annotations

import argparse

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, milliseconds_each, option, words


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    shown = "a tar archive of JPEG photographs; with --single also a Parquet file with columns image and label"
    option(parser, "--data", None, shown, required=True, metavar="FILE")
    shown = "one process: a loader with workers of its own against a torch DataLoader, both with --prep-workers"
    option(parser, "--single", False, shown, action="store_true")
    shown = "numbers of members that read at once, as in 1,4,16 (default: 1,4,16; with hosts one and four on each)"
    option(parser, "--members", None, shown, type=counts)
    shown = "designs: bare ring, node, independent; with hosts also single, multi, all, auto (default: those)"
    option(parser, "--designs", None, shown, type=words)
    option(
        parser,
        "--peers",
        False,
        "add the design 'dataloader': a plain torch DataLoader a member",
        action="store_true",
    )
    shown = "instead: memory of so many training members, beside two processes with a DataLoader each (default: 8)"
    parser.add_argument("--memory", nargs="?", const=8, type=count, metavar="MEMBERS", help=shown)
    option(
        parser,
        "--prep-workers",
        "1",
        "preparation processes, of a node or of each independent member",
        type=counts,
    )
    option(parser, "--batch-size", 32, "samples of a batch", type=count)
    option(
        parser,
        "--samples",
        5000,
        "samples that each member consumes at least, after its first batch; whole epochs",
        type=count,
    )
    option(
        parser,
        "--samples-alone",
        1000,
        "the same where each member prepares for itself, which is slow",
        type=count,
    )
    option(parser, "--size", 224, "pixels of a side", type=count)
    steps = ("emulated", "model")
    option(
        parser, "--step", "emulated", "a member's compute: an emulated accelerator or a real model", choices=steps
    )
    shown = "emulated accelerator: wait that long after each batch, using no CPU, as in 0,10,60 (default: 0)"
    option(parser, "--step-ms", None, shown, type=milliseconds_each)
    option(
        parser, "--cores", None, "pin everything to that many cores, as in 1,2 (default: no pinning)", type=counts
    )
    option(parser, "--hosts", 1, "nodes: hosts in network namespaces on this machine (needs root)", type=count)
    option(parser, "--link", None, "rate of the hosts' links, as in 1gbit,10gbit (default: unlimited)", type=words)
    shown = "bytes of a frame's payload on the hosts' links; 9000 for jumbo frames (default: 1500)"
    option(parser, "--mtu", None, shown, type=count)
    option(
        parser,
        "--repeats",
        5,
        "medians of that many runs; one run where each member prepares for itself",
        type=count,
    )


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    import dataclasses

    from ensemble.bench.pipelines import figures, rows, study
    from ensemble.bench.pipelines.config import DATALOADER, EMULATED
    from ensemble.spec import SpecError

    if options.memory is not None:
        return _study_memory(options, report)
    if options.single:
        return _run_single(options, report)
    if options.step != EMULATED and options.step_ms:
        raise SpecError(f"--step-ms is for the emulated accelerator, not for --step {options.step}")
    for name in ("link", "mtu"):
        if getattr(options, name) is not None and options.hosts == 1:
            raise SpecError(f"--{name} is for several hosts: say how many with --hosts")
    designs = options.designs or study.default_designs(options.hosts)
    found = study.study(
        options.data,
        options.members or study.default_members(options.hosts),
        designs=[*dict.fromkeys([*designs, *([DATALOADER] if options.peers else [])])],
        prep_workers=options.prep_workers,
        batch_size=options.batch_size,
        samples=options.samples,
        samples_alone=options.samples_alone,
        size=options.size,
        step=options.step,
        step_ms=options.step_ms or (0.0,),
        cores=options.cores or (None,),
        nodes=options.hosts,
        links=options.link or (None,),
        mtu=options.mtu or 1500,
        repeats=options.repeats,
        report=report,
    )
    return Outcome(
        tables=[("", rows.table(found))],
        rows=[dataclasses.asdict(row) for row in found],
        findings=list(rows.findings(found)),
        title=figures.TITLE,
        notes=figures.notes(found),
        panels=figures.panels(found),
    )


def _run_single(options: argparse.Namespace, report: Report) -> Outcome:
    """One process with workers of its own, beside a DataLoader."""
    import dataclasses

    from ensemble.bench.pipelines import single

    found = single.study(
        options.data,
        workers=options.prep_workers,
        step_ms=options.step_ms or (0.0, 60.0),
        repeats=options.repeats,
        report=report,
    )
    return Outcome(
        tables=[("", single.table(found))],
        rows=[dataclasses.asdict(row) for row in found],
        findings=list(single.findings(found)),
        title="One process",
        notes=[],
        panels=[],
    )


def _study_memory(options: argparse.Namespace, report: Report) -> Outcome:
    import dataclasses

    from ensemble.bench.pipelines import memory
    from ensemble.spec import SpecError

    given = [name for name in ("members", "designs", "cores", "step_ms", "link", "mtu") if getattr(options, name)]
    if given := given + ["peers"] * options.peers + ["hosts"] * (options.hosts > 1) + ["single"] * options.single:
        raise SpecError(f"--memory compares two fixed sides: leave out --{given[0].replace('_', '-')}")
    found = memory.study_memory(
        options.data,
        members=options.memory,
        size=options.size,
        batch_size=options.batch_size,
        repeats=options.repeats,
        report=report,
    )
    return Outcome(
        tables=memory.tables(found),
        rows=[dataclasses.asdict(row) for row in found],
        findings=memory.findings(found),
        title="Memory of members that share a pipeline",
        notes=[f"batch {options.batch_size}", f"{options.size} pixels a side"],
        panels=memory.panels(found),
    )


STUDY = Study(
    name="pipelines",
    summary="what one shared pipeline saves",
    description="What one shared pipeline saves: every combination of the lists given, in one table.",
    add_options=add_options,
    run=run,
)
