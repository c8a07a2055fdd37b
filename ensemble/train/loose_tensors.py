"""Loose tensors: what a model's modules hold beside their state_dict, as plain attributes, in lists and dicts, in
modules that are not registered, and as buffers that are not persistent. A checkpoint has them as its part `loose`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensemble.train.own_tensors import fit_buffers, select_own

_REGISTERS = ("_parameters", "_buffers", "_modules")
#: Attributes that each module has.
STANDARD = frozenset(vars(nn.Module())) - {*_REGISTERS}
_PLAIN = (Tensor, nn.Parameter)
#: Of a list or dict that is searched for tensors: longer ones are data, such as a vocabulary.
MOST_ITEMS = 1000


def find_loose(model: nn.Module) -> dict[str, Tensor]:
    """The loose tensors and numpy arrays of a model, in place, by their path, such as `encoder.freqs[0]`.

    Tensors of a base and views of weights are none, nor are tensors of a graph: they are computed anew.
    """
    weights = [tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]
    ids, own = {id(tensor) for tensor in weights}, select_own(model)
    storages = {_storage(tensor) for tensor in weights if type(tensor) in _PLAIN and _is_dense(tensor)}
    return {
        path: tensor
        for path, tensor in _walk(model, "", set())
        if id(tensor) not in ids and tensor.numel() and _storage(tensor) not in storages and own(tensor)
    }


def copy_loose(model: nn.Module, most_bytes: int) -> dict[str, Tensor]:
    """The loose tensors as a checkpoint keeps them, on the CPU; none where they are too large."""
    loose = find_loose(model)
    if sum(tensor.nbytes for tensor in loose.values()) > most_bytes:
        return {}
    return {path: tensor.detach().cpu().clone() for path, tensor in loose.items()}


@torch.no_grad()
def set_loose(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write saved loose tensors over those of the same path, shape and type in a model that was built again."""
    fit_buffers(model, saved)
    for path, tensor in find_loose(model).items() if saved else ():
        value = saved.get(path, tensor)
        if (value.shape, value.dtype) == (tensor.shape, tensor.dtype):
            # Where it overlaps itself it stays: the model's answers show whether that matters.
            with contextlib.suppress(RuntimeError):
                if not torch.equal(value := value.to(tensor.device), tensor):
                    tensor.copy_(value)


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, and the memory of arrays, that can be copied and written as they are."""
    if isinstance(value, Tensor):
        is_plain = type(value) in _PLAIN and _is_dense(value)
        if is_plain and value.grad_fn is None and value.device.type != "meta":
            yield path, value
    elif isinstance(value, np.ndarray):
        if value.flags.writeable and value.flags.owndata:  # else it may be a file, or another's memory
            with contextlib.suppress(TypeError, ValueError):  # objects, another byte order
                yield path, torch.from_numpy(value)
    elif isinstance(value, nn.Module | dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        parts: Iterable[tuple[str, Any]] = ()
        if isinstance(value, nn.Module):
            own = {name: item for name, item in vars(value).items() if name not in STANDARD}
            own |= {name: item for kind in _REGISTERS for name, item in own.pop(kind).items()}
            parts = [(f"{path}.{name}" if path else name, item) for name, item in own.items()]
        else:
            with contextlib.suppress(
                Exception
            ):  # of the user's class, which may refuse to be listed: it holds none
                items = value.items() if isinstance(value, dict) else enumerate(value)
                parts = [(f"{path}[{key!r}]", item) for key, item in items] if len(value) <= MOST_ITEMS else ()
        for name, item in parts:
            yield from _walk(item, name, seen)


def _is_dense(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_quantized


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
