"""What a stage *is*, as a value that two processes, and two versions of ray-ensemble, can compare.

A description covers all of the user's code and values that can be reached (`describer`). What is ours goes by
public name and version (`ours`), what is installed by qualified name. What cannot be covered is listed as *gaps*,
each with what reads it: descriptions with different digests are of different things, always; equal ones with gaps
are *unsure*, which only the user can settle (`id=`, `version=`).

`SCHEME` is the form of all this. Fingerprints of two schemes cannot be compared; what is stored says its scheme.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pipelines.fingerprint.describer import Describer
from pipelines.fingerprint.ours import OURS, describe_ours, is_ours, known_as
from pipelines.fingerprint.values import describe_array, digest

__all__ = [
    "OURS",
    "SCHEME",
    "Description",
    "Held",
    "describe",
    "describe_array",
    "describe_ours",
    "digest",
    "is_ours",
    "known_as",
]

#: The form of descriptions.
SCHEME = 6


_LONGEST = 4096  # characters of what is kept with each copy of an object


@dataclasses.dataclass(frozen=True)
class Held:
    """What an object held when it was described.

    Attributes:
        value: a description, or its digest, of the object without the code that it reaches.
        code: the functions, classes and modules that it refers to.
    """

    value: Any
    code: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Description:
    """What was described of a value.

    Attributes:
        value: a JSON value that is equal for equal things.
        gaps: what it does not cover, in words; empty if equal descriptions mean equal things.
        held: of the object itself.
    """

    value: Any
    gaps: tuple[str, ...] = ()
    held: Held | None = dataclasses.field(default=None, compare=False)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return digest(self.value)


def describe(value: Any, *, is_seeded: bool = False, before: Held | None = None) -> Description:
    """Describes a function, class or object with all that it reaches.

    Args:
        is_seeded: whether generators of random numbers in it are seeded before each use: their state says nothing.
        before: what the same object held earlier, without gaps: that is described, with that code as it is now.
    """
    what = value if before is None else before.code
    describer = Describer(is_seeded=is_seeded)
    described = describer.describe(what)
    if describer.written:
        describer = Describer(is_seeded=is_seeded, written=frozenset(describer.written))
        described = describer.describe(what)
    held = before or Held(_shorten(described), describer.roots)
    code = describer.parts
    return Description([held.value, code] if code else held.value, tuple(describer.gaps), held)


def _shorten(described: Any) -> Any:
    return described if len(json.dumps(described)) < _LONGEST else digest(described)
