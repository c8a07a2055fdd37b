"""How arguments are checked where they come in: a mistake is a `PipelineError` of one line.

It says what, the value, and what is valid. What has passed is returned as Python's own type, for messages and
arithmetic that bear no other.
"""

from __future__ import annotations

import math
import operator
import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.errors import PipelineError

LONGEST_NAME = 255
MOST_RANKS = 1 << 20
LONGEST_S = 1e6  # more than a selector can wait at once: it counts milliseconds in 31 bits
_SHOWN = 80
_TRANSPORT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def shown(value: object) -> str:
    """A value for an error, in one line that is not too long."""
    said = " ".join(repr(value).split())
    return said if len(said) <= _SHOWN else said[: _SHOWN - 3] + "..."


def integer(what: str, value: object, low: int, high: int | None = None, why: str = "") -> int:
    """An integer of at least `low`, and at most `high`."""
    valid = f"at least {low}" if high is None else f"in {low}..{high}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise PipelineError(f"{what} must be an integer, {valid}, got {shown(value)}")
    if number < low or (high is not None and number > high):
        raise PipelineError(f"{what} must be {valid}{why}, got {shown(value)}")
    return number


def seconds(what: str, value: object, *, above: bool = False) -> float:
    """A finite number of seconds, of at least (or above) 0."""
    valid = f"{'above' if above else 'at least'} 0 and at most {LONGEST_S:.0f}"
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 <= number <= LONGEST_S or (above and number == 0):
        raise PipelineError(f"{what} must be {valid} (seconds), got {shown(value)}")
    return number


def flag(what: str, value: object) -> None:
    """True or False."""
    if not isinstance(value, bool):
        raise PipelineError(f"{what} must be True or False, got {shown(value)}")


def choice(what: str, value: object, valid: Sequence[str]) -> None:
    """One of the valid words."""
    if not isinstance(value, str) or value not in valid:
        raise PipelineError(f"{what} must be {' or '.join(map(repr, valid))}, got {shown(value)}")


def path(what: str, value: object) -> str:
    """A path, as text."""
    if isinstance(value, str | os.PathLike):
        said = os.fspath(value)
        if isinstance(said, str) and said and "\0" not in said:
            return said
    raise PipelineError(f"{what} must be a path (str or os.PathLike), got {shown(value)}")


def name(what: str, value: object) -> str:
    """A name of at most 255 characters that can be written down in UTF-8."""
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise PipelineError(f"{what} must be a text of 1 to {LONGEST_NAME} characters, got {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PipelineError(f"{what} must be a text that UTF-8 can encode, got {shown(value)}") from None
    return value


def address(value: object) -> str:
    """Where a feeder listens."""
    if isinstance(getattr(value, "address", None), str):
        raise PipelineError(
            f"address must be a feeder's path, got the {type(value).__name__}: pass feeder.address"
        )
    return path("address", value)


def function(what: str, value: object) -> None:
    """Something to call, or None."""
    if value is not None and not callable(value):
        raise PipelineError(f"{what} must be a function or None, got {shown(value)}")


def pipeline(what: str, value: object) -> None:
    """A Pipeline: known by what it can do, for this room stands above its own."""
    if isinstance(value, type) or not hasattr(value, "describe_for_peers"):
        hint = ""
        if isinstance(value, str | os.PathLike):
            hint = ", a path: make one of a source that reads it, Pipeline(pipelines.sources...)"
        elif hasattr(value, "where"):
            hint = ", a source: make one of it, Pipeline(source)"
        raise PipelineError(f"{what} must be a Pipeline, got {shown(value)}{hint}")


def threads(value: object, pipeline: Any) -> None:
    """True or False, and only where a pipeline's stages bear it."""
    flag("threads", value)
    drawing = [stage.name for stage in pipeline.stages if stage.random == "torch"]
    if value and drawing:
        raise PipelineError(
            f"the stage {drawing[0]} draws from torch's generator, of which a process has one: "
            "prepare in processes (threads=False)"
        )


def resident(value: object) -> None:
    """A mapping of names to Pipelines, or None."""
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise PipelineError(f"resident must be a mapping of names to Pipelines, got {shown(value)}")
    for name, held in value.items():
        if not isinstance(name, str):
            raise PipelineError(f"resident must have str for names, got {shown(name)}")
        pipeline(f"resident[{name!r}]", held)


def epochs(value: Any) -> range | int:
    """How many epochs, or which: a range of at least one, in steps of 1."""
    if isinstance(value, range):
        if value.step != 1 or not 0 <= value.start < value.stop:
            raise PipelineError(
                f"epochs must be range(first, last) with 0 <= first < last and step 1, got {value!r}"
            )
        return value
    try:
        return integer("epochs", value, 1)
    except PipelineError:
        raise PipelineError(
            f"epochs must be a number of at least 1 or range(first, last), got {shown(value)}"
        ) from None


def transport(value: object) -> None:
    """A name that `pipelines.multinode.transport.connect` takes."""
    if value in ("gloo", "nccl", "horovod") or (isinstance(value, str) and _TRANSPORT.fullmatch(value)):
        return
    valid = "'gloo', 'nccl', 'horovod' or 'module:function'"
    raise PipelineError(f"Peers.transport must be {valid}, got {shown(value)}")


def interface(value: str) -> None:
    """A network interface of this host."""
    names = [name for _, name in socket.if_nameindex()]
    if value not in names:
        raise PipelineError(
            f"Peers.interface must be one of this host's, which are {', '.join(names)}; got {shown(value)}"
        )
