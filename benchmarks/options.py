"""Options that several studies have."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from benchmarks import models
from ensemble.cli.arguments import count, directory, option
from ensemble.spec.validation import SpecError, check_choice


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


def chosen_nets(
    options: argparse.Namespace, names: Sequence[str], *, images: bool | None = None
) -> list[models.Net]:
    """Networks by name in the sizes of `data_options`; the name "none" is left out.

    Args:
        images: whether they are to be networks of images, or of texts; None for any.

    Raises:
        SpecError: there is no network of that name, or it is of the other kind.
    """
    changed = {number: getattr(options, number) for number in models.NUMBERS}
    nets = [models.net_of(name, **changed) for name in names if name != "none"]
    for net in nets if images is not None else ():
        if (net.kind != models.LSTM) != images:
            raise SpecError(f"{net.name!r} is no network of {'images' if images else 'texts'}")
    return nets


def check_names(option: str, names: Iterable[str], valid: Iterable[str]) -> None:
    """Check the names that an option lists.

    Raises:
        SpecError: one is not valid.
    """
    for name in names:
        check_choice(option, name, list(valid))
