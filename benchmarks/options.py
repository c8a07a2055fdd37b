"""Options that several studies have."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import models
from ensemble.cli.arguments import count, directory, option


def data_option(parser: argparse.ArgumentParser) -> None:
    """`--data`: the directory of the data sets."""
    shown = "holds cifar10/ and imdb/, each with train.parquet and test.parquet; handwritten digits without it"
    option(parser, "--data", None, shown, type=directory, metavar="DIR")


def run_dir_option(parser: argparse._ActionsContainer) -> None:
    """`--run-dir`: where the members' runs are kept."""
    option(parser, "--run-dir", None, "where the members' runs are kept and continued", metavar="DIR")


def net_options(parser: argparse.ArgumentParser) -> None:
    """The sizes of networks, such as `--hidden`."""
    for name, meaning in models.NUMBERS.items():
        option(parser, f"--{name}", None, f"{meaning}, of all models that have it", type=count)


def chosen_net(options: argparse.Namespace, name: str) -> models.Net:
    """A network by name in the sizes of `net_options`.

    Raises:
        SpecError: there is no network of that name.
    """
    return models.net_of(name, **{number: getattr(options, number) for number in models.NUMBERS})


def chosen_nets(options: argparse.Namespace, names: Sequence[str]) -> list[models.Net]:
    """Networks as `chosen_net` has them; the name "none" is left out."""
    return [chosen_net(options, name) for name in names if name != "none"]
