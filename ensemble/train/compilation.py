"""Compiles the model of a member by torch.compile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ensemble.train.kernel_caches import name_kernel_caches

#: Variables that were set here, for the member in training, with their values.
_set_here: dict[str, str] = {}


def compile_forward(model: nn.Module, options: Mapping[str, Any], run_dir: Path) -> None:
    """Compile what the model computes when it is called; its parameters, names and hooks stay as they are.

    Args:
        options: the `name` of the mode and the `backend`, as `ensemble.spec.loops` resolves them.
        run_dir: where kernels are kept, unless the environment names a place.
    """
    release_caches()
    for variable, folder in name_kernel_caches(run_dir).items():
        os.environ[variable] = _set_here[variable] = folder
    # torch limits how often it compiles one function, and members before this one in the process may share it.
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, mode=options["name"], backend=options["backend"])


def release_caches() -> None:
    """Leave the environment as it was before `compile_forward`: the process may be the user's, or train others."""
    while _set_here:
        variable, value = _set_here.popitem()
        if os.environ.get(variable) == value:
            del os.environ[variable]
