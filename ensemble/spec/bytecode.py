"""Imports user code without writing `__pycache__`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_bytecode() -> Iterator[None]:
    """Within, an import writes no `__pycache__` beside the module, whose directory may be another user's."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
