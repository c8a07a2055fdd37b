"""Types of options, and options that several studies have."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import models
from ensemble.cli import arguments
from ensemble.spec.validation import SpecError, check_choice

T = TypeVar("T")
count, words = arguments.count, arguments.words
_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}


def option(parser: argparse._ActionsContainer, name: str, default: Any, text: str, **more: Any) -> None:
    """Add an option to a parser; its help is the text and the default."""
    shown = "" if default in (None, False) else " (default: %(default)s)"
    parser.add_argument(name, default=default, help=text + shown, **more)


def milliseconds(text: str) -> float:
    """A duration in milliseconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds, got {text!r}")
    return value


def size(text: str) -> int:
    """Bytes, as in 4096, 64KiB, 16MiB."""
    match = re.fullmatch(r"([1-9]\d*)(|KiB|MiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a size, as in 4KiB,16MiB; got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def directory(text: str) -> str:
    """A directory that exists."""
    if not Path(text).expanduser().is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {text!r}")
    return str(Path(text).expanduser())


def _list_of(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    return lambda text: [parse(part) for part in words(text)]


#: Lists, separated by commas.
counts, sizes, milliseconds_each = _list_of(count), _list_of(size), _list_of(milliseconds)


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
