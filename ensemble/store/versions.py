"""Says with which versions of the libraries and which revision of the code a run was made."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pipelines.providers import loaded_distributions

#: Names of `versions`, beside Python's, to the distributions of which one is installed.
_LIBRARIES = {
    "torch": ("torch",),
    "ray": ("ray",),
    "optuna": ("optuna",),
    "ray_ensemble": ("ray-ensemble",),
    "numpy": ("numpy",),
    "pillow": ("pillow",),
    "opencv": ("opencv-python-headless", "opencv-python", "opencv-contrib-python"),
    "simplejpeg": ("simplejpeg",),
}


def versions() -> dict[str, str | None]:
    """Versions of Python, of `_LIBRARIES` (None where not installed), and of the extensions in use."""
    libraries = {name: _find_version(*_LIBRARIES[name]) for name in _LIBRARIES}
    return {"python": platform.python_version(), **libraries, **loaded_distributions()}


def list_missing(recorded: Mapping[str, str | None]) -> list[str]:
    """The extensions among recorded `versions` that are not installed here, as pip names them."""
    extensions = {name: version for name, version in recorded.items() if name not in ("python", *_LIBRARIES)}
    return [f"{name}=={version}" for name, version in extensions.items() if _find_version(name) is None]


def _find_version(*distributions: str) -> str | None:
    for distribution in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def revision(directory: Path) -> str | None:
    """The git commit of a directory, with `-dirty` where tracked files differ; None outside a repository."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
