"""What of a model is a member's own: no tensor of the frozen network that members share (`Recipe.base`), and no
parameter of another member's.

Only what is its own is trained, averaged, sent to other workers, saved and loaded. `ensemble/base/` opens a base.
A parameter at the level of a module would be trained by each member of a process in turn.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble.spec import Recipe, SpecError
from ensemble.train.job import TrainingError
from pipelines.providers import import_object

#: Loaded where a recipe has a base.
USE_BASE = "ensemble.base.frozen:use_base"

#: The parameters of models that this process has built to train, or to load, as keys.
TRAINED: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()
LOADED: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()


class Base(Protocol):
    """The frozen network of a run, in this process; see `ensemble.base.frozen.FrozenBase`."""

    def build(self, model: Callable[..., Any], params: Mapping[str, Any]) -> Any: ...
    def is_own(self, tensor: Tensor) -> bool: ...
    def select(self, state: Mapping[str, Any]) -> dict[str, Any]: ...
    def load(self, model: nn.Module, weights: Mapping[str, Any]) -> object: ...
    def describe(self) -> dict[str, str]: ...
    def check_unwritten(self, *, whole: bool) -> None: ...


#: That on which `call_model` builds; of each model the base on which it stands.
OPENED: ContextVar[Base | None] = ContextVar("base", default=None)
BASES: MutableMapping[nn.Module, Base] = WeakKeyDictionary()


def use_base(run_dir: Any, recipe: Any, device: torch.device | str = "cpu") -> Any:
    """A context in which models are built on the base of a run, which it yields; None without one."""
    return import_object(USE_BASE)(run_dir, device) if getattr(recipe, "base", None) else contextlib.nullcontext()


def call_model(recipe: Recipe, params: Mapping[str, Any]) -> Any:
    """What `Recipe.model` builds; on the base of `use_base`, where the recipe has one."""
    base = None if recipe.base is None else OPENED.get()
    return recipe.model(params) if base is None else base.build(recipe.model, params)


def select_own(model: nn.Module) -> Callable[[Tensor], bool]:
    """Whether a tensor of a model is its own: its memory is not the base's."""
    return BASES[model].is_own if model in BASES else functools.partial(operator.is_not, None)


def own_state(model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of a model without the tensors of its base."""
    return dict(model.state_dict() if model not in BASES else BASES[model].select(model.state_dict()))


def load_own(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load what `own_state` returned; the base is not written to."""
    fit_buffers(model, weights)
    _ = BASES[model].load(model, weights) if model in BASES else model.load_state_dict(weights)


def fit_buffers(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Replace the buffers that cannot be written: of another shape than the saved ones, None, or expanded."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            value = saved.get(f"{path}.{name}" if path else name)
            if not isinstance(value, Tensor) or (buffer is not None and nn.parameter.is_lazy(buffer)):
                continue
            near = next(model.parameters(), value) if buffer is None else buffer
            is_expanded = near is buffer and buffer.layout == torch.strided and 0 in buffer.stride()
            if buffer is None or buffer.shape != value.shape or is_expanded:
                module._buffers[name] = value.detach().to(near.device).clone(memory_format=torch.contiguous_format)


def explain_other_base(model: nn.Module, saved: Mapping[str, Any]) -> str | None:
    """Say that a checkpoint is of a model on another base; None where it is not."""
    was, own = saved.get("base") or {}, BASES[model].describe() if model in BASES else {}
    if was.get("digest") == own.get("digest"):
        return None
    names = [f"{one['digest'][:16]} of {one['source']}" if one else "no base" for one in (was, own)]
    return f"the checkpoint belongs to the base {names[0]}, and the model stands on {names[1]}"


def check_same_base(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raise TrainingError where the checkpoint is of a model on another base."""
    if (why := explain_other_base(model, saved)) is not None:
        raise TrainingError(why)


@functools.cache
def note_process() -> None:
    """Take note of the parameters of this process, before it builds the first model that it trains.

    Frozen objects (`gc.freeze`) are not looked at: a fork server's, which has no code of the user's.
    """
    TRAINED.update(dict.fromkeys(value for value in gc.get_objects() if type(value) is nn.Parameter))


def refuse_shared(model: nn.Module) -> None:
    """Take note of the parameters of a new model; raises SpecError where one that trains is not its own."""
    shared = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter in TRAINED
    ]
    if shared:
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        raise SpecError(
            f"the model has a parameter that existed before it was built, {shared[0]}{more}: all members would "
            "train the same one. Build the network inside Recipe.model, take copy.deepcopy() of it there, or "
            "freeze it (requires_grad_(False))"
        )
    TRAINED.update(dict.fromkeys(model.parameters()))
