"""Runs the combined members as one torch module. Imports torch, so `load` imports it only when it is called."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ensemble.combine import formulas
from ensemble.combine.calibrators import Temperature, load_calibrator
from ensemble.combine.combination import Combination, Combine
from ensemble.combine.member_calls import MemberCall, WithoutFastPath, has_attention, is_traced
from ensemble.combine.metrics import CombineError
from ensemble.combine.tasks import find_math
from ensemble.train.forward_errors import explain_forward_error, is_repeatable
from ensemble.train.pickled import join_tensors, split_tensors
from pipelines.loader.ragged import find_tensors, map_tensors
from pipelines.samples.structure import advise_image_size

ONE_SAMPLE = "samples lie along the first axis: one sample x is the batch x[None]"


class EnsembleModel(nn.Module):
    """Maps a batch dict to values float32 [b, ...] of the ensemble's task, by all members that have a weight.

    The batch is moved to where the weights are: `.to("cuda")` moves the whole ensemble. Members compute in float32
    (their outputs under autocast while training differ by its rounding), without torch's fast path of attention.
    Parameters are frozen, so that no graph is kept; gradients with respect to the batch still flow.

    `copy.deepcopy`, `torch.compile` and `torch.export.export(model, (dict(batch),), strict=False)` take it as any
    module. `torch.save(model, file)` stores it with the code of the run's declaration: `torch.load(file,
    weights_only=False)` needs `ensemble`, and of the user's modules those that could be imported by name where it
    was saved. As any pickle it runs code: load none that you do not trust.

    Attributes:
        task: what `values` are (`ensemble.spec.task`).
        classes: names of the classes or labels in the order of `values`; None where they are not known.
        member_ids: of the members in it, in the order of `weights`.
        method: average, weighted, greedy, stack, or function for the user's.
        calibration: the parameters of the calibrator, such as the temperature; 1.0 for none.
        thresholds: by which classes or labels are predicted, float32 [C] (`Ensemble.thresholds`): it then returns
            a dict: `values`, and `decision`, the classes int64 [b, ...] or labels bool [b, L]; None for none.
        uncertainty: whether it returns a dict: `values` [b, ...] and, [b] each, those of `total`, `aleatoric`,
            `epistemic` and `disagreement` that have a meaning for the task (`ensemble.combine.uncertainty`): means
            over all positions of the sample, for nothing but targets says which of them are padding.
    """

    weights: Tensor
    thresholds: Tensor | None
    #: Within it a base that members share is computed once.
    once: Callable[[], contextlib.AbstractContextManager[None]] = staticmethod(contextlib.nullcontext)

    def __init__(
        self,
        members: Mapping[str, nn.Module],
        calls: Mapping[str, MemberCall],
        combination: Combination,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        uncertainty: bool = False,
        classes: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.task = combination.task
        self.classes = None if classes is None else tuple(classes)
        self.calls = dict(calls)  # of each member: they may have been trained with other code
        self.shapes = dict(shapes or {})  # of the fields of one sample in training, as far as they are known
        self.member_ids = list(members)
        self.members = nn.ModuleDict(members)
        self.method = combination.method
        self.calibration = combination.calibration
        calibrator = combination.calibrator or find_math(combination.task).calibrator
        self._calibrator = None if calibrator is None else load_calibrator(calibrator, combination.task)
        self.uncertainty = uncertainty
        self._attentive = {name for name, model in members.items() if has_attention(model)}
        self.register_buffer("weights", torch.tensor(combination.weights, dtype=torch.float32))
        thresholds = combination.thresholds
        self.register_buffer(
            "thresholds", None if thresholds is None else torch.tensor(thresholds, dtype=torch.float32)
        )
        self.stack = None if combination.stack is None else StackModel(combination.stack)
        self.function = combination.function
        self.requires_grad_(False)
        self.eval()

    @property
    def temperature(self) -> float:
        """Of the calibration of probabilities, 1.0 for none."""
        return float(self.calibration) if isinstance(self._calibrator, Temperature) else 1.0

    @property
    def fields(self) -> list[str]:
        """The fields of a batch that the members' models are called with, as their training has shown; none where
        it has not.
        """
        fields = dict[str, None]()
        for call in self.calls.values():
            seen = call.seen.call
            if seen is None or call.recipe.predict is not None or None in (*seen.args, *seen.kwargs.values()):
                return []
            fields |= dict.fromkeys(seen.list_needed(call.recipe.target))
        return list(fields)

    def forward(self, batch: Mapping[str, Any]) -> Tensor | dict[str, Tensor]:
        """Values of a batch with the fields that the members' models (or `Recipe.predict`) read.

        Raises:
            CombineError: a field lacks its first axis (one sample is a batch [1, ...]), or a member's answers are
                not what the task says, one row a sample.
        """
        self._check_axes(batch)
        batch = _move(batch, self.weights.device)
        with self.once():
            outputs = [self._predict_member(name, batch) for name in self.member_ids]
        values = self._pool(outputs)
        if self._calibrator is not None and self.calibration != 1.0:
            values = self._calibrator.apply(self.task, values, self.calibration)
        more: dict[str, Tensor] = {}
        if self.thresholds is not None:
            more["decision"] = formulas.decide(self.task, values, self.thresholds)
        if self.uncertainty:
            parts = formulas.decompose(self.task, outputs, self.weights)
            more |= {part: one.flatten(1).mean(dim=1) if one.dim() > 1 else one for part, one in parts.items()}
        return {"values": values, **more} if more else values

    def _pool(self, outputs: list[Tensor]) -> Tensor:
        if self.function is not None:
            return self._call_function(self.function, outputs)
        if self.stack is not None:
            stacked: Tensor = self.stack(outputs)
            return stacked
        mixed: Tensor = formulas.mix(self.task, outputs, self.weights)
        return mixed

    def _call_function(self, function: Combine, outputs: list[Tensor]) -> Tensor:
        values: Tensor = torch.as_tensor(function(torch.stack(outputs))).float()
        if not is_traced():
            why = formulas.explain_invalid(self.task, values.detach(), read=values.device.type != "meta")
            same = slice(1) if self.task.kind == "free" else slice(None)
            if why is None and values.shape[same] != outputs[0].shape[same]:
                why = f"values of shape {list(values.shape)} for the members' {list(outputs[0].shape)}"
            if why is not None:
                raise CombineError(f"Ensemble.combine gives {why}")
        normalised: Tensor = formulas.normalise(self.task, values)
        return normalised

    def _predict_member(self, name: str, batch: Mapping[str, Any]) -> Tensor:
        model, call = self.members[name], self.calls[name]
        with WithoutFastPath() if name in self._attentive else contextlib.nullcontext():
            values = self._compute_values(call, model, name, batch)
        if not is_traced():
            self._check_values(name, values, batch)
        normalised: Tensor = formulas.normalise(self.task, values)
        return normalised

    def _compute_values(self, call: MemberCall, model: nn.Module, name: str, batch: Mapping[str, Any]) -> Tensor:
        if is_traced():
            return call.compute_values(model, batch)
        try:
            return call.compute_values(model, batch)
        except Exception as error:
            why = explain_forward_error(error, batch) if is_repeatable(error) else None
            if why is None:
                raise
            raise CombineError(f"{name} cannot predict this batch: {why}{self._explain_sizes(batch)}") from error

    def _explain_sizes(self, batch: Mapping[str, Any]) -> str:
        """The end of a message on a field of another shape than in training: both shapes, and what to do."""
        for field, value in batch.items():
            own = tuple(value.shape[1:]) if isinstance(value, Tensor) else ()
            wanted = self.shapes.get(field, own)
            if own != wanted:
                advice = advise_image_size(field, own, wanted) or "prepare it as the training data were"
                return f"; {field!r} was {list(wanted)} in training and is {list(own)} here: {advice}"
        return ""

    def _check_values(self, name: str, values: Tensor, batch: Mapping[str, Any]) -> None:
        predicts = self.calls[name].recipe.predict is not None  # else the values are of a softmax, say
        why = formulas.explain_invalid(self.task, values.detach(), read=predicts and values.device.type != "meta")
        if why is not None:
            source = "Recipe.predict" if predicts else "the model"
            raise CombineError(f"{source} gives {name} {why}")
        lists = [value for value in batch.values() if isinstance(value, list)]
        tensors = find_tensors([value for value in batch.values() if not isinstance(value, list)])
        rows = {len(one) for one in lists} | {len(tensor) for tensor in tensors if tensor.dim()}
        if rows and len(values) not in rows:
            raise CombineError(f"{name} gives {len(values)} rows for a batch of another size; {ONE_SAMPLE}")

    def _check_axes(self, batch: Any) -> None:
        if not isinstance(batch, Mapping):
            names = ", ".join(f"{name!r}: ..." for name in self.fields)
            raise CombineError(
                f"the model is called with a batch, a dict of tensors such as {{{names}}}, not with a "
                f"{type(batch).__name__}"
            )
        for field, value in batch.items():
            if isinstance(value, np.ndarray):
                raise CombineError(f"the batch's {field!r} is a numpy array: give torch.from_numpy(...) of it")
            if isinstance(value, Tensor) and value.dim() != 1 + len(self.shapes.get(field, value.shape[1:])):
                shape = list(value.shape)
                wanted = f"{1 + len(self.shapes[field])} axes" if field in self.shapes else "one axis or more"
                raise CombineError(f"the batch's {field!r} has shape {shape}, not {wanted}; {ONE_SAMPLE}")

    def extra_repr(self) -> str:
        """The combination in a line, for print(model)."""
        shares = ", ".join(f"{m}: {w:.3f}" for m, w in zip(self.member_ids, self.weights.tolist(), strict=True))
        calibration = f"{self.calibration:.4g}" if isinstance(self.calibration, float) else self.calibration
        return f"method={self.method!r}, calibration={calibration}, weights={{{shares}}}"

    def __deepcopy__(self, memo: dict[int, Any]) -> EnsembleModel:
        """A copy, as of any module, although it is pickled in another way."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """How it is pickled: see `ensemble.train.pickled`."""
        return restore_model, split_tensors(self.__dict__)


class StackModel(nn.Module):
    """A fitted `stacks.Stack` whose arrays are buffers: members' values, a list of [b, ...], to one [b, ...]."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.fitted = stack
        for name, part in stack.list_arrays().items():
            dtype = torch.float32 if part.dtype.kind == "f" else None
            self.register_buffer(name, torch.tensor(part, dtype=dtype))

    def forward(self, outputs: Sequence[Tensor]) -> Tensor:
        """What the stack makes of them."""
        buffers: dict[str, Any] = dict(self.named_buffers())
        values: Tensor = replace(self.fitted, **buffers).apply(outputs)
        return values


def restore_model(content: bytes, tensors: list[Tensor]) -> EnsembleModel:
    """The model that was pickled as this content and these tensors."""
    model = EnsembleModel.__new__(EnsembleModel)
    model.__dict__.update(join_tensors(content, tensors))
    return model


def _move(batch: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
    """The batch with its tensors on `device`; itself when they are there."""
    if all(tensor.device == device for tensor in find_tensors(batch)):
        return batch
    return {name: map_tensors(value, lambda tensor: tensor.to(device)) for name, value in batch.items()}
