"""`python -m benchmarks scaling`: more workers, and larger batches (`benchmarks.scaling`)."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks.options import chosen_net, data_option, net_options, run_dir_option
from ensemble.bench.results import Outcome, Report, Study
from ensemble.cli.arguments import count, counts, milliseconds_each, option, words
from ensemble.spec.validation import check_choice

if TYPE_CHECKING:
    from benchmarks.scaling.rows import WorkerRow
    from benchmarks.scaling.study import BatchPlan

WORKERS, BATCHES = "workers", "batches"
PARTS = (WORKERS, BATCHES)
_STEP_MS, _FULL_SEEDS, _FULL_EPOCHS, _FULL_SAMPLES = 100.0, 10, 30, 40_000


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_option(parser)
    option(parser, "--parts", "workers,batches", "what is studied", type=words)
    net_options(parser)
    shown = "larger defaults for all sizes: some hours on two cores"
    option(parser, "--full", False, shown, action="store_true")

    part = parser.add_argument_group("part 'workers'")
    option(part, "--model", "lstm", "cnn, cnn-small, lstm, lstm-small or lstm-large")
    option(part, "--workers", None, "numbers of workers, as in 1,2,4,8 (default: 1,2,4,8)", type=counts)
    option(part, "--scalings", "strong,weak", "strong: one batch for all; weak: one for each worker", type=words)
    option(part, "--worker-batch", 64, "samples of a batch: global in strong scaling, else a worker's", type=count)
    shown = (
        "emulated accelerators: a timed wait of that length for such a batch, which uses no processor; 0: this "
        f"machine computes, by default with at most one worker a core (default: 0,{_STEP_MS:g})"
    )
    option(part, "--step-ms", None, shown, type=milliseconds_each)
    option(part, "--steps", None, "timed steps (default: 10)", type=count)
    option(part, "--compression", "none", "compression of gradients between workers, such as bf16 or qsgd4")
    option(part, "--hosts", 1, "hosts in network namespaces, for the workers (needs root)", type=count)
    option(part, "--link", None, "rate of the hosts' links, as in 1gbit (default: unlimited)")

    part = parser.add_argument_group("part 'batches'")
    option(part, "--net", "cnn-small", "the network that is trained")
    shown = "global batches, as in 128,8192 (default: 128,512,2048,8192; of digits 32,128,512)"
    option(part, "--batches", None, shown, type=counts)
    option(
        part, "--optimizers", "sgd,lars,lars-decay", "lars-decay: with weight decay on normalization", type=words
    )
    option(part, "--rates", None, "learning rates of SGD's grid (default: 0.05,0.1,0.2,0.4,0.8)", type=rates)
    option(part, "--lars-rates", None, "rates of LARS's grid, at trust 0.02 (default: 0.5,1,2,4)", type=rates)
    option(part, "--micro-batch", None, "larger batches are trained in parts of so many samples", type=count)
    option(part, "--seeds", None, "seeds of the best rates (default: 5)", type=count)
    option(part, "--epochs", None, "epochs of every member (default: 12)", type=count)
    option(part, "--samples", None, "samples to learn from (default: 10000)", type=count)
    option(part, "--held-out", 2000, "samples to choose rates by, and as many to measure by", type=count)
    run_dir_option(part)


def rates(text: str) -> tuple[float, ...]:
    """Learning rates with commas between them, ascending."""
    try:
        found = sorted(float(part) for part in text.split(","))
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"must be numbers above 0 with commas between them, got {text!r}")
    return tuple(found)


def run(options: argparse.Namespace, report: Report) -> Outcome:
    """See `Study`."""
    from benchmarks.scaling.figures import outcome
    from benchmarks.scaling.study import study_batches

    for part in options.parts:
        check_choice("--parts", part, PARTS)
    plan = _plan(options) if BATCHES in options.parts else None
    of_workers = _study_workers(options, report) if WORKERS in options.parts else []
    of_batches = study_batches(plan, options.run_dir, report) if plan else []
    return outcome(of_workers, of_batches)


def _study_workers(options: argparse.Namespace, report: Report) -> list[WorkerRow]:
    from benchmarks.scaling.rows import STRONG, WEAK
    from benchmarks.scaling.study import study_workers
    from ensemble.spec.validation import SpecError

    for scaling in options.scalings:
        check_choice("--scalings", scaling, (STRONG, WEAK))
    if options.link is not None and options.hosts == 1:
        raise SpecError("--link is for several hosts: say how many with --hosts")
    return study_workers(
        chosen_net(options, options.model),
        options.workers or (1, 2, 4, 8),
        data=options.data,
        scalings=options.scalings,
        step_ms=[ms or None for ms in options.step_ms or (0.0, _STEP_MS)],
        only_cores=options.workers is None,
        batch_size=options.worker_batch,
        steps=options.steps or (30 if options.full else 10),
        compression=options.compression,
        on_hosts=options.hosts,
        link=options.link,
        report=report,
    )


def _plan(options: argparse.Namespace) -> BatchPlan:
    from benchmarks.scaling.rows import SGD
    from benchmarks.scaling.study import OPTIMIZERS, BatchPlan

    for name in options.optimizers:
        check_choice("--optimizers", name, tuple(OPTIMIZERS))
    grids = {}
    for name, (_, usual) in OPTIMIZERS.items():
        own = options.rates if name == SGD else options.lars_rates
        if name in options.optimizers:
            grids[name] = own or usual
    full = options.full
    given = options.batches or ((128, 512, 2048, 8192) if options.data else (32, 128, 512))
    return BatchPlan(
        net=chosen_net(options, options.net),
        data=options.data,
        batches=tuple(sorted(set(given))),
        grids=grids,
        epochs=options.epochs or (_FULL_EPOCHS if full else 12),
        samples=options.samples or (_FULL_SAMPLES if full and options.data else 10_000),
        held_out=options.held_out,
        seeds=options.seeds or (_FULL_SEEDS if full else 5),
        micro_batch=options.micro_batch,
    )


STUDY = Study(
    name="scaling",
    summary="more workers, and larger batches",
    description="One member over 1 to k workers; and SGD against LARS while the batch grows.",
    add_options=add_options,
    run=run,
)
