"""Keeps torch to one thread while samples are prepared."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def limit_torch_threads() -> Iterator[None]:
    """Run torch on one thread, as a preparation worker does: with more, its sums have other last bits."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if hasattr(torch, "get_num_threads") else 1  # type: ignore[union-attr]
    if torch is None or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
