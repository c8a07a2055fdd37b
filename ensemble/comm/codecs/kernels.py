"""Kernels compiled by numba, kept on disk between processes. Imported when the first one is needed.

A kernel's machine code lies in `__pycache__` beside its file, or where that cannot be written in the user's cache
directory (`NUMBA_CACHE_DIR` names another); where neither can be, it is compiled anew in every process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])

# With Python's error model each division is tested for zero, which keeps a loop from being vectorized.
_jit: Any = numba.njit


def kernel(function: F) -> F:
    """Compile at the first call, or load what an earlier process compiled."""
    try:
        return cast(F, _jit(function, cache=True, nogil=True, error_model="numpy", boundscheck=False))
    except RuntimeError as error:  # numba's error if it cannot write its cache
        if "no locator available" not in str(error):
            raise
        return cast(F, _jit(function, nogil=True, error_model="numpy", boundscheck=False))


def inline(function: F) -> F:
    """A part of kernels, compiled into each."""
    return cast(F, _jit(function, error_model="numpy", boundscheck=False))
