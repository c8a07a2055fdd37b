"""Where compilers keep the kernels of members: with their run, whose next start finds them."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
from pathlib import Path

from ensemble.store import StoreError
from ensemble.store.trust import check_ownership
from pipelines.environment.processor import read_processor

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
#: Of /proc/cpuinfo: what a compiler makes use of.
_OF_PROCESSOR = ("model name", "flags", "CPU implementer", "CPU part", "Features")

log = logging.getLogger(__name__)


def name_kernel_caches(run_dir: Path) -> dict[str, str]:
    """The environment variables that name the folders, but for those that the user has set.

    Kernels are loaded as they are found: the folder is the user's own, whatever modes the run directory has. Those
    of processors with other instructions are in a folder of their own: PyTorch compiles for the one that it is on.
    It locks files there.
    """
    folder = run_dir / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_ownership(folder, folder.stat())
    except (OSError, StoreError) as error:
        log.warning("compiled kernels are not kept with the run: %s", error)
        return {}
    return {
        variable: str(folder / _name_processor() / name)
        for variable, name in _FOLDERS.items()
        if find_folder(variable) is None
    }


def find_folder(variable: str) -> str | None:
    """The folder that the user has named for a compiler's kernels, or None.

    PyTorch names its default in the environment as soon as its optimizers are imported.
    """
    folder = os.environ.get(variable)
    is_default = folder is not None and any(part.startswith("torchinductor_") for part in Path(folder).parts)
    return None if is_default else folder


def remove_empty(run_dir: Path) -> None:
    """Remove the folder of a run for which nothing was compiled."""
    try:
        (run_dir / "compiled").rmdir()
    except OSError:  # there is none, or it has kernels
        return


@functools.cache
def _name_processor() -> str:
    """A name of the processor's kind, 12 hexadecimal digits."""
    fields = read_processor()
    known = [platform.machine(), *(f"{name}: {fields[name]}" for name in _OF_PROCESSOR if name in fields)]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:12]
