"""What a run may have left behind on a machine where others are at work, too; waiting for what happens."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def named_memory() -> set[str]:
    """Entries of /dev/shm that no living process has mapped or open."""
    here, held = set(os.listdir("/dev/shm")), ""
    for process in Path("/proc").glob("[0-9]*") if here else ():
        with contextlib.suppress(OSError):
            held += (process / "maps").read_text()
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held += f"{os.readlink(descriptor)}\n"
    return {name for name in here if f"/dev/shm/{name}" not in held}


def new_named_memory(before: set[str], within_s: float = 120.0) -> set[str]:
    """Those that have come since and stay; another process's may be a moment from being mapped, or removed."""
    until = time.monotonic() + within_s
    while (left := named_memory() - before) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def wait_until(true: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    """Wait for what happens, and return what it says; the time limit only ends a test that hangs."""
    until = time.monotonic() + seconds
    while not (said := true()):
        assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return said
