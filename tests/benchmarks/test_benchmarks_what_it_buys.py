"""`python -m benchmarks what_it_buys`: cells that are measured and resumed, and what is said of them."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.results import group_by
from benchmarks.what_it_buys.analysis import RANDOM, SCALED, method_rows, pair_rows, plain_at, verdict_rows
from benchmarks.what_it_buys.cells import LEARNING, LONGER, METHODS, PLAIN, Cell, plan, read_cells, run_cells
from benchmarks.what_it_buys.plain import Loop, fit_temperature, score
from benchmarks.what_it_buys.tasks import CIFAR10, PADDING, TABLES, TASKS, make_pipelines, read_pool, split

WINE, DIGITS = TASKS["wine"], TASKS["digits"]


def test_blocks_have_all_methods_but_those_that_cannot_learn_in_so_few_trials() -> None:
    planned = plan([*TASKS], [*METHODS], seeds=5, large_seeds=3, scale=1.0)
    assert len({cell.key for cell in planned}) == len(planned)
    blocks = group_by(planned, lambda cell: (cell.task, cell.seed, cell.budget_s))
    assert len(blocks) == 5 * 5 + 5 * 3 + 3 * 2
    for (name, seed, budget_s), block in blocks.items():
        is_small = budget_s == TASKS[name].budgets[0]
        assert {cell.method for cell in block} == {*METHODS} - (set(LEARNING) if is_small else set())
        assert is_small or name in TABLES or seed < 3
    dear = [cell.task not in TABLES and cell.budget_s == TASKS[cell.task].budgets[1] for cell in planned]
    assert dear == sorted(dear), "they are the last"
    for kind in (False, True):
        ordered = [cell.seed for cell, is_dear in zip(planned, dear, strict=True) if is_dear == kind]
        assert ordered == sorted(ordered)


def test_a_seed_has_a_split_of_its_own_and_no_sample_is_in_two_parts() -> None:
    pool = read_pool(DIGITS, None)
    numbered = np.arange(len(pool[1]), dtype=np.float32)[:, None], pool[1]
    parts = {seed: split(DIGITS, numbered, seed) for seed in (0, 1)}
    sizes = {name: len(label) for name, (_, label) in parts[0].items()}
    assert sizes == {"train": 1078, "valid": 359, "test": 360}
    every = np.concatenate([x for x, _ in parts[0].values()])
    assert len(np.unique(every)) == len(numbered[0])
    assert not np.array_equal(parts[0]["test"][1], parts[1]["test"][1])
    pixels = np.concatenate([x for x, _ in split(DIGITS, pool, 0).values()])
    assert (pixels.min(), pixels.max()) == (0, 1), "a pixel that is constant where one learns is not blown up"
    learned = split(WINE, read_pool(WINE, None), 0)["train"][0]
    assert np.allclose(learned.mean(0), 0, atol=1e-5) and np.allclose(learned.std(0), 1, atol=1e-3)


def test_the_loop_crops_and_flips_each_image_by_itself_and_scales_as_the_pipelines_do() -> None:
    task, rng = TASKS[CIFAR10], np.random.default_rng(0)
    pool = rng.integers(0, 256, (8000, 3, 16, 16), np.uint8), rng.integers(0, 10, 8000)
    arrays = {name: (x[:6], label[:6]) for name, (x, label) in split(task, pool, 0).items()}
    loop, x = Loop(task, arrays), torch.from_numpy(arrays["train"][0])
    [batch] = make_pipelines(task, arrays)["valid"].loader(6)
    whole = loop._prepare(torch.from_numpy(arrays["valid"][0]))
    assert torch.allclose(batch["x"], whole[batch["index"]], atol=1e-5)
    torch.manual_seed(0)
    made = loop._prepare(x, augment=True)
    padded = torch.nn.functional.pad(x, [PADDING] * 4)
    found = []
    for before, after in zip(padded, made, strict=True):
        shifts = range(2 * PADDING + 1)
        cuts: dict[tuple[int | str, ...], torch.Tensor] = {}
        cuts |= {(i, j): before[:, i : i + 16, j : j + 16] for i in shifts for j in shifts}
        cuts |= {(*at, "flipped"): cut.flip(2) for at, cut in [*cuts.items()]}
        found += [at for at, cut in cuts.items() if torch.allclose(loop._prepare(cut[None])[0], after)]
    assert len(found) == len(x) and len({*found}) > 1
    assert {len(at) for at in found} == {2, 3}, "some are flipped, some are not"


def test_the_temperature_undoes_scores_that_are_too_sure() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4000, 3)
    label = torch.distributions.Categorical(logits=logits).sample()
    sure = (4 * logits).log_softmax(1)
    assert fit_temperature(sure, label) == pytest.approx(4, rel=0.1)
    nll, accuracy = score(sure, label, 4.0)
    assert nll == pytest.approx(float(torch.nn.functional.cross_entropy(logits, label)), rel=1e-5)
    assert accuracy == pytest.approx(float((logits.argmax(1) == label).float().mean()))


@pytest.mark.more
def test_cells_are_measured_in_their_own_processes_and_a_later_call_goes_on(tmp_path: Path) -> None:
    path, lines = tmp_path / "cells.jsonl", list[str]()
    known = Cell(task="digits", method="random", seed=0, budget_s=2.0, nll=9.0, accuracy=0.5)
    path.write_text(json.dumps(dataclasses.asdict(known)) + '\n{"task": "digits", "meth', encoding="utf-8")
    planned = [
        Cell(task="digits", method=PLAIN, seed=0, budget_s=2.0),
        known,
        Cell(task="digits", method="metric", seed=0, budget_s=4.0),
    ]
    plain, kept, ours = run_cells(planned, path, None, lines.append)
    assert kept.nll == 9.0, "it was not measured again"
    assert len(lines) == 2 and not (plain.error or ours.error), lines
    for cell in (plain, ours):
        assert cell.nll is not None and cell.accuracy is not None and cell.work_cpu_s and cell.cpu_s
        assert 0 < cell.nll < np.log(10) and cell.accuracy > 0.5
        assert cell.cpu_s >= cell.work_cpu_s - 0.1
    assert plain.trained == len(plain.trace) >= 1 == plain.combined
    assert ours.combined is not None and 1 <= ours.combined <= ours.trained
    assert [point[0] for point in plain.trace] == sorted(point[0] for point in plain.trace)
    assert plain.work_cpu_s and plain.work_cpu_s < 2 * LONGER * 2.0
    before = path.read_bytes()
    assert run_cells(planned, path, None, lines.append) == [plain, kept, ours]
    assert path.read_bytes() == before and len(lines) == 2 and len(read_cells(path)) == 3


NLL = {"metric": [0.30, 0.28, 0.35], RANDOM: [0.31, 0.27, 0.36]}
TRACES = [
    [[2.0, 0.9, 0.8, 0.70], [6.0, 0.50, 0.45, 0.80], [11.0, 0.29, 0.28, 0.9]],
    [[2.0, 0.8, 0.7, 0.75], [6.0, 0.45, 0.40, 0.85], [11.0, 0.29, 0.26, 0.9]],
    [[2.0, 0.7, 0.6, 0.72], [6.0, 0.55, 0.50, 0.82], [11.0, 0.33, 0.32, 0.9]],
]


def of_method(method: str, seed: int, nll: float) -> Cell:
    given: dict[str, Any] = {"nll": nll, "raw_nll": nll + 0.1, "scaled_nll": nll, "best_nll": nll + 0.2}
    given |= {"accuracy": 0.9, "work_cpu_s": 10.5, "trained": 4 + seed, "combined": 2}
    return Cell(task="wine", method=method, seed=seed, budget_s=9.0, **given)


CELLS = [of_method(method, seed, nll) for method, found in NLL.items() for seed, nll in enumerate(found)]
CELLS += [
    Cell(task="wine", method=PLAIN, seed=seed, budget_s=9.0, nll=trace[-1][1], trace=trace)
    for seed, trace in enumerate(TRACES)
]


def test_the_plain_script_is_what_it_was_after_so_many_cpu_seconds() -> None:
    long = CELLS[-3]
    at = plain_at(long, 9.0)
    assert at is not None and (at.nll, at.accuracy, at.work_cpu_s, at.trained) == (0.50, 0.80, 6.0, 2)
    scaled = plain_at(long, 11.0, SCALED)
    assert scaled is not None and (scaled.nll, scaled.raw_nll, scaled.method) == (0.28, 0.29, SCALED)
    assert plain_at(long, 1.9) is None


def test_rows_have_medians_and_paired_intervals_over_seeds() -> None:
    rows = {(row.method, row.budget_s): row for row in method_rows(CELLS)}
    assert rows["metric", 9.0].nll.ends == (0.30, 0.28, 0.35) and rows["metric", 9.0].seeds == 3
    assert rows["metric", 9.0].model_cpu_s.ends == pytest.approx((10.5 / 5, 10.5 / 6, 10.5 / 4))
    assert rows[PLAIN, 9.0].nll.median == statistics.median([0.50, 0.45, 0.55])
    assert rows[SCALED, 9.0].nll.ends == (0.45, 0.40, 0.50)
    pairs = {(row.method, row.other): row for row in pair_rows(CELLS)}
    less = np.array(NLL["metric"]) - np.array([0.50, 0.45, 0.55])  # at the 10.5 s that it took
    half = stats.t.ppf(0.975, 2) * less.std(ddof=1) / np.sqrt(3)
    found = pairs["metric", PLAIN]
    assert found.nll.ends == pytest.approx((less.mean(), less.mean() - half, less.mean() + half))
    assert (found.verdict, found.won, found.seeds) == ("better", 3, 3)
    assert found.raw_nll.mean == pytest.approx(less.mean() + 0.1)
    beside = pairs["metric", RANDOM]
    assert (beside.verdict, beside.won) == ("", 2)
    assert beside.nll.mean == pytest.approx(np.mean(np.array(NLL["metric"]) - np.array(NLL[RANDOM])))
    verdicts = {(row.method, row.other): row for row in verdict_rows([*pairs.values()])}
    assert verdicts["metric", PLAIN].better == "wine, 9" and verdicts["metric", PLAIN].won == "3 of 3"
    assert verdicts["metric", RANDOM].unclear == "wine, 9" and verdicts["metric", RANDOM].worse == "nowhere"
