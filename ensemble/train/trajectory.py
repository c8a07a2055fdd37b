"""The state of a member where an epoch begins, as digests by path; processes that train alike have equal ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensemble.train.loose_tensors import find_loose
from ensemble.train.state import TrainState

#: Digests by path, such as `weights.head.bias` or `optimizer.head.bias.exp_avg`.
Digests = dict[str, str]

#: The first parts of paths that decide the next steps.
DECIDING = ("weights", "kept", "requires_grad", "optimizer", "schedule", "precision", "states")
#: Those that decide what follows a first step, and those of which a difference may only explain another.
AFTER, HIDDEN = ("weights", "kept", "requires_grad"), ("loose", "modules", "callbacks")
#: How paths are named for people, by their first part; and how many.
_WORDS = {
    "kept": "the averaged or best ",
    "requires_grad": "`requires_grad` of ",
    "optimizer": "the optimizer's ",
    "schedule": "the schedule's ",
    "states": "member.state()'s ",
    "loose": "the tensor ",
    "modules": "the attribute ",
    "callbacks": "a callback's ",
}
_NAMED = 2
#: Items of a list that are compared one by one.
_MOST_ITEMS = 1000


def describe_state(state: TrainState) -> Digests:
    """Return the digests of all that the next steps of a member depend on; all ranks call it together."""
    optimization, found = state.optimization, dict[str, Any]()
    model, parts = optimization.model, optimization.state_dict()
    names = {parameter: name for name, parameter in model.named_parameters()}
    found["weights"] = (parts.get("kept") or {}).get("trained", parts["model"])
    found["kept"] = parts["model"] if "kept" in parts else {}
    found["requires_grad"] = {name: parameter.requires_grad for parameter, name in names.items()}
    found["optimizer"] = _describe_optimizer(optimization.optimizer, names)
    found |= {name: parts[name] for name in ("schedule", "precision")}
    found["states"] = {name: value for name, value in state.own.objects.items() if _is_of_steps(value)}
    found["callbacks"] = parts["callbacks"]
    found["loose"] = find_loose(model)
    found["modules"] = {path: _find_numbers(module) for path, module in model.named_modules()}
    return {path: text for name, value in found.items() for path, text in _flatten(name, value)}


def describe_weights(weights: Mapping[str, Any]) -> Digests:
    """Return the digests of weights as `describe_state` has those of a member."""
    return dict(_flatten("weights", weights))


def _describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
    """The groups and the state of an optimizer, with parameters by name."""
    groups = [
        {**group, "params": [names.get(parameter, "?") for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"groups": groups, **{names.get(one, "?"): dict(value) for one, value in optimizer.state.items()}}


def _is_of_steps(value: Any) -> bool:
    """Whether an object is an optimizer, a schedule, or holds weights; other states may hold the time of day."""
    return isinstance(value, nn.Module) or hasattr(value, "param_groups") or hasattr(value, "last_epoch")


def _find_numbers(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in (bool, int, float)}


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield each tensor, array and number in nested containers with its path; other objects have no digest."""
    if isinstance(value, Tensor):
        yield path, _digest(value)
    elif isinstance(value, np.ndarray):
        yield path, _hash(str((value.dtype, value.shape)), value.tobytes())
    elif value is None or isinstance(value, bool | int | float | str | np.generic):
        yield path, repr(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{path}.{key}", item)
    elif isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS:
        for number, item in enumerate(value):
            yield from _flatten(f"{path}.{number}", item)
    elif callable(state_dict := getattr(value, "state_dict", None)):
        yield from _flatten(path, state_dict())


def _digest(tensor: Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        return "lazy"
    tensor = tensor.detach()
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    content = dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _hash(str((tensor.dtype, tuple(tensor.shape))), content)


def _hash(kind: str, content: Any) -> str:
    digest = hashlib.sha1(kind.encode(), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest()


def find_differences(one: Digests, other: Digests, parts: Iterable[str] = DECIDING) -> list[str]:
    """Return the paths in these parts that only one has, or of which the digests differ, in their order."""
    paths = [path for path in {**one, **other} if path.partition(".")[0] in parts]
    return [path for path in paths if one.get(path) != other.get(path)]


def name_paths(paths: Sequence[str]) -> str:
    """Return that these paths differ, as a reader knows them."""
    parts = [path.partition(".") for path in paths[:_NAMED]]
    named = ", ".join(f"{_WORDS.get(part, '')}`{name}`" for part, _, name in parts)
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{named}{more} {'differs' if len(paths) == 1 else 'differ'}"


def find_change(trajectory: Mapping[int, Digests], path: str, before: int) -> int | None:
    """Return the last epoch before `before` in which a path got another digest; None where it never did."""
    for epoch in range(before, 0, -1):
        if epoch in trajectory and trajectory.get(epoch - 1, {}).get(path) != trajectory[epoch].get(path):
            return epoch - 1
    return None


def measure_distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the Euclidean distance between weights; of a name that one lacks, from 0."""
    floats = {name: tensor.detach().double() for name, tensor in one.items() if tensor.is_floating_point()}
    squares = [
        (own - other[name].double() if name in other else own).square().sum() for name, own in floats.items()
    ]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0
