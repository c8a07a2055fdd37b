"""Checks of arguments: a mistake is a `PipelineError` of one line with the argument, its value and what is valid.

Some checks return the value as a plain Python type, for arithmetic and messages that accept no other.
"""

from __future__ import annotations

import math
import operator
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.errors import PipelineError

LONGEST_NAME = 255
MOST_RANKS = 1 << 20
LONGEST_S = 1e6  # more than a selector can wait at once: it counts milliseconds in 31 bits
_SHOWN = 80


def shorten_repr(value: object) -> str:
    """The repr of a value for an error message: one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def check_integer(what: str, value: object, low: int, high: int | None = None, why: str = "") -> int:
    valid = f"at least {low}" if high is None else f"in {low}..{high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise PipelineError(f"{what} must be an integer, {valid}, got {shorten_repr(value)}")
    if number < low or (high is not None and number > high):
        raise PipelineError(f"{what} must be {valid}{why}, got {shorten_repr(value)}")
    return number


def check_seconds(what: str, value: object, *, above: bool = False) -> float:
    valid = f"{'above' if above else 'at least'} 0 and at most {LONGEST_S:.0f}"
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= LONGEST_S or (above and number == 0):
        raise PipelineError(f"{what} must be {valid} (seconds), got {shorten_repr(value)}")
    return number


def check_share_or_count(what: str, value: object) -> float | int:
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    if isinstance(value, float | bool | str):
        raise PipelineError(
            f"{what} must be a share from 0.0 to 1.0 or a number of records, got {shorten_repr(value)}"
        )
    return check_integer(what, value, 0)


def check_flag(what: str, value: object) -> None:
    if not isinstance(value, bool):
        raise PipelineError(f"{what} must be True or False, got {shorten_repr(value)}")


def check_choice(what: str, value: object, valid: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in valid:
        raise PipelineError(f"{what} must be {' or '.join(map(repr, valid))}, got {shorten_repr(value)}")


def check_path(what: str, value: object) -> str:
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if isinstance(path, str) and path and "\0" not in path:
            return path
    raise PipelineError(f"{what} must be a path (str or os.PathLike), got {shorten_repr(value)}")


def check_name(what: str, value: object) -> str:
    """Check a name of 1 to 255 characters that UTF-8 can encode, and return it."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise PipelineError(f"{what} must be a text of 1 to {LONGEST_NAME} characters, got {shorten_repr(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PipelineError(f"{what} must be a text that UTF-8 can encode, got {shorten_repr(value)}") from None
    return value


def check_address(value: object) -> str:
    if isinstance(getattr(value, "address", None), str):
        raise PipelineError(
            f"address must be a feeder's path, got the {type(value).__name__}: pass feeder.address"
        )
    return check_path("address", value)


def check_function(what: str, value: object) -> None:
    if value is not None and not callable(value):
        raise PipelineError(f"{what} must be a function or None, got {shorten_repr(value)}")


def check_pipeline(what: str, value: object) -> None:
    """Check that a value is a Pipeline, by its methods: this module cannot import the class."""
    if isinstance(value, type) or not hasattr(value, "describe_for_peers"):
        hint = ""
        if isinstance(value, str | os.PathLike):
            hint = ", a path: give it to a source, as in Pipeline(pipelines.sources...)"
        elif hasattr(value, "where"):
            hint = ", a source: write Pipeline(source)"
        raise PipelineError(f"{what} must be a Pipeline, got {shorten_repr(value)}{hint}")


def check_source(value: Any) -> None:
    if not hasattr(value, "where"):
        raise PipelineError(f"Pipeline() takes a source of pipelines.sources, got {type(value).__name__}")
    if len(value) == 0:
        raise PipelineError(f"the source is empty: {value!r}")


def check_any_integer(what: str, value: Any) -> int:
    try:
        return int(operator.index(value))
    except TypeError:
        raise PipelineError(f"{what} must be an integer, got {value!r}") from None


def check_shuffle(value: Any, source: Any) -> None:
    """Check `shuffle` of a pipeline: blocks are for sources that are read in groups."""
    if value not in (True, False, "blocks"):
        raise PipelineError(f"shuffle must be True, False or 'blocks', got {value!r}")
    if value == "blocks" and getattr(source, "groups", None) is None:
        raise PipelineError(
            f"shuffle='blocks' is for a source that is read in groups (parquet, tar), not for {source!r}, which "
            "reads every record at the same cost: use shuffle=True"
        )


def check_repeatable(pipeline: Any) -> None:
    """Check that a pipeline gives each record once and the same in each epoch, for a set that is prepared once."""
    if pipeline.sampling is not None:
        raise PipelineError(f"a resident set holds each record once, so leave out sampling={pipeline.sampling!r}")
    if (stage := pipeline.random_stage) is not None:
        raise PipelineError(f"a resident set is prepared once, but the stage {stage.name} is random: leave it out")


def check_resident(value: object) -> None:
    """Check a mapping of names to Pipelines, or None."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise PipelineError(f"resident must be a mapping of names to Pipelines, got {shorten_repr(value)}")
    for name, held in value.items():
        if not isinstance(name, str):
            raise PipelineError(f"resident must have str for names, got {shorten_repr(name)}")
        check_pipeline(f"resident[{name!r}]", held)


def check_epochs(value: Any) -> range | int:
    if isinstance(value, range):
        if value.step != 1 or not 0 <= value.start < value.stop:
            raise PipelineError(
                f"epochs must be range(first, last) with 0 <= first < last and step 1, got {value!r}"
            )
        return value
    try:
        return check_integer("epochs", value, 1)
    except PipelineError:
        raise PipelineError(
            f"epochs must be a number of at least 1 or range(first, last), got {shorten_repr(value)}"
        ) from None


def check_interface(value: str) -> None:
    """Check the name of a network interface of this host."""
    names = [name for _, name in socket.if_nameindex()]
    if value not in names:
        raise PipelineError(
            f"Peers.interface must be one of this host's, which are {', '.join(names)}; got {shorten_repr(value)}"
        )
