"""`python -m benchmarks compression`: what low-precision exchange saves and costs (Grubic et al. 2018).

**Steps**: training steps of emulated networks over links, by what gradients travel as. **Accuracy** against bits.
"""

from __future__ import annotations

import argparse

from benchmarks.options import (
    check_names,
    chosen_nets,
    count,
    counts,
    data_options,
    option,
    training_options,
    words,
)
from benchmarks.results import Outcome, Report, Study, run_parts

_STEPPED = "fp16,qsgd16,qsgd8,qsgd4,qsgd2,onebit,onebit-zero,onebit-tensor,powersgd"
_TRAINED = "qsgd8,qsgd4,qsgd4+ef,qsgd2,qsgd2+ef,onebit-ef,onebit+ef,powersgd+ef"


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    option(parser, "--parts", "steps,accuracy", "what is studied", type=words)

    part = parser.add_argument_group("part 'steps'")
    option(part, "--nets", "alexnet,resnet50", "networks: alexnet, vgg16, resnet50, inception", type=words)
    option(part, "--devices", "p100", "accelerators that are emulated: k80, p100", type=words)
    shown = "compressions of gradients; +ef and -ef: with and without error feedback; onebit-zero: threshold at "
    shown += "zero, onebit-tensor: own columns"
    option(part, "--schemes", _STEPPED, shown, type=words)
    option(part, "--workers", "2,4", "workers, each on a host in a network namespace (root)", type=counts)
    option(part, "--links", "1gbit,10gbit", "rates of the hosts' links", type=words)
    option(part, "--steps", 3, "timed steps, after one that is not", type=count)

    part = parser.add_argument_group("part 'accuracy'")
    option(part, "--train", "cnn,lstm-small", "networks that are trained, or 'none'", type=words)
    option(part, "--train-schemes", _TRAINED, "schemes of the trained networks, beside fp32", type=words)
    training_options(part, seeds=3, epochs=None, samples=2000, held_out=2000)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.compression import accuracy, steps
    from benchmarks.compression.expected import show_accuracies, show_steps
    from benchmarks.launch.hosts import rate_bps
    from benchmarks.net_shapes import DEVICES, NETS

    check_names("--nets", options.nets, NETS)
    check_names("--devices", options.devices, DEVICES)
    for rate in options.links:
        rate_bps(rate)
    stepped = accuracy.parse_schemes("--schemes", options.schemes)
    compared = accuracy.parse_schemes("--train-schemes", options.train_schemes)
    trained = chosen_nets(options, options.train) if "accuracy" in options.parts else []
    declared = [(net, accuracy.declare_members(net, compared, options)) for net in trained]
    parts = {  # whatever the user may have got wrong was raised before
        "steps": lambda: show_steps([*steps.study_steps(options, stepped, report)]),
        "accuracy": lambda: show_accuracies([*accuracy.measure_accuracies(options, declared, compared, report)]),
    }
    return run_parts(options.parts, parts)


STUDY = Study(
    name="compression",
    summary="what low-precision gradient exchange saves and costs",
    description="Training steps over links of several rates, and accuracy against bits.",
    add_options=add_options,
    run=run,
)
