"""Emulated networks: real sizes, autograd, hooks and exchange of gradients; a timed wait instead of arithmetic.

The backward pass of a layer waits until the accelerator would have its gradients. A third of a step is the forward
pass, the rest the backward pass, shared out among the layers by their multiply-adds.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.net_shapes import FORWARD, NETS, ready_times
from ensemble.comm.gradients import GradientExchange


def largest_parameter(net: str) -> int:
    """Values of the largest parameter of one of `net_shapes.NETS`."""
    return max(math.prod(shape) for layer in NETS[net]() for shape in layer.shapes)


class EmulatedNet:
    """A network of `net_shapes.NETS` on an emulated accelerator.

    Args:
        net: its name.
        step_s: seconds of a step without an exchange.
        values: fp32, at least `largest_parameter`; all gradients are views of them.

    Attributes:
        parameters: in forward order; they take no memory.
    """

    def __init__(self, net: str, step_s: float, values: Tensor) -> None:
        self.parameters: list[Parameter] = []
        self._step_s, self._values, self._begun = step_s, values, 0.0
        self._layers: list[tuple[float, list[Parameter]]] = []
        ready = ready_times(net)
        for layer in NETS[net]():
            weights = [Parameter(torch.zeros(()).expand(shape)) for shape in layer.shapes]
            self._layers.append((ready[len(self.parameters)], weights))
            self.parameters += weights

    def step(self, exchange: GradientExchange | None = None) -> None:
        """A training step, with the exchange of its gradients if there is one."""
        self._begun = time.perf_counter()
        for parameter in self.parameters:
            parameter.grad = None
        x = torch.zeros((), requires_grad=True)
        for ready, weights in self._layers:
            x = _LayerWork.apply(x, self, ready, *weights)  # type: ignore[no-untyped-call]
        self.wait_until(FORWARD)
        with exchange.overlap_backward() if exchange is not None else contextlib.nullcontext():
            x.backward()  # type: ignore[no-untyped-call]
        if exchange is not None:
            exchange.finish()
            exchange.end_step(True)

    def wait_until(self, share: float) -> None:
        """Sleep until that share of the step's time has passed since its beginning."""
        time.sleep(max(0.0, self._begun + share * self._step_s - time.perf_counter()))

    def gradient(self, shape: torch.Size) -> Tensor:
        """A gradient of that shape, without a copy."""
        return self._values[: math.prod(shape)].view(shape)


class _LayerWork(torch.autograd.Function):
    """A layer: nothing forwards, its gradients backwards once the accelerator has them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: EmulatedNet, ready: float, *weights: Parameter) -> Tensor:
        ctx.net, ctx.ready, ctx.shapes = net, ready, [weight.shape for weight in weights]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.net.wait_until(ctx.ready)
        return grad, None, None, *(ctx.net.gradient(shape) for shape in ctx.shapes)
