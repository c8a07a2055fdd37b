"""A stand-in for NVIDIA's management library: nodes with GPUs on a machine without any; see `nvml_stand_in.c`."""

from __future__ import annotations

import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("nvml_stand_in.c")


def build(folder: Path) -> dict[str, str]:
    """Build the library into a folder; returns the environment in which processes find it.

    Raises:
        RuntimeError: there is no C compiler.
    """
    command = ["cc", "-shared", "-fPIC", "-D_GNU_SOURCE", "-o", str(folder / "libnvidia-ml.so.1"), str(_SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"no C compiler to build the stand-in for NVIDIA's driver: {error}") from None
    return {"LD_LIBRARY_PATH": str(folder)}
