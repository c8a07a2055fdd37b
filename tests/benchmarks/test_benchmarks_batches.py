"""`python -m benchmarks batches`: cases, what it says of them, runs on the digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.plain_rows import make_row

from benchmarks.__main__ import main
from benchmarks.batches.expected import accuracy_claims
from benchmarks.batches.measure import LARS, SGD, BatchRow, Case, best_rate, make_cases, make_member, make_rows
from benchmarks.members import MemberResult
from benchmarks.results import Interval

powers = st.lists(st.integers(2, 13), min_size=2, unique=True).map(
    lambda found: [2**power for power in sorted(found)]
)


@given(powers, st.integers(1, 90), st.lists(st.integers(1, 4), max_size=2, unique=True))
def test_all_cases_but_those_for_longer_have_as_many_epochs(
    batches: list[int], epochs: int, longer: list[int]
) -> None:
    base, *others = cases = make_cases(batches, epochs, longer)
    assert base == Case(optimizer=SGD, batch_size=batches[0], epochs=epochs)
    usual = [case.batch_size for case in others if case.optimizer == LARS and case.epochs == epochs]
    assert usual == batches[1:]
    assert {case.batch_size for case in cases if case.epochs != epochs} <= {batches[-1]}
    assert len(set(cases)) == len(cases)
    for case in cases:
        member = make_member(case, {}, 0.1, 1, batches[0])
        assert member.accumulate and case.batch_size == member.accumulate * batches[0]


def test_the_best_rate_is_the_smaller_of_equals_and_never_one_that_diverged() -> None:
    assert best_rate({0.1: 50.0, 0.2: 60.0, 0.4: 60.0, 0.8: None}) == 0.2
    assert best_rate({0.1: None}) is None


def of_case(optimizer: str, batch: int, epochs: int, steps: int, difference: float | None) -> BatchRow:
    less = None if difference is None else Interval(difference, 0.4, 3)
    found = Interval(80 + (difference or 0.0), 0.3, 3)
    case = {"optimizer": optimizer, "batch_size": batch, "epochs": epochs, "steps": steps, "seeds": 3}
    more = {"less_sgd": None if optimizer == SGD else Interval(0.3, 0.4, 3), "edge": optimizer == SGD}
    return make_row(BatchRow, data="cifar10", lr=0.2, grid={}, accuracy=found, difference=less, **case, **more)


ROWS = [
    of_case(SGD, 256, 30, 5280, None),
    of_case(LARS, 2048, 30, 660, -0.5),
    of_case(SGD, 8192, 30, 180, -9.0),
    of_case(LARS, 8192, 30, 180, -2.5),
    of_case(LARS, 8192, 60, 360, -0.9),
]


def test_the_claim_is_of_the_largest_batch_with_as_many_epochs_and_says_what_is_kept() -> None:
    [claim] = accuracy_claims(ROWS)
    assert claim.measured.startswith("-2.50 points in 30 epochs: 77.50 ± 0.30 % at 8,192, 80.00 ± 0.30 % at 256")
    assert claim.loses.startswith(
        "in 180 steps: -2.50 points, 95 % interval -2.90 to -2.10 over 3 seeds: a differ"
    )
    kept_in = "; within a point of 30 epochs of the small batch in 660 (batch 2,048, 30 epochs)"
    assert claim.loses.endswith(kept_in), "not where -1.3 may be lost"
    [kept] = accuracy_claims([ROWS[0], of_case(LARS, 8192, 30, 180, -0.5)])
    assert kept.loses == ""
    for missing in (ROWS[:1], [], [make_row(BatchRow, optimizer=SGD, epochs=30, accuracy=None)]):
        assert not list(accuracy_claims(missing))


def test_rows_compare_seed_by_seed_with_the_small_batch_and_with_sgd_at_the_same() -> None:
    grids = {case: {0.1: 50.0, 0.2: 60.0, 0.4: 1.0} for case in make_cases([32, 512], 3, [])}
    diverged = Case(optimizer=SGD, batch_size=1024, epochs=3)
    best = dict.fromkeys(grids, 0.2)
    results = [MemberResult(float(value)) for value in (90, 50, 80, 70, 40, 66)]
    rows = make_rows({**grids, diverged: {0.1: None}}, best, results, 1000, "digits")
    base, small, large, lost = rows
    assert base.difference is None and base.accuracy and base.accuracy.mean == 80 and not base.edge
    assert large.difference and large.difference.mean == -7 and large.steps == 3 * 2
    assert large.less_sgd and large.less_sgd.mean == 28 and small.less_sgd is None
    assert lost.accuracy is None and lost.lr is None and "diverged at every rate" in str(lost.note)


@pytest.mark.slow
def test_the_command_studies_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = "batches --width 4 --epochs 1 --seeds 2 --batches 32,256 --longer 2 --rates 0.1"
    assert main([*arguments.split(), "--lars-rates", "1,2", "--json", "rows.json"]) == 0
    claim, base, _, large, _, longer = json.loads((tmp_path / "rows.json").read_text())
    assert claim["part"] == "claim" and base["difference"] is None
    assert (base["grid"], base["lr"]) == ({}, 0.1), "one rate is taken as it is"
    assert (large["steps"], longer["steps"]) == (5, 10) and large["difference_low"] is not None
    assert str(longer["lr"]) in longer["grid"].keys() == {"1.0", "2.0"}, "its rate was chosen for its epochs"
