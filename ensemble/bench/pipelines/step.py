"""What a member of the pipelines study does with a batch: nothing, an emulated accelerator, or a real model."""

from __future__ import annotations

import time
from typing import Any

from ensemble.bench.pipelines.config import MODEL, Config

CLASSES, RATE = 10, 1e-3


class Step:
    """Call it with each batch of images, uint8 [b, 3, size, size].

    Attributes:
        where: "emulated", or the device that a model computes on: "cpu" or "cuda".
        total_s: time that a model took in all calls; count: of calls.
    """

    def __init__(self, config: Config) -> None:
        self.where = config.step
        self.total_s = 0.0
        self.count = 0
        self._wait_s = config.step_ms / 1000
        self._model = Model(config.size) if config.step == MODEL else None
        if self._model is not None:
            self.where = self._model.device

    def __call__(self, images: Any) -> None:
        """Compute, or wait as long as computing would take."""
        if self._model is not None:
            began = time.perf_counter()
            self._model(images)
            self.total_s += time.perf_counter() - began
        elif self._wait_s:
            time.sleep(self._wait_s)
        self.count += 1

    @property
    def mean_ms(self) -> float:
        """A model's time for one call, measured."""
        return 1000 * self.total_s / self.count if self.count else 0.0


class Model:
    """A small convolutional net, its gradients and a step of SGD; on CUDA where it is, else on one CPU thread."""

    def __init__(self, size: int) -> None:
        import torch
        from torch import nn

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.AvgPool2d(4),
            nn.Conv2d(3, 16, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, CLASSES),
        ).to(self.device)
        self(torch.zeros((2, 3, size, size), dtype=torch.uint8))  # what only the first pass costs

    def __call__(self, images: Any) -> None:
        """One training step on made-up labels; done when it returns."""
        import torch

        images = torch.as_tensor(images).to(self.device, non_blocking=True).float() / 255
        labels = torch.arange(len(images), device=self.device) % CLASSES
        loss = torch.nn.functional.cross_entropy(self.net(images), labels)
        weights = list(self.net.parameters())
        with torch.no_grad():
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                weight.sub_(gradient, alpha=RATE)
        float(loss.detach())  # waits for the device
