"""What all processes that are started here have in common: an environment, an end no later than their parent's."""

from __future__ import annotations

import os
import select
import sys
import threading


def child_environment() -> dict[str, str]:
    """The environment of a child: one thread for every library, and this process's import path.

    It leaves no `__pycache__` beside the user's modules.
    """
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return {**os.environ, **single, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}


def end_with_parent(started: threading.Event | None = None) -> None:
    """End this process when its parent closes our standard input, whatever it is busy with.

    Args:
        started: when it is set, the process looks after that itself.
    """
    parent = select.poll()
    parent.register(0, 0)  # hang-ups only, which come unasked: what is said is not ours to read

    def wait() -> None:
        parent.poll()
        if started is None or not started.is_set():
            os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()
