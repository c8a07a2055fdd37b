"""Whatever is killed, stopped or interrupted, and whenever: the run ends as if nothing had happened.

A seed that fails is run again alone by its name: `pytest -k "[SEED]" tests/faults/test_faults_chaos.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults_cluster import Nodes
from faults_conductor import draw, run_seed

QUICK = (16, 20)
MANY = range(100, 130)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes(2)
    yield made
    made.close()


@pytest.mark.parametrize(
    "seed", [pytest.param(QUICK[0], marks=pytest.mark.more), pytest.param(QUICK[1], marks=pytest.mark.slow)]
)
def test_whoever_is_killed_or_stopped_every_member_ends_with_its_weights(
    seed: int, expected: dict[str, str | None]
) -> None:
    run_seed(seed, expected)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", [seed for seed in MANY if draw(seed).executor == "local"])
def test_every_member_ends_with_its_weights_through_many_seeds(seed: int, expected: dict[str, str | None]) -> None:
    run_seed(seed, expected)


@pytest.mark.chaos
@pytest.mark.ray
@pytest.mark.parametrize("seed", [seed for seed in MANY if draw(seed).executor == "ray"])
def test_every_member_ends_with_its_weights_through_many_seeds_on_several_nodes(
    seed: int, expected: dict[str, str | None], nodes: Nodes
) -> None:
    run_seed(seed, expected, nodes)
