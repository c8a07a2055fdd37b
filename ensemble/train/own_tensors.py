"""What of a model is a member's own: no tensor of the frozen network that members share (`Recipe.base`), and no
parameter of another member's.

Only what is its own is trained, averaged, sent to other workers, saved and loaded. `ensemble/base/` opens a base.
A parameter at the level of a module would be trained by each member of a process in turn.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble.spec import Recipe, SpecError
from ensemble.train.job import TrainingError
from pipelines.providers import import_object

#: Loaded where a recipe has a base.
OPEN_BASE = "ensemble.base.frozen:open_base"

#: The parameters of models that this process has built to train, or to load, as keys.
TRAINED: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()
LOADED: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()


class Base(Protocol):
    """The frozen network of a run, in this process (`ensemble.base.frozen.FrozenBase`)."""

    digest: str
    source: str
    storages: set[int]

    def copy(self, device: torch.device) -> nn.Module:
        """Modules of a member, over the shared tensors."""

    def find_written(self, *, whole: bool) -> str | None:
        """The name of a tensor that was written to."""


_opened: ContextVar[tuple[Base, torch.device] | None] = ContextVar("base", default=None)
_bases: MutableMapping[nn.Module, Base] = WeakKeyDictionary()  # of models
_copies: MutableMapping[nn.Module, nn.Module] = WeakKeyDictionary()  # of its base, that a model is built around


@contextlib.contextmanager
def use_base(run_dir: Path | str, recipe: Any, device: torch.device | str = "cpu") -> Iterator[Base | None]:
    """Let models be built on the base of a run, where the recipe has one.

    Raises:
        StoreError: its file is gone, or damaged.
    """
    if getattr(recipe, "base", None) is None:
        yield None
        return
    base = import_object(OPEN_BASE)(run_dir)
    before = _opened.set((base, torch.device(device)))
    try:
        yield base
    finally:
        _opened.reset(before)


def call_model(recipe: Recipe, params: Mapping[str, Any]) -> Any:
    """What `Recipe.model` builds; on the base of `use_base`, where the recipe has one.

    Raises:
        SpecError: a parameter of the base is to be trained.
    """
    if recipe.base is None:
        return recipe.model(params)
    opened = _opened.get()
    assert opened is not None, "within use_base()"
    base, device = opened
    network = base.copy(device)
    model = recipe.model(params, network)
    if isinstance(model, nn.Module):
        _bases[model], _copies[model] = base, network
        own = select_own(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not own(parameter):
                parameter.requires_grad_(False)
                raise SpecError(
                    f"Recipe.model lets {name} train, a parameter of the base ({base.source}) that all members "
                    "share: put copy.deepcopy() of its module in its place"
                )
    return model


def find_copy(model: nn.Module) -> nn.Module | None:
    """The copy of its base that a model is built around; None where it has none."""
    return _copies.get(model)


def select_own(model: nn.Module) -> Callable[[Tensor], bool]:
    """Whether a tensor of a model is its own: its memory is not the base's."""
    base = _bases.get(model)
    if base is None:
        return lambda tensor: True
    storages = base.storages
    return lambda tensor: nn.parameter.is_lazy(tensor) or tensor.untyped_storage().data_ptr() not in storages


def own_state(model: nn.Module) -> dict[str, Any]:
    """The `state_dict` of a model without the tensors of its base."""
    own = select_own(model)
    state = model.state_dict()
    return {name: value for name, value in state.items() if not isinstance(value, Tensor) or own(value)}


def load_own(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Load what `own_state` returned; the base is not written to.

    Raises:
        RuntimeError: the weights are not this model's.
    """
    if model not in _bases:
        model.load_state_dict(weights)
        return
    own = own_state(model)
    if own.keys() != weights.keys():
        raise RuntimeError(f"the names differ in {', '.join(sorted(own.keys() ^ weights.keys())[:4])}")
    with torch.no_grad():  # load_state_dict() writes to some of what it is not given: num_batches_tracked
        for name, tensor in own.items():
            if nn.parameter.is_lazy(tensor):
                tensor.materialize(weights[name].shape)
            if tensor.shape != weights[name].shape:
                raise RuntimeError(f"{name} is {list(tensor.shape)}, and was {list(weights[name].shape)}")
            tensor.copy_(weights[name])


def describe_base(model: nn.Module) -> dict[str, Any]:
    """The part `base` of a checkpoint; none where the model has no base."""
    base = _bases.get(model)
    return {} if base is None else {"base": {"digest": base.digest, "source": base.source}}


def check_same_base(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raise TrainingError where the checkpoint is of a model on another base."""
    was, own = saved.get("base"), describe_base(model).get("base")
    if (was or {}).get("digest") != (own or {}).get("digest"):
        names = ["no base" if one is None else f"{one['digest'][:16]} of {one['source']}" for one in (was, own)]
        raise TrainingError(f"the checkpoint belongs to the base {names[0]}, and the model stands on {names[1]}")


def check_unwritten(model: nn.Module, *, whole: bool = False) -> None:
    """Raise TrainingError where the base of a model was written to.

    Args:
        whole: compare all bytes with the file; else only what torch counts as a write, which takes no time.
    """
    base = _bases.get(model)
    if base is not None and (name := base.find_written(whole=whole)) is not None:
        raise TrainingError(
            f"the member has written to {name} of the frozen base ({base.source}), which all members share; put "
            "copy.deepcopy() of its module in its place in Recipe.model"
        )


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
            f"the model has a parameter that was there before it was built, {shared[0]}{more}: members would "
            "train it one after the other. Build the network inside Recipe.model, take copy.deepcopy() of it "
            "there, or freeze it (requires_grad_(False))"
        )
    TRAINED.update(dict.fromkeys(model.parameters()))
