"""Describes errors in a model or a loss: in which layer, and what the batch had; torch names neither.

Both are found in the frames of the traceback once a member has failed: what runs is not touched.
"""

from __future__ import annotations

import dis
import re
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

from ensemble.spec import SpecError, unknown_name
from ensemble.store import StoreError
from ensemble.train.job import TrainingError
from ensemble.train.own_tensors import call_model

#: Errors that the same step raises each time. Of the other ones some pass: a file that is not there yet.
_REPEATABLE = (TypeError, LookupError, AttributeError, NameError, NotImplementedError)
_OURS = ("ensemble", "pipelines")
#: Of errors raised in a line of this project that are the user's: a function that takes other arguments is called,
#: or an operation that torch does not have.
_OF_THE_CALL = re.compile(r"\(\) (takes|got|missing)|not callable|aten::")
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
    r"got Double and Float|Float but found Double|type Double but": "a field is of float64, the model of float32: "
    ".map(stages.cast(FIELD, 'float32'))",
    r"did not return a loss from the inputs": "fields= needs the labels, by the model's name for them",
}


def describe_error(error: BaseException) -> str:
    """What ended a member, in one line for the user."""
    line = next(iter(str(error).splitlines()), "") or "no message"
    if (place := find_own_mistake(error)) is not None:
        return f"an error inside ray-ensemble ({place}): {type(error).__name__}: {line}; please report it"
    if isinstance(error, TrainingError | SpecError | StoreError):
        return line
    shown = f"{type(error).__name__}: {line}"
    return "; ".join(
        filter(None, (shown, find_advice(shown), _describe_model_call(error) or explain_forward_error(error)))
    )


def _describe_model_call(error: BaseException) -> str | None:
    """Where in `Recipe.model` an error was raised, and with which hyperparameters; None: not there."""
    call = next((frame for frame in _list_frames(error) if frame.f_code is call_model.__code__), None)
    return (
        None if call is None else f"in model(params){find_line(error)} with params {dict(call.f_locals['params'])}"
    )


def find_own_mistake(error: BaseException) -> str | None:
    """The file and line of this project that failed; None where the user or the machine is at fault.

    What it raises on purpose is for the user, and so is what torch and numpy say of tensors: a RuntimeError or a
    ValueError.
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or not isinstance(error, (*_REPEATABLE, ArithmeticError, AssertionError)):
        return None
    frame, text = last.tb_frame, f"{type(error).__name__}: {error}"
    module, is_usual = str(frame.f_globals.get("__name__")), type(error).__module__ == "builtins"
    is_meant = frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    is_meant &= not isinstance(error, NotImplementedError | AssertionError)
    if module.partition(".")[0] not in _OURS or not is_usual or is_meant:
        return None
    if _OF_THE_CALL.search(text) or find_advice(text) is not None:
        return None
    return f"{module.replace('.', '/')}.py, line {last.tb_lineno}"


def find_line(error: BaseException) -> str:
    """Return where in the user's code an error was raised, ` (FILE, line N)`; empty where it was not there."""
    libraries = ("<", "site-packages", "dist-packages", *(f"/{package}/" for package in _OURS), sys.base_prefix)
    places = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__))
    own = [
        f" ({Path(file).name}, line {line})" for file, line in places if not any(one in file for one in libraries)
    ]
    return own[-1] if own else ""


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
    is_of_torch = type(error) in (RuntimeError, ValueError) and explain_forward_error(error) is not None
    return isinstance(error, _REPEATABLE) or (is_of_torch and "CU" not in str(error))  # no CUDA, CUDNN, CUBLAS


def explain_forward_error(error: BaseException, batch: Mapping[str, Any] | None = None) -> str | None:
    """In which layer an error was raised, and the fields of the batch; None where it was not in a model.

    Args:
        batch: that a loaded model was called with; None: the member was in training, and it is in a frame.
    """
    frames = _list_frames(error)
    if batch is not None and isinstance(error, KeyError) and error.args[0] not in batch:
        missing = unknown_name("the batch has no field", str(error.args[0]), list(batch))
        return f"{missing}; give it, or write a Recipe.predict(model, batch) that does without it"
    layers = [frame.f_locals["self"] for frame in frames if _is_forward(frame)]
    if not layers:
        return None
    fields = _find_batch(frames) if batch is None else batch
    shown = [
        f"{name!r} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in fields.items()
        if isinstance(value, Tensor)
    ]
    layer = " ".join(repr(layers[-1]).split())
    where = layer if len(layer) <= 80 else type(layers[-1]).__name__
    return f"in {where}" + (f", where the batch has {', '.join(shown)}" if shown else "")


def _list_frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module)


def _find_batch(frames: list[FrameType]) -> Mapping[str, Any]:
    """The batch of the innermost frame that has one."""
    for frame in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, Mapping) and isinstance(value.get("index"), Tensor):
                return value
    return {}
