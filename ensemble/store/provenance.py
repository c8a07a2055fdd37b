"""With what a run was made: versions of the libraries, revision of the user's code."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

_LIBRARIES = {"torch": "torch", "ray": "ray", "optuna": "optuna", "ray_ensemble": "ray-ensemble"}


def versions() -> dict[str, str | None]:
    """Versions of python, torch, ray, optuna and ray_ensemble, without importing any; None where not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distribution in _LIBRARIES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def revision(directory: Path) -> str | None:
    """The git commit of a directory, with `-dirty` where tracked files differ; None outside a repository."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
