"""Compiles the model of a member by torch.compile; kernels are kept with the run, whose next start finds them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemble.store import StoreError
from ensemble.store.trust import check_ownership
from pipelines.environment.processor import read_processor

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
#: Of /proc/cpuinfo: what a compiler makes use of.
_OF_PROCESSOR = ("model name", "flags", "CPU implementer", "CPU part", "Features")
#: Variables that were set here, for the member in training: to what, and what they were.
_set_here: dict[str, tuple[str, str | None]] = {}

log = logging.getLogger(__name__)


def compile_forward(model: Any, options: Mapping[str, Any], run_dir: Path) -> None:
    """Compile what the model computes when it is called; its parameters, names and hooks stay as they are.

    Args:
        options: the `name` of the mode and the `backend`, as `ensemble.spec.loops` resolves them.
        run_dir: where kernels are kept, unless the environment names a place.
    """
    import torch

    release_caches()
    for variable, folder in name_kernel_caches(run_dir).items():
        _set_here[variable] = (folder, os.environ.get(variable))
        os.environ[variable] = folder
    # torch limits how often it compiles one function, and members before this one in the process may share it.
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, mode=options["name"], backend=options["backend"])


def release_caches() -> None:
    """Leave the environment as it was before `compile_forward`: the process may be the user's, or train others."""
    while _set_here:
        variable, (folder, earlier) = _set_here.popitem()
        if os.environ.get(variable) == folder:
            del os.environ[variable]
            os.environ.update({variable: earlier} if earlier else {})


def name_kernel_caches(run_dir: Path) -> dict[str, str]:
    """The environment variables that name the folders, but for those that the user has set.

    Kernels are loaded as they are found: the folder is the user's own, whatever modes the run directory has. Those
    of processors with other instructions are in a folder of their own: PyTorch compiles for the one that it is on.
    """
    folder = run_dir / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_ownership(folder, folder.stat())
    except (OSError, StoreError) as error:
        log.warning("compiled kernels are not kept with the run: %s", error)
        return {}
    return {name: str(folder / _name_processor() / _FOLDERS[name]) for name in _FOLDERS if not find_folder(name)}


def find_folder(variable: str) -> str | None:
    """The folder that the user has named for a compiler's kernels, or None.

    PyTorch names its default in the environment as soon as its optimizers are imported.
    """
    folder = os.environ.get(variable)
    is_default = folder is not None and any(part.startswith("torchinductor_") for part in Path(folder).parts)
    return None if is_default else folder


def remove_empty(*folders: Path) -> None:
    """Remove the folders, and those that PyTorch makes where it keeps kernels by default, that are empty."""
    unnamed = [os.environ[name] for name in _FOLDERS if name in os.environ and find_folder(name) is None]
    for folder in (*folders, *map(Path, unnamed)):
        with contextlib.suppress(OSError):  # there is none, or it has kernels
            folder.rmdir()


@functools.cache
def _name_processor() -> str:
    """A name of the processor's kind, 12 hexadecimal digits."""
    fields = read_processor()
    parts = [platform.machine(), *(f"{name}: {fields[name]}" for name in _OF_PROCESSOR if name in fields)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
