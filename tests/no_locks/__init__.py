"""A file system without locks, as Lustre is where it is not mounted with `-o flock`: a library to be preloaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_environment(build: Path, where: Path) -> dict[str, str]:
    """Variables of a process for which files below `where` cannot be locked.

    Args:
        build: where the library is compiled.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    library = build / "no_locks.so"
    source = Path(__file__).with_name("no_locks.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "NO_LOCKS": str(where.resolve())}
