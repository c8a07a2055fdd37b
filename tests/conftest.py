"""Where tests that share a helper module find it, and what holds for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "execute"))

# Machines that run tests are shared: how long one example takes says nothing.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
