"""Whether a model that is built again is the one that was trained: a checkpoint has its answers to a few samples.

They are computed as `ensemble.load` computes them, by the model in training with the weights that the checkpoint
has, and are its part `answers`. Who builds the model again has it answer once more before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.train.loose_tensors import find_loose
from pipelines.loader.ragged import Ragged, find_tensors, map_tensors

SAMPLES = 4
#: Of the samples in a checkpoint: several where they are small beside the weights, else one.
LEAST_BYTES, MOST_BYTES = 2**16, 2**24
_SHARE = 10

#: Relative rounding of one layer: of a float32 network on the CPU, and on a GPU, whose convolutions take TF32.
_ROUNDING = {"cpu": 2.0**-16, "cuda": 2.0**-10}
#: Roundings that may add up between the first layer and the last.
_ADDED = 16
_NAMED = 6

Compute = Callable[[Any, int], Tensor]
"""From a batch and a seed to the values of the model in evaluation mode."""


def limit_bytes(model: nn.Module) -> int:
    """The bytes that a checkpoint may have beside the weights of a model, to tell whether it is the same."""
    return max(LEAST_BYTES, sum(tensor.nbytes for tensor in find_tensors(model.state_dict())) // _SHARE)


def pack_batch(value: Any) -> Any:
    """A batch, or a part of one, as a checkpoint can have it.

    Raises:
        TypeError: it holds an object of another kind.
    """
    if isinstance(value, Tensor):
        return value.cpu().clone()
    if isinstance(value, Mapping):
        return {name: pack_batch(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(pack_batch, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a batch holds a {type(value).__name__}")


def unpack_batch(value: Any, device: torch.device) -> Any:
    """The batch that was packed, on a device; a list of tensors is a ragged field."""
    if isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value):
        value = Ragged(value, value[0][:0])
    return map_tensors(value, lambda tensor: tensor.to(device))


def record_answers(
    model: nn.Module, packed: Any, device: torch.device, compute: Compute, seed: int
) -> dict[str, Any]:
    """What a model answers to a batch."""
    values = compute(unpack_batch(packed, device), seed).float()
    widths = [torch.finfo(each.dtype).eps for each in model.parameters() if each.is_floating_point()]
    rounding = _ADDED * max(*widths, _ROUNDING["cpu" if device.type == "cpu" else "cuda"], 0.0)
    return {"batch": packed, "values": values.cpu().clone(), "rounding": rounding, "seed": seed}


def explain_other_answers(
    answers: Mapping[str, Any], model: nn.Module, device: torch.device, compute: Compute
) -> str | None:
    """Why a model is not the one that gave these answers; None where it is.

    A model that draws gives other ones on another device: it may differ by as much as from itself.
    """
    batch, expected, seed = unpack_batch(answers["batch"], device), answers["values"], answers["seed"]
    found = compute(batch, seed).float().cpu()
    if found.shape != expected.shape:
        return f"it gives values of shape {list(found.shape)}, and gave {list(expected.shape)}"
    difference = _difference(found, expected)
    allowed = answers["rounding"] * float(expected.nan_to_num(0, 0, 0).abs().max())
    if difference <= allowed:
        return None
    own = _difference(compute(batch, seed + 1).float().cpu(), found)
    if own > allowed and difference <= 4 * own:
        return None
    loose = list(find_loose(model))
    more = f" and {len(loose) - _NAMED} more" if len(loose) > _NAMED else ""
    cause = (
        f"not in its state_dict: {', '.join(loose[:_NAMED])}{more}; register_buffer() keeps a tensor in it"
        if loose
        else "all its tensors are in its state_dict: is there other state (a number that training changes, a "
        "generator of its own, a global variable), or does Recipe.model read what has changed?"
    )
    return (
        f"its predictions of {len(expected)} samples of validation data differ by up to {difference:.3g} from those "
        f"before it was saved, and rounding explains {allowed:.1g} ({cause})"
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference; NaN where only one of two values is NaN."""
    is_same = (found == expected) | (found.isnan() & expected.isnan())
    return float(torch.where(is_same, 0, (found - expected).abs()).amax()) if found.numel() else 0.0
