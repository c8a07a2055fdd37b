"""Explains errors in a model or a loss: which layer, what it expects, what it was given, and of which field.

torch names neither the layer nor the field. Both are found in the frames of the traceback once a member has
failed: what runs is not touched.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ensemble.spec import SpecError, unknown_name
from ensemble.store import StoreError
from ensemble.train.job import TrainingError

#: Errors that the same step raises each time. Of the other ones some pass: a file that is not there yet.
_REPEATABLE = (TypeError, LookupError, AttributeError, NameError, NotImplementedError)
#: Parts of torch's messages about shapes and types, and of those about devices, which may pass.
_MISMATCH = re.compile(
    r"\b(shapes?|sizes?|dtypes?|types?|dims?|dimensions?|channels?|targets?|elements|not implemented for)\b"
)
_OF_DEVICE = re.compile(r"CUDA|CUBLAS|CUDNN|NCCL|HIP|device-side", re.IGNORECASE)
_OURS = ("ensemble", "pipelines")
#: Errors that say little of a mistake that is often made -> what to do. No other attempt helps.
_ADVICE = {
    r"AssertionError: Torch not compiled with CUDA": "leave .cuda() out: devices= moves members",
    r"BdbQuit|EOFError: EOF when reading a line": "a member has no terminal: debug with executor='inline'",
    r"SystemExit": "the member's code ended the program: return, or raise an error",
    r"to unpack \(expected": "a batch is a dict of fields: fields=('x', 'label') makes it a tuple",
    r"must be Tensor, not [A-Z](?!oneType)": "Recipe.loss is called as loss(model, batch), outputs are model(...)",
    r"'Hyperparameters' object has no attribute 'suggest": "params have values: a Search(space) suggests them",
    r"type float at pos|'float' object cannot be interpreted": "integer(8, 64, log=True) searches whole numbers",
    r"no attribute 'world'": "the member is the first argument, and the model the second",
    r"required positional argument: 'self'": "give an instance of the class, not the class",
    r"did not return a loss from the inputs": "fields= needs the labels, by the model's name for them",
}

#: Functions and layers whose target is classes.
_OF_CLASSES = frozenset(("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"))


def describe_error(error: BaseException) -> str:
    """What ended a member, in one line for the user."""
    line = next(iter(str(error).splitlines()), "") or "no message"
    if isinstance(error, TrainingError | SpecError | StoreError):
        return line
    shown = f"{type(error).__name__}: {line}"
    return "; ".join(filter(None, (shown, find_advice(shown), explain_forward_error(error))))


def find_advice(line: str) -> str | None:
    """What to do about an error that says little by itself, `TYPE: MESSAGE`; None where nothing is known."""
    return next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, line)), None)


def is_repeatable(error: BaseException) -> bool:
    """Whether a first step that raised this error in the user's code would raise it again: wrong shapes, dtypes,
    keys, names."""
    frames = _list_frames(error)
    if frames and str(frames[-1].f_globals.get("__name__")).partition(".")[0] in _OURS:
        return False
    if find_advice(f"{type(error).__name__}: {error}") is not None:
        return True
    if isinstance(error, RuntimeError | ValueError) and not isinstance(error, NotImplementedError):
        text = str(error)
        return _MISMATCH.search(text) is not None and _OF_DEVICE.search(text) is None
    return isinstance(error, _REPEATABLE)


def explain_forward_error(error: BaseException, batch: Mapping[str, Any] | None = None) -> str | None:
    """What a layer or a loss expects and what it was given, where one of torch or the user's raised the error.

    Args:
        batch: that a loaded model was called with; None: the member was in training, and it is in a frame.

    Returns:
        None where the error was not raised in one, or nothing is known of its tensors.
    """
    frames = _list_frames(error)
    if batch is not None and _reads_missing_field(error, batch, frames[-1]):
        missing = unknown_name("the batch has no field", error.args[0], list(batch))
        return f"{missing}; give it, or write a Recipe.predict(model, batch) that does without it"
    layers = [frame for frame in frames if _is_forward(frame)]
    call = next((frame for frame in reversed(frames) if frame in layers or _is_function(frame)), None)
    if call is None:
        return None
    if _is_function(call) and layers and _is_of_torch(type(layers[-1].f_locals["self"])):
        call = layers[-1]  # a layer of torch calls a function of torch
    given = {name: value for name in _list_arguments(call) if isinstance(value := call.f_locals[name], Tensor)}
    if not given:
        return None
    split = next((frame.f_locals["split"] for frame in frames if _has_split(frame)), "train")
    of, whose = f" of Ensemble.{split}", f"the batch of Ensemble.{split}"
    if batch is not None:
        of, whose, split = "", "the batch", ""
    batch = _find_batch(frames) if batch is None else batch
    shown = {name: _show(value) for name, value in given.items()}
    fields = {name: field for name, value in given.items() if (field := _find_field(value, batch)) is not None}
    parts = [
        (f"{name} " if len(given) > 1 else "")
        + shown[name]
        + (f", the field {fields[name]!r}{of}" if name in fields else "")
        for name in given
    ]
    if not fields and batch:
        has = [f"{name!r} {_show(each)}" for name, each in batch.items() if isinstance(each, Tensor)]
        parts.append(f"where {whose} has {', '.join(has)}")
    which, expected, remedy = _describe_call(call, layers, given, fields)
    wanted = f" expects {expected} and" if expected else ""
    remedy = remedy if split == "train" else ""  # training fits the layer
    return f"{which}{wanted} was given {', '.join(parts)}{f'; {remedy}' if remedy else ''}"


def _reads_missing_field(error: BaseException, batch: Mapping[str, Any], frame: FrameType) -> bool:
    if not isinstance(error, KeyError) or not isinstance(error.args[0], str) or error.args[0] in batch:
        return False
    return any(isinstance(value, Mapping) and value.keys() >= batch.keys() for value in frame.f_locals.values())


def _list_frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)


def _is_function(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "torch.nn.functional"


def _is_of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.")


def _has_split(frame: FrameType) -> bool:
    of_training = str(frame.f_globals.get("__name__")).startswith("ensemble.train.")
    return of_training and isinstance(frame.f_locals.get("split"), str)


def _list_arguments(frame: FrameType) -> list[str]:
    """The names of the arguments of a call that still have a value, without `self`."""
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name != "self" and name in frame.f_locals]


def _find_batch(frames: list[FrameType]) -> Mapping[str, Any]:
    """The batch of the innermost frame that has one."""
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, Mapping) and isinstance(value.get("index"), Tensor):
                return value
    return {}


def _find_field(value: Tensor, batch: Mapping[str, Any]) -> str | None:
    """The field of a batch that a tensor is, or is a view of."""
    for name, field in batch.items():
        if isinstance(field, Tensor) and (field is value or field.data_ptr() == value.data_ptr() != 0):
            return name
    return None


def _show(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {_name(tensor.dtype)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_call(
    call: FrameType, layers: list[FrameType], given: Mapping[str, Tensor], fields: Mapping[str, str]
) -> tuple[str, str, str]:
    """Which layer or function it is, what that expects, and what would fit."""
    if call not in layers:
        which, expected, remedy = call.f_code.co_name, "", ""
        kind = which
    else:
        layer = call.f_locals["self"]
        which, kind = _locate(layer, layers[0].f_locals["self"]), type(layer).__name__
        expected, remedy = _describe_layer(layer, next(iter(given.values())), next(iter(fields.values()), None))
    target = given.get("target")
    if kind in _OF_CLASSES and target is not None and len(given) > 1:
        scores = next(iter(given.values()))
        is_shares = target.is_floating_point() and target.shape == scores.shape
        if not is_shares and (target.is_floating_point() or target.dim() >= scores.dim()):
            classes = [*scores.shape[:1], *scores.shape[2:]]
            expected = f"a target of classes, {classes} int64,"
            remedy = f"let a stage return {fields.get('target', 'the label')!r} so"
    return which, expected, remedy


def _locate(layer: nn.Module, model: nn.Module) -> str:
    """A layer by its name in the model, and its class."""
    name = next((name for name, each in model.named_modules() if each is layer), "")
    shown = " ".join(repr(layer).split()) if _is_of_torch(type(layer)) else type(layer).__name__
    shown = shown if len(shown) <= 80 else type(layer).__name__
    return f"the layer {name!r}, {shown}," if name else f"{shown}.forward"


def _describe_layer(layer: nn.Module, given: Tensor, field: str | None) -> tuple[str, str]:
    """What a layer of torch expects, and what would fit; empty strings where that is not known."""
    if isinstance(layer, nn.Embedding):
        fits = given.dtype in (torch.int32, torch.int64)
        is_read = fits and given.numel() and given.device.type == "cpu"
        span = f" (they are {int(given.min())} ... {int(given.max())})" if is_read else ""
        return f"integers of 0 ... {layer.num_embeddings - 1}{span}", "" if fits else "they are int64"
    weight = next((each for each in layer.parameters(recurse=False)), None)
    if weight is None or not _is_of_torch(type(layer)):
        return "", ""
    size, option, axis = _find_size(layer)
    if size is None:
        return "", ""
    expected = f"[{', '.join(size)}] {_name(weight.dtype)}"
    # Where autocast is on, layers cast what is of another precision.
    is_cast = given.dtype.is_floating_point and torch.is_autocast_enabled(given.device.type)
    if given.dtype != weight.dtype and not is_cast:
        return expected, f"let a stage return {field or 'it'!r} as {_name(weight.dtype)}"
    has_axes = "..." in size or len(size) == given.dim()
    if isinstance(layer, nn.Linear) and given.dim() > 2 and given[0].numel() == layer.in_features:
        return expected, "nn.Flatten() before it would fit"
    if option and has_axes and given.dim() > abs(axis) - (axis < 0):
        return expected, f"{option}={given.shape[axis]} would fit"
    return expected, ""


def _find_size(layer: nn.Module) -> tuple[list[str] | None, str, int]:
    """The axes that a layer expects, the option that says the size of one of them, and which axis that is."""
    if isinstance(layer, nn.Linear):
        return ["...", str(layer.in_features)], "in_features", -1
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return ["b", str(layer.in_channels), *"dhw"[-len(layer.kernel_size) :]], "in_channels", 1
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return ["b", str(layer.num_features), "..."], "num_features", 1
    if isinstance(layer, nn.LayerNorm):
        return ["...", *map(str, layer.normalized_shape)], "", -1
    if isinstance(layer, nn.RNNBase):
        axes = ("b", "steps") if layer.batch_first else ("steps", "b")
        return [*axes, str(layer.input_size)], "input_size", -1
    return None, "", 0
