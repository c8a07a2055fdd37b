"""Gathers results of all ranks: JSON values, rows of predictions, means over samples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ensemble.comm import Communicator


def gather_json(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's JSON value, by rank; floats keep all their bits."""
    if comm.world == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(share.tolist())) for share in comm.all_gather(text)]


def gather_rows(comm: Communicator, rows: Tensor | None) -> Tensor | None:
    """All ranks' rows, in rank order, on the CPU; a rank without rows may give None."""
    if rows is not None:
        rows = rows.detach().cpu().contiguous()
    if comm.world == 1:
        return rows
    shapes = gather_json(comm, None if rows is None else [str(rows.dtype), list(rows.shape[1:])])
    known = next((shape for shape in shapes if shape is not None), None)
    if known is None:
        return None
    if rows is None:
        rows = torch.empty((0, *known[1]), dtype=getattr(torch, known[0].removeprefix("torch.")))
    return torch.cat(comm.all_gather(rows))


class Means:
    """Means over samples, of values added batch by batch."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Any], size: int) -> None:
        """Add the values of a batch of `size` samples: a tensor [size], or a scalar that holds for each sample."""
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if value.shape != (size,):
                    raise ValueError(
                        f"metric {name!r} must be a scalar or one value per sample ([{size}]), "
                        f"got a tensor of shape {list(value.shape)}"
                    )
                added: Tensor | float = value.detach().double().sum()
            else:
                added = (value.detach().double() if isinstance(value, Tensor) else float(value)) * size
            # stays on its device until the end: reading it back would wait for the GPU
            self._sums[name] = self._sums.get(name, 0.0) + added
            self._counts[name] = self._counts.get(name, 0) + size

    def over_all(self, comm: Communicator) -> dict[str, float]:
        """The means over the samples of all ranks, on every rank."""
        own = {name: [float(total), self._counts[name]] for name, total in self._sums.items()}
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for share in gather_json(comm, own):
            for name, (total, count) in share.items():
                sums[name] = sums.get(name, 0.0) + total
                counts[name] = counts.get(name, 0) + count
        return {name: total / counts[name] for name, total in sums.items() if counts[name]}
