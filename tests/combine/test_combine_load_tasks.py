"""A run of every task is loaded as one module, which says what was measured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import task_cases as cases
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.event_dicts import fold, read_events
from kit.property_examples import examples

import ensemble
from ensemble.combine import find_math, fit, uncertainty
from ensemble.combine.calibrators import apply_calibration
from ensemble.combine.formulas import decompose, explain_invalid, mix, normalise
from ensemble.combine.model import EnsembleModel, StackModel
from ensemble.combine.prediction_matrix import read_prediction_matrix
from ensemble.events import NOT_COMBINED
from ensemble.spec import COMBINERS, Ensemble
from ensemble.spec.task import Task, quantiles
from ensemble.store import RunDir, RunState, load_predictions


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
    about = {"name": "e", "recipe": case.recipe, "train": cases.data(case), "valid": cases.data(case, 30, seed=1)}
    about |= {"test": cases.data(case, 20, seed=2), "members": [{"lr": lr} for lr in (0.05, 0.2)]}
    about |= {"combine": median if name == "free" else "weighted", "epochs": 1, "batch_size": 8}
    declared = Ensemble(**about)
    path = tmp_path_factory.mktemp(name.replace(" ", "_")) / "run"
    result = ensemble.submit(declared, path, "inline").wait()
    assert {row["state"] for row in result.members} == {"finished"}
    return name, RunDir(path)


def state_of(run: RunDir) -> RunState:
    return fold(read_events(run.events))


BATCH = {"x": torch.from_numpy(np.random.default_rng(2).normal(size=(20, cases.WIDE)))}


def test_a_loaded_run_says_what_was_measured_and_each_member_predicts_what_it_saved(finished: Any) -> None:
    name, run = finished
    event: Any = state_of(run).combined
    model, saved = ensemble.load(run.path), load_predictions(run.predictions("member-0"), "test")
    values = model(BATCH)
    assert isinstance(model, EnsembleModel) and model.member_ids == event.members
    assert (model.task, values.dtype, values.shape) == (saved.task, torch.float32, saved.values.shape)
    recipe, expected = cases.CASES[name].recipe, event.metrics["ensemble"]
    more = [*recipe.split_metrics, *filter(None, [recipe.objective])]
    figures = find_math(model.task).measure(values.numpy(), saved.target, more)
    assert {key: figures[key] for key in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for member in state_of(run).members:
        alone = ensemble.load(run.path, combine=median if name == "free" else "average", members=[member])
        alone.calibration = 1.0
        own = load_predictions(run.predictions(member), "test").values
        np.testing.assert_allclose(alone(BATCH).numpy(), own, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")  # what cannot be stacked is averaged, with a warning
def test_every_method_is_loaded_as_it_is_fitted(finished: tuple[str, RunDir]) -> None:
    name, run = finished
    if name == "free":
        return
    state = state_of(run)
    valid, test = (read_prediction_matrix(run, state, list(state.members), split) for split in ("valid", "test"))
    objective = find_math(valid.task).choose_criterion(state.objective, state.direction)
    for method in COMBINERS:
        fitted = fit(method, valid.values, valid.target, task=valid.task, objective=objective)
        values = ensemble.load(run.path, combine=method)(BATCH).numpy()
        np.testing.assert_allclose(values, fitted.predict(test.values), rtol=1e-4, atol=1e-4)


def test_uncertainties_are_those_of_the_saved_predictions(finished: tuple[str, RunDir]) -> None:
    name, run = finished
    if name in ("free", "steps"):  # of steps those that are padding are left out where targets are known
        return
    parts = ensemble.load(run.path, uncertainty=True)(BATCH)
    weights = (state_of(run).combined or NOT_COMBINED).weights
    saved = read_prediction_matrix(run, state_of(run), list(weights), "test")
    expected = uncertainty.decompose(saved.task, saved.values, np.array(list(weights.values())))
    assert set(expected) == set(parts) - {"values"}
    for part, values in expected.items():
        np.testing.assert_allclose(parts[part].numpy(), values, rtol=1e-3, atol=3e-6, err_msg=part)


#: Largest difference between float32 and float64, for values of the order of 1.
TOLERANCE = 3e-6

TASKS = [*map(Task, ("classification", "multilabel", "regression", "gaussian")), quantiles(0.1, 0.5, 0.9)]  # type: ignore[arg-type]

cases_formulas = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 7), st.booleans())


def draw(task: Task, seed: int, members: int, samples: int, steps: bool) -> tuple[list[Any], Any]:
    rng = np.random.default_rng(seed)
    shape = (members, samples, *((3,) if steps else ()))
    if task.kind == "classification":
        scores = rng.normal(size=(*shape, 4)) * rng.choice([1.0, 100.0])
        values = np.exp(scores - scores.max(axis=-1, keepdims=True))
        values /= values.sum(axis=-1, keepdims=True)
    elif task.kind == "multilabel":
        values = 1 / (1 + np.exp(-rng.normal(size=(members, samples, 4)) * rng.choice([1.0, 30.0])))
    elif task.kind == "gaussian":
        values = np.stack([rng.normal(size=shape), rng.exponential(size=shape) + 1e-3], axis=-1)
    elif task.kind == "quantiles":
        values = np.sort(rng.normal(size=(*shape, 3)), axis=-1)
    else:
        values = rng.normal(size=shape)
    weights = rng.dirichlet(np.ones(members))
    return list(values.astype(np.float32)), weights


def as_tensors(each: list[Any]) -> list[Any]:
    return [torch.from_numpy(values) for values in each]


def assert_close(found: Any, wanted: Any, scale: float = 1.0) -> None:
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5 * scale, atol=TOLERANCE * scale)


EACH_TASK = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)


@EACH_TASK
@examples(12)
@given(case=cases_formulas, factor=st.sampled_from([0.05, 0.5, 1.0, 1.7, 20.0]))
def test_mixtures_and_calibrations_of_tensors_are_those_of_arrays(task: Task, case: Any, factor: float) -> None:
    math, (each, weights) = find_math(task), draw(task, *case)
    wanted = math.mix([math.normalise(values) for values in each], weights)
    normalised = [normalise(task, values) for values in as_tensors(each)]
    mixed: Any = mix(task, normalised, torch.tensor(weights, dtype=torch.float32))
    assert_close(mixed, wanted)
    # A low temperature multiplies what two logits differ by: each computes from the same mixture here.
    calibrated = math.calibrate(mixed.numpy(), factor)
    assert_close(apply_calibration(task, mixed, factor), calibrated, scale=1 / min(factor, 1))


@pytest.mark.parametrize("kind", ["classification", "multilabel", "regression"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.more) for seed in range(2, 8))])
def test_stacks_of_tensors_are_those_of_arrays(kind: Any, seed: int) -> None:
    task = Task(kind)
    math, rng = find_math(task), np.random.default_rng(seed)
    each, _ = draw(task, seed, 3, 40, steps=kind != "multilabel" and seed % 2 == 1)
    if kind == "regression":
        target: Any = each[0] + 0.1 * rng.normal(size=each[0].shape)
    elif kind == "multilabel":
        target = (rng.random(each[0].shape) < each[0]).astype(np.int64)
        target[:, 1] = 0  # a label that validation never has is averaged
    else:
        target = each[0].argmax(axis=-1) % 3  # the last class is never seen
    stack, _ = math.fit_stack(each, target)
    assert_close(StackModel(stack)(as_tensors(each)), stack.predict(each))


@EACH_TASK
@examples(12)
@given(case=cases_formulas)
def test_uncertainties_of_tensors_are_those_of_arrays(task: Task, case: Any) -> None:
    each, weights = draw(task, *case)
    wanted = uncertainty.decompose(task, each, weights)
    found = decompose(task, as_tensors(each), torch.tensor(weights, dtype=torch.float32))
    assert list(found) == list(wanted)
    for name, own in wanted.items():
        # the square root of a rounding is larger than it
        tolerance = 1e-3 if (task.kind, name) == ("quantiles", "epistemic") else TOLERANCE
        positions = found[name].flatten(1).mean(dim=1) if found[name].dim() > 1 else found[name]
        np.testing.assert_allclose(positions.numpy(), own, rtol=1e-5, atol=tolerance)
    if len(each) > 1 and task.kind == "classification":
        same = decompose(task, as_tensors([each[0]] * len(each)), torch.tensor(weights, dtype=torch.float32))
        assert not same["disagreement"].any()


def test_a_probability_a_hair_below_0_is_0() -> None:
    """As `Recipe.predict` may give it: 1 less the sum of the others."""
    task, values = Task("classification"), np.array([[-1e-9, 0.5, 0.5 + 1e-9]], np.float32)
    assert explain_invalid(task, torch.from_numpy(values), read=True) is None
    each, half = [normalise(task, torch.from_numpy(values))] * 2, np.array([0.5, 0.5])
    wanted = uncertainty.decompose(task, [find_math(task).normalise(values)] * 2, half)
    for name, one in decompose(task, each, torch.tensor(half)).items():
        assert one.numpy() == pytest.approx(wanted[name], abs=TOLERANCE), name


def test_a_single_quantile_has_no_width_and_a_member_without_weight_no_pair_to_disagree() -> None:
    median, half = quantiles(0.5), np.array([0.5, 0.5])
    each = [np.ones((3, 1)), np.zeros((3, 1))]
    assert list(uncertainty.decompose(median, each, half)) == ["epistemic"]
    assert list(decompose(median, as_tensors(each), torch.tensor(half))) == ["epistemic"]
    pair = [torch.tensor([[0.2, 0.8]]), torch.tensor([[0.8, 0.2]])]
    parts = decompose(Task("classification"), pair, torch.tensor([1.0, 0.0]))
    assert parts["disagreement"].tolist() == [0.0] and parts["epistemic"].tolist() == [0.0]
