"""Measures, in a process that begins as those of a run do, what each takes before its first step."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.spec import Ensemble, Identity
from ensemble.train.beginning import read
from pipelines.errors import PipelineError
from pipelines.ipc.memory_pickle import dump

if TYPE_CHECKING:
    from ensemble.user_code.fingerprint import Code

log = logging.getLogger(__name__)


#: A process that prepares samples: what it takes until there is a first one.
PREPARES = (
    "import sys, time; from pipelines.ipc.memory_pickle import load; load(int(sys.argv[1])).fields; "
    "print(f'\\n{time.process_time()}')"
)


def measure_startup(folder: Path, ensemble: Ensemble, member: Identity, code: Code) -> dict[str, float]:
    """Measure what processes of a run take before their first step, in processes that do nothing else.

    Args:
        folder: temporary, for what libraries keep when they are imported.

    Returns:
        `seconds` until a process has imported what all need; CPU-seconds as in `ensemble.train.beginning`, and
        those of a process that prepares samples (`prepare`); 0 where the user's code fails.
    """
    from ensemble.executors.forkserver import PRELOADED
    from ensemble.executors.spawn import make_node_environment
    from ensemble.store.kept_code import pickle_by_value
    from pipelines.ipc.child_processes import child_environment

    environment = {**child_environment(), **make_node_environment(folder)}
    began = time.monotonic()
    with pickle_by_value(code, ensemble):
        words = ("-m", "ensemble.train.beginning"), (str(folder), *PRELOADED)
        found, seconds = read(_run((ensemble, member), environment, *words)), time.monotonic() - began
        printed = _run(ensemble.pipeline(member.params), environment, ("-c", PREPARES)).split()
    share = found["preload"] / total if (total := found.pop("total")) else 1.0
    return {"seconds": seconds * share, "prepare": float(printed[-1]) if printed else 0.0, **found}


def _run(value: Any, environment: dict[str, str], before: Sequence[str], after: Sequence[str] = ()) -> str:
    """What Python prints that gets a value in a memory file, whose number is an argument."""
    try:
        fd = dump(value)
    except PipelineError:  # some modules cannot go by value; a run has them imported
        return ""
    try:
        command = [sys.executable, *before, str(fd), *after]
        done = subprocess.run(command, env=environment, pass_fds=[fd], capture_output=True, text=True)
    finally:
        os.close(fd)
    if done.returncode:
        log.debug("what a process takes before its first step is not known: %s", done.stderr)
    return done.stdout
