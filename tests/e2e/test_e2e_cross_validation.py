"""Cross-validation: out-of-fold predictions, what is fitted on them, and the model trained on all samples."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.finished_runs import finished_hashes, of_kind, read_state
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import TimeSeriesSplit
from torch import nn
from torch.nn import functional

import ensemble
from ensemble import EarlyStopping, Ensemble, Folds, Member, Recipe, Resources
from ensemble.combine import prediction_matrix
from ensemble.store import DamagedError, RunDir, fold, read_events
from pipelines import Pipeline, sources, stages

K, PENALTY = 4, 0.05


CANCER_X, CANCER_Y = load_breast_cancer(return_X_y=True)
CANCER_X = ((CANCER_X - CANCER_X.mean(axis=0)) / CANCER_X.std(axis=0)).astype(np.float32)[:, :8]


def cancer() -> Any:
    return sources.arrays(x=CANCER_X, label=CANCER_Y.astype(np.int64), day=np.arange(len(CANCER_Y))[::-1].copy())


def logistic(params: dict[str, Any]) -> nn.Module:
    net = nn.Linear(params.get("columns", 8), 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def logistic_loss(net: Any, batch: Any) -> Any:
    """Of scikit-learn's LogisticRegression(C=1 / (n * PENALTY)), by sample, where the weights' mean is 1."""
    second = net.weight[1] - net.weight[0]
    x = batch["x"][:, : net.in_features]
    losses = functional.cross_entropy(net(x), batch["label"], reduction="none")
    return losses + PENALTY / 2 * second.square().sum() if net.training else losses


def nearly_newton(net: Any, params: dict[str, Any]) -> Any:
    """SGD by gradients times the inverse of a bound of the Hessian of all samples (Boehning 1992)."""
    x, curvature = CANCER_X[:, : net.in_features].astype(np.float64), 0.25
    hessian = curvature * x.T @ x / len(x) + PENALTY * np.eye(x.shape[1])
    inverse = torch.from_numpy(np.linalg.inv(hessian)).float()
    net.weight.register_hook(lambda gradient: gradient @ inverse)
    net.bias.register_hook(lambda gradient: gradient / curvature)
    return torch.optim.SGD(net.parameters(), lr=params["lr"])


def predict_cancer(net: Any, batch: Any) -> Any:
    return torch.softmax(net(batch["x"][:, : net.in_features]), dim=-1)


def declare(**options: Any) -> Ensemble:
    recipe = Recipe(model=logistic, loss=logistic_loss, optimizer=nearly_newton, predict=predict_cancer)
    usual: dict[str, Any] = {"recipe": recipe, "members": [{"lr": 0.5}] * K, "train": Pipeline(cancer(), seed=0)}
    usual |= {"weights": Folds(K, stratify="label"), "out_of_fold": True, "epochs": 2, "checkpoint_every": 100}
    usual |= {"batch_size": len(CANCER_Y), "resources": Resources(cpus_per_worker=0.1)}
    return Ensemble(name="cv", **{**usual, **options})


@pytest.mark.more
def test_members_leave_out_the_folds_of_a_file(tmp_path: Path) -> None:
    """Each prediction is of the member that left out the record's fold: of scikit-learn's model of all others."""
    given = np.random.default_rng(0).choice(["a", "b", "c", "d"], len(CANCER_Y), p=[0.1, 0.2, 0.3, 0.4])
    np.save(tmp_path / "folds.npy", given)
    source = sources.with_fields(cancer(), scaffold=np.load(tmp_path / "folds.npy"))
    train = Pipeline(source, seed=0).map(stages.drop("scaffold"))
    declared = declare(train=train, weights=Folds(K, assigned="scaffold"), epochs=30, members=[{"lr": 1.0}] * K)
    run(declared, tmp_path / "run")
    found = ensemble.load_predictions(tmp_path / "run", "valid")
    assert len(found) == len(CANCER_Y)
    for number, fold_name in enumerate("abcd"):
        own = ensemble.load_predictions(tmp_path / "run", "valid", f"member-{number}")
        outside = np.flatnonzero(given == fold_name)
        assert sorted(own.index) == outside.tolist(), "fold j is the j-th name in sorted order"
        kept = np.flatnonzero(given != fold_name)
        theirs = LogisticRegression(C=1 / (len(kept) * PENALTY), tol=1e-8).fit(CANCER_X[kept], CANCER_Y[kept])
        expected = theirs.predict_proba(CANCER_X[outside])
        np.testing.assert_allclose(own.values[np.argsort(own.index)], expected, atol=2e-3)
    executed = tmp_path / "local"
    run(declared, executed, "local")
    assert finished_hashes(executed) == finished_hashes(tmp_path / "run"), (
        "the same bits in processes of their own"
    )


def run(declared: Ensemble, run_dir: Path, executor: str = "inline") -> Any:
    ensemble.submit(declared, run_dir, executor=executor).wait()
    combined = read_state(run_dir).combined
    assert combined is not None
    return combined


def folds_of(run_dir: Path, members: range, n: int) -> np.ndarray[Any, Any]:
    """The fold of each sample, by the predictions that each member has saved; each sample is in one at most."""
    found = np.full(n, -1)
    for fold_number, member in enumerate(members):
        index = ensemble.load_predictions(run_dir, "valid", f"member-{member}").index
        assert (found[index] == -1).all()
        found[index] = fold_number
    return found


def test_predictions_and_figures_of_a_converged_model_are_those_of_cross_val_predict(tmp_path: Path) -> None:
    members = [{"lr": 1.0}] * K
    combined = run(declare(members=members, epochs=30, combine="average", calibrate=False), tmp_path / "run")
    folds = folds_of(tmp_path / "run", range(K), len(CANCER_Y))
    assert (folds >= 0).all()
    for label in (0, 1):
        shares = np.bincount(folds[label == CANCER_Y], minlength=K)
        assert np.ptp(shares) <= 1
    # C multiplies the sum of losses; here their mean has the penalty.
    expected = np.empty((len(CANCER_Y), 2))
    for held_out in range(K):
        kept = folds != held_out
        model = LogisticRegression(C=1 / (PENALTY * kept.sum()), tol=1e-10, max_iter=10_000)
        expected[~kept] = model.fit(CANCER_X[kept], CANCER_Y[kept]).predict_proba(CANCER_X[~kept])
    found = ensemble.load_predictions(tmp_path / "run", "valid")
    assert np.array_equal(found.index, np.arange(len(CANCER_Y))) and np.array_equal(found.targets, CANCER_Y)
    assert np.abs(found.values - expected).max() < 1e-3
    assert combined.metrics["ensemble"]["nll"] == pytest.approx(log_loss(CANCER_Y, found.values), abs=1e-6)
    accuracy = (found.values.argmax(axis=1) == CANCER_Y).mean()
    assert combined.metrics["ensemble"]["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    low, high = combined.intervals["ensemble"]["nll"]
    assert low < combined.metrics["ensemble"]["nll"] < high
    assert combined.note.startswith("cross-validation: measured on the training samples")
    assert combined.uncertainty is None  # the members of a fold's sample are one, and cannot disagree


def test_blocks_in_time_are_those_of_time_series_split_predicted_as_valid_prepares_them(tmp_path: Path) -> None:
    """Also when training augments; the start is not predicted."""
    pipes = {"train": Pipeline(cancer(), seed=0).map(grain), "valid": Pipeline(cancer())}
    how: dict[str, Any] = {"combine": "average", "calibrate": False, **pipes}
    run(declare(epochs=1, weights=Folds(K, by="day", gap=3), **how), tmp_path / "run")
    days = np.arange(len(CANCER_Y))
    for number, (before, block) in enumerate(TimeSeriesSplit(K, gap=3).split(days)):
        saved = ensemble.load_predictions(tmp_path / "run", "valid", f"member-{number}")
        assert np.array_equal(np.sort(saved.index), np.sort(len(days) - 1 - block)), "the days go down"
        (epoch,) = of_kind(tmp_path / "run", "epoch", f"member-{number}")
        assert epoch["samples"] == len(before)
    merged = ensemble.load_predictions(tmp_path / "run", "valid")
    assert np.array_equal(merged.index, np.arange(len(days) // (K + 1) * K))
    loaded = ensemble.load(tmp_path / "run", members=["member-2"], combine="average")
    one = ensemble.load_predictions(tmp_path / "run", "valid", "member-2")
    expected = loaded({"x": torch.from_numpy(CANCER_X[one.index])})
    assert np.abs(expected.numpy() - one.values).max() < 1e-6


CONFIGURATIONS = [{"lr": 0.5, "columns": 8}, {"lr": 0.5, "columns": 3}, {"lr": 0.5, "columns": 1}]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("several") / "run"
    members = ensemble.cross_validated(CONFIGURATIONS, Folds(K, stratify="label"))
    options: dict[str, Any] = {"combine": "stack", "test": Pipeline(cancer().take(100)), "allow_overlap": True}
    run(declare(members=members, weights="uniform", epochs=6, **options), run_dir)
    return run_dir


def test_a_stack_is_scikit_learns_on_the_same_out_of_fold_matrix(several: Path) -> None:
    columns = []
    for at in range(3):
        matrix = np.empty((len(CANCER_Y), 2))
        for member in range(at * K, (at + 1) * K):
            one = ensemble.load_predictions(several, "valid", f"member-{member}")
            matrix[one.index] = one.values
        columns.append(np.log(np.maximum(matrix, 1e-7)))
    features = np.concatenate(columns, axis=1)
    loaded = ensemble.load(several, combine="stack")
    assert loaded.member_ids == [f"member-{m}" for m in range(3 * K)]
    coefficients = loaded.stack.coefficients.numpy()[1].T.reshape(3, K, 2)
    assert np.ptp(coefficients, axis=1).max() < 1e-6, "the members of a configuration have equal parts of its own"
    models = [LogisticRegression(C=c, max_iter=1000).fit(features, CANCER_Y) for c in (0.001, 0.01, 0.1, 1.0)]
    theirs = [model.coef_.reshape(3, 2) for model in models]
    assert min(np.abs(coefficients.sum(axis=1) - those).max() for those in theirs) < 1e-3


@pytest.mark.more
def test_wide_members_and_named_classes_that_augment_share_one_set_of_records(tmp_path: Path) -> None:
    """Two workers each see a part of the fold; texts are numbered in both pipelines alike."""
    names = np.array(["malign", "benign"])[CANCER_Y]
    source = sources.arrays(x=CANCER_X, label=names)
    members = [Member({"lr": 0.5}, workers=1 + (number == 1)) for number in range(K)]
    train = Pipeline(source, seed=0).map(grain)
    declared = declare(members=members, train=train, valid=Pipeline(source), batch_size=64)
    combined = run(declared, tmp_path / "run", "local")
    assert (folds_of(tmp_path / "run", range(K), len(names)) >= 0).all()
    found = ensemble.load_predictions(tmp_path / "run", "valid")
    assert [found.classes[target] for target in found.targets] == names.tolist() if found.classes else False
    assert combined.metrics["ensemble"]["accuracy"] > 0.9
    assert combined.measured_on == "training samples, out of fold"


@pytest.mark.more
def test_a_train_function_is_evaluated_on_its_fold_and_may_predict_nothing_else(tmp_path: Path) -> None:
    def train(member: Any) -> None:
        net, split = logistic({}), member.params["split"]
        member.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5))
        for _ in member.epochs():
            for batch in member.batches():
                member.backward(logistic_loss(net, batch))
                member.step()
            member.report(**member.evaluate(lambda net, batch: {"loss": logistic_loss(net, batch)}))
        with member.evaluating() as net:
            rows = [(predict_cancer(net, batch), batch["index"].clone()) for batch in member.batches(split)]
        member.predictions("valid", *(torch.cat(part) for part in zip(*rows, strict=True)))

    options: dict[str, Any] = {"recipe": train, "objective": "loss", "retries": 0}
    combined = run(declare(members=[{"split": "valid"}] * K, **options), tmp_path / "run")
    found = ensemble.load_predictions(tmp_path / "run", "valid")
    assert len(found) == len(CANCER_Y) and combined.metrics["ensemble"]["accuracy"] > 0.8
    members = [{"split": "test"}] * K
    with_test = declare(members=members, test=Pipeline(cancer()), allow_overlap=True, **options)
    ensemble.submit(with_test, tmp_path / "wrong", executor="inline").wait()
    failed = of_kind(tmp_path / "wrong", "failed")
    assert failed and "predicts only the samples of 'valid' on which it did not train" in failed[0]["error"]


def grain(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + rng.normal(0, 1, sample["x"].shape).astype(np.float32)}


def test_an_incomplete_configuration_is_left_out_and_damaged_predictions_are_refused(
    several: Path, tmp_path: Path
) -> None:
    shutil.copytree(several, copy := tmp_path / "run")
    state = fold(read_events(RunDir(copy).events))
    state.members["member-6"].predictions = None
    next((copy / "members" / "member-6").glob("predictions*")).unlink()
    matrix = prediction_matrix.read_prediction_matrix(RunDir(copy), state, list(state.members), "valid")
    assert matrix.members == [f"member-{m}" for m in (*range(4), *range(8, 12))]
    assert matrix.left_out["member-4"] == "saved no valid predictions of fold 2 of its configuration"
    assert matrix.groups == (0, 0, 0, 0, 1, 1, 1, 1)
    path = next((copy / "members" / "member-5").glob("predictions*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DamagedError, match="member-5"):
        ensemble.load_predictions(copy, "valid")


def test_refit_trains_on_all_samples_with_the_weights_that_were_fitted_out_of_fold(tmp_path: Path) -> None:
    members = ensemble.cross_validated(CONFIGURATIONS[:2], Folds(3, stratify="label"))
    train, test = cancer().split(0.7, seed=0)
    options: dict[str, Any] = {
        "train": Pipeline(train, seed=0),
        "test": Pipeline(test),
        "batch_size": 32,
        "epochs": 6,
    }
    options |= {"early_stopping": EarlyStopping(patience=1), "keep": "best", "combine": "average"}
    declared = declare(members=members, weights="uniform", objective="loss", **options)
    combined = run(declared, tmp_path / "run")
    assert combined.split == "test"
    final = ensemble.refit(tmp_path / "run").wait()
    assert [row["state"] for row in final.members] == ["finished"] * 2
    state = read_state(tmp_path / "run-refitted")
    kept = [each.kept["epoch"] + 1 for each in read_state(tmp_path / "run").members.values()]
    medians = [sorted(kept[:3])[1], sorted(kept[3:])[1]]
    assert [each.identity["epochs"] for each in state.members.values()] == medians
    assert all(each.identity["weights"] is None for each in state.members.values())
    assert state.combined is not None and state.combined.split == "test" and state.combined.conformal is None
    each = [ensemble.load_predictions(tmp_path / "run-refitted", "test", f"member-{m}") for m in range(2)]
    logs = np.log((each[0].values + each[1].values) / 2) / combined.calibration["value"]
    expected = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    assert state.combined.metrics is not None
    nll = log_loss(each[0].targets, expected)
    assert state.combined.metrics["ensemble"]["nll"] == pytest.approx(nll, abs=1e-5)
    loaded = ensemble.load(tmp_path / "run-refitted")
    again = loaded({"x": torch.from_numpy(CANCER_X[test.indices])}).numpy()
    assert np.abs(again - expected).max() < 1e-5
    before = finished_hashes(tmp_path / "run-refitted")
    ensemble.refit(tmp_path / "run").wait()  # it is continued, not trained again
    assert finished_hashes(tmp_path / "run-refitted") == before
    assert len(of_kind(tmp_path / "run-refitted", "started")) == 2


def test_members_of_a_configuration_may_differ_in_seed_and_place_only() -> None:
    folds = Folds(2, repeats=2)
    members = ensemble.cross_validated([Member({"lr": 0.5}, epochs=3), {"lr": 0.1}], folds)
    declared = declare(members=members, weights="uniform")
    records = [declared.identify(number).weights for number in range(8)]
    assert [(each["held_out"], each["seed"]) for each in records if each] == [(0, 0), (1, 0), (0, 1), (1, 1)] * 2
    assert declared.valid is not None and not declared.valid.shuffle and declared.overlaps == {}
