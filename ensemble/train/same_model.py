"""Whether a model that is built again is the one that was trained: a checkpoint has its answers to a few samples.

They are computed as `ensemble.load` does it, and are its part `answers`. Whoever builds the model again has it
answer once more before it is used.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ensemble.train.evaluator import evaluation_mode
from ensemble.train.forward_errors import describe_error
from ensemble.train.loose_tensors import find_loose
from ensemble.train.outputs import OutputError
from ensemble.train.own_tensors import own_state
from ensemble.train.predictions import predict_batch
from ensemble.train.seeding import seeded
from ensemble.user_code.fingerprint import code_of
from pipelines.loader.ragged import Ragged, find_tensors, map_tensors

if TYPE_CHECKING:
    from ensemble.train.state import TrainState

#: Samples in a checkpoint where they are small beside the weights; else one, if that is not too large.
SAMPLES = 4
LEAST_BYTES, MOST_BYTES = 2**16, 2**24
_SHARE = 10
#: Relative rounding of a layer, float32 on the CPU and TF32 on a GPU, and how many may add up.
_ROUNDING, _LAYERS = defaultdict(lambda: 2.0**-10, cpu=2.0**-16), 16
_NAMED = 6

Compute = Callable[[Any, int], Tensor]
"""From a batch and a seed to the values of a model in evaluation mode."""


def limit_bytes(model: nn.Module) -> int:
    """The bytes that a checkpoint may have beside a model's weights, to tell whether another is the same."""
    return max(LEAST_BYTES, sum(tensor.nbytes for tensor in find_tensors(own_state(model))) // _SHARE)


def find_rounding(model: nn.Module, device: torch.device) -> float:
    """Return the relative rounding of a model's outputs, by the type of its weights and its device."""
    widths = [torch.finfo(weight.dtype).eps for weight in model.parameters() if weight.is_floating_point()]
    return _LAYERS * max(*widths, _ROUNDING[device.type], 0.0)


class Answers:
    """The answers of a member in training; all ranks call the methods together, as its model may need them all."""

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._code = code_of(state.ensemble).fingerprint  # before training changes a global variable
        self._batch: Any = None

    def record(self) -> dict[str, Any] | None:
        """What the weights that count answer; None where no split was read, or nothing says what is predicted."""
        state = self._state
        try:
            self._batch = self._read_batch() if self._batch is None else self._batch
            if not self._batch:
                return None
            with self._answering() as (model, compute):
                values = compute(_unpack(self._batch, state.device), state.identity.seed).cpu()
        except OutputError:
            return None
        except Exception as error:  # of the user's code, which trains all the same
            self._batch = {}
            state.reporter.log(f"load will not check the model: a few samples alone fail: {describe_error(error)}")
            return None
        rounding = find_rounding(model, state.device)
        about = {"seed": state.identity.seed, "code": self._code}
        return {"batch": self._batch, "values": values, "rounding": rounding, **about}

    def explain_other(self, saved: Mapping[str, Any] | None) -> str | None:
        """See `explain_other_answers`; None as well where the code is another, or the model cannot answer yet."""
        if saved is not None and self._state.can_predict and saved["code"] == self._code:
            with contextlib.suppress(Exception), self._answering() as (model, compute):  # it may not be complete
                return explain_other_answers(saved, model, self._state.device, compute)
        return None

    @contextlib.contextmanager
    def _answering(self) -> Iterator[tuple[nn.Module, Compute]]:
        """Yield the model as it is loaded, with the weights that count, not compiled, and what it predicts."""
        state, model = self._state, self._state.optimization.model

        def compute(batch: Any, seed: int) -> Tensor:
            with seeded(seed, state.device):
                return predict_batch(state, model, batch)

        with state.optimization.kept.counting(), evaluation_mode(model), torch.no_grad():
            compiled = vars(model).pop("forward", None) if state.identity.compile is not None else None
            try:
                yield model, compute
            finally:
                if compiled is not None:
                    model.forward = compiled

    def _read_batch(self) -> Any:
        """A few samples of the first split that the member has read; empty where they are too large."""
        state, splits = self._state, self._state.splits
        if not state.can_predict or not splits or not state.data.has_read(splits[0]):
            return None
        for samples, limit in ((SAMPLES, limit_bytes(state.optimization.model)), (1, MOST_BYTES)):
            batch = state.data.read_first(splits[0], samples, state.collate)
            if sum(tensor.nbytes for tensor in find_tensors(batch)) <= limit:
                return _pack(batch)
        return {}


def _pack(value: Any) -> Any:
    """A batch, or a part of one, as a checkpoint can have it; raises TypeError where it has objects."""
    if isinstance(value, Tensor):
        return value.cpu().clone()
    if isinstance(value, Mapping):
        return {name: _pack(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_pack, value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a batch holds a {type(value).__name__}")


def _unpack(value: Any, device: torch.device) -> Any:
    if isinstance(value, Mapping):
        return {name: _unpack(field, device) for name, field in value.items()}
    if isinstance(value, list) and value and all(isinstance(sample, Tensor) for sample in value):
        value = Ragged(value, value[0][:0])
    return map_tensors(value, lambda tensor: tensor.to(device, copy=True))  # a loss may write into it


def explain_other_answers(
    saved: Mapping[str, Any], model: nn.Module, device: torch.device, compute: Compute
) -> str | None:
    """Why a model is not the one that gave these answers; None where it is.

    A model that draws gives other ones on another device: it may differ by as much as from itself.
    """
    batch, expected, seed = saved["batch"], saved["values"], saved["seed"]
    values = compute(_unpack(batch, device), seed).cpu()
    if values.shape != expected.shape:
        return f"it gives values of shape {list(values.shape)}, before {list(expected.shape)}"
    difference = find_difference(values, expected)
    rounding = max(saved["rounding"], _LAYERS * _ROUNDING[device.type])  # of either device
    allowed = rounding * float(expected.nan_to_num(0, 0, 0).abs().max())
    own = (
        0.0 if difference <= allowed else find_difference(compute(_unpack(batch, device), seed + 1).cpu(), values)
    )
    if difference <= allowed or (own > allowed and difference <= 4 * own):
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
        f"its predictions of {len(expected)} samples of validation data differ by up to {difference:.3g} from "
        f"those before it was saved; rounding explains only {allowed:.1g} ({cause})"
    )


def find_difference(values: Tensor, others: Tensor) -> float:
    """The largest difference; NaN where only one of two values is NaN."""
    is_same = (values == others) | (values.isnan() & others.isnan())
    return float(torch.where(is_same, 0, (values - others).abs()).amax()) if values.numel() else 0.0
