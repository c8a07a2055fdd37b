"""`python -m benchmarks fabric`: what a network does for collectives and for training, after Samsi et al. 2020.

Collectives are shown as nccl-tests shows them. Training is data-parallel over links, on emulated accelerators;
workers are those of one member (Svyatkovskiy et al. 2019).
"""

from __future__ import annotations

import argparse

from benchmarks.options import (
    check_names,
    chosen_nets,
    count,
    counts,
    data_options,
    milliseconds_each,
    option,
    sizes,
    words,
)
from benchmarks.results import Outcome, Report, Study, run_parts
from ensemble.spec.validation import SpecError

_LINKS = "2x2@1gbit,2x2@10gbit"


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    option(parser, "--parts", "collectives,training,workers", "what is studied", type=words)
    shown = "hosts in network namespaces (root), ranks of each, and their links' rate; or loopback, for four ranks"
    option(parser, "--links", _LINKS, shown, type=words)
    option(parser, "--backends", None, "such as gloo,hierarchical (default: all that are available)", type=words)
    option(parser, "--steps", 10, "timed steps, of training and of workers", type=count)

    part = parser.add_argument_group("part 'collectives'")
    option(part, "--iterations", 20, "iterations of each case, at most", type=count)
    option(part, "--collectives", None, "such as all_reduce,broadcast (default: all)", type=words)
    option(part, "--sizes", "4KiB,64KiB,1MiB,16MiB", "sizes of messages", type=sizes)

    part = parser.add_argument_group("part 'training'")
    option(part, "--nets", "resnet50,vgg16", "networks on emulated P100s, also inception", type=words)

    part = parser.add_argument_group("part 'workers'")
    option(part, "--model", "lstm", "cnn, cnn-small, lstm, lstm-small or lstm-large")
    option(part, "--workers", None, "numbers of workers, as in 1,2,4,8 (default: 1,2,4,8)", type=counts)
    option(part, "--scalings", "strong,weak", "strong: one batch for all; weak: one for each worker", type=words)
    option(part, "--worker-batch", 64, "samples of a batch: global in strong scaling, else a worker's", type=count)
    shown = "emulated accelerators: a timed wait of that length for such a batch; 0: this machine computes"
    option(part, "--step-ms", "0,100", shown, type=milliseconds_each)
    option(part, "--hosts", 1, "hosts in network namespaces, for the workers (needs root)", type=count)
    option(part, "--link", None, "rate of these hosts' links, as in 1gbit (default: unlimited)")


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.fabric import expected, study
    from benchmarks.fabric.links import parse_link
    from benchmarks.fabric.measure import COLLECTIVES
    from benchmarks.fabric.workers import SCALINGS, study_workers
    from benchmarks.launch import hosts
    from benchmarks.launch.backends import check_backend, default_backends, unavailable_reason

    for name in options.backends or ():
        check_backend(name)
        if (reason := unavailable_reason(name)) is not None:
            raise SpecError(f"--backends {name}: {reason}")
    check_names("--collectives", options.collectives or (), COLLECTIVES)
    check_names("--nets", options.nets, study.NETS)
    check_names("--scalings", options.scalings, SCALINGS)
    if options.link is not None and options.hosts == 1:
        raise SpecError("--link is for several hosts: say how many with --hosts")
    if options.hosts > 1 and (reason := hosts.unavailable()):
        raise SpecError(f"--hosts {options.hosts}: {reason}")
    backends = options.backends or default_backends()
    links = study.possible_links([parse_link(text) for text in options.links], report)
    [net] = chosen_nets(options, [options.model])
    parts = {
        "collectives": lambda: expected.show_collectives(
            [*study.study_collectives(links, backends, options, report)]
        ),
        "training": lambda: expected.show_training([*study.study_training(links, backends, options, report)]),
        "workers": lambda: expected.show_workers(study_workers(net, options, report)),
    }
    return run_parts(options.parts, parts)


STUDY = Study(
    name="fabric",
    summary="what a network does for collectives and for training",
    description="Collectives in the columns of nccl-tests, training over links, one member over workers.",
    add_options=add_options,
    run=run,
)
