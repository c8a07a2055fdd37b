"""Consumers come, read, stall, leave and die, so do workers and feeders: `feeder_machine.py` says what holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.machines import draw_histories

#: Whose histories have all faults: with another version of hypothesis, others may be needed.
SEEDS, FAULTS = (2, 6, 8, 9, 10, 11, 15, 17, 18, 20), ("reader killed", "worker killed", "feeder killed", "left")
CASES = [(0, 4, ("reader killed", "feeder killed", "left")), pytest.param(1, 10, (), marks=pytest.mark.more)]
CASES += [pytest.param(seed, 10, FAULTS, marks=pytest.mark.chaos) for seed in SEEDS]


@pytest.mark.parametrize(("seed", "examples", "faults"), CASES)
def test_everyone_reads_everything_once_whoever_comes_stalls_leaves_or_dies(
    seed: int, examples: int, faults: tuple[str, ...]
) -> None:
    draw_histories(Path(__file__).with_name("feeder_machine.py"), seed, examples, faults)
