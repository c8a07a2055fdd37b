"""`python -m benchmarks precision`: what half precision costs and saves, after Svyatkovskiy et al. 2019.

Training steps of each precision take turns in one process; memory and exchanged bytes have a process for each.
Accuracy is that of an Ensemble whose members are precisions x seeds.
"""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, count, data_options, option, training_options, words
from benchmarks.results import Outcome, Report, Study
from ensemble.spec.validation import SpecError


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    shown = "networks whose steps are timed: cnn, cnn-small, lstm, lstm-small, lstm-large, or 'none'"
    option(parser, "--models", "lstm,lstm-small,cnn", shown, type=words)
    option(parser, "--train", "lstm-small,cnn", "whose accuracy is measured, or 'none'", type=words)
    option(parser, "--precisions", "fp32,bf16,fp16", "precisions that are compared", type=words)
    option(parser, "--steps", 15, "timed steps of each precision; slow ones stop earlier", type=count)
    option(parser, "--threads", 1, "threads of torch while steps are timed", type=count)
    option(parser, "--batch-size", 64, "samples of a batch", type=count)
    training_options(parser, seeds=5, epochs=None, samples=10_000, held_out=4000)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.precision.expected import make_outcome
    from benchmarks.precision.measure import study

    timed, trained = chosen_nets(options, options.models), chosen_nets(options, options.train)
    if not timed and not trained:
        raise SpecError("nothing to study: name a network in --models or in --train")
    return make_outcome(study(options, timed, trained, report))


STUDY = Study(
    name="precision",
    summary="what half precision costs and saves",
    description="Training in fp32, bf16 and fp16: steps, memory, bytes exchanged, and accuracy over seeds.",
    add_options=add_options,
    run=run,
)
