"""Source of records from a map-style Dataset of another library."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import Description, known_as
from pipelines.sources._base import Groups, Source
from pipelines.sources._classes import ClassNames, find_names_of_items
from pipelines.sources._files import check_names
from pipelines.sources._origin import Origin
from pipelines.sources._values import NAMES, UnnamedValues, make_record

_MOST_PARTS = 1000  # Datasets in a list of one


@known_as("pipelines.sources.dataset", version=2)
class Dataset(Source):
    """See `dataset`."""

    kind = "dataset"
    _opened: Any = None  # what this process reads

    def __init__(
        self, items: Any, id: str | None, names: Sequence[str] | None, groups: npt.ArrayLike | None
    ) -> None:
        if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
            hint = "; a stream is for iterable()" if hasattr(items, "__iter__") else ""
            raise PipelineError(
                f"dataset(): {type(items).__name__} has no __getitem__ and __len__; "
                f"only map-style Datasets can be read{hint}"
            )
        self._count = len(items)
        if self._count == 0:
            raise PipelineError(f"dataset(): {type(items).__name__} holds no record")
        self.items = items
        self._given = check_names(self.kind, names, "names= must name each value of an item")
        self.names = self._given or NAMES
        self._id = id
        self._groups = None if groups is None else _check_groups(groups, self._count)

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def _read(self, index: int) -> dict[str, Any]:
        if self._opened is None:
            self._opened = copy_reader(self.items)
        try:
            return make_record(self._opened[index], self._given)
        except SampleError as error:
            raise SampleError(index, error.where, error.reason) from error
        except UnnamedValues as error:
            raise SampleError(index, self.where(index), str(error)) from None
        except MemoryError:
            raise  # of the machine's making, not the record's
        except Exception as error:
            raise SampleError(index, self.where(index), f"{type(error).__name__}: {error}") from error

    @property
    def groups(self) -> Groups | None:
        """See `Source.groups`."""
        return self._groups

    def find_class_names(self, field: str) -> ClassNames | None:
        return None if len(self.names) == 2 and field == self.names[0] else find_names_of_items(self.items)

    def find_origin(self) -> Origin:
        return _find_origin(self.items, self.describe_for_fingerprint)

    def where(self, index: int) -> str:
        return _locate(self.items, index)

    def identity(self) -> Any:
        if self._id is None:
            return None
        return {"source": self._describe_class(), "id": self._id, "count": self._count, "names": list(self.names)}


def dataset(
    map_style: Any,
    id: str | None = None,
    names: Sequence[str] | None = None,
    *,
    groups: npt.ArrayLike | None = None,
) -> Dataset:
    """Makes a source from any object with `__len__` and `__getitem__`, such as a map-style torch Dataset.

    Items that are dicts, named tuples or objects of dataclasses have their own names. Tensors become numpy arrays,
    PIL images [C, H, W], also inside nested dicts, lists and tuples; other values stay as they are. The bands of a
    PIL image stay, too: one with a palette, as a mask has, gives indices, one of 1 bit bool, 16 bits stay uint16.

    Args:
        map_style: the Dataset. It must be deterministic: leave a random `transform` out of it and `map` the
            transform as a stage, which is seeded.
        id: identifies the records in fingerprints. Without it, independently started processes cannot share a
            pipeline over them.
        names: fields of an item that is a tuple, in order, or of the only value; `image` and `label` unless given,
            if there are two values.
        groups: bounds of the groups of consecutive items that are best read together, such as those of a chunk:
            integers [groups + 1] that ascend from 0 to the number of items. They allow `shuffle="blocks"`.

    Returns:
        The source; its items are read by the processes that prepare samples.

    Raises:
        PipelineError: the object is not map-style, or is empty, `names` are not distinct, or `groups` are no such
            bounds.

    Examples:
        >>> source = dataset(torchvision.datasets.CIFAR10("data"), id="cifar10-train")
    """
    return Dataset(map_style, id, names, groups)


def _check_groups(groups: npt.ArrayLike, count: int) -> Groups:
    bounds = np.asarray(groups)
    is_ascending = (
        bounds.ndim == 1 and len(bounds) > 1 and bounds.dtype.kind in "iu" and (np.diff(bounds) > 0).all()
    )
    if not is_ascending or (bounds[0], bounds[-1]) != (0, count):
        raise PipelineError(
            f"dataset(): groups must be integers that ascend from 0 to {count}, got {groups!r:.60}"
        )
    return bounds.astype(np.int64)


def copy_reader(items: Any) -> Any:
    """A shallow copy of a Dataset, for one process to read: the data in it are shared.

    Many Datasets open a file at their first read (`if self.f is None: self.f = h5py.File(...)`), after which they
    cannot be pickled. The original stays as it was given. What is no plain object of a class of Python's is not
    copied; a Dataset within a Dataset (`Subset`, `ConcatDataset`) is.
    """
    made = _copy_plain(items, {})
    return items if made is None else made


def _copy_plain(items: Any, made_before: dict[int, Any]) -> Any:
    if id(items) in made_before:
        return made_before[id(items)]
    cls = type(items)
    is_plain = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__"))
    has_slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    if not is_plain or has_slots or not hasattr(items, "__dict__") or hasattr(cls, "__copy__"):
        return None
    if not (hasattr(cls, "__getitem__") and hasattr(cls, "__len__")) or isinstance(items, list | tuple | dict):
        return None
    try:
        made = object.__new__(cls)
    except TypeError:  # its memory is a C type's
        return None
    made_before[id(items)] = made
    for name, value in vars(items).items():
        inner = _copy_plain(value, made_before)
        if type(value) is list and 0 < len(value) <= _MOST_PARTS:
            copies = [_copy_plain(part, made_before) for part in value]
            if all(part is not None for part in copies):
                inner = copies
        made.__dict__[name] = value if inner is None else inner
    return made


def _find_origin(items: Any, describe: Callable[[], Description]) -> Origin:
    """The Dataset that has the items, through torch's Subset, and which of its items they are."""
    if type(items).__name__ == "Subset" and hasattr(items, "dataset") and hasattr(items, "indices"):
        unknown = Description(None, ("its Dataset has no id",))
        return _find_origin(items.dataset, lambda: unknown).select(np.asarray(items.indices, np.int64))
    return Origin(items, describe, range(len(items)))


def _locate(items: Any, index: int) -> str:
    """Names an item, through torch's Subset and ConcatDataset to the Dataset that holds it."""
    name = type(items).__name__
    try:
        if name == "Subset":
            return f"Subset[{index}] = {_locate(items.dataset, int(items.indices[index]))}"
        if name == "ConcatDataset":
            number = bisect_right(items.cumulative_sizes, index)
            first = items.cumulative_sizes[number - 1] if number else 0
            return f"ConcatDataset[{index}] = {_locate(items.datasets[number], index - first)}"
    except (AttributeError, IndexError, TypeError):  # others may have classes of these names
        pass
    return f"{name}[{index}]"
