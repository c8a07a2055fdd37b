"""Calls of what a user has brought: samplers, pruners, terminators, functions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ensemble.spec import SpecError


class ForeignError(SpecError):
    """An object or a function of the user's has failed, so that a search cannot go on; the message names it."""


@contextlib.contextmanager
def calling(what: object, where: str) -> Iterator[None]:
    """A block that calls the user's object or function.

    Args:
        where: what it decides, for the message.

    Raises:
        ForeignError: in place of whatever it raises, but a SpecError.
    """
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        name = getattr(what, "__name__", type(what).__name__)
        raise ForeignError(f"{where}: {name} raised {type(error).__name__}: {error}") from error
