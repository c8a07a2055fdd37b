"""Measures, in a process that does nothing else, what the processes of a run take before their first step."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def measure(fd: int, folder: str, preloaded: Sequence[str]) -> None:
    """Print, as JSON, CPU-seconds of this process.

    `preload`: imports that all processes share. `load`: the declaration, with the modules that it names. `sample`,
    `train`: what is imported when a sample is prepared, and a member trains. `build`: of a model. `measure`: of a
    few steps.

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
    found = {"preload": time.process_time()}
    ensemble, member = load(fd)
    found["load"] = time.process_time() - found["preload"]
    found["sample"] = _time(lambda: ensemble.pipeline(member.params).fields)
    once, again = (_time(lambda: measure_here(ensemble, [member], folder, 0.0)) for _ in range(2))
    found |= {"train": max(0.0, once - again), "measure": again}
    recipe = ensemble.recipe
    found["build"] = _time(lambda: recipe.model(member.params)) if isinstance(recipe, Recipe) else 0.0
    found["total"] = time.process_time()
    print(f"\n{json.dumps(found)}")


def _time(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    measure(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
