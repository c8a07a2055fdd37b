"""Keeps a member's network in its checkpoints, so that it can be built without `Recipe.model`.

That may read a file of pretrained weights, which is gone, or download it, for which a node has no internet. What
it returned is kept in another way, too: pickled without the tensors of its state dict, which the checkpoint has.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.store import RunDir, StoreError, pickle_by_value
from ensemble.train.pickled import join_tensors, split_tensors
from ensemble.user_code.fingerprint import PYTHON, Code

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble.spec import Ensemble

#: Of the pickle, with the tensors that are in no state dict: they are in each checkpoint.
MOST_BYTES = 64 * 2**20
_PLAIN = (Tensor, nn.Parameter)
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class NotKept(Exception):
    """A network cannot be kept, or not be built again; the message says why."""


def pack_network(model: nn.Module, ensemble: Ensemble, code: Code) -> dict[str, Any]:
    """The part `network` of a checkpoint: what builds the model again, given its weights and buffers.

    Args:
        model: before its first step.
        code: of the ensemble; the network is no other code's.

    Raises:
        NotKept: it cannot be pickled, has tensors that a pickle does not restore as they are, or is too large.
    """
    names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items() if _is_tensor(tensor)}
    try:
        with pickle_by_value(code, ensemble):
            content, tensors = split_tensors(model)
    except Exception as error:  # objects raise whatever they like from __reduce__
        raise NotKept(f"it cannot be pickled: {error}") from None
    for tensor in tensors:
        _check_plain(tensor)
    storages = {
        tensor.untyped_storage().data_ptr() for tensor in tensors if id(tensor) in names and tensor.numel()
    }
    described = [_describe(tensor, names.get(id(tensor)), storages) for tensor in tensors]
    size = len(content) + sum(each["value"].nbytes for each in described if "value" in each)
    if size > MOST_BYTES:
        raise NotKept(f"beside the weights in its state dict it holds {size / 2**20:.0f} MiB")
    pickled = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return {"python": PYTHON, "code": code.fingerprint, "pickle": pickled, "tensors": described}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _check_plain(tensor: Tensor) -> None:
    if type(tensor) not in _PLAIN or tensor.grad_fn is not None:
        raise NotKept(f"it holds a {type(tensor).__name__} that cannot be pickled as it is")
    marks = [mark for mark, value in vars(tensor).items() if not _is_plain(value)]
    if marks or any(getattr(tensor, hooks, None) for hooks in _HOOKS):
        raise NotKept(f"a tensor of it has {', '.join(marks) or 'hooks'}")


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint can have a value: what libraries note at tensors, such as `_is_hf_initialized`."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str)


def _describe(tensor: Tensor, name: str | None, storages: set[int]) -> dict[str, Any]:
    kind: dict[str, Any] = {"parameter": isinstance(tensor, nn.Parameter), "requires_grad": tensor.requires_grad}
    kind["marks"] = dict(vars(tensor))
    if name is not None:
        return {**kind, "name": name}
    if tensor.numel() and tensor.untyped_storage().data_ptr() in storages:
        raise NotKept("it holds a view of a weight")
    return {**kind, "value": tensor.detach().cpu()}


def unpack_network(run: RunDir, file: Path, state: Mapping[str, Any], code: str | None = None) -> nn.Module:
    """The network of a checkpoint, with the weights in it, on the CPU.

    Args:
        file: the checkpoint. Its digest was compared with the log's; the code in it runs if it is the user's own.
        state: its parts `network` and `model`.
        code: the fingerprint of today's code, where that may be other code than the network's.

    Raises:
        NotKept: the checkpoint has none, or not of this code or Python, or it cannot be built.
    """
    kept = state.get("network")
    if kept is None:
        raise NotKept(f"{file} has no network beside the weights")
    try:
        run.check_owners(file)
    except (StoreError, OSError) as error:
        raise NotKept(str(error)) from None
    if kept["python"] != PYTHON or (code is not None and kept["code"] != code):
        raise NotKept(f"the network in {file} is of other code, or of another Python")
    weights = state["model"]
    try:
        model: nn.Module = join_tensors(
            kept["pickle"].numpy().tobytes(), list(_restore_tensors(kept["tensors"], weights))
        )
        model.load_state_dict(weights)
    except (pickle.UnpicklingError, ImportError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise NotKept(f"the network in {file} cannot be built: {error}") from None
    return model


def _restore_tensors(described: list[dict[str, Any]], weights: Mapping[str, Tensor]) -> Iterator[Tensor]:
    for each in described:
        tensor = weights[each["name"]].clone() if "name" in each else each["value"]
        made = nn.Parameter(tensor) if each["parameter"] else tensor
        vars(made).update(each.get("marks", {}))
        yield made.requires_grad_(each["requires_grad"])
