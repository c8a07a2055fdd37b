"""Who is told when a run fails, stalls, ends, or has used its budget.

It is a parameter of `submit` and `resume`, and no part of the declaration: an address may hold a token, and what
is declared is kept in the run directory.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from ensemble.spec.validation import SpecError, check_number, option_class


@option_class
@dataclass(frozen=True, kw_only=True)
class Notify:
    """Where alerts are sent: to a webhook or to a command, each as a JSON object.

    Attributes:
        url: http or https; the object is the body of a POST.
        command: a program and its arguments, run without a shell; the object is its standard input.
        page: address of the live page, which alerts then hold.
        stalled_after: a member that makes no step for so many times its usual epoch stalls.
    """

    name: ClassVar[str] = "alerts"
    url: str | None = field(default=None, repr=False)
    command: str | Sequence[str] | None = field(default=None, repr=False)
    page: str | None = None
    stalled_after: float = 5.0

    def __post_init__(self) -> None:
        if (self.url is None) == (self.command is None):
            raise SpecError("Notify needs either a url or a command")
        if self.url is not None and not _is_web_address(self.url):
            raise SpecError(
                "Notify.url must begin with http:// or https:// and name a host"
            )  # it may hold a token
        if self.command is not None:
            object.__setattr__(self, "command", _split(self.command))
        check_number("Notify.stalled_after", self.stalled_after, low=1)


def resolve_notify(given: Any) -> tuple[Notify, ...]:
    """Returns who is told.

    Args:
        given: None, an address, a `Notify`, or several of these.

    Raises:
        SpecError: it is something else.
    """
    if given is None:
        return ()
    several = given if isinstance(given, (list, tuple)) else [given]
    found = [Notify(url=each) if isinstance(each, str) else each for each in several]
    if not all(isinstance(each, Notify) for each in found):
        raise SpecError(
            "notify= must be an address such as 'https://...', ensemble.Notify(...), or a list of these"
        )
    return tuple(found)


def _is_web_address(url: object) -> bool:
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        return parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        return False


def _split(command: object) -> tuple[str, ...]:
    try:
        parts = shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise SpecError(f"Notify.command cannot be split into arguments: {error}") from None
    if not isinstance(parts, (list, tuple)) or not parts or not all(isinstance(part, str) for part in parts):
        raise SpecError("Notify.command must be a program with its arguments, such as 'notify-send Run'")
    return tuple(parts)
