"""A member's step in the pipelines study: nothing, an emulated accelerator, or a real model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ensemble.bench.pipelines.config import MODEL, Config

if TYPE_CHECKING:
    from torch import nn

CLASSES, _LEARNING_RATE = 10, 1e-3


class Step:
    """A callable for each batch of images, uint8 [b, 3, size, size].

    Attributes:
        device: of the model, "cpu" or "cuda"; else "emulated".
        total_s: seconds of the model in all calls.  count: of calls.
    """

    def __init__(self, config: Config) -> None:
        self.device = config.step
        self.total_s = 0.0
        self.count = 0
        self._wait_s = config.step_ms / 1000
        self._model = Model(config.size) if config.step == MODEL else None
        if self._model is not None:
            self.device = self._model.device

    def __call__(self, images: Any) -> None:
        """Compute on a batch, or wait for the emulated time."""
        if self._model is not None:
            start = time.perf_counter()
            self._model(images)
            self.total_s += time.perf_counter() - start
        elif self._wait_s:
            time.sleep(self._wait_s)
        self.count += 1

    @property
    def mean_ms(self) -> float:
        """The model's mean milliseconds for a call."""
        return 1000 * self.total_s / self.count if self.count else 0.0


def make_net() -> nn.Module:
    """A small convolutional net for images of any size."""
    from torch import nn

    return nn.Sequential(
        nn.AvgPool2d(4),
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


class Model:
    """A step of SGD on a small convolutional net, on CUDA where it is available, else on one CPU thread."""

    def __init__(self, size: int) -> None:
        import torch

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        self.net = make_net().to(self.device)
        self(torch.zeros((2, 3, size, size), dtype=torch.uint8))  # warm-up

    def __call__(self, images: Any) -> None:
        """Train one step on arbitrary labels; returns when the device has finished."""
        import torch

        images = torch.as_tensor(images).to(self.device, non_blocking=True).float() / 255
        labels = torch.arange(len(images), device=self.device) % CLASSES
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        weights = list(self.net.parameters())
        with torch.no_grad():
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(gradient, alpha=_LEARNING_RATE)
        float(loss.detach())  # waits for the device
