"""Pickles a model with the user's code in it, whose tensors stay apart: `torch.save` stores them as it stores any.

The classes and functions of a run's declaration were unpickled by value, so no module has them under their names
and the ordinary pickle refuses them. cloudpickle takes them by value again; those of modules that can be imported
are taken by name.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from pipelines.ipc.memory_pickle import Pickler


def split_tensors(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A pickle of any object, and the tensors in it, in the order in which the pickle counts them."""
    with io.BytesIO() as file:
        pickler = _Pickler(file)
        pickler.dump(value)
        return file.getvalue(), pickler.tensors


def join_tensors(content: bytes, tensors: list[torch.Tensor]) -> Any:
    """The object that `split_tensors` pickled."""
    with io.BytesIO(content) as file:
        return _Unpickler(file, tensors).load()


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """The number of a tensor; None for what is pickled here."""
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        """The tensor of this number."""
        return self._tensors[number]
