"""The gain in the ensemble's metric: who adds something, and what a search makes of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import apply_event, fold
from kit.kept_predictions import save_predictions
from kit.task_members import TASKS, make_members

from ensemble.combine import CombineError, find_math
from ensemble.controller.starts import make_trials
from ensemble.search import marginal_gain
from ensemble.search.marginal_gain import Gains, Views
from ensemble.search.trials import SearchTrials
from ensemble.spec import CLASSIFICATION, Ensemble, Recipe, Search, SpecError, Task, uniform
from ensemble.store import RunDir, RunState, StoreError
from pipelines import Pipeline, sources

ROWS, CLASSES = 200, 4
MATH = find_math(CLASSIFICATION)
TARGET = np.random.default_rng(0).integers(0, CLASSES, ROWS)


def compute_gains(
    values: list[Any], target: Any, metric: str = "nll", chosen: Any = None, task: Task = CLASSIFICATION
) -> list[float]:
    guess = find_math(task).guess(values[0], target)
    return marginal_gain.compute_gains(Views.of(values, target, metric, task, guess), chosen)


def member(wrong: np.ndarray, sure: float = 0.9, seed: int = 0) -> np.ndarray:
    """Probabilities that are right but for some rows, where they are less sure; with some noise of their own."""
    said = np.where(wrong, (TARGET + 1) % CLASSES, TARGET)
    p = np.where(wrong, 0.15, (1 - sure) / (CLASSES - 1))[:, None].repeat(CLASSES, axis=1)
    p[np.arange(ROWS), said] = np.where(wrong, 0.55, sure)
    p *= np.random.default_rng(seed).uniform(0.95, 1.05, p.shape)
    return (p / p.sum(axis=1, keepdims=True)).astype(np.float32)


GOOD = np.arange(ROWS) < 30  # wrong in 15 %
OTHER = np.arange(ROWS) >= 150  # wrong in 25 %, elsewhere
COPIES = [member(GOOD, seed=seed) for seed in range(3)]
DIFFERENT = member(OTHER, seed=3)
NOISE = member(np.random.default_rng(4).random(ROWS) < 0.75, seed=4)


@pytest.mark.parametrize("metric", ["nll", "brier", "accuracy"])
def test_a_worse_but_different_member_adds_more_than_one_of_three_copies(metric: Any) -> None:
    assert MATH.measure(DIFFERENT, TARGET)["accuracy"] < MATH.measure(COPIES[0], TARGET)["accuracy"]
    *copies, different, noise = compute_gains([*COPIES, DIFFERENT, NOISE], TARGET, metric)
    assert different > max(copies) and different > 0
    assert noise < different
    alone = compute_gains([COPIES[0], DIFFERENT], TARGET, metric)
    assert alone[0] > max(copies), "it was worth more while it had no copies"


def test_a_lone_member_is_held_against_the_frequencies_of_the_classes() -> None:
    prior = find_math(CLASSIFICATION).guess(DIFFERENT, TARGET)
    assert prior[0].tolist() == (np.bincount(TARGET) / ROWS).tolist()
    before, after = (MATH.measure(values, TARGET)["nll"] for values in (prior, DIFFERENT))
    assert compute_gains([DIFFERENT], TARGET, "nll") == [before - after]
    assert compute_gains([prior], TARGET, "accuracy") == [0.0]


def test_one_that_only_does_harm_has_a_negative_gain_and_a_worse_one_a_more_negative() -> None:
    perfect = member(np.zeros(ROWS, bool), sure=0.999)
    half, always = (member(np.random.default_rng(9).random(ROWS) < share, sure=0.9, seed=9) for share in (0.5, 1))
    _, bad, worse = compute_gains([perfect, half, always], TARGET, "nll")
    assert worse < bad < 0


@given(st.integers(1, 5), st.integers(0, 100), st.sampled_from(["nll", "brier", "accuracy"]))
def test_gains_of_some_are_those_of_all(members: int, seed: int, metric: Any) -> None:
    rng = np.random.default_rng(seed)
    probabilities = [rng.dirichlet(np.ones(3), 20).astype(np.float32) for _ in range(members)]
    target = rng.integers(0, 3, 20)
    whole = compute_gains(probabilities, target, metric)
    assert [compute_gains(probabilities, target, metric, [i])[0] for i in range(members)] == whole


AS_GOOD = 111  # the seed of two members with equally large errors


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_in_every_task_what_a_member_adds_is_its_gain(task: Task) -> None:
    values, target = make_members(task, AS_GOOD, 2, n=300)
    worst = find_math(task).guess(values[0], np.random.default_rng(0).permutation(target)).astype(np.float32)
    *copies, other, nothing = compute_gains([values[0]] * 3 + [values[1], worst], target, task=task)
    assert max(copies) < other and other > 0
    assert nothing < other / 10
    guess = find_math(task).guess(values[0], target)
    assert compute_gains([values[0]], target, task=task)[0] > 0 == compute_gains([guess], target, task=task)[0]


def test_the_gain_of_points_is_the_share_of_the_variance_that_is_explained() -> None:
    from sklearn.metrics import r2_score

    (values,), target = make_members(Task("regression"), 0, 1)
    gain = compute_gains([values], target, task=Task("regression"))[0]
    assert gain == pytest.approx(r2_score(target, values.astype(np.float64)))


def declared(**options: Any) -> Ensemble:
    search = Search({"lr": uniform(0, 1)}, trials=9, objective="gain")
    data = Pipeline(sources.arrays(x=np.zeros((8, 2), np.float32)))
    recipe = Recipe(model=len, loss=len, task="classification")
    return Ensemble(name="gain", recipe=recipe, search=search, train=data, **{"valid": data, **options})


class Run:
    """A search's trials over a log, each of which ends at once with the predictions it is given."""

    def __init__(self, path: Path, ensemble: Ensemble, events: Any = ()) -> None:
        self.run_dir = RunDir.create(path, ensemble)
        self.state: RunState = fold(events)
        self.events = list(events)
        if not events:
            self.log(type="run_started", name="g", run_id="r", objective="accuracy", direction=ensemble.mode)
        self.trials = make_trials(ensemble, self.run_dir, self.state, sharing=False)

    def log(self, **event: Any) -> None:
        self.events.append({"v": 2, "t": float(len(self.events)), **event})
        apply_event(self.state, self.events[-1])

    def next(self, predictions: np.ndarray | None) -> dict[str, Any]:
        identity = self.trials.next()
        self.log(type="member", **identity.as_dict())
        if predictions is not None:
            path = self.run_dir.predictions(identity.member)
            save_predictions(path, "valid", predictions, np.arange(ROWS), TARGET)
        metrics = self.trials.final(identity.number, {"accuracy": 0.5})["metrics"]
        self.log(type="finished", member=identity.member, attempt=0, metrics=metrics)
        self.trials.ended(identity.number, "finished", metrics)
        return dict(metrics)

    @property
    def values(self) -> list[float | None]:
        assert isinstance(self.trials, SearchTrials)
        return [trial.value for trial in self.trials._searcher.study.trials]


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_search_values_all_trials_by_what_they_add_now_after_a_resume_too(tmp_path: Path, mode: Any) -> None:
    objective, sign = ("accuracy", 1) if mode == "max" else ("loss", -1)
    ensemble = declared(mode=mode, objective=objective)
    run = Run(tmp_path, ensemble)
    told = [run.next(p)["gain"] for p in (COPIES[0], DIFFERENT, COPIES[1], COPIES[2])]
    assert told[0] == pytest.approx(compute_gains([COPIES[0]], TARGET)[0]) and told[0] > 3 * told[1] > 0
    events, journal = list(run.events), run.run_dir.journal
    proposed = run.trials.next().params
    now = compute_gains([COPIES[0], DIFFERENT, COPIES[1], COPIES[2]], TARGET)
    assert run.values[:4] == pytest.approx([sign * gain for gain in now])
    assert max(range(4), key=now.__getitem__) == 1
    asked = journal.read_bytes().splitlines(keepends=True)
    assert b'"op_code":4' in asked[-1]
    journal.write_bytes(b"".join(asked[:-1]))
    resumed = Run(tmp_path, ensemble, events)
    assert resumed.values == [sign * gain for gain in told], "read, not computed"
    assert resumed.trials.next().params == proposed
    assert resumed.values == run.values


