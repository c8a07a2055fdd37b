"""Gathers results of all ranks: JSON values, rows of predictions, means over samples and over their positions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ensemble.comm import Communicator
from ensemble.store import PredictedRows
from ensemble.train.job import TrainingError


def gather_json(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's JSON value, by rank; floats keep all their bits."""
    if comm.world == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(share.tolist())) for share in comm.all_gather(text)]


def gather_rows(comm: Communicator, rows: Tensor | None) -> Tensor | None:
    """All ranks' rows, in rank order, on the CPU; a rank without rows may give None."""
    rows = None if rows is None else rows.detach().cpu().contiguous()
    if comm.world == 1:
        return rows
    layout = find_first(comm, None if rows is None else [str(rows.dtype), list(rows.shape[1:])])
    if layout is None:
        return None
    if rows is None:
        rows = torch.empty((0, *layout[1]), dtype=getattr(torch, layout[0].removeprefix("torch.")))
    return torch.cat(comm.all_gather(rows))


def gather_predictions(comm: Communicator, rows: PredictedRows, together: PredictedRows) -> PredictedRows:
    """The predictions of all ranks on rank 0, in `together`, some at a time; of one rank alone its own."""
    if comm.world == 1:
        return rows
    kept = None if rows.positions is None else rows.positions.tolist()
    layout = find_first(comm, [rows.tail, kept] if len(rows) else None)
    if layout is not None and layout[1] is not None:
        together.tail, together.positions = layout[0], np.array(layout[1])
    pieces = rows.pieces()
    for _ in range(max(gather_json(comm, rows.count_pieces()))):
        parts = (None if part is None else torch.from_numpy(part.copy()) for part in next(pieces, [None] * 4))
        shares = [gather_rows(comm, part) for part in parts]
        values, lengths, index, target = (None if share is None else share.numpy() for share in shares)
        if comm.rank == 0 and values is not None:
            together.add_flat(values, lengths, index, target)
    if rows.fields:
        indices = gather_rows(comm, torch.from_numpy(rows.index))
        assert indices is not None
        # Rows came in pieces of all ranks by turns, fields come rank by rank.
        order = indices.numpy().argsort(kind="stable")
        places = order[np.searchsorted(indices.numpy(), together.index, sorter=order)]
        for name, own in rows.fields.items():
            values = _gather_field(comm, own)
            if values is not None:
                together.fields[name] = [values[places]]
    return together


def _gather_field(comm: Communicator, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    """The values of a field of all ranks, rank by rank: numbers, or texts; None where the split lacks it."""
    own = np.ascontiguousarray(np.concatenate(parts)) if parts else None
    described = find_first(comm, None if own is None else [own.dtype.kind, own.dtype.str, list(own.shape[1:])])
    if described is None:
        return None
    kind, dtype, shape = described
    if kind == "U":
        shares = gather_json(comm, [] if own is None else own.tolist())
        return np.array([text for share in shares for text in share])
    content = None if own is None else torch.from_numpy(own.reshape(len(own), -1).view(np.uint8))
    rows = gather_rows(comm, content)
    assert rows is not None
    values: npt.NDArray[Any] = rows.numpy().view(dtype).reshape(-1, *shape)
    return values


def find_first(comm: Communicator, value: Any) -> Any:
    """The JSON value of the first rank that has another one than None; None where none has."""
    return next((share for share in gather_json(comm, value) if share is not None), None)


def compute_once(comm: Communicator, compute: Callable[[], Any]) -> Any:
    """A JSON value that rank 0 computes, on every rank; where it fails, all ranks do."""
    value, failure = None, None
    if comm.rank == 0:
        try:
            value = compute()
        except Exception as error:
            failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    value, text = gather_json(comm, [value, text])[0]
    if failure is not None:
        raise failure
    if text is not None:
        raise TrainingError(text)
    return value


@dataclass(frozen=True)
class Ratio:
    """A mean over what is counted in a batch, such as the steps of its samples that take part.

    Attributes:
        is_root: whether the figure is the square root of the mean.
    """

    total: Tensor
    count: Tensor
    is_root: bool = False


def read_metric(name: str, value: Any) -> float:
    """A metric as a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TrainingError(f"the metric {name!r} must be a number, got {value!r:.60}") from None


class Means:
    """Means over samples, or over what a `Ratio` counts, of values added batch by batch."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, Any] = {}
        self._roots: set[str] = set()

    def add(self, values: Mapping[str, Any], size: int) -> None:
        """Add the values of a batch of `size` samples: a tensor [size], or a scalar that holds for each sample."""
        for name, value in values.items():
            total: Any
            count: Any = size
            if isinstance(value, Ratio):
                total, count = value.total.detach().double(), value.count
                self._roots |= {name} if value.is_root else set()
            elif isinstance(value, Tensor) and value.dim() > 0:
                if value.shape != (size,):
                    raise ValueError(
                        f"metric {name!r} must be a scalar or one value per sample ([{size}]), "
                        f"got a tensor of shape {list(value.shape)}"
                    )
                total = value.detach().double().sum()
            else:
                scalar = value.detach().double() if isinstance(value, Tensor) else read_metric(name, value)
                total = scalar * size
            # stays on its device until the end: reading it back would wait for the GPU
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._counts[name] = self._counts.get(name, 0) + count

    def over_all(self, comm: Communicator) -> dict[str, float]:
        """The means over all ranks, on every rank; without those of nothing."""
        own = {name: [float(total), int(self._counts[name])] for name, total in self._sums.items()}
        shares, roots = zip(*gather_json(comm, [own, sorted(self._roots)]), strict=True)
        means: dict[str, float] = {}
        for name in dict.fromkeys(name for share in shares for name in share):
            parts = [share[name] for share in shares if name in share]
            if count := sum(part[1] for part in parts):
                mean = sum((part[0] for part in parts), 0.0) / count
                means[name] = math.sqrt(mean) if any(name in rooted for rooted in roots) else mean
        return means
