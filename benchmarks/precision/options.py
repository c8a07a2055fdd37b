"""`python -m benchmarks precision`: what half precision costs and saves (`benchmarks.precision`)."""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, data_option, net_options, run_dir_option
from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, option, words
from ensemble.spec.validation import SpecError

_SIZES = ("steps", "threads", "batch_size", "seeds", "epochs", "samples", "held_out")


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_option(parser)
    shown = "networks whose steps are timed: cnn, cnn-small, lstm, lstm-small, lstm-large, or 'none'"
    shown += " (default: lstm,lstm-small,cnn)"
    option(parser, "--models", None, shown, type=words)
    option(
        parser,
        "--train",
        None,
        "whose metric is measured, or 'none' (default: lstm-small,cnn)",
        type=words,
    )
    option(parser, "--precisions", "fp32,bf16,fp16", "precisions that are compared", type=words)
    shown = "timed steps of each precision; slow ones stop earlier (default: 15)"
    option(parser, "--steps", None, shown, type=count)
    option(parser, "--threads", None, "threads of torch while steps are timed (default: 1)", type=count)
    option(parser, "--batch-size", None, "samples of a batch (default: 64)", type=count)
    option(parser, "--seeds", None, "members in each precision (default: 5)", type=count)
    option(parser, "--epochs", None, "epochs of each member (default: 6 of a CNN, 4 of an LSTM)", type=count)
    option(parser, "--samples", None, "samples to learn from (default: 10000)", type=count)
    option(parser, "--held-out", None, "samples to measure the metric by (default: 4000)", type=count)
    net_options(parser)
    shown = (
        "larger defaults: also the LSTM of 79 million weights, and the metric of the LSTM of full size; "
        "20,000 samples, ten epochs, ten seeds: some hours on two cores"
    )
    option(parser, "--full", False, shown, action="store_true")
    run_dir_option(parser)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    import dataclasses

    from benchmarks.precision import figures, rows
    from benchmarks.precision.study import DEFAULTS, FULL, study

    usual_timed, usual_trained, usual_sizes = FULL if options.full else DEFAULTS
    sizes = {name: getattr(options, name) for name in _SIZES if getattr(options, name) is not None}
    timed = chosen_nets(options, options.models or usual_timed)
    trained = chosen_nets(options, options.train or usual_trained)
    if not timed and not trained:
        raise SpecError("nothing to study: name a network in --models or in --train")
    found = study(
        timed,
        trained,
        options.precisions,
        data=options.data,
        sizes=dataclasses.replace(usual_sizes, **sizes),
        run_dir=options.run_dir,
        report=report,
    )
    return Outcome(
        tables=[("", rows.table(found))],
        rows=[rows.as_json(row) for row in found],
        findings=list(rows.findings(found)),
        title=figures.TITLE,
        notes=figures.NOTES,
        panels=list(figures.panels(found)),
    )


STUDY = Study(
    name="precision",
    summary="what half precision costs and saves",
    description="Training in fp32, bf16 and fp16: steps, memory, bytes exchanged, and the metric over seeds.",
    add_options=add_options,
    run=run,
)
