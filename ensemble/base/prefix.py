"""Computes a base once for all members of a combined model, where they call it with the same tensors.

Members that have put nothing inside the base get one network instead of equal copies of it. Its modules remember
what they returned, for as long as one forward pass of the combined model lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.base.frozen import COPIES, FrozenBase
from ensemble.comm._compat import count_writes
from ensemble.train.pickled import split_tensors
from pipelines.loader.ragged import find_tensors

_returned: ContextVar[dict[Any, Any] | None] = ContextVar("returned", default=None)


@contextlib.contextmanager
def compute_once() -> Iterator[None]:
    """Within the block a shared module is computed once for the same inputs."""
    before = _returned.set({})
    try:
        yield
    finally:
        _returned.reset(before)


def share_prefix(models: Iterable[nn.Module], base: FrozenBase) -> bool:
    """Give models that have left their copy of the base as it was one network; returns whether there are any."""
    shared, is_any = base.copy(), False
    content = split_tensors(shared)
    for model in models:
        copied = COPIES.get(model)
        if copied is None or not _is_equal(split_tensors(copied), content):
            continue
        inside = list(copied.modules())
        twins = dict(zip(inside, shared.modules(), strict=True))
        for parent in [module for module in model.modules() if module not in twins]:
            for name, child in parent.named_children():
                if child in twins:
                    vars(twins[child])["forward"] = _Remembering(twins[child])
                    setattr(parent, name, twins[child])
                    is_any = True
    return is_any


def _is_equal(one: tuple[bytes, list[Tensor]], other: tuple[bytes, list[Tensor]]) -> bool:
    return one[0] == other[0] and all(a is b for a, b in zip(one[1], other[1], strict=True))


class _Remembering:
    """The `forward` of a module, which returns for the same tensors what it has returned before."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self._module).forward
        returned = None if torch.compiler.is_dynamo_compiling() else _returned.get()
        inputs = [*args, *kwargs.values()]
        if returned is None or torch.is_inference_mode_enabled() or not all(map(_is_comparable, inputs)):
            return forward(self._module, *args, **kwargs)
        places = len(args), *kwargs
        key = (
            id(self._module),
            places,
            *((id(v), count_writes(v)) if isinstance(v, Tensor) else v for v in inputs),
        )
        _, outputs, versions = returned.get(key, (None, None, None))
        if versions is None or versions != [count_writes(tensor) for tensor in find_tensors(outputs)]:
            outputs = forward(self._module, *args, **kwargs)
            versions = [count_writes(tensor) for tensor in find_tensors(outputs)]
            returned[key] = inputs, outputs, versions  # an id is of one object while the object is there
        return outputs


def _is_comparable(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | bool | int | float | str)
