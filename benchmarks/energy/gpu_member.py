"""A member that trains on a GPU: `python -m benchmarks.energy.gpu_member CONFIG`; `busy` has how it is told.

Without a GPU it trains a small network on the processor, so that the way it is told can be tried there.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.energy.busy import Config, serve

if TYPE_CHECKING:
    import torch

_WIDTH, _BATCH, _LAYERS = 4096, 2048, 4
_WIDTH_ON_CPU, _BATCH_ON_CPU = 64, 64


class Training:
    """Steps of a network of linear layers that learns random targets.

    Attributes:
        seconds: for which it has stepped.
    """

    def __init__(self, device: torch.device) -> None:
        import torch
        from torch import nn

        from ensemble.train.gpu_busy import open_gpu_busy

        on_gpu = device.type == "cuda"
        width, batch = (_WIDTH, _BATCH) if on_gpu else (_WIDTH_ON_CPU, _BATCH_ON_CPU)
        layers = [part for _ in range(_LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
        self._model = nn.Sequential(*layers).to(device)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._inputs = torch.randn(batch, width, device=device)
        self._targets = torch.randn(batch, width, device=device)
        self.gpu_busy = open_gpu_busy(device)
        self.seconds = 0.0
        self.step()  # so that what a first step prepares is not part of a window

    def step(self) -> None:
        """One step; the device has done it when this returns."""
        began = time.monotonic()
        if self.gpu_busy is not None:
            self.gpu_busy.begin()
        self._optimizer.zero_grad()
        loss = (self._model(self._inputs) - self._targets).square().mean()
        loss.backward()
        self._optimizer.step()
        if self.gpu_busy is not None:
            self.gpu_busy.end()
        loss.item()  # waits for it
        self.seconds += time.monotonic() - began


def main() -> int:
    """Runs until the input ends."""
    import torch

    training = Training(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    busy = training.gpu_busy
    config = Config(**json.loads(sys.argv[1]))
    return serve(config, lambda: training.seconds, training.step, None if busy is None else busy.read)


if __name__ == "__main__":
    sys.exit(main())
