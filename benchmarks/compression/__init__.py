"""`python -m benchmarks compression`: what low-precision exchange saves and costs (Grubic et al. 2018)."""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, data_options, training_options
from ensemble.bench.results import Outcome, Report, Study, run_parts
from ensemble.cli.arguments import count, counts, option, sizes, words

_STEPPED = "fp16,qsgd16,qsgd8,qsgd4,qsgd2,onebit,onebit-zero,onebit-tensor,powersgd"
_TRAINED = "qsgd8,qsgd4,qsgd4+ef,qsgd2,qsgd2+ef,onebit-ef,onebit+ef,powersgd+ef"


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    option(parser, "--parts", "steps,codecs,exchanges,accuracy", "what is studied", type=words)

    part = parser.add_argument_group("parts 'codecs' and 'exchanges'")
    shown = "compressions of gradients; +ef and -ef: with and without error feedback, as in qsgd4+ef,onebit-ef"
    option(part, "--schemes", "fp16,bf16,qsgd8,qsgd4,qsgd2,onebit,powersgd", shown, type=words)
    option(part, "--hosts", "2,4", "hosts in network namespaces (root), of a rank each", type=counts)
    shown = "rates of the hosts' links, or unlimited"
    option(part, "--rates", "200mbit,1gbit,10gbit,unlimited", shown, type=words)
    option(part, "--sizes", "1MiB,16MiB", "sizes of messages", type=sizes)
    option(part, "--models", "lstm", "networks whose gradients are exchanged, or 'none'", type=words)
    shown = "iterations of each exchange, fewer of one that takes more than a quarter of a second"
    option(part, "--iterations", 9, shown, type=count)
    option(part, "--rounds", 3, "rounds in which schemes take turns", type=count)

    part = parser.add_argument_group("part 'steps'")
    option(part, "--nets", "alexnet,resnet50", "networks: alexnet, vgg16, resnet50, inception, lstm", type=words)
    option(part, "--devices", "p100", "accelerators that are emulated: k80, p100", type=words)
    option(part, "--primitives", "ring,gloo,mpi", "what sums gradients: ring, gloo, mpi, hierarchical", type=words)
    option(
        part,
        "--step-schemes",
        _STEPPED,
        "as --schemes; onebit-zero: threshold at zero, onebit-tensor: own columns",
        type=words,
    )
    option(part, "--workers", "2,4", "workers that are measured", type=counts)
    shown = "workers of a host; from 2 on 'hierarchical' can sum inside hosts first"
    option(part, "--ranks-per-host", 1, shown, type=count)
    option(part, "--links", "1gbit,10gbit", "rates of the hosts' links that are measured", type=words)
    option(part, "--predicted-workers", "8,16", "workers that are predicted", type=counts)
    option(part, "--predicted-links", "100mbit,1gbit,10gbit,100gbit", "that are predicted", type=words)
    option(part, "--steps", 3, "timed steps, after one that is not", type=count)
    option(
        part,
        "--check",
        10,
        "one in so many predicted steps is measured, where that is possible; 0: none",
        type=int,
    )

    part = parser.add_argument_group("part 'accuracy'")
    option(part, "--train", "cnn,lstm-small", "networks that are trained, or 'none'", type=words)
    option(part, "--train-schemes", _TRAINED, "schemes of the trained networks, beside fp32", type=words)
    shown = "rates of links at which accuracy is compared at the time at which fp32 has finished"
    option(part, "--time-links", "100mbit,10gbit", shown, type=words)
    training_options(part, seeds=3, epochs=None, samples=2000, held_out=2000)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.compression import measure, steps
    from benchmarks.compression.expected import show_accuracies, show_codecs, show_exchanges
    from ensemble.bench.launch.hosts import rate_bps

    nets, trained = chosen_nets(options, options.models), chosen_nets(options, options.train)
    for rate in (*options.rates, *options.time_links):
        if rate != measure.UNLIMITED:
            rate_bps(rate)
    exchanged, compared = measure.parse_schemes(options.schemes), measure.parse_schemes(options.train_schemes)
    trained = trained if "accuracy" in options.parts else []
    declared = [(net, measure.declare_members(net, compared, options)) for net in trained]
    stepped = measure.parse_schemes(options.step_schemes)
    steps.check_options(options)
    parts = {  # whatever the user may have got wrong was raised before
        "steps": lambda: steps.study_steps(options, stepped, report),
        "codecs": lambda: show_codecs([*measure.measure_codecs(options.rounds, exchanged, report)]),
        "exchanges": lambda: show_exchanges([*measure.measure_exchanges(options, nets, exchanged, report)]),
        "accuracy": lambda: show_accuracies(*measure.measure_accuracies(options, declared, compared, report)),
    }
    return run_parts(options.parts, parts, "Compression")


STUDY = Study(
    name="compression",
    summary="what low-precision gradient exchange saves and costs",
    description="Training steps, codecs, exchanges over links of several rates, and accuracy against bits.",
    add_options=add_options,
    run=run,
)
