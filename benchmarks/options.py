"""Options that several studies have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import models
from ensemble.cli.arguments import count, directory, option


def data_options(parser: argparse.ArgumentParser) -> None:
    """`--data`, the directory of the data sets, and the sizes of networks, such as `--hidden`."""
    shown = "holds cifar10/ and imdb/, each with train.parquet and test.parquet; handwritten digits without it"
    option(parser, "--data", None, shown, type=directory, metavar="DIR")
    for name, meaning in models.NUMBERS.items():
        option(parser, f"--{name}", None, f"{meaning}, of all models that have it", type=count)


def training_options(
    parser: argparse._ActionsContainer, *, seeds: int, epochs: int | None, samples: int, held_out: int
) -> None:
    """Options of members that are trained, with these defaults; without `epochs` those of `models.EPOCHS`."""
    option(parser, "--seeds", seeds, "seeds, each a member in each variant", type=count)
    usual = " and ".join(f"{number} of {kind.upper()}s" for kind, number in models.EPOCHS.items())
    usual = "" if epochs else f" (default: {usual}, of the digits {models.DIGITS_EPOCHS} times as many)"
    option(parser, "--epochs", epochs, f"epochs of each member{usual}", type=count)
    option(parser, "--samples", samples, "samples to learn from", type=count)
    option(parser, "--held-out", held_out, "samples to measure by, and as many to choose by", type=count)
    option(parser, "--run-dir", None, "where the members' runs are kept and continued", metavar="DIR")


def chosen_nets(options: argparse.Namespace, names: Sequence[str]) -> list[models.Net]:
    """Networks by name in the sizes of `data_options`; the name "none" is left out.

    Raises:
        SpecError: there is no network of that name.
    """
    changed = {number: getattr(options, number) for number in models.NUMBERS}
    return [models.net_of(name, **changed) for name in names if name != "none"]
