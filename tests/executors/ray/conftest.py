"""What tests on a model of Ray share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_model import World, replace_ray


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Which cluster Ray's functions stand for; leases are on a model, and time stands still."""
    with pytest.MonkeyPatch.context() as patch:
        yield from replace_ray(patch)
