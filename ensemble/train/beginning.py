"""Measures, in a process that does nothing else, what the processes of a run take before their first step."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_MARK = "ensemble.train.beginning: "


def measure(fd: int, folder: str, preloaded: Sequence[str]) -> None:
    """Print, as JSON in two lines, CPU-seconds of this process.

    `preload`: imports that all processes share, alone where the rest fails. `load`: the declaration, with the
    modules that it names. `train`: what is imported when a member trains. `build`: of a model. `measure`: of a few
    steps.

    Args:
        fd: of a memory file with the declaration and a member of it.
        folder: for the log.
    """
    for name in preloaded:
        importlib.import_module(name)
    from ensemble.spec import Recipe
    from ensemble.train.optimizers import warm_up
    from ensemble.train.trial_steps import measure_here
    from pipelines.ipc.memory_pickle import load

    warm_up()
    preload = time.process_time()
    print(f"{_MARK}{json.dumps({'preload': preload})}", flush=True)
    ensemble, member = load(fd)
    found = {"load": time.process_time() - preload}
    once, again = (_time(lambda: measure_here(ensemble, [member], folder, 0.0)) for _ in range(2))
    found |= {"train": max(0.0, once - again), "measure": again}
    recipe = ensemble.recipe
    found["build"] = _time(lambda: recipe.model(member.params)) if isinstance(recipe, Recipe) else 0.0
    found["total"] = time.process_time()
    print(f"\n{_MARK}{json.dumps(found)}")


def read(printed: str) -> dict[str, float]:
    """What `measure` has printed; 0 for what it has not."""
    found = dict.fromkeys(("preload", "load", "train", "build", "measure", "total"), 0.0)
    for line in printed.splitlines():
        found |= json.loads(line.removeprefix(_MARK)) if line.startswith(_MARK) else {}
    return found


def _time(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    measure(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
