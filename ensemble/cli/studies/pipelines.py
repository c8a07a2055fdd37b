"""`ensemble bench pipelines`: what sharing one pipeline saves (`ensemble.bench.pipelines`)."""

from __future__ import annotations

import argparse
import functools

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, milliseconds_each, option, words

#: Options that the study of memory has not, as they are kept and as they are given.
_NOT_OF_MEMORY = {name: name for name in ("members", "crop", "cores", "link", "mtu")}
_NOT_OF_MEMORY |= {"design": "designs", "step_ms": "step-ms", "nodes": "hosts"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`; options are kept under the names that the fields of the study's `Config` have."""
    add = functools.partial(option, parser)
    shown = "a tar archive of JPEG photographs, or a Parquet file with the column image"
    add("--data", None, shown, required=True, metavar="FILE")
    shown = "numbers of members that read at once, as in 1,4,16 (default: 1,4,16; with hosts one and four on each)"
    add("--members", None, shown, type=counts)
    shown = "designs: bare ring, node, independent (default: those), loader, dataloader; with hosts also single, "
    add("--designs", None, shown + "multi, all, auto (default: those and node)", type=words, dest="design")
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
    shown = "nodes: hosts in network namespaces on this machine (needs root)"
    add("--hosts", 1, shown, type=count, dest="nodes")
    add("--link", None, "rate of the hosts' links, as in 1gbit,10gbit (default: unlimited)", type=words)
    shown = "bytes of a frame's payload on the hosts' links; 9000 for jumbo frames (default: 1500)"
    add("--mtu", None, shown, type=count)
    shown = "runs of each case, of which medians are shown; one where each member prepares for itself"
    add("--repeats", 5, shown, type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    import dataclasses

    from ensemble.spec import SpecError

    if options.memory is not None:
        return _study_memory(options, report)
    from ensemble.bench.pipelines import figures, study
    from ensemble.bench.pipelines.config import Config

    if options.step != "emulated" and options.step_ms:
        raise SpecError(f"--step-ms is for the emulated accelerator, not for --step {options.step}")
    for name in ("link", "mtu"):
        if getattr(options, name) is not None and options.nodes == 1:
            raise SpecError(f"--{name} is for several hosts: say how many with --hosts")
    given = vars(options)
    fields = {field.name: given[field.name] for field in dataclasses.fields(Config) if given.get(field.name)}
    return figures.make_outcome(study.study(**fields, repeats=options.repeats, report=report))


def _study_memory(options: argparse.Namespace, report: Report) -> Outcome:
    from ensemble.bench.pipelines import memory
    from ensemble.spec import SpecError

    given = [shown for name, shown in _NOT_OF_MEMORY.items() if getattr(options, name) not in (None, False, 1)]
    if given:
        raise SpecError(f"--memory compares two fixed sides: leave out --{given[0]}")
    picked = {name: getattr(options, name) for name in ("size", "batch_size", "repeats")}
    return memory.outcome(memory.study_memory(options.data, members=options.memory, report=report, **picked))


STUDY = Study(
    name="pipelines",
    summary="what one shared pipeline saves",
    description="What one shared pipeline saves: every combination of the lists given, in one table.",
    add_options=add_options,
    run=run,
)
