"""Saves and loads a member's predictions on a split, for selection, calibration and combination. Needs no torch.

One safetensors file: `probabilities` float32 [n, C], `index` int64 [n], `target` int64 [n] where there is one.
Rows are kept in the order of `index`, so that those of two members stand side by side.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.store.files import StoreError, make_directory, pin_file, write_bytes

VERSION = "1"


@dataclass(frozen=True)
class Predictions:
    """A member's class probabilities for each sample of a split.

    Attributes:
        probabilities: float32 [n, C].  index: int64 [n], the samples' indices, ascending.
        target: int64 [n], the true classes, or None.
    """

    probabilities: npt.NDArray[np.float32]
    index: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64] | None


def save_predictions(path: str | os.PathLike[str], probabilities: Any, index: Any, target: Any | None) -> None:
    """Writes predictions atomically; arrays or CPU tensors with shapes [n, C], [n], [n] in any row order.

    Raises:
        ValueError: shapes do not fit, or an index is there twice.
        WriteError: the file cannot be written.
    """
    from safetensors.numpy import save

    rows, order = np.asarray(probabilities, dtype=np.float32), np.asarray(index, dtype=np.int64)
    if rows.ndim != 2 or order.shape != (len(rows),):
        raise ValueError(f"{path}: probabilities [n, C] and index [n] have shapes {rows.shape} and {order.shape}")
    by_index = np.argsort(order, kind="stable")
    order = order[by_index]
    if (twice := order[1:][order[1:] == order[:-1]]).size:
        raise ValueError(f"{path}: index {twice[0]} is there twice; every sample is predicted once")
    tensors: dict[str, npt.NDArray[Any]] = {"probabilities": np.ascontiguousarray(rows[by_index]), "index": order}
    if target is not None:
        truth = np.asarray(target, dtype=np.int64)
        if truth.shape != order.shape:
            raise ValueError(f"{path}: target must have shape {order.shape}, got {truth.shape}")
        tensors["target"] = truth[by_index]
    file = Path(path)
    make_directory(file.parent)
    write_bytes(file, save(tensors, metadata={"ensemble.predictions": VERSION}))


def load_predictions(path: str | os.PathLike[str]) -> Predictions:
    """Read what `save_predictions` wrote.

    Raises:
        StoreError: there is no such file, or it holds something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with pin_file(path) as name, safe_open(name, framework="numpy") as file:
            version = (file.metadata() or {}).get("ensemble.predictions")
            if version != VERSION:
                raise StoreError(f"{path} holds no predictions of version {VERSION} (version {version})")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist: the member has not saved predictions for that split") from None
    except (OSError, SafetensorError) as error:
        raise StoreError(f"cannot read {path}: {error}") from None
    return Predictions(tensors["probabilities"], tensors["index"], tensors.get("target"))
