"""The parameter shapes of well-known networks, layer by layer in the order of the forward pass.

For studies of gradient exchange, where a network is the sizes of its gradients and when each is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]
#: Images/s of one accelerator with synthetic data, by device and batch: TensorFlow's benchmarks of May 2017
#: (www.tensorflow.org/performance/benchmarks; CUDA 8, cuDNN 5.1). AlexNet's are published for batches of 512 only.
IMAGES_PER_S: dict[tuple[str, int], dict[str, float]] = {
    ("k80", 32): {"alexnet": 656.0, "vgg16": 35.4, "resnet50": 49.5, "inception": 29.3},
    ("p100", 32): {"alexnet": 2987.0, "vgg16": 144.0, "resnet50": 195.0, "inception": 128.0},
    ("p100", 64): {"resnet50": 219.0, "inception": 142.0, "vgg16": 154.0},
}
DEVICES = tuple(dict.fromkeys(device for device, _ in IMAGES_PER_S))
#: Share of the forward pass in a step.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Layer:
    """One layer with weights.

    Attributes:
        shapes: of its parameters, those of its normalization included.
        macs: multiply-adds of its forward pass for one sample, normalization left out. The backward pass has
            twice as many.
    """

    shapes: tuple[Shape, ...]
    macs: int


def step_seconds(device: str, net: str, batch: int) -> float | None:
    """Seconds of a training step; None where nobody has published it."""
    rate = IMAGES_PER_S[device, batch].get(net)
    return None if rate is None else batch / rate


def parameter_shapes(net: str) -> list[Shape]:
    """The shapes of the parameters of one of `NETS`."""
    return [shape for layer in NETS[net]() for shape in layer.shapes]


def time_shares(layers: Sequence[Layer]) -> list[float]:
    """Each layer's share of the forward pass, and of the backward pass, by its multiply-adds."""
    total = sum(layer.macs for layer in layers)
    return [layer.macs / total for layer in layers]


def ready_times(net: str) -> list[float]:
    """When each parameter's gradient is computed, as a share of the step, in the order of the parameters."""
    layers, unready, ready = list(NETS[net]()), 1.0, list[float]()
    for layer, share in zip(layers, time_shares(layers), strict=True):
        ready += [FORWARD + (1 - FORWARD) * unready] * len(layer.shapes)
        unready -= share
    return ready


def alexnet() -> Iterator[Layer]:
    """AlexNet (Krizhevsky 2014, one column) for 224 px: 61,100,840 parameters."""
    inputs = 3
    for outputs, kernel, pixels in ((64, 11, 55), (192, 5, 27), (384, 3, 13), (256, 3, 13), (256, 3, 13)):
        yield _convolve(inputs, outputs, kernel, pixels, norm=False)
        inputs = outputs
    yield from _linear(36 * inputs, 4096, 4096, 1000)


def vgg16() -> Iterator[Layer]:
    """VGG-16 (Simonyan, Zisserman 2015, D) for 224 px: 138,357,544 parameters."""
    inputs = 3
    for outputs, count, pixels in ((64, 2, 224), (128, 2, 112), (256, 3, 56), (512, 3, 28), (512, 3, 14)):
        for _ in range(count):
            yield _convolve(inputs, outputs, 3, pixels, norm=False)
            inputs = outputs
    yield from _linear(49 * inputs, 4096, 4096, 1000)


def resnet50() -> Iterator[Layer]:
    """ResNet-50 (He et al. 2016, stride in the 3 x 3 convolutions) for 224 px: 25,557,032 in 161 parameters."""
    yield _convolve(3, 64, 7, 112)
    inputs, before = 64, 56
    for width, blocks, pixels in ((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)):
        for block in range(blocks):
            yield _convolve(inputs, width, 1, before)
            yield _convolve(width, width, 3, pixels)
            yield _convolve(width, 4 * width, 1, pixels)
            if block == 0:
                yield _convolve(inputs, 4 * width, 1, pixels)
            inputs, before = 4 * width, pixels
    yield from _linear(inputs, 1000)


def inception_v3() -> Iterator[Layer]:
    """Inception-v3 (Szegedy et al. 2016) for 299 px, without the auxiliary classifier: 23,834,568 parameters."""
    row, column = (1, 7), (7, 1)
    yield from _chain(3, (32, 3, 149), (32, 3, 147), (64, 3, 147), (80, 1, 73), (192, 3, 71))
    inputs = 192
    for pooled in (32, 64, 64):
        yield from _chain(inputs, (64, 1, 35))
        yield from _chain(inputs, (48, 1, 35), (64, 5, 35))
        yield from _chain(inputs, (64, 1, 35), (96, 3, 35), (96, 3, 35))
        yield from _chain(inputs, (pooled, 1, 35))
        inputs = 224 + pooled
    yield from _chain(inputs, (384, 3, 17))
    yield from _chain(inputs, (64, 1, 35), (96, 3, 35), (96, 3, 17))
    for width in (128, 160, 160, 192):
        yield from _chain(768, (192, 1, 17))
        yield from _chain(768, (width, 1, 17), (width, row, 17), (192, column, 17))
        factors = ((width, column, 17), (width, row, 17), (width, column, 17), (192, row, 17))
        yield from _chain(768, (width, 1, 17), *factors)
        yield from _chain(768, (192, 1, 17))
    yield from _chain(768, (192, 1, 17), (320, 3, 8))
    yield from _chain(768, (192, 1, 17), (192, row, 17), (192, column, 17), (192, 3, 8))
    for inputs in (1280, 2048):
        yield from _chain(inputs, (320, 1, 8))
        for before in (((384, 1, 8),), ((448, 1, 8), (384, 3, 8))):
            yield from _chain(inputs, *before)
            yield _convolve(384, 384, (1, 3), 8)
            yield _convolve(384, 384, (3, 1), 8)
        yield from _chain(inputs, (192, 1, 8))
    yield from _linear(2048, 1000)


NETS: dict[str, Callable[[], Iterator[Layer]]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "resnet50": resnet50,
    "inception": inception_v3,
}


def _convolve(inputs: int, outputs: int, kernel: int | Shape, pixels: int, *, norm: bool = True) -> Layer:
    """A convolution to `pixels` x `pixels`, with a normalization (and then no bias) or a bias."""
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    weights = (outputs, inputs, *sides)
    return Layer((weights, *[(outputs,)] * (2 if norm else 1)), math.prod(weights) * pixels**2)


def _chain(inputs: int, *convolutions: tuple[int, int | Shape, int]) -> Iterator[Layer]:
    """Convolutions, each of (outputs, kernel, pixels), one after the other."""
    for outputs, kernel, pixels in convolutions:
        yield _convolve(inputs, outputs, kernel, pixels)
        inputs = outputs


def _linear(*widths: int) -> Iterator[Layer]:
    for inputs, outputs in itertools.pairwise(widths):
        yield Layer(((outputs, inputs), (outputs,)), inputs * outputs)
