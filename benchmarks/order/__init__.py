"""`python -m benchmarks order`: what it costs an ensemble that its members read one order of the samples."""

from __future__ import annotations

import argparse

from benchmarks.options import check_names, count, directory, option, words
from benchmarks.results import Outcome, Report, Study, outcome_of
from ensemble.spec.validation import SpecError

_TASKS = ("cancer", "digits", "cifar10", "rare")


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    shown = "holds cifar10/train.parquet (default: only tasks that scikit-learn ships)"
    option(parser, "--data", None, shown, type=directory, metavar="DIR")
    option(parser, "--tasks", "cancer,digits,rare", f"of {', '.join(_TASKS)}", type=words)
    option(parser, "--seeds", 20, "ensembles in each arm; of rare as many of each of three splits", type=count)
    option(parser, "--quick", False, "two seeds of one epoch, which show only that it runs", action="store_true")


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`.

    Raises:
        SpecError: there is no such task, or its data are missing.
    """
    import torch

    from benchmarks.order.measure import RARE, compare_orders, compare_rare

    check_names("--tasks", options.tasks, _TASKS)
    if options.data is None and "cifar10" in options.tasks:
        raise SpecError("cifar10: give --data, a directory with cifar10/train.parquet")
    torch.set_num_threads(1)
    seeds, epochs = (2, 1) if options.quick else (options.seeds, None)
    rows = []
    for name in options.tasks:
        report(f"{name}: {seeds} seeds")
        rows += compare_rare(seeds, epochs) if name == RARE else compare_orders(name, options.data, seeds, epochs)
    return outcome_of(rows, "median, of rare the mean (bootstrap interval)", part="order")


STUDY = Study(
    name="order",
    summary="what it costs an ensemble that its members read one order",
    description="Ensembles of members that read one order of the samples, against orders of their own.",
    add_options=add_options,
    run=run,
)
