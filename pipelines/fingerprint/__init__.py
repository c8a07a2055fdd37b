"""What a value *is*, as JSON that two processes, and two versions of ray-ensemble, can compare (`describe`).

Descriptions with different digests are of different things, always. Equal ones are of the same, unless they have
*gaps*: then they are *unsure*, which only the user can settle (`id=`, `version=`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

from pipelines.fingerprint.describer import Describer
from pipelines.fingerprint.ours import OURS, describe_ours, is_ours, known_as
from pipelines.fingerprint.values import describe_array

__all__ = ["OURS", "SCHEME", "Description", "Held", "describe", "describe_array", "describe_ours", "digest"]
__all__ += ["is_ours", "known_as"]

#: The form of descriptions: those of two schemes cannot be compared; what is stored says its scheme.
SCHEME = 7
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
    """Describe a function, class or object with all that it reaches.

    Args:
        is_seeded: whether generators of random numbers in it are seeded before each use: their state says nothing.
        before: what the same object held earlier, without gaps: that is described, with that code as it is now.
    """
    root = value if before is None else before.code
    describer = Describer(is_seeded=is_seeded)
    described = describer.describe(root)
    if describer.written:
        describer = Describer(is_seeded=is_seeded, written=describer.written)
        described = describer.describe(root)
    if before is None:
        is_short = len(json.dumps(described)) < _LONGEST
        before = Held(described if is_short else digest(described), describer.roots)
    parts = describer.parts
    return Description([before.value, parts] if parts else before.value, tuple(describer.gaps), before)


def digest(description: Any) -> str:
    """A short name for a description."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]
