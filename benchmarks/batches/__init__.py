"""`python -m benchmarks batches`: what larger batches, and the learning rates of more workers, cost in accuracy.

**Accuracy** (Jia et al. 2018): the batch grows with the number of epochs fixed; SGD against LARS, each with the
best learning rate of a grid.

**Rates** (Svyatkovskiy et al. 2019): laws of the learning rate of n workers with a batch of fixed size each.
"""

from __future__ import annotations

import argparse

from benchmarks.options import check_names, chosen_nets, data_options, training_options
from ensemble.bench.results import Outcome, Report, Study, run_parts
from ensemble.cli.arguments import count, counts, option, words
from ensemble.spec.identity import PRECISIONS
from ensemble.spec.validation import SpecError, check_choice


def add_options(parser: argparse.ArgumentParser) -> None:
    """See `Study`."""
    data_options(parser)
    option(parser, "--parts", "accuracy,rates", "what is studied", type=words)
    shown = "of computing: fp32, or bf16, which is slow on a processor without AVX512-BF16"
    option(parser, "--precision", "fp32", shown, choices=PRECISIONS)

    part = parser.add_argument_group("part 'accuracy'")
    option(part, "--net", "resnet", "the network that is trained, of images")
    shown = "global batches, of which the first is the baseline's (default: 64,256,1024; of digits 32,256)"
    option(part, "--batches", None, shown, type=counts)
    option(
        part,
        "--optimizers",
        "lars",
        "of batches beyond the first: lars, lars-decay; sgd is always trained",
        type=words,
    )
    option(part, "--rates", "0.1,0.2,0.4,0.8", "learning rates of SGD's grids", type=parse_rates)
    option(part, "--lars-rates", "0.75,1.5,3,6", "rates of LARS's grids, at trust 0.02", type=parse_rates)
    shown = "multiples of the epochs, also trained with the largest batch, at rates that are chosen for them"
    option(part, "--longer", "1", shown, type=counts)
    training_options(part, seeds=3, epochs=10, samples=10_000, held_out=2000)

    part = parser.add_argument_group("part 'rates'")
    option(part, "--law-models", "lstm-small,plasma", "networks of texts, and 'plasma'", type=words)
    option(part, "--law-workers", "1,4,16,64", "numbers of workers n, by accumulation", type=counts)
    option(part, "--law-batch", 8, "samples of a worker's batch", type=count)
    option(part, "--law-optimizer", "adam", "adam, or sgd with momentum")
    option(part, "--law-rates", None, "rates of one worker, of which the best is taken", type=parse_rates)
    option(part, "--law-seeds", 3, "seeds of each law and number of workers", type=count)
    option(part, "--law-epochs", 5, "epochs of each member", type=count)
    option(part, "--law-samples", 1024, "samples, or shots of plasma, to learn from", type=count)
    option(part, "--target", 98, "per cent of one worker's final metric that is to be reached", type=count)


def parse_rates(text: str) -> list[float]:
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
    from benchmarks.batches import rates
    from benchmarks.batches.accuracy import OPTIMIZERS, study_accuracy
    from benchmarks.batches.accuracy_expected import show_accuracy
    from benchmarks.batches.rates_expected import show_rates

    check_names("--optimizers", options.optimizers, OPTIMIZERS)
    check_choice("--law-optimizer", options.law_optimizer, list(rates.OPTIMIZERS))
    if min(options.seeds, options.law_seeds) < 2:
        raise SpecError("--seeds and --law-seeds must be at least 2: an interval over one seed says nothing")
    [net] = chosen_nets(options, [options.net], images=True)
    tasks = [rates.make_task(name, options) for name in options.law_models] if "rates" in options.parts else []
    for task in tasks:
        if (most := max(options.law_workers) * options.law_batch) > len(task.train):
            raise SpecError(f"{task.name}: a batch of {most} is more than the {len(task.train)} samples")
    parts = {
        "accuracy": lambda: show_accuracy(study_accuracy(net, options, report)),
        "rates": lambda: show_rates(rates.study_rates(tasks, options, report)),
    }
    return run_parts(options.parts, parts, "Batches")


STUDY = Study(
    name="batches",
    summary="accuracy over batches, and learning rates of more workers",
    description="SGD against LARS while the batch grows, and laws of the learning rate of n workers.",
    add_options=add_options,
    run=run,
)
