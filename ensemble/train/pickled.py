"""Pickles a model with the user's code in it, whose tensors stay apart: `torch.save` stores them as it stores any.

The classes and functions of a run's declaration were unpickled by value, so no module has them under their names
and the ordinary pickle refuses them. cloudpickle takes them by value again; those of modules that can be imported
are taken by name. In a state of a run its classes are named as well: those of whoever loads it count.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from ensemble.store import find_class_by_value, make_classes_anew
from pipelines.ipc.memory_pickle import Pickler, is_importable


def split_tensors(value: Any, parts: Mapping[str, Any] | None = None) -> tuple[bytes, list[torch.Tensor]]:
    """A pickle of any object, and the tensors in it, in the order in which the pickle counts them.

    Args:
        parts: objects by name that whoever loads it has; None: it is no state of a run, and has all by value.
    """
    with io.BytesIO() as file:
        pickler = _Pickler(file, parts)
        pickler.dump(value)
        return file.getvalue(), pickler.tensors


def join_tensors(content: bytes, tensors: list[torch.Tensor], parts: Mapping[str, Any] | None = None) -> Any:
    """The object that `split_tensors` pickled."""
    with io.BytesIO(content) as file:
        return _Unpickler(file, tensors, parts).load()


class _Pickler(Pickler):
    def __init__(self, file: io.BytesIO, parts: Mapping[str, Any] | None) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._is_state = parts is not None
        self._names = {id(part): name for name, part in (parts or {}).items()}

    def persistent_id(self, obj: Any) -> int | str | tuple[str, str, bytes] | None:
        """The number of a tensor, the name of a part, what names a class; None for what is pickled here."""
        if (name := self._names.get(id(obj))) is not None:
            return name
        if self._is_state and isinstance(obj, type) and not is_importable(obj):
            return _describe_class(obj)
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


def _describe_class(kind: type) -> tuple[str, str, bytes]:
    """The module and the name of a class; and a pickle of it, where the run's declaration does not have it."""
    if find_class_by_value(kind.__module__, kind.__qualname__) is kind:
        return kind.__module__, kind.__qualname__, b""
    with make_classes_anew(), io.BytesIO() as file:
        Pickler(file).dump(kind)
        return kind.__module__, kind.__qualname__, file.getvalue()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor], parts: Mapping[str, Any] | None) -> None:
        super().__init__(file)
        self._tensors, self._parts = tensors, parts

    def find_class(self, module: str, name: str) -> Any:
        """That of the declaration, for a state of a run; else what the module has."""
        declared = None if self._parts is None else find_class_by_value(module, name)
        return declared or super().find_class(module, name)

    def persistent_load(self, named: Any) -> Any:
        """What `_Pickler.persistent_id` has named."""
        if isinstance(named, int):
            return self._tensors[named]
        if isinstance(named, str) and self._parts is not None:
            return self._parts[named]
        module, name, content = named
        if not content or find_class_by_value(module, name) is not None:
            return self.find_class(module, name)
        with make_classes_anew():
            return pickle.loads(content)
