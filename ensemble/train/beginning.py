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
        command = [sys.executable, "-m", __name__, str(fd), folder, *words]
        done = subprocess.run(command, env=dict(environment), pass_fds=[fd], capture_output=True, text=True)
        os.close(fd)
        if done.returncode:
            log.debug("what a process takes before its first step is not known: %s", done.stderr)
        found |= {
            k: v for line in done.stdout.splitlines() if line[:2] == '{"' for k, v in json.loads(line).items()
        }
    return found


def _measure(fd: int, folder: str, preloaded: list[str]) -> None:
    if not preloaded:
        print(f"\n{json.dumps({'prepare': _time(lambda: load(fd).fields)})}")
        return
    for name in preloaded:
        importlib.import_module(name)
    from ensemble.train.optimizers import warm_up
    from ensemble.train.trial_steps import measure_here

    warm_up()
    print(json.dumps({"preload": time.process_time()}), flush=True)
    began = time.process_time()
    ensemble, member = load(fd)
    found = {"load": time.process_time() - began}
    once, again = (_time(lambda: measure_here(ensemble, [member], folder, 0.0)) for _ in range(2))
    build = getattr(ensemble.recipe, "model", lambda params: None)
    found |= {"train": max(0.0, once - again), "measure": again, "build": _time(lambda: build(member.params))}
    print(f"\n{json.dumps(found)}")


def _time(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    _measure(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
