"""A part of a study that is a process of its own, since it needs another environment; it ends with its parent.

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


class ChildTimeoutError(RuntimeError):
    """A process has taken longer than its time limit."""


def run_child(module: str, *arguments: str, environment: Mapping[str, str], timeout_s: float) -> str:
    """Run a module that ends when its standard input does (`end_with_parent`); returns its standard output.

    Raises:
        RuntimeError: it has failed; the message is its last line on standard error.
        ChildTimeoutError: it takes longer.
    """
    read_end, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=read_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C is handled by the calling process
    )
    os.close(read_end)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ChildTimeoutError(f"{module} takes more than {timeout_s:g} s") from None
    finally:
        os.close(write_end)
        process.communicate()
    if process.returncode:
        raise RuntimeError(last_line(errors, f"{module} has failed without a message"))
    return output


def last_line(text: str, missing: str = "no output") -> str:
    """The last line that is not empty; `missing` where there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), missing)


def end_with_parent() -> None:
    """End this process in order when its parent has ended, or no longer waits for it."""
    exit_on_signals()
    parent = select.poll()
    parent.register(0, 0)  # hang-ups only, which are always reported

    def wait() -> None:
        parent.poll()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()
