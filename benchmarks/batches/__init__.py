"""`python -m benchmarks batches`: what larger batches cost in accuracy, after Jia et al. 2018.

The batch grows with the number of epochs fixed; SGD against LARS, each with the best learning rate of a grid.
"""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, counts, data_options, option, training_options
from benchmarks.results import Outcome, Report, Study
from ensemble.spec.identity import PRECISIONS
from ensemble.spec.validation import SpecError


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    shown = "of computing: fp32, or bf16, which is slow on a processor without AVX512-BF16"
    option(parser, "--precision", "fp32", shown, choices=PRECISIONS)

    option(parser, "--net", "resnet", "the network that is trained, of images")
    shown = "global batches, of which the first is the baseline's (default: 64,256,1024; of digits 32,256)"
    option(parser, "--batches", None, shown, type=counts)
    option(parser, "--rates", "0.1,0.2,0.4,0.8", "learning rates of SGD's grids", type=parse_rates)
    option(parser, "--lars-rates", "0.75,1.5,3,6", "rates of LARS's grids, at trust 0.02", type=parse_rates)
    shown = "multiples of the epochs, also trained with the largest batch, at rates that are chosen for them"
    option(parser, "--longer", "1", shown, type=counts)
    training_options(parser, seeds=3, epochs=10, samples=10_000, held_out=2000)


def parse_rates(text: str) -> list[float]:
    """Learning rates with commas between them, ascending."""
    try:
        rates = sorted(float(part) for part in text.split(","))
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"must be numbers above 0 with commas between them, got {text!r}")
    return rates


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.batches.expected import show_accuracy
    from benchmarks.batches.measure import study_accuracy

    if options.seeds < 2:
        raise SpecError("--seeds must be at least 2: an interval over one seed says nothing")
    [net] = chosen_nets(options, [options.net], images=True)
    return show_accuracy(study_accuracy(net, options, report))


STUDY = Study(
    name="batches",
    summary="what larger batches cost in accuracy",
    description="SGD against LARS while the batch grows, in as many epochs.",
    add_options=add_options,
    run=run,
)
