"""Gives child processes their environment, and ends them with their parent."""

from __future__ import annotations

import os
import select
import sys
import threading


def child_environment() -> dict[str, str]:
    """The environment of a child process.

    Libraries use one thread each, imports use this process's path, and no `__pycache__` is written beside the
    user's modules.
    """
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**os.environ, **single, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def end_with_parent(started: threading.Event | None = None) -> None:
    """End this process when its parent closes its standard input, even while it is busy.

    Args:
        started: once set, the process handles the end of its input itself.
    """
    parent = select.poll()
    parent.register(0, 0)  # hang-ups only, which are always reported; the input is not read here

    def wait() -> None:
        parent.poll()
        if started is None or not started.is_set():
            os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
