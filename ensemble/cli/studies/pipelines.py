"""`ensemble bench pipelines`: what sharing one pipeline saves (`ensemble.bench.pipelines`)."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, milliseconds_each, option, words

#: Options that are not called as they are kept.
_SHOWN = {"design": "designs", "nodes": "hosts"}
#: Options of `Config` that the study of memory has, too.
_OF_MEMORY = ("data", "size", "batch_size")


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
    shown = "preparation processes, of a node or of each member that prepares for itself (default: 1)"
    add("--prep-workers", None, shown, type=counts)
    add("--batch-size", None, "samples of a batch (default: 32)", type=count)
    shown = "samples that each member consumes at least, after its first batch; whole epochs (default: 5000)"
    add("--samples", None, shown, type=count)
    shown = "the same where each member prepares for itself, which is slow (default: 1000, but no more than those)"
    add("--samples-alone", None, shown, type=count)
    add("--size", None, "pixels of a side (default: 224)", type=count)
    add("--crop", None, "resize a random part of each image, as in training", action="store_true")
    shown = "a member's compute: emulated, an accelerator's wait, or model, a real small net; or both"
    add("--step", None, shown + " (default: emulated)", type=words)
    shown = "emulated accelerator: wait that long after each batch, using no CPU, as in 0,10,60 (default: 0)"
    add("--step-ms", None, shown, type=milliseconds_each)
    shown = "pin everything to that many cores, as in 1,2 (default: no pinning)"
    add("--cores", None, shown, type=counts)
    shown = "nodes: hosts in network namespaces on this machine, as root (default: 1)"
    add("--hosts", None, shown, type=count, dest="nodes")
    shown = "hosts that prepare, in the designs single and multi, as in 1,3,5 (default: one and all)"
    add("--preparers", None, shown, type=counts)
    add("--link", None, "rate of the hosts' links, as in 1gbit,10gbit (default: unlimited)", type=words)
    shown = "bytes of a frame's payload on the hosts' links; 9000 for jumbo frames (default: 1500)"
    add("--mtu", None, shown, type=count)
    shown = "runs of each case, of which medians are shown; one where each member prepares for itself"
    add("--repeats", 5, shown, type=count)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    import dataclasses

    from ensemble.bench.pipelines import figures, memory, study
    from ensemble.bench.pipelines.config import Config
    from ensemble.spec import SpecError

    kept = vars(options)
    names = (field.name for field in dataclasses.fields(Config))
    given = {name: kept[name] for name in names if kept.get(name) is not None}
    for name, reason in _find_ignored(given, options.memory):
        raise SpecError(f"--{_SHOWN.get(name, name.replace('_', '-'))} {reason}")
    more = {"repeats": options.repeats, "report": report}
    if options.memory is not None:
        return memory.outcome(memory.study_memory(members=options.memory, **given, **more))
    return figures.make_outcome(study.study(**given, **more))


def _find_ignored(given: dict[str, Any], memory: int | None) -> Iterator[tuple[str, str]]:
    """Options that no case of the study would heed, and why."""
    from ensemble.bench.pipelines.config import ALONE, EMULATED, MODEL, WITH_PREPARERS
    from ensemble.spec.validation import check_choice

    if memory is not None:
        yield from ((name, "is not for --memory, of two fixed sides") for name in given if name not in _OF_MEMORY)
    steps, designs = given.get("step", [EMULATED]), set(given.get("design", ()))
    for step in steps:
        check_choice("--step", step, (EMULATED, MODEL))
    unheeded = {
        "step_ms": (EMULATED not in steps, f"is for the emulated accelerator, not for --step {MODEL}"),
        "samples": (designs and designs <= {*ALONE}, "is for designs that share: say --samples-alone"),
        "samples_alone": (designs and not designs & {*ALONE}, f"is for the designs {', '.join(ALONE)}"),
        "preparers": (designs and not designs & {*WITH_PREPARERS}, f"is for {' and '.join(WITH_PREPARERS)}"),
    }
    nodes = given.get("nodes", 1)
    if nodes == 1:
        unheeded |= dict.fromkeys(
            ("link", "mtu", "preparers"), (True, "is for several hosts: say how many with --hosts")
        )
    elif max(given.get("preparers", [1])) > nodes:
        unheeded["preparers"] = (True, f"are more than the {nodes} hosts")
    yield from (
        (name, reason) for name, (is_unheeded, reason) in unheeded.items() if is_unheeded and name in given
    )


STUDY = Study(
    name="pipelines",
    summary="what one shared pipeline saves",
    description="What one shared pipeline saves: every combination of the lists given, in one table.",
    add_options=add_options,
    run=run,
)
