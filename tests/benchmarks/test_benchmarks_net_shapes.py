"""The networks of the studies have the sizes that were published."""

from __future__ import annotations

import math

import pytest

from benchmarks.net_shapes import NETS, parameter_shapes, time_shares


@pytest.mark.parametrize(
    ("net", "tensors", "parameters", "gigamacs"),
    [
        ("alexnet", 16, 61_100_840, 0.71),
        ("vgg16", 32, 138_357_544, 15.5),
        ("resnet50", 161, 25_557_032, 4.1),
        ("inception", 284, 23_834_568, 5.7),
    ],
)
def test_a_net_has_its_published_size(net: str, tensors: int, parameters: int, gigamacs: float) -> None:
    shapes, layers = parameter_shapes(net), list(NETS[net]())
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, parameters)
    assert sum(layer.macs for layer in layers) / 1e9 == pytest.approx(gigamacs, rel=0.02)
    assert math.isclose(sum(time_shares(layers)), 1)
