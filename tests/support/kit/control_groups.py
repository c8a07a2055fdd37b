"""Control groups of the kernel, of version 1 or 2, with a limit of memory; where root may make them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def make_control_group(limit_mib: int) -> Iterator[Path | None]:
    """Yields the folder of a new group, which must be empty again at the end; None where none can be made."""
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        path = Path(root) / f"ensemble-{secrets.token_hex(4)}"
        if not (Path(root) / "cgroup.procs").exists():
            continue
        try:
            path.mkdir()
            (path / limit).write_text(str(limit_mib * 2**20))
        except OSError:
            path.rmdir() if path.exists() else None
            continue
        try:
            yield path
        finally:
            path.rmdir()
        return
    yield None
