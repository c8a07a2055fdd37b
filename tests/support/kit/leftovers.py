"""What a run may have left behind on a machine where others are at work, too; waiting for what happens."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


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


def find_processes_below(folder: Path, *, rays_agents: bool = True) -> list[psutil.Process]:
    """Other processes that live and have to do with a folder, by their command, environment or open files.

    Args:
        rays_agents: whether Ray's own agents of a node count.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended
            command = process.cmdline()
            words = [*command, *process.environ().values(), *(file.path for file in process.open_files())]
            is_over = process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid()
            is_rays = any(name in command for name in ("ray::DashboardAgent", "ray::RuntimeEnvAgent"))
            if any(str(folder) in word for word in words) and not is_over and (rays_agents or not is_rays):
                found.append(process)
    return found


def wait_until(true: Callable[[], Any], what: str, seconds: float = 300.0) -> Any:
    """Wait for what happens, and return what it says; the time limit only ends a test that hangs."""
    until = time.monotonic() + seconds
    while not (said := true()):
        assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)
    return said
