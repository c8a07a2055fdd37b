"""Runs scripts as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run_python(*words: str | Path, cwd: Path, also: tuple[Path, ...] = (), timeout_s: float = 600) -> str:
    """What a program prints that must succeed; `also` are further folders of its modules."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *also)))}
    pipes = {"capture_output": True, "text": True, "timeout": timeout_s}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, check=False, **pipes)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)
