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

    A real step is one of SGD on a small net with arbitrary labels, on CUDA where it is available, else on one CPU
    thread.

    Attributes:
        device: of the model, "cpu" or "cuda"; else "emulated".
        mean_ms: milliseconds of the model in a call, on average; 0 without a model.
    """

    def __init__(self, config: Config) -> None:
        self.device, self.mean_ms = config.step, 0.0
        self._wait_s, self._count = config.step_ms / 1000, 0
        self._net: nn.Module | None = None
        if config.step == MODEL:
            import torch

            self.device = "cuda" if torch.cuda.is_available() else "cpu"
            torch.manual_seed(0)
            self._net = make_net().to(self.device)
            self._train(self._net, torch.zeros((2, 3, config.size, config.size), dtype=torch.uint8))  # warm-up

    def __call__(self, images: Any) -> None:
        """Compute on a batch, or wait for the emulated time."""
        if self._net is not None:
            start = time.perf_counter()
            self._train(self._net, images)
            self._count += 1
            self.mean_ms += (1000 * (time.perf_counter() - start) - self.mean_ms) / self._count
        elif self._wait_s:
            time.sleep(self._wait_s)

    def _train(self, net: nn.Module, images: Any) -> None:
        """Returns when the device has finished."""
        import torch

        images = torch.as_tensor(images).to(self.device, non_blocking=True).float() / 255
        labels = torch.arange(len(images), device=self.device) % CLASSES
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        weights = list(net.parameters())
        with torch.no_grad():  # no torch.optim: its import takes more memory than the step
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(gradient, alpha=_LEARNING_RATE)
        float(loss.detach())  # waits for the device


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
