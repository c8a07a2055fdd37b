"""`ensemble bench pipelines`: what sharing one pipeline saves (`ensemble.bench.pipelines`)."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, milliseconds_each, option, words

#: Options that the study of memory has not.
_NOT_OF_MEMORY = ("members", "designs", "crop", "cores", "step_ms", "link", "mtu")


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    add = functools.partial(option, parser)
    shown = "a tar archive of JPEG photographs, or a Parquet file with the column image"
    add("--data", None, shown, required=True, metavar="FILE")
    shown = "numbers of members that read at once, as in 1,4,16 (default: 1,4,16; with hosts one and four on each)"
    add("--members", None, shown, type=counts)
    shown = "designs: bare ring, node, independent (default: those), loader, dataloader; with hosts also single, "
    add("--designs", None, shown + "multi, all, auto (default: those and node)", type=words)
    shown = "instead: memory of so many training members, beside two processes with a DataLoader each (default: 8)"
    parser.add_argument("--memory", nargs="?", const=8, type=count, metavar="MEMBERS", help=shown)
    shown = "preparation processes, of a node or of each member that prepares for itself"
    add("--prep-workers", "1", shown, type=counts)
    add("--batch-size", 32, "samples of a batch", type=count)
    shown = "samples that each member consumes at least, after its first batch; whole epochs"
    add("--samples", 5000, shown, type=count)
    shown = "the same where each member prepares for itself, which is slow"
    add("--samples-alone", 1000, shown, type=count)
    add("--size", 224, "pixels of a side", type=count)
    add("--crop", False, "resize a random part of each image, as in training", action="store_true")
    shown = "a member's compute: an emulated accelerator or a real model"
    add("--step", "emulated", shown, choices=("emulated", "model"))
    shown = "emulated accelerator: wait that long after each batch, using no CPU, as in 0,10,60 (default: 0)"
    add("--step-ms", None, shown, type=milliseconds_each)
    shown = "pin everything to that many cores, as in 1,2 (default: no pinning)"
    add("--cores", None, shown, type=counts)
    add("--hosts", 1, "nodes: hosts in network namespaces on this machine (needs root)", type=count)
    add("--link", None, "rate of the hosts' links, as in 1gbit,10gbit (default: unlimited)", type=words)
    shown = "bytes of a frame's payload on the hosts' links; 9000 for jumbo frames (default: 1500)"
    add("--mtu", None, shown, type=count)
    shown = "medians of that many runs; one run where each member prepares for itself beside designs that share"
    add("--repeats", 5, shown, type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from ensemble.spec import SpecError

    if options.memory is not None:
        return _study_memory(options, report)
    from ensemble.bench.pipelines import figures, rows, study

    if options.step != "emulated" and options.step_ms:
        raise SpecError(f"--step-ms is for the emulated accelerator, not for --step {options.step}")
    for name in ("link", "mtu"):
        if getattr(options, name) is not None and options.hosts == 1:
            raise SpecError(f"--{name} is for several hosts: say how many with --hosts")
    found = study.study(
        options.data,
        options.members or (),
        designs=options.designs or (),
        step_ms=options.step_ms or (0.0,),
        cores=options.cores or (None,),
        nodes=options.hosts,
        links=options.link or (None,),
        mtu=options.mtu or 1500,
        report=report,
        **_pick(options, "prep_workers samples samples_alone step repeats batch_size size crop"),
    )
    return Outcome(
        tables=[("", rows.table(found))],
        rows=[vars(row) for row in found],
        findings=list(rows.findings(found)),
        title=figures.TITLE,
        notes=figures.notes(found),
        panels=figures.panels(found),
    )


def _pick(options: argparse.Namespace, names: str) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names.split()}


def _study_memory(options: argparse.Namespace, report: Report) -> Outcome:
    from ensemble.bench.pipelines import memory
    from ensemble.spec import SpecError

    given = [name for name in _NOT_OF_MEMORY if getattr(options, name)] + ["hosts"] * (options.hosts > 1)
    if given:
        raise SpecError(f"--memory compares two fixed sides: leave out --{given[0].replace('_', '-')}")
    picked = _pick(options, "size batch_size repeats")
    return memory.outcome(memory.study_memory(options.data, members=options.memory, report=report, **picked))


STUDY = Study(
    name="pipelines",
    summary="what one shared pipeline saves",
    description="What one shared pipeline saves: every combination of the lists given, in one table.",
    add_options=add_options,
    run=run,
)
