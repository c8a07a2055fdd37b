"""`python -m benchmarks compression`: what low-precision exchange saves and costs (`benchmarks.compression`)."""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, data_option, net_options, run_dir_option
from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, option, sizes, words
from ensemble.spec.validation import check_choice

_SCHEMES = "fp16,bf16,qsgd8,qsgd4,qsgd2,onebit,powersgd"
_TRAINED = "qsgd8,qsgd4,qsgd4+ef,qsgd2,qsgd2+ef,onebit-ef,onebit+ef,powersgd+ef"
_RATES, _ALL_RATES = "200mbit,1gbit,10gbit,unlimited", "100mbit,200mbit,500mbit,1gbit,2gbit,5gbit,10gbit,unlimited"


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_option(parser)
    option(parser, "--parts", "codecs,exchanges,accuracy", "what is studied", type=words)
    net_options(parser)
    shown = "larger defaults for all sizes: some hours on two cores"
    option(parser, "--full", False, shown, action="store_true")

    part = parser.add_argument_group("parts 'codecs' and 'exchanges'")
    shown = "compressions of gradients; +ef and -ef: with and without error feedback, as in qsgd4+ef,onebit-ef"
    option(part, "--schemes", _SCHEMES, shown, type=words)
    option(
        part,
        "--hosts",
        None,
        "hosts in network namespaces (root), of a rank each (default: 2,4)",
        type=counts,
    )
    shown = f"rates of the hosts' links, or unlimited (default: {_RATES})"
    option(part, "--rates", None, shown, type=words)
    option(part, "--sizes", None, "sizes of messages, as in 64KiB,16MiB (default: 1MiB,16MiB)", type=sizes)
    option(part, "--models", None, "networks whose gradients are exchanged, or 'none' (default: lstm)", type=words)
    option(part, "--iterations", None, "iterations of each exchange, at most (default: 9)", type=count)
    option(part, "--rounds", 3, "rounds in which schemes take turns", type=count)

    part = parser.add_argument_group("part 'accuracy'")
    option(part, "--train", None, "networks that are trained, or 'none' (default: cnn,lstm-small)", type=words)
    option(part, "--train-schemes", _TRAINED, "schemes of the trained networks, beside fp32", type=words)
    option(part, "--seeds", None, "members in each scheme (default: 3)", type=count)
    shown = "of each member (default: 8 of a CNN, 4 of an LSTM; on the digits four times as many)"
    option(part, "--epochs", None, shown, type=count)
    option(part, "--samples", None, "samples to learn from (default: 2000)", type=count)
    option(part, "--held-out", None, "samples to measure accuracy by (default: 2000)", type=count)
    run_dir_option(part)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.compression.figures import outcome
    from benchmarks.compression.study import PARTS, study

    for part in options.parts:
        check_choice("--parts", part, PARTS)
    full = options.full
    sizes = {
        "hosts": [2, 4, 8] if full else [2, 4],
        "rates": (_ALL_RATES if full else _RATES).split(","),
        "sizes": [2**k for k in ((16, 20, 22, 24, 26) if full else (20, 24))],
        "models": ["lstm", "cnn"] if full else ["lstm"],
        "iterations": 30 if full else 9,
        "train": ["cnn", "lstm-small"],
        "seeds": 5 if full else 3,
        "samples": 20_000 if full else 2000,
        "held_out": 4000 if full else 2000,
    }
    given = {name: value for name, value in vars(options).items() if value is not None}
    usual = argparse.Namespace(**{**vars(options), **sizes, **given}, seconds=20.0 if full else 2.0)
    nets, trained = chosen_nets(usual, usual.models), chosen_nets(usual, usual.train)
    return outcome(study(usual, nets, trained, report))


STUDY = Study(
    name="compression",
    summary="what low-precision gradient exchange saves and costs",
    description="Codecs, exchanges over links of several rates, and accuracy against bits.",
    add_options=add_options,
    run=run,
)
