"""What the study trains and exchanges: the nets' names and the shapes of a ResNet-50; needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

NETS = ("compute-heavy", "parameter-heavy")


def resnet50() -> Iterator[tuple[int, ...]]:
    """The shapes of a ResNet-50's 161 parameters (He et al. 2016), in the order of the forward pass."""
    yield from ((64, 3, 7, 7), (64,), (64,))
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from ((width, inputs, 1, 1), (width,), (width,))
            yield from ((width, width, 3, 3), (width,), (width,))
            yield from ((4 * width, width, 1, 1), (4 * width,), (4 * width,))
            if block == 0:
                yield from ((4 * width, inputs, 1, 1), (4 * width,), (4 * width,))
            inputs = 4 * width
    yield from ((1000, inputs), (1000,))
