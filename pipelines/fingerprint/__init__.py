"""What a stage *is*, as a value that two processes, and two versions of ray-ensemble, can compare.

A description covers all of the user's code and values that can be reached (`describer`). What is ours goes by
public name and version (`ours`), what is installed by qualified name. What cannot be covered is listed as *gaps*,
each with what reads it: descriptions with different digests are of different things, always; equal ones with gaps
are *unsure*, which only the user can settle (`id=`, `version=`).

`SCHEME` is the form of all this. Fingerprints of two schemes cannot be compared; what is stored says its scheme.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pipelines.fingerprint.describer import Describer
from pipelines.fingerprint.ours import OURS, describe_ours, is_ours, known_as
from pipelines.fingerprint.values import describe_array, digest

__all__ = [
    "OURS",
    "SCHEME",
    "Description",
    "describe",
    "describe_array",
    "describe_ours",
    "digest",
    "is_ours",
    "known_as",
]

#: The form of descriptions.
SCHEME = 4


@dataclasses.dataclass(frozen=True)
class Description:
    """What was described of a value.

    Attributes:
        value: a JSON value that is equal for equal things.
        gaps: what it does not cover, in words; empty if equal descriptions mean equal things.
    """

    value: Any
    gaps: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return digest(self.value)


def describe(value: Any, *, is_seeded: bool = False) -> Description:
    """Describes a function, class or object with all that it reaches.

    Args:
        is_seeded: whether generators of random numbers in it are seeded before each use: their state says nothing.
    """
    describer = Describer(is_seeded=is_seeded)
    described = describer.describe(value)
    if describer.written:
        describer = Describer(is_seeded=is_seeded, written=frozenset(describer.written))
        described = describer.describe(value)
    parts = describer.parts
    return Description([described, parts] if parts else described, tuple(describer.gaps))
