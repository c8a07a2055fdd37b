"""`Source`: reads records by index and says where each is stored.

Many processes read a source at once. It is made once, which indexes all files, and then pickled to each process
that prepares samples. Open files and caches are made at first use in each process and never pickled.
"""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from pipelines.checks import check_integer
from pipelines.errors import PipelineError
from pipelines.fingerprint import Description, describe, is_ours
from pipelines.sources._labels import Values, encode_classes, encode_keys, pack_values, read_values
from pipelines.sources._origin import Indices, Origin, check_apart

if TYPE_CHECKING:
    from pipelines.sources._classes import ClassNames
    from pipelines.sources._subset import Subset

Groups = npt.NDArray[np.int64]


class Source(ABC):
    """Records by index: `source[i]` returns a new dict of raw values, which the caller may keep and change.

    A subclass implements `__len__`, `_read`, `where` and `identity`.

    Attributes:
        kind: the name of the function that makes such a source.
        is_fork_safe: whether forked processes may go on with the source that they inherit, with its open files and
            caches; else they make a pickled copy.
    """

    kind: str
    is_fork_safe = False

    @abstractmethod
    def __len__(self) -> int:
        """The number of records."""

    @abstractmethod
    def _read(self, index: int) -> dict[str, Any]:
        """Reads the record at `index`, 0 to `len(self) - 1`."""

    @abstractmethod
    def where(self, index: int) -> str:
        """Says where the record at `index` is stored, for error messages: the file, and the row or member."""

    @abstractmethod
    def identity(self) -> Any:
        """Returns a JSON value that is equal only for sources with equal records; None if that is unknown."""

    def describe_for_fingerprint(self) -> Description:
        """Describes the source by its `identity`, and one of a user's also by its code and all its state."""
        identity = self.identity()
        gaps = () if identity is not None else (f"{self!r} does not say what its records are",)
        if is_ours(type(self)):
            return Description(identity, gaps)
        users = describe(self)
        return Description([identity, users.value], (*gaps, *users.gaps))

    def _describe_class(self) -> Any:
        """Describes the class of the source as a JSON value, for `identity`: ours by name and version."""
        return describe(type(self)).value

    @property
    def groups(self) -> Groups | None:
        """Bounds of the groups of consecutive records that are best read together, for a block shuffle.

        int64 [groups + 1], strictly ascending from 0 to the number of records; None if each record costs the same.
        """
        return None

    def find_class_names(self, field: str) -> ClassNames | None:
        """The names that the numbers in a field stand for: the attribute `classes`; None if there are none."""
        if not getattr(self, "classes", None):
            return None
        from pipelines.sources._classes import find_names_of_items

        return find_names_of_items(self)

    def is_text(self, field: str) -> bool:
        return False

    def number_classes(self, field: str, names: Sequence[str]) -> Source:
        """Returns a source of the same records, in which the classes of a field have the numbers of `names`.

        Args:
            field: numbers with names (`find_class_names`), or texts (`is_text`).
            names: the names of the classes, in the order of their numbers. A record of another class is an error.

        Returns:
            This source, where its classes have these numbers already.

        Raises:
            PipelineError: it does not know the classes of the field.
        """
        from pipelines.sources._classes import number_classes

        return number_classes(self, field, names)

    def find_origin(self) -> Origin:
        """Returns what the records are of, by which two sources can be seen to share some."""
        return Origin(self, self.describe_for_fingerprint, range(len(self)))

    def will_read(self, indices: npt.NDArray[np.int64]) -> None:  # noqa: B027 - most sources have no use for it
        """Announces the records that are read next, int64 [n]: a source may prefetch their groups."""

    def copy_records(self, indices: npt.NDArray[np.int64], into: Mapping[str, npt.NDArray[Any]]) -> bool:
        """Copies many records at once, bit for bit as they are read one by one.

        Args:
            into: field -> array [n, *shape] that receives the values.

        Returns:
            Whether it did; False: the records are read one by one, whatever the arrays hold then.
        """
        return False

    def identify_records(self, indices: Indices) -> Any:
        """Returns the `identity` of some of the records, in which the others have no part; None: none is known."""
        return None

    def renew(self, renewed: dict[int, Source]) -> Source:
        """Returns the source, made again if a file was changed after its records were indexed.

        Args:
            renewed: by their ids, sources of which others are parts, and what they are now; it is filled.

        Raises:
            PipelineError: a file cannot be read any more, or another number of records than before is in them.
        """
        inner = getattr(self, "source", None)
        if not (is_ours(type(self)) and isinstance(inner, Source)):
            return self
        if (new := inner.renew_in(renewed)) is inner:
            return self
        if len(new) != len(inner):
            raise PipelineError(
                f"{inner!r} has {len(new):,} records now, so its parts have changed: declare them again"
            )
        other = copy.copy(self)
        other.__dict__.pop("groups", None)
        other.__dict__["source"] = new
        return other

    def renew_in(self, renewed: dict[int, Source]) -> Source:
        """Returns what `renew` returns, once for all sources that have this one as a part."""
        if id(self) not in renewed:
            renewed[id(self)] = self.renew(renewed)
        return renewed[id(self)]

    def forget(self) -> None:  # noqa: B027 - most sources keep nothing
        """Frees what was cached for further reads, because this process may not read again."""

    def load_for_forks(self) -> None:  # noqa: B027 - most sources keep nothing
        """Loads what each of several forked processes would load for itself, if there is room for all of it."""

    def __repr__(self) -> str:
        return f"{self.kind}({len(self)} records)"

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Reads a record.

        Args:
            index: an integer; a negative one counts from the end.

        Raises:
            IndexError: there is no such record.
            SampleError: the record cannot be read.
        """
        position = operator.index(index)
        count = len(self)
        if not -count <= position < count:
            raise IndexError(f"there is no record {position}: the source has {count}")
        return self._read(position % count)

    def find_reader(self) -> Callable[[int], dict[str, Any]]:
        """Returns what `source[index]` calls for an index that is known to be from 0 to `len(self) - 1`."""
        return self._read if type(self).__getitem__ is Source.__getitem__ else self.__getitem__

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Reads all records in order."""
        for index in range(len(self)):
            yield self._read(index)

    def column(self, field: str) -> npt.NDArray[Any]:
        """Reads one field of all records, for labels, groups and times.

        `arrays`, `parquet` and `image_folder` give it without reading the other fields; other sources read every
        record once. Nothing is decoded.

        Returns:
            The values, [n, ...]; texts and bytes are objects.

        Raises:
            PipelineError: the records have no such field.
            SampleError: a record cannot be read.
        """
        values = []
        for index in range(len(self)):
            record = self._read(index)
            if field not in record:
                raise self._missing_field(field, record)
            values.append(record[field])
        return pack_values(values)

    def _missing_field(self, field: str, fields: Iterable[str]) -> PipelineError:
        return PipelineError(f"{self!r} has no field {field!r} (it has: {', '.join(fields)})")

    @overload
    def split(
        self,
        fraction: float,
        seed: int = 0,
        *,
        stratify: Values | None = None,
        group: Values | None = None,
        by: Values | None = None,
        key: Values | None = None,
    ) -> tuple[Subset, Subset]: ...
    @overload
    def split(
        self,
        fraction: Sequence[float],
        seed: int = 0,
        *,
        stratify: Values | None = None,
        group: Values | None = None,
        by: Values | None = None,
        key: Values | None = None,
    ) -> tuple[Subset, ...]: ...
    def split(
        self,
        fraction: float | Sequence[float],
        seed: int = 0,
        *,
        stratify: Values | None = None,
        group: Values | None = None,
        by: Values | None = None,
        key: Values | None = None,
    ) -> tuple[Subset, ...]:
        """Divides the records into sources, at random unless `by` is given; each record is in exactly one.

        The division depends on (number of records, fraction, seed, values of `stratify` or `group`) alone, for
        all versions of numpy: records are ranked by the raw output of the Philox generator, whose stream numpy
        guarantees (NEP 19). One record more or less changes the division of those behind it, unless `key` is
        given. Each part keeps its records in ascending order. Needs about 40 bytes of memory per record, of which
        8 stay in use.

        Args:
            fraction: the part of the records that the first source has, between 0 and 1; the second the others.
                Or the fractions of all parts, which sum to 1.
            seed: an integer of at least 0.
            stratify: classes, whose shares each part keeps: the number of a class in a part is within one of
                class size * fraction. The name of a field, an array [n], or a function of a record.
            group: groups (patients, sessions, documents) that stay together; given as `stratify` is. The parts
                come as near to the fractions as placing the groups one by one allows: of two parts, none is off by
                more than half of the largest group; of more, none is too large by more than
                (1 + fraction * (parts - 2)) times that, unless the last groups are needed for empty parts. With
                `stratify`, the shares of the classes are evened out as well. A warning says so where a part is off
                by more than a quarter of its fraction.
            by: numbers, dates or texts such as 2024-01-31 to order by; given as `stratify` is. The first part has
                the lowest ones. Equal ones stay in the order of the source, and may be divided.
            key: what names a record (a file, an id): a text, bytes or an integer; given as `stratify` is. A record
                stays in its part when others are added, removed or moved, and all records of a key are in one
                part. Of n keys a part has its fraction by chance, within about sqrt(n * fraction). The part is
                that in whose share of [0, 2^64) the digest of the key lies (BLAKE2b, 64 bits), mixed with one of
                the seed.

        Returns:
            A source for each part; its records have new indices, from 0.

        Raises:
            PipelineError: an argument is invalid, a part would be empty, or there are fewer groups than parts.
            SampleError: a record cannot be read for its class, group, time or key.

        Examples:
            >>> train, valid = source.split(0.9, seed=0)
            >>> train, valid = source.split(0.9, key="id")
            >>> train, valid, test = source.split((0.8, 0.1, 0.1), stratify="label", group="patient")
        """
        from pipelines.sources import _splits
        from pipelines.sources._subset import Subset

        ordered_by = by if isinstance(by, str) else None
        divided = _splits.split(self, fraction, seed, stratify, group, by, key)
        parts = tuple(Subset(self, indices, ordered_by) for indices in divided)
        self._check_parts(parts)
        return parts

    def _check_parts(self, parts: Sequence[Subset]) -> None:
        """Raise PipelineError for parts of which one would tell what is in another."""
        check_apart(
            parts, "pieces of one record would be in several parts: split the records first, then make pieces"
        )

    def folds(
        self, k: int, seed: int = 0, *, stratify: Values | None = None, group: Values | None = None
    ) -> list[tuple[Subset, Subset]]:
        """Divides the records into k folds, for cross-validation; each record is in exactly one of them.

        Args:
            k: number of folds, at least 2.
            seed: as in `split`.
            stratify: as in `split`.
            group: as in `split`. Without it the sizes of two folds differ by at most one.

        Returns:
            For each fold a pair: a source of all other records, and one of the fold's.

        Raises:
            PipelineError: an argument is invalid, or there are fewer records or groups than folds.
            SampleError: a record cannot be read for its class or group.

        Examples:
            >>> for train, valid in source.folds(5, stratify="label"): ...
        """
        from pipelines.sources._subset import Subset

        folds = self.number_folds(k, seed, stratify=stratify, group=group)
        return [
            (Subset(self, np.flatnonzero(folds != held_out)), Subset(self, np.flatnonzero(folds == held_out)))
            for held_out in range(k)
        ]

    def number_folds(self, k: int, seed: int = 0, **options: Values | None) -> npt.NDArray[np.int64]:
        from pipelines.sources import _splits
        from pipelines.sources._subset import Subset

        folds = _splits.assign_folds(self, k, seed, **options)
        self._check_parts([Subset(self, np.flatnonzero(folds == number)) for number in range(k)])
        return folds

    def rank(self, by: Values) -> npt.NDArray[np.int64]:
        """Returns the place of each record in the order of time, 0 to n - 1, int64 [n].

        Args:
            by: numbers or datetimes, given as in `split`; records with equal ones stay in the source's order.

        Raises:
            PipelineError: a record has neither, or NaN.
        """
        from pipelines.sources._splits import find_places

        return find_places(self, by)

    def weigh_classes(
        self, field: str, weights: str | Mapping[Any, float] = "balanced"
    ) -> npt.NDArray[np.float64]:
        """Returns a weight for each record by its class, float64 [n], for `pipelines.weights.assigned`.

        Args:
            field: one class in each record: an integer, a boolean or a text.
            weights: "balanced": records / (classes * records of the class); or that of each class, by the label as
                the records have it, or by its name.

        Raises:
            PipelineError: a value is no class, a class has no weight, or no record is of a class that has one.
        """
        if isinstance(weights, str):
            codes, classes = encode_classes(read_values(self, field, "weigh_classes()"), f"the field {field!r}")
            if weights != "balanced":
                raise PipelineError(f"weigh_classes(): weights are 'balanced' or class -> weight, got {weights!r}")
            return (len(codes) / (len(classes) * np.bincount(codes)))[codes]
        codes, keys = encode_keys(self, field, weights, "weight")
        return np.array([weights[key] for key in keys], np.float64)[codes]

    def take(self, n: int) -> Subset:
        """Returns a source of the first `n` records.

        Raises:
            PipelineError: there are fewer than `n`, or `n` is below 1.
        """
        from pipelines.sources._subset import Subset

        return Subset(
            self, range(check_integer(f"take(n) of a source of {len(self)} records: n", n, 1, len(self)))
        )

    def filter(self, function: Callable[[dict[str, Any]], Any]) -> Subset:
        """Returns a source of the records for which a function is true; it is called once for each record, now.

        Raises:
            PipelineError: it is true for none.
            SampleError: a record cannot be read, or the function fails.
        """
        from pipelines.sources._subset import filter_records

        return filter_records(self, function)
