"""Four members with a real training step: on one shared pipeline, and each on a pipeline of its own.

Images are blurred, cropped and flipped on the CPU. Members share the GPU in equal parts; the shared pipeline has
one preparation process, and a member of its own prepares in its own process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from benchmarks import models
from gpu_cases.common import Row, Setting, attempt, row
from gpu_cases.networks import image_pipeline
from gpu_cases.runs import declare_alike, train

_MEMBERS = 4
_DESIGNS = {"shared": ("node", 1), "own": ("independent", 1), "shared, 4 workers": ("node", 4)}


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    for what, (sharing, workers) in list(_DESIGNS.items())[: setting.choose(3, 2)]:
        yield attempt(what, functools.partial(_measure, setting, what, sharing, workers))


def _measure(setting: Setting, what: str, sharing: str, workers: int) -> Row:
    net = setting.choose(models.net_of("cnn", pixels=64), models.net_of("cnn-small", width=2, pixels=8))
    data = image_pipeline(setting.choose(2048, 64), net.pixels, blurred=True)
    members = setting.choose(_MEMBERS, 2)
    epochs = setting.choose(4, 3)
    declared = declare_alike(setting, "sharing", net, data, members, epochs, sharing=sharing, prep_workers=workers)
    return row(what, **train(setting, declared))
