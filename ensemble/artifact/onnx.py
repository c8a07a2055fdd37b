"""Writes a program as ONNX, and holds it against the model by onnxruntime. Needs the extra `onnx`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.artifact.layout import ArtifactError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor
    from torch.export import ExportedProgram

#: By how much a number may differ, of its size where that is above 1.
TOLERANCE = 1e-5
_NEEDED = ("onnx", "onnxscript", "onnxruntime")


def check_installed() -> None:
    """Raises where what writes and runs ONNX is not installed.

    Raises:
        ArtifactError: see above.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ArtifactError(
            f"ONNX needs {', '.join(missing)}, not installed here: pip install 'ray-ensemble[onnx]'"
        )


def save_onnx(
    path: Path, program: ExportedProgram, batches: Sequence[tuple[Mapping[str, Tensor], Tensor]]
) -> float:
    """Write a program as ONNX, if onnxruntime computes what the model computes.

    Args:
        path: of the file.
        program: takes one batch and returns one tensor.
        batches: pairs of a batch and the values that the model gives for it.

    Returns:
        The largest difference between the two, in parts of what is larger, 1 or the number.

    Raises:
        ArtifactError: it cannot be written, or differs by more than `TOLERANCE`.
    """
    import onnxruntime
    import torch

    from ensemble.artifact.program import as_outputs, silence

    names, made_of = list(batches[0][0]), list(as_outputs(batches[0][1]))
    try:
        with silence():
            made = torch.onnx.export(
                program, input_names=names, output_names=made_of, dynamo=True, verbose=False, optimize=True
            )
            assert made is not None
            made.save(path, external_data=False)
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        apart = 0.0
        for batch, values in batches:
            given = {name: value.numpy() for name, value in batch.items()}
            wanted = as_outputs(values)
            for name, found in zip(made_of, session.run(made_of, given), strict=True):
                if name != "decision":  # which follows from the values, and is another one within their rounding
                    apart = max(apart, measure_difference(found, wanted[name].numpy()))
    except Exception as error:  # of torch, onnxscript or onnxruntime, which share no class
        reason = " ".join(str(error).split())
        raise ArtifactError(
            f"the model cannot be written as ONNX: {type(error).__name__}: {reason[:200]}; export without --onnx"
        ) from error
    if apart > TOLERANCE:
        raise ArtifactError(
            f"ONNX differs from load() by {apart:.3g}, more than {TOLERANCE:g}; export without --onnx"
        )
    return apart


def measure_difference(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """The largest difference of two arrays, in parts of what is larger, 1 or the number.

    Infinite where their shapes differ, or where one has a NaN or an infinity that the other has not.
    """
    import numpy as np

    if found.shape != wanted.shape:
        return float("inf")
    one, other = found.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return float("inf")
    apart = np.abs(one[finite] - other[finite]) / np.maximum(1.0, np.abs(other[finite]))
    return float(apart.max(initial=0.0)) if np.isfinite(apart).all() else float("inf")