def test_a_member_without_predictions_teaches_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, declared())
    assert "gain" not in run.next(None) and "member-0 has no gain" in caplog.text
    assert "gain" in run.next(DIFFERENT)
    assert "gain" not in run.next(np.ones((ROWS, 1))), "no class probabilities"
    assert run.next(COPIES[0])["gain"] > 0
    run.trials.next()
    assert [value is None for value in run.values] == [True, False, True, False, True]


def test_what_was_predicted_for_other_samples_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir.create(tmp_path, declared())
    save_predictions(run_dir.predictions("member-0"), "valid", DIFFERENT, np.arange(ROWS), TARGET)
    save_predictions(run_dir.predictions("member-1"), "valid", DIFFERENT, 1 + np.arange(ROWS), TARGET)
    save_predictions(run_dir.predictions("member-2"), "valid", DIFFERENT, np.arange(ROWS), None)
    known = Gains(run_dir, "nll", RunState())
    assert known.compute("member-0", ["member-9", "member-0"]) > 0
    with pytest.raises(CombineError, match="different valid samples"):
        known.compute("member-1", ["member-0"])
    with pytest.raises(CombineError, match="saved targets"):
        known.compute("member-2", ["member-0"])
    with pytest.raises(StoreError, match="has not saved predictions"):
        known.compute("member-3", [])
    assert list(known.compute_all(["member-0", "member-1", "member-9"])) == ["member-0"]


def test_a_gain_needs_validation_data_and_a_task() -> None:
    with pytest.raises(SpecError, match="is measured on Ensemble"):
        declared(valid=None)
    points, values_of_points = make_members(Task("regression"), 0, 2)
    with pytest.raises(CombineError, match=r"'accuracy' has no meaning for regression \(it has: rmse, mae\)"):
        compute_gains(points, values_of_points, "accuracy", task=Task("regression"))
    with pytest.raises(CombineError, match="outputs of the task free have no declared way of combining"):
        compute_gains([DIFFERENT], TARGET, "nll", task=Task("free"))
