"""Members packed on one GPU as processes, on a shared stream, against members one after another.

A small CNN on made-up images, whose kernels leave most of the GPU idle. `models_per_min` counts from the launch,
so the start of processes is in it; `samples_per_s` is that of the time in which all members train.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks import models
from ensemble.spec import Ensemble
from gpu_cases.common import Row, Setting, attempt, row
from gpu_cases.networks import image_pipeline
from gpu_cases.runs import declare_alike, train


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    yield attempt("one after another", functools.partial(_measure, setting, 2, alone=True))
    for members in setting.choose((16, 1, 4, 8, 2), (1, 2)):
        yield attempt(f"{members} at once", functools.partial(_measure, setting, members))


def _measure(setting: Setting, members: int, alone: bool = False) -> Row:
    figures = train(setting, declare_packed(setting, members, alone=alone))
    return row("one after another" if alone else f"{members} at once", **figures)


def declare_packed(setting: Setting, members: int, *, alone: bool = False, mps: bool = False) -> Ensemble:
    """Members of a small CNN that share one GPU and one stream.

    Args:
        alone: each has all of the GPU, so that they follow one another.
        mps: whether they share it through the Multi-Process Service.
    """
    net = setting.choose(models.NETS["cnn"], models.net_of("cnn-small", width=2, pixels=8))
    data = image_pipeline(setting.choose(8192, 128), net.pixels)
    epochs, workers = setting.choose(9, 3), setting.choose(4, 1)
    return declare_alike(setting, "packed", net, data, members, epochs, alone=alone, mps=mps, prep_workers=workers)
