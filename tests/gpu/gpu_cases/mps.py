"""The members of the case `packing` on one GPU through the Multi-Process Service: compare with its rows."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ensemble.executors.mps import ABSENT, BINARY, Mps
from gpu_cases.common import NO_GPU, Absent, Row, Setting, attempt, check, row
from gpu_cases.packing import declare_packed
from gpu_cases.runs import train


def run(setting: Setting) -> Iterator[Row]:
    """See the module's text."""
    if setting.on_gpu and shutil.which(BINARY) is None:
        raise Absent(ABSENT)
    starts = _starts()
    if setting.on_gpu:
        yield check("the service starts", starts)
        if not starts:  # members would take turns
            return
    for members in setting.choose((16, 4), (2,)):
        yield attempt(f"{members} at once", functools.partial(_measure, setting, members))
    if not setting.on_gpu:
        raise Absent(f"the service is {NO_GPU}")


def _starts() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        service = Mps(Path(folder))
        started = service.running
        service.close()
    return started


def _measure(setting: Setting, members: int) -> Row:
    return row(f"{members} at once", **train(setting, declare_packed(setting, members, mps=True)))
