"""Keeps weights in the files of their checkpoints, where memory does not hold those of all members.

Their tensors are pages of the file, which the kernel reads when they are needed and drops when it needs memory. A
file does not align them, and kernels give other bits on other alignments: while a model is called, those that are
not aligned are copied, one member's after the other's.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

_ALIGNMENT = 64  # of torch's own memory on the CPU
_CALLING = threading.RLock()
_MAPPED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def map_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Replace the parameters and buffers of a model by equal ones, of the same names, that are pages of a file."""
    for name, own in model.state_dict(keep_vars=True).items():
        mapped = weights.get(name)
        if isinstance(own, Tensor) and mapped is not None and _is_alike(own, mapped):
            own.data = mapped
    _MAPPED.add(model)


def _is_alike(own: Tensor, mapped: Tensor) -> bool:
    return own.shape == mapped.shape and own.dtype == mapped.dtype and own.stride() == mapped.stride()


@contextlib.contextmanager
def aligned(model: nn.Module) -> Iterator[None]:
    """Within the context, all parameters and buffers of a model are aligned; one thread is in it at a time."""
    if model not in _MAPPED and not _find_unaligned(model):
        yield
        return
    with _CALLING:
        mapped = [(tensor, tensor.data) for tensor in _find_unaligned(model)]
        try:
            for tensor, data in mapped:
                tensor.data = data.clone()
            yield
        finally:
            for tensor, data in mapped:
                tensor.data = data


def _find_unaligned(model: nn.Module) -> list[Tensor]:
    tensors = itertools.chain(model.parameters(), model.buffers())
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.data_ptr() % _ALIGNMENT]
