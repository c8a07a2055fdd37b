"""`python -m benchmarks scaling`: more workers, and larger batches.

**Workers** (Svyatkovskiy et al. 2019): one member data-parallel over 1 to k workers, its step split into computing
and synchronization, beside the model t = compute / n + communication(n).

**Batches** (Jia et al. 2018): the batch grows with the number of epochs fixed; SGD against LARS without and with
weight decay on biases and normalization, each with the best learning rate of a grid.
"""

from __future__ import annotations

import argparse

from benchmarks.options import chosen_nets, data_options, training_options
from ensemble.bench.results import Outcome, Report, Study, run_parts
from ensemble.cli.arguments import count, counts, milliseconds_each, option, words
from ensemble.spec.validation import SpecError, check_choice


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    option(parser, "--parts", "workers,batches", "what is studied", type=words)

    part = parser.add_argument_group("part 'workers'")
    option(part, "--model", "lstm", "cnn, cnn-small, lstm, lstm-small or lstm-large")
    option(part, "--workers", None, "numbers of workers, as in 1,2,4,8 (default: 1,2,4,8)", type=counts)
    option(part, "--scalings", "strong,weak", "strong: one batch for all; weak: one for each worker", type=words)
    option(part, "--worker-batch", 64, "samples of a batch: global in strong scaling, else a worker's", type=count)
    shown = (
        "emulated accelerators: a timed wait of that length for such a batch, which uses no processor; 0: this "
        "machine computes, without --workers with at most one worker a core"
    )
    option(part, "--step-ms", "0,100", shown, type=milliseconds_each)
    option(part, "--steps", 10, "timed steps", type=count)
    option(part, "--compression", "none", "compression of gradients between workers, such as bf16 or qsgd4")
    option(part, "--hosts", 1, "hosts in network namespaces, for the workers (needs root)", type=count)
    option(part, "--link", None, "rate of the hosts' links, as in 1gbit (default: unlimited)")

    part = parser.add_argument_group("part 'batches'")
    option(part, "--net", "cnn-small", "the network that is trained")
    shown = "global batches, as in 128,8192 (default: 128,512,2048,8192; of digits 32,128,512)"
    option(part, "--batches", None, shown, type=counts)
    option(part, "--rates", "0.05,0.1,0.2,0.4,0.8", "learning rates of SGD's grid", type=rates)
    option(part, "--lars-rates", "0.5,1,2,4", "rates of LARS's grid, at trust 0.02", type=rates)
    training_options(part, seeds=5, epochs=12, samples=10_000, held_out=2000)


def rates(text: str) -> list[float]:
    """Learning rates with commas between them, ascending."""
    try:
        found = sorted(float(part) for part in text.split(","))
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"must be numbers above 0 with commas between them, got {text!r}")
    return found


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.scaling.expected import show_batches, show_workers
    from benchmarks.scaling.measure import SCALINGS, study_batches, study_workers

    for scaling in options.scalings:
        check_choice("--scalings", scaling, SCALINGS)
    if options.link is not None and options.hosts == 1:
        raise SpecError("--link is for several hosts: say how many with --hosts")
    net, trained = chosen_nets(options, (options.model, options.net))
    parts = {
        "workers": lambda: show_workers(study_workers(net, options, report)),
        "batches": lambda: show_batches(study_batches(trained, options, report)),
    }
    return run_parts(options.parts, parts, "Scaling")


STUDY = Study(
    name="scaling",
    summary="more workers, and larger batches",
    description="One member over 1 to k workers; and SGD against LARS while the batch grows.",
    add_options=add_options,
    run=run,
)
