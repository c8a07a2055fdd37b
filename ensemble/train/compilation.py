"""Compiles the model of a member by torch.compile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

#: Where torch keeps compiled kernels; else in a temporary directory that stays.
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def compile_forward(model: nn.Module, options: Mapping[str, Any], folder: Path) -> None:
    """Compile what the model computes when it is called; its parameters, names and hooks stay as they are.

    Args:
        options: the `name` of the mode and the `backend`, as `ensemble.spec.loops` resolves them.
        folder: for compiled kernels, shared by the members of a run.
    """
    # torch limits how often it compiles one function, and members before this one in the process may share it.
    torch.compiler.reset()
    for variable, name in _CACHES.items():
        os.environ.setdefault(variable, str(folder / name))
    model.forward = torch.compile(model.forward, mode=options["name"], backend=options["backend"])
