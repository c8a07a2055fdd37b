"""Combining more members than the memory holds: their predictions are mapped, and one is looked at at a time."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kit.kept_predictions import save_predictions

from ensemble.combine import formulas, prediction_matrix
from ensemble.combine.combination import fit_held_out
from ensemble.combine.uncertainty import quantify
from ensemble.store import RunDir, read_predictions

MEMBERS, N, CLASSES = 24, 4_000, 20


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunDir, Any]:
    run_dir, rng = RunDir(tmp_path), np.random.default_rng(0)
    target = rng.integers(0, CLASSES, N)
    members = {
        f"{number:03d}": SimpleNamespace(id=f"{number:03d}", identity={}, predictions={}, outdated=None)
        for number in range(MEMBERS)
    }
    for name, member in members.items():
        values = rng.random((N, CLASSES), dtype=np.float32)
        values[np.arange(N), target] += rng.random()
        values /= values.sum(axis=1, keepdims=True)
        member.predictions["valid"] = save_predictions(
            run_dir.predictions(name), "valid", values, np.arange(N), target
        )
    return run_dir, SimpleNamespace(members=members)


@pytest.mark.parametrize("method", ["average", "greedy"])
def test_the_memory_taken_does_not_grow_with_the_members(run: Any, method: str, monkeypatch: Any) -> None:
    run_dir, state = run
    in_memory = {name: read_predictions(run_dir, member, "valid") for name, member in state.members.items()}
    before = prediction_matrix.align("valid", in_memory)
    combination, expected = fit_held_out(method, before.values, before.target, task=before.task)
    surely = quantify("valid", before, combination).parts
    del in_memory, before
    one = N * CLASSES * 4
    monkeypatch.setattr(formulas, "CHUNK_OF_ALL", N * CLASSES)  # blocks of rows change no bit
    tracemalloc.start()
    try:
        found = prediction_matrix.read_prediction_matrix(run_dir, state, list(state.members), "valid")
        combination, held_out = fit_held_out(method, found.values, found.target, task=found.task)
        sure = quantify("valid", found, combination)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(expected, held_out)
    assert sure.parts.keys() == surely.keys() and all(np.array_equal(surely[k], sure.parts[k]) for k in surely)
    assert peak < 12 * one, f"{peak / one:.1f} times what one of {MEMBERS} members has predicted"
