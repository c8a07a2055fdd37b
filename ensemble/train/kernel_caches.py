"""Where compilers keep the kernels of members: with their run, whose next start finds them."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def name_kernel_caches(run_dir: Path) -> dict[str, str]:
    """The environment variables that name the folders, but for those that the user has set.

    PyTorch names a kernel by what it was compiled from, its own version and the processor or GPU, so that machines
    of several kinds can share the folders. It locks files there.
    """
    return {
        variable: str(run_dir / "compiled" / folder)
        for variable, folder in _FOLDERS.items()
        if variable not in os.environ
    }
