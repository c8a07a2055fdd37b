"""Calls a trained member: from a batch to its values, as its recipe does it. Imports torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ensemble.spec import Recipe
from ensemble.train.call import Observation
from ensemble.train.outputs import compute_values

ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules of torch that have a fast path, which rounds otherwise (a Transformer's outputs differ by 7e-7)."""


class WithoutFastPath(TorchFunctionMode):
    """A context in which the modules of `ATTENTION` do not take their fast path: what is exported does not either.

    They do not where a tensor has a `__torch_function__`, as all have in a mode. `torch.backends.mha` has a switch
    for the whole process, whose other threads would compute otherwise while a member is called; a mode is of its
    thread. It costs some microseconds for each call of a torch function.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls the function as if there were no mode."""
        return func(*args, **(kwargs or {}))


_dtype_lock = threading.RLock()  # of threads that call members, once those have several default dtypes
_dtypes: set[torch.dtype] = set()  # of members of this process


@contextlib.contextmanager
def _use_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the context, torch's default dtype is this one, also for other threads: torch has one for all."""
    _dtypes.add(dtype)
    if is_traced() or (len(_dtypes) == 1 and dtype == torch.get_default_dtype()):
        yield
        return
    with _dtype_lock:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@dataclass(frozen=True)
class MemberCall:
    """How a member's values follow from a batch.

    Attributes:
        recipe: whose `predict` is called, or whose loss calls the model.
        seen: what the first training batch showed: the arguments of the model, so that no loss is needed.
        default_dtype: torch's when the member was trained, in which a model makes tensors of its own.
    """

    recipe: Recipe
    seen: Observation
    default_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        _dtypes.add(self.default_dtype)

    def compute_values(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """The member's values float32 [b, ...], as its task lays them out."""
        with _use_default_dtype(self.default_dtype):
            return compute_values(self.recipe, model, batch, self.seen)


def has_attention(model: nn.Module) -> bool:
    """Whether a part of the model may take a fast path."""
    return any(isinstance(module, ATTENTION) for module in model.modules())


def is_traced() -> bool:
    """Whether a forward pass is being compiled or exported: values of tensors cannot be looked at."""
    return torch.compiler.is_compiling() or torch.compiler.is_exporting()
