"""A run is killed at any change of a file and its members are managed: `run_machine.py` says what holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.machines import draw_histories

VERBS = ("pause", "add", "cancel", "stop")
CASES = [(0, 2, ("killed",)), pytest.param(1, 15, ("killed", *VERBS), marks=pytest.mark.more)]
CASES += [pytest.param(seed, 30, ("killed", *VERBS), marks=pytest.mark.chaos) for seed in range(2, 6)]


@pytest.mark.parametrize(("seed", "examples", "faults"), CASES)
def test_no_history_loses_or_repeats_anything(seed: int, examples: int, faults: tuple[str, ...]) -> None:
    draw_histories(Path(__file__).with_name("run_machine.py"), seed, examples, faults)
