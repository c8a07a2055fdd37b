"""Measures, in processes that do nothing else, what those of a run take before their first step."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from pipelines.errors import PipelineError
from pipelines.ipc.memory_pickle import dump, load

log = logging.getLogger(__name__)


def measure_beginning(
    ensemble: Any, member: Any, folder: str, environment: Mapping[str, str], preloaded: tuple[str, ...]
) -> dict[str, float]:
    """CPU-seconds: `preload`, of imports that all processes share; `load`, of the declaration, with the modules
    that it names; `train`, of what is imported when a member trains; `build`, of a model; `measure`, of a few
    steps; `prepare`, of a process until it has prepared a sample. 0 where the user's code fails.
    """
    found = dict.fromkeys(("preload", "load", "train", "build", "measure", "prepare"), 0.0)
    for value, words in (((ensemble, member), preloaded), (ensemble.pipeline(member.params), ())):
        try:
            fd = dump(value)
        except PipelineError:  # some modules cannot go by value; a run has them imported
            continue
        figures, writes = os.pipe()  # standard output is of the user's code
        command = [sys.executable, "-m", __name__, str(fd), str(writes), folder, *words]
        done = subprocess.run(
            command,
            env=dict(environment),
            pass_fds=[fd, writes],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        os.close(fd)
        os.close(writes)
        if done.returncode:
            log.debug("what a process takes before its first step is not known: %s", done.stderr.decode())
        with open(figures, encoding="ascii") as lines:
            for line in lines:
                found |= json.loads(line)
    return found


def _measure(fd: int, writes: int, folder: str, preloaded: list[str]) -> None:
    def report(**figures: float) -> None:
        os.write(writes, json.dumps(figures).encode() + b"\n")

    if not preloaded:
        report(prepare=_time(lambda: load(fd).fields))
        return
    for name in preloaded:
        importlib.import_module(name)
    from ensemble.train.optimizers import warm_up
    from ensemble.train.trial_steps import measure_here

    warm_up()
    report(preload=time.process_time())
    began = time.process_time()
    ensemble, member = load(fd)
    report(load=time.process_time() - began)
    once, again = (_time(lambda: measure_here(ensemble, [member], folder, 0.0)) for _ in range(2))
    build = getattr(ensemble.recipe, "model", lambda params: None)
    report(train=max(0.0, once - again), measure=again, build=_time(lambda: build(member.params)))


def _time(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    _measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
