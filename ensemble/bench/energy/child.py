"""A part of the study that is a process of its own, since it needs another environment; it ends with its parent.

The parent holds the other end of the child's standard input. When that is closed, because the parent was
interrupted, terminated or killed, the child ends as after SIGTERM: in order, with its processes and its files.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from ensemble.interrupts import exit_on_signals


def run_child(module: str, *arguments: str, environment: Mapping[str, str], timeout_s: float) -> str:
    """Run a module, of which `main` calls `end_with_parent` first; returns its standard output.

    Raises:
        RuntimeError: it has failed, or takes longer; the message is one line.
    """
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=read_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,  # Ctrl-C is handled by the calling process
    )
    os.close(read_end)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{module} takes more than {timeout_s:g} s") from None
    finally:
        os.close(write_end)
        process.communicate()
    if process.returncode:
        raise RuntimeError((errors.splitlines() or [f"{module} has failed without a message"])[-1])
    return output


def end_with_parent() -> None:
    """End this process in order when its parent has ended, or no longer waits for it."""
    exit_on_signals()
    parent = select.poll()
    parent.register(0, 0)  # hang-ups only, which are always reported

    def wait() -> None:
        parent.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
