"""Source of records from a map-style Dataset of another library."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._base import Source
from pipelines.sources._items import NAMES, UnnamedValues, check_names, make_record


@known_as("pipelines.sources.dataset")
class Dataset(Source):
    """See `dataset`."""

    kind = "dataset"

    def __init__(self, items: Any, id: str | None, names: Sequence[str] | None) -> None:
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
        called = check_names(self.kind, names)
        self.names = NAMES if called is None else called
        self._is_named = called is not None
        self._id = id

    def __len__(self) -> int:
        return self._count

    def _read(self, index: int) -> dict[str, Any]:
        try:
            # Of before `_is_named`, names were always given.
            return make_record(self.items[index], self.names if self.__dict__.get("_is_named", True) else None)
        except SampleError as error:
            raise SampleError(index, error.where, error.reason) from error
        except UnnamedValues as error:
            raise SampleError(index, self.where(index), str(error)) from None
        except MemoryError:
            raise  # of the machine's making, not the record's
        except Exception as error:
            raise SampleError(index, self.where(index), f"{type(error).__name__}: {error}") from error

    def where(self, index: int) -> str:
        return _locate(self.items, index)

    def identity(self) -> Any:
        if self._id is None:
            return None
        return {"source": self._describe_class(), "id": self._id, "count": self._count, "names": list(self.names)}


def dataset(map_style: Any, id: str | None = None, names: Sequence[str] | None = None) -> Dataset:
    """Makes a source from any object with `__len__` and `__getitem__`, such as a map-style torch Dataset.

    Items that are dicts, named tuples or objects of dataclasses have their own names. Tensors become numpy arrays,
    PIL images uint8 [C, H, W], also inside nested dicts, lists and tuples; other values stay as they are.

    Args:
        map_style: the Dataset. It must be deterministic: leave a random `transform` out of it and `map` the
            transform as a stage, which is seeded.
        id: identifies the records in fingerprints. Without it, independently started processes cannot share a
            pipeline over them.
        names: fields of an item that is a tuple, in order, or of the only value; `image` and `label` unless given,
            if there are two values.

    Raises:
        PipelineError: the object is not map-style, or is empty, or `names` are not distinct.

    Examples:
        >>> source = dataset(torchvision.datasets.CIFAR10("data"), id="cifar10-train")
    """
    return Dataset(map_style, id, names)


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
