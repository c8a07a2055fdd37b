"""Four members with a real training step: on one shared pipeline, and each on a pipeline of its own.

Images are blurred, cropped and flipped on the CPU. Members share the GPU in equal parts; the shared pipeline has
one preparation process, and a member of its own prepares in its own process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ensemble.bench import models
from ensemble.bench.members import declare
from ensemble.spec import Member
from gpu_cases.common import Row, Setting, attempt, row
from gpu_cases.networks import MADE_UP, image_pipeline
from gpu_cases.runs import share_of_machine, train

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
    declared = declare(
        "sharing",
        net,
        data,
        data,
        [Member(net.params(MADE_UP), seed=seed) for seed in range(members)],
        setting.choose(4, 3),
        batch_size=setting.choose(64, 32),
        valid=None,
        devices=setting.device,
        resources=share_of_machine(members),
        sharing=sharing,
        prep_workers=workers,
    )
    return row(what, **train(setting, declared))
