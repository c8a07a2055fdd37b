"""Loose tensors: what a model's modules hold beside their state_dict, as plain attributes, in lists and dicts, in
modules that are not registered, and as buffers that are not persistent. A checkpoint has them as its part `loose`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_STANDARD = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_PLAIN = (Tensor, nn.Parameter)
#: Of a list or dict that is searched for tensors: longer ones are data, such as a vocabulary.
MOST_ITEMS = 1000


def find_loose(model: nn.Module) -> dict[str, Tensor]:
    """The loose tensors and numpy arrays of a model, in place, by their path, such as `encoder.freqs[0]`.

    Views of weights are none, nor are tensors of a graph: they are computed anew.
    """
    state = [tensor for tensor in model.state_dict(keep_vars=True).values() if isinstance(tensor, Tensor)]
    known = {id(tensor) for tensor in state}
    storages = {_storage(tensor) for tensor in state if type(tensor) in _PLAIN and _is_dense(tensor)}
    return {
        path: tensor
        for path, tensor in _walk(model, "", set())
        if id(tensor) not in known and tensor.numel() and _storage(tensor) not in storages
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
    if not saved:
        return
    for path, tensor in find_loose(model).items():
        value = saved.get(path)
        if value is not None and (value.shape, value.dtype) == (tensor.shape, tensor.dtype):
            value = value.to(tensor.device)
            # Where it overlaps itself it stays: the model's answers show whether that matters.
            with contextlib.suppress(RuntimeError):
                if not torch.equal(value, tensor):
                    tensor.copy_(value)


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor | np.ndarray):
        tensor = _as_tensor(value)
        if tensor is not None:
            yield path, tensor
        return
    if not isinstance(value, nn.Module | dict | list | tuple) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for name, item in vars(value).items():
            if name in ("_parameters", "_buffers", "_modules"):
                for key, registered in item.items():
                    yield from _walk(registered, f"{path}.{key}" if path else key, seen)
            elif name not in _STANDARD:
                yield from _walk(item, f"{path}.{name}" if path else name, seen)
    elif len(value) <= MOST_ITEMS:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(item, f"{path}[{key!r}]", seen)


def _as_tensor(value: Tensor | np.ndarray[Any, Any]) -> Tensor | None:
    """The tensor, or one of the memory of an array; None for what cannot be copied and written as it is."""
    if isinstance(value, np.ndarray):
        with contextlib.suppress(TypeError, ValueError):  # objects, another byte order
            is_own = value.flags.writeable and value.flags.owndata  # else it may be a file, or another's memory
            return torch.from_numpy(value) if is_own else None
        return None
    is_written = type(value) in _PLAIN and _is_dense(value) and value.grad_fn is None
    return value if is_written and value.device.type != "meta" else None


def _is_dense(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_quantized


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
