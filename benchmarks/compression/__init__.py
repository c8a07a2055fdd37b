"""`python -m benchmarks compression`: what low-precision exchange saves and costs (Grubic et al. 2018)."""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, data_options, training_options
from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, option, sizes, words
from ensemble.spec.validation import check_choice

PARTS = ("codecs", "exchanges", "accuracy")
_TRAINED = "qsgd8,qsgd4,qsgd4+ef,qsgd2,qsgd2+ef,onebit-ef,onebit+ef,powersgd+ef"


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    option(parser, "--parts", "codecs,exchanges,accuracy", "what is studied", type=words)

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

    part = parser.add_argument_group("part 'accuracy'")
    option(part, "--train", "cnn,lstm-small", "networks that are trained, or 'none'", type=words)
    option(part, "--train-schemes", _TRAINED, "schemes of the trained networks, beside fp32", type=words)
    training_options(part, seeds=3, epochs=None, samples=2000, held_out=2000)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.compression.expected import make_outcome
    from benchmarks.compression.measure import study

    for part in options.parts:
        check_choice("--parts", part, PARTS)
    nets, trained = chosen_nets(options, options.models), chosen_nets(options, options.train)
    return make_outcome(*study(options, nets, trained, report))


STUDY = Study(
    name="compression",
    summary="what low-precision gradient exchange saves and costs",
    description="Codecs, exchanges over links of several rates, and accuracy against bits.",
    add_options=add_options,
    run=run,
)
