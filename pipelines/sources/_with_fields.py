"""Source of the records of another one with more fields: labels or folds from a file of their own."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pipelines.errors import PipelineError
from pipelines.fingerprint import Description, is_ours, known_as
from pipelines.sources._arrays import Arrays, arrays
from pipelines.sources._base import Source
from pipelines.sources._classes import ClassNames
from pipelines.sources._subset import Derived, Subset


@known_as("pipelines.sources.with_fields")
class WithFields(Derived):
    """See `with_fields`."""

    kind = "with_fields"

    def __init__(self, source: Source, added: Arrays) -> None:
        self.source, self.added = source, added
        self.is_fork_safe = source.is_fork_safe and is_ours(type(source))

    def _read(self, index: int) -> dict[str, Any]:
        return {**self.source._read(index), **self.added._read(index)}

    def _find_source(self, field: str) -> Source:
        return self.added if field in self.added.columns else self.source

    def column(self, field: str) -> npt.NDArray[Any]:
        return self._find_source(field).column(field)

    def find_class_names(self, field: str) -> ClassNames | None:
        return self._find_source(field).find_class_names(field)

    def is_text(self, field: str) -> bool:
        return self._find_source(field).is_text(field)

    def _check_parts(self, parts: Any) -> None:
        self.source._check_parts([Subset(self.source, part.indices) for part in parts])

    def identity(self) -> Any:
        whole = self.source.identity()
        return whole and {"source": self._describe_class(), "of": whole, "fields": self.added.identity()}

    def describe_for_fingerprint(self) -> Description:
        whole = self.source.describe_for_fingerprint()
        return Description([self._describe_class(), self.added.identity(), whole.value], whole.gaps)


def with_fields(source: Source, **fields: Any) -> WithFields:
    """Makes a source of the records of another one with more fields, such as the fold of each from a file.

    Args:
        source: the source to whose records the fields are added.
        fields: field -> array or sequence, as in `arrays`, with a value for each record in the source's order.

    Returns:
        A source of as many records.

    Raises:
        PipelineError: a field has more or fewer values than there are records, or is in the records already.

    Examples:
        >>> source = with_fields(image_folder("photos"), fold=np.load("folds.npy"))
    """
    added = arrays(**fields)
    if len(added) != len(source):
        raise PipelineError(
            f"with_fields(): {', '.join(fields)} must have one value for each of the {len(source)} records, "
            f"got {len(added)}"
        )
    if double := sorted({*source[0]} & {*fields}):
        raise PipelineError(f"with_fields(): the records have a field {double[0]!r} already: give another name")
    return WithFields(source, added)
