"""Finds records that two sources have in common, and sources that are parts of the same data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.fingerprint import Description
from pipelines.sources._base import Origin, Source, Subset
from pipelines.sources._sides import Sketch


def count_shared_records(one: Any, other: Any) -> int:
    """The number of the other source's records that are records of this one, too.

    They are found by what they are of (`Source.find_origin`): the same source, or sources of one identity, such as
    those of the same files. Equal records of sources that are not known to be the same do not count.
    """
    mine, theirs = map(_find_origin, (one, other))
    if not _is_same_root(mine, theirs):
        return 0
    return int(np.isin(np.asarray(theirs.indices), np.asarray(mine.indices)).sum())


def sketch_parts(sources: Mapping[str, Any]) -> dict[str, Sketch]:
    """A sample of the records of each source that is a part of the same data as another of them."""
    parts = {
        name: (source, source.find_origin()) for name, source in sources.items() if isinstance(source, Subset)
    }
    return {
        name: source.sketch()
        for name, (source, origin) in parts.items()
        if any(other != name and _is_same_root(origin, theirs) for other, (_, theirs) in parts.items())
    }


def _find_origin(source: Any) -> Origin:
    if isinstance(source, Source):
        return source.find_origin()
    return Origin(source, lambda: Description(None, ("it has no identity",)), range(len(source)))


def _is_same_root(mine: Origin, theirs: Origin) -> bool:
    if mine.root is theirs.root:
        return True
    if type(mine.root) is not type(theirs.root) or len(mine.root) != len(theirs.root):
        return False
    described = mine.describe()
    return not described.gaps and described == theirs.describe()
