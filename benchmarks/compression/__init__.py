"""`python -m benchmarks compression`: what low-precision exchange saves and costs (Grubic et al. 2018)."""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, data_options, training_options
from ensemble.bench.results import Outcome, Report, Study, run_parts
from ensemble.cli.arguments import count, counts, option, sizes, words

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
    from benchmarks.compression import measure
    from benchmarks.compression.expected import show_accuracies, show_codecs, show_exchanges
    from ensemble.bench.launch.hosts import rate_bps

    nets, trained = chosen_nets(options, options.models), chosen_nets(options, options.train)
    for rate in options.rates:
        if rate != measure.UNLIMITED:
            rate_bps(rate)
    exchanged, compared = measure.parse_schemes(options.schemes), measure.parse_schemes(options.train_schemes)
    trained = trained if "accuracy" in options.parts else []
    declared = [(net, measure.declare_members(net, compared, options)) for net in trained]
    parts = {  # whatever the user may have got wrong was raised before
        "codecs": lambda: show_codecs([*measure.measure_codecs(options.rounds, exchanged, report)]),
        "exchanges": lambda: show_exchanges([*measure.measure_exchanges(options, nets, exchanged, report)]),
        "accuracy": lambda: show_accuracies([*measure.measure_accuracies(options, declared, compared, report)]),
    }
    return run_parts(options.parts, parts, "Compression")


STUDY = Study(
    name="compression",
    summary="what low-precision gradient exchange saves and costs",
    description="Codecs, exchanges over links of several rates, and accuracy against bits.",
    add_options=add_options,
    run=run,
)
