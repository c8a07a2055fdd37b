"""Source of records from a map-style Dataset of another library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipelines.errors import PipelineError, SampleError
from pipelines.fingerprint import known_as
from pipelines.sources._base import Source
from pipelines.stages._pictures import image_to_array, is_pil_image


@known_as("pipelines.sources.dataset")
class Dataset(Source):
    """See `dataset`."""

    kind = "dataset"

    def __init__(self, items: Any, id: str | None, names: Sequence[str]) -> None:
        if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
            raise PipelineError(
                f"dataset(): {type(items).__name__} has no __getitem__ and __len__; "
                "only map-style Datasets can be read"
            )
        self._count = len(items)
        if self._count == 0:
            raise PipelineError(f"dataset(): {type(items).__name__} holds no record")
        self.items = items
        self.names = tuple(names)
        self._id = id

    def __len__(self) -> int:
        return self._count

    def _read(self, index: int) -> dict[str, Any]:
        try:
            item = self.items[index]
            if isinstance(item, Mapping):
                return {name: _copy_value(value) for name, value in item.items()}
            values = item if isinstance(item, tuple | list) else (item,)
            if len(values) == len(self.names):
                return {name: _copy_value(value) for name, value in zip(self.names, values, strict=True)}
        except SampleError as error:
            raise SampleError(index, error.where, error.reason) from error
        except MemoryError:
            raise  # of the machine's making, not the record's
        except Exception as error:
            raise SampleError(index, self.where(index), f"{type(error).__name__}: {error}") from error
        reason = f"an item of {len(values)} values, but names= has {len(self.names)}: {', '.join(self.names)}"
        raise SampleError(index, self.where(index), reason)

    def where(self, index: int) -> str:
        return f"{type(self.items).__name__}[{index}]"

    def identity(self) -> Any:
        if self._id is None:
            return None
        return {"source": self._describe_class(), "id": self._id, "count": self._count, "names": list(self.names)}


def dataset(map_style: Any, id: str | None = None, names: Sequence[str] = ("image", "label")) -> Dataset:
    """Makes a source from any object with `__len__` and `__getitem__`, such as a map-style torch Dataset.

    Tensors become numpy arrays, PIL images uint8 [C, H, W]; other values stay as they are.

    Args:
        map_style: the Dataset. It must be deterministic: leave a random `transform` out of it and `map` the
            transform as a stage, which is seeded.
        id: identifies the records in fingerprints. Without it, independently started processes cannot share a
            pipeline over them.
        names: fields of an item that is a tuple, in order. An item that is a dict has its own names.

    Raises:
        PipelineError: the object is not map-style, or is empty.

    Examples:
        >>> source = dataset(torchvision.datasets.CIFAR10("data"), id="cifar10-train")
    """
    return Dataset(map_style, id, names)


def _copy_value(value: Any) -> Any:
    """Converts a value and copies its memory: a stage that writes into it must not change the Dataset."""
    if isinstance(value, np.ndarray):
        return value.copy()
    home = type(value).__module__.partition(".")[0]
    if home == "torch" and hasattr(value, "detach"):
        return value.detach().cpu().numpy().copy()
    if is_pil_image(value):
        return image_to_array(value)
    return value
