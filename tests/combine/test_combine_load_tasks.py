"""A run of every task is loaded as one module, which says what was measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import task_cases as cases  # noqa: E402
from kit.event_dicts import fold, read_events  # noqa: E402

import ensemble  # noqa: E402
from ensemble.combine import find_math, fit  # noqa: E402
from ensemble.combine.model import EnsembleModel  # noqa: E402
from ensemble.combine.prediction_matrix import read_prediction_matrix  # noqa: E402
from ensemble.combine.uncertainty import decompose  # noqa: E402
from ensemble.events import NOT_COMBINED  # noqa: E402
from ensemble.spec import COMBINERS, Ensemble  # noqa: E402
from ensemble.store import RunDir, RunState, load_predictions  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def median(values: torch.Tensor) -> torch.Tensor:
    return values.quantile(0.5, dim=0)


#: Those that tests/e2e/test_e2e_every_task.py does not load in the first tier.
FIRST = ("single", "regression", "quantiles", "predict")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in FIRST else pytest.mark.more) for name in cases.CASES],
)
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunDir]:
    name, case = request.param, cases.CASES[request.param]
    declared = Ensemble(
        name="e",
        recipe=case.recipe,
        train=cases.data(case),
        valid=cases.data(case, 30, seed=1),
        test=cases.data(case, 20, seed=2),
        members=[{"lr": lr} for lr in (0.05, 0.2)],
        combine=median if name == "free" else "weighted",
        epochs=1,
        batch_size=8,
    )
    path = tmp_path_factory.mktemp(name.replace(" ", "_")) / "run"
    result = ensemble.submit(declared, path, "inline").wait()
    assert {row["state"] for row in result.members} == {"finished"}
    return name, RunDir(path)


def state_of(run: RunDir) -> RunState:
    return fold(read_events(run.events))


def test_a_loaded_run_says_what_was_measured(finished: tuple[str, RunDir]) -> None:
    name, run = finished
    event: Any = state_of(run).combined
    model = ensemble.load(run.path)
    saved = load_predictions(run.predictions("member-0"), "test")
    batch = {"x": torch.from_numpy(np.random.default_rng(2).normal(size=(20, cases.WIDE)))}
    values = model(batch)
    assert isinstance(model, EnsembleModel)
    assert (model.task, values.dtype, values.shape) == (saved.task, torch.float32, saved.values.shape)
    assert model.member_ids == event.members
    math = find_math(model.task)
    recipe = cases.CASES[name].recipe
    more = [*recipe.split_metrics, *filter(None, [recipe.objective])]
    found = math.measure(values.numpy(), saved.target, more)
    wanted = event.metrics["ensemble"]
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_every_method_is_loaded_as_it_is_fitted(finished: tuple[str, RunDir]) -> None:
    name, run = finished
    if name == "free":
        return
    state = state_of(run)
    valid, test = (read_prediction_matrix(run, state, list(state.members), split) for split in ("valid", "test"))
    objective = find_math(valid.task).choose_criterion(state.objective, state.direction)
    batch = {"x": torch.from_numpy(np.random.default_rng(2).normal(size=(20, cases.WIDE)))}
    for method in COMBINERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what cannot be stacked is averaged, with a warning
            values = ensemble.load(run.path, combine=method)(batch)
        fitted = fit(method, valid.values, valid.target, task=valid.task, objective=objective)
        np.testing.assert_allclose(values.numpy(), fitted.predict(test.values), rtol=1e-4, atol=1e-4)


def test_uncertainties_are_those_of_the_saved_predictions(finished: tuple[str, RunDir]) -> None:
    name, run = finished
    if name in ("free", "steps"):  # of steps those that are padding are left out where targets are known
        return
    batch = {"x": torch.from_numpy(np.random.default_rng(2).normal(size=(20, cases.WIDE)))}
    found = ensemble.load(run.path, uncertainty=True)(batch)
    weights = (state_of(run).combined or NOT_COMBINED).weights
    saved = read_prediction_matrix(run, state_of(run), list(weights), "test")
    wanted = decompose(saved.task, saved.values, np.array(list(weights.values())))
    assert set(wanted) == set(found) - {"values"}
    for part, values in wanted.items():
        np.testing.assert_allclose(found[part].numpy(), values, rtol=1e-3, atol=3e-6, err_msg=part)


def test_each_member_predicts_what_it_saved(finished: tuple[str, RunDir]) -> None:
    name, run = finished
    batch = {"x": torch.from_numpy(np.random.default_rng(2).normal(size=(20, cases.WIDE)))}
    alone: Any = median if name == "free" else "average"
    for member in state_of(run).members:
        model = ensemble.load(run.path, combine=alone, members=[member])
        model.calibration = 1.0
        saved = load_predictions(run.predictions(member), "test").values
        np.testing.assert_allclose(model(batch).numpy(), saved, rtol=1e-5, atol=1e-6)
