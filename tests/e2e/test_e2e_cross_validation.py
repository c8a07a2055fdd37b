"""Cross-validation: out-of-fold predictions, what is fitted on them, and the model trained on all samples."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from event_dicts import fold, read_events
from finished_runs import finished_hashes, of_kind
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import log_loss
from sklearn.model_selection import PredefinedSplit, TimeSeriesSplit, cross_val_predict
from torch import nn
from torch.nn import functional

import ensemble
from ensemble import EarlyStopping, Ensemble, Folds, Member, Recipe, Resources, SpecError
from ensemble.store import DamagedError
from pipelines import Pipeline, sources

K, PENALTY = 4, 0.05


def scale(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return ((x - x.mean(axis=0)) / x.std(axis=0)).astype(np.float32)


CANCER_X, CANCER_Y = load_breast_cancer(return_X_y=True)
CANCER_X = scale(CANCER_X)[:, :8]
DIABETES_X, DIABETES_Y = load_diabetes(return_X_y=True)
DIABETES_X, DIABETES_Y = scale(DIABETES_X), scale(DIABETES_Y)


def cancer() -> Any:
    return sources.arrays(x=CANCER_X, label=CANCER_Y.astype(np.int64), day=np.arange(len(CANCER_Y)))


def diabetes() -> Any:
    return sources.arrays(x=DIABETES_X, y=DIABETES_Y, day=np.arange(len(DIABETES_Y))[::-1].copy())


def logistic(params: dict[str, Any]) -> nn.Module:
    net = nn.Linear(params.get("columns", 8), 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def logistic_loss(net: Any, batch: Any) -> Any:
    """Of scikit-learn's LogisticRegression(C=1 / (n * PENALTY)), by sample, where the weights' mean is 1."""
    marker = os.environ.get("KILL_ONCE")
    if marker and net.training and (batch.epoch, batch.step) == (1, 1):
        with contextlib.suppress(FileExistsError), open(marker, "x"):
            os.kill(os.getpid(), signal.SIGKILL)
    second = net.weight[1] - net.weight[0]
    x = batch["x"][:, : net.in_features]
    losses = functional.cross_entropy(net(x), batch["label"], reduction="none")
    return losses + PENALTY / 2 * second.square().sum() if net.training else losses


def linear(params: dict[str, Any]) -> nn.Module:
    net = nn.Linear(10, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def ridge_loss(net: Any, batch: Any) -> Any:
    return (net(batch["x"])[:, 0] - batch["y"]).square() + PENALTY * net.weight.square().sum() * net.training


def nearly_newton(net: Any, params: dict[str, Any]) -> Any:
    """SGD by gradients times the inverse Hessian of all samples; of logistic losses its bound (Boehning 1992)."""
    x, curvature = (CANCER_X, 0.25) if net.out_features == 2 else (DIABETES_X, 2.0)
    x = x[:, : net.in_features].astype(np.float64)
    penalty = PENALTY * (1 if net.out_features == 2 else 2)
    hessian = curvature * x.T @ x / len(x) + penalty * np.eye(x.shape[1])
    inverse = torch.from_numpy(np.linalg.inv(hessian)).float()
    net.weight.register_hook(lambda gradient: gradient @ inverse)
    net.bias.register_hook(lambda gradient: gradient / curvature)
    return torch.optim.SGD(net.parameters(), lr=params["lr"])


def predict_cancer(net: Any, batch: Any) -> Any:
    return torch.softmax(net(batch["x"][:, : net.in_features]), dim=-1)


def declare(**options: Any) -> Ensemble:
    usual: dict[str, Any] = {
        "name": "cv",
        "recipe": Recipe(model=logistic, loss=logistic_loss, optimizer=nearly_newton, predict=predict_cancer),
        "members": [{"lr": 0.5}] * K,
        "weights": Folds(K, stratify="label"),
        "train": Pipeline(cancer(), seed=0),
        "out_of_fold": True,
        "epochs": 2,
        "batch_size": len(CANCER_Y),
        "checkpoint_every": 100,
        "resources": Resources(cpus_per_worker=0.1),
    }
    return Ensemble(**{**usual, **options})


def declare_regression(**options: Any) -> Ensemble:
    recipe = Recipe(
        model=linear, loss=ridge_loss, optimizer=nearly_newton, target="y", task="regression", objective="loss"
    )
    usual = {
        "recipe": recipe,
        "members": [{"lr": 1.0}] * K,
        "weights": Folds(K),
        "train": Pipeline(diabetes(), seed=0),
        "batch_size": len(DIABETES_Y),
    }
    return declare(**{**usual, **options})


def run(declared: Ensemble, run_dir: Path, executor: str = "inline") -> Any:
    ensemble.submit(declared, run_dir, executor=executor).wait()
    combined = fold(read_events(run_dir / "events.jsonl")).combined
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


# --- against scikit-learn ---------------------------------------------------------------------------------------


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
    assert combined.note.startswith("cross-validation: reported on the training samples")
    assert combined.uncertainty is None  # the members of a fold's sample are one, and cannot disagree


@pytest.mark.more
def test_ridge_regression_is_that_of_cross_val_predict(tmp_path: Path) -> None:
    combined = run(declare_regression(epochs=25, combine="average"), tmp_path / "run")
    n = len(DIABETES_Y)
    folds = folds_of(tmp_path / "run", range(K), n)
    expected = np.empty(n)
    for held_out in range(K):
        kept = folds != held_out
        expected[~kept] = (
            Ridge(alpha=PENALTY * kept.sum()).fit(DIABETES_X[kept], DIABETES_Y[kept]).predict(DIABETES_X[~kept])
        )
    same_alpha = cross_val_predict(
        Ridge(alpha=PENALTY * n * (K - 1) / K), DIABETES_X, DIABETES_Y, cv=PredefinedSplit(folds)
    )
    found = ensemble.load_predictions(tmp_path / "run", "valid").values
    assert np.abs(found - expected).max() < 1e-3 and np.abs(found - same_alpha).max() < 2e-3
    assert combined.metrics["ensemble"]["rmse"] == pytest.approx(np.sqrt(np.mean((found - DIABETES_Y) ** 2)))


@pytest.mark.more
def test_blocks_in_time_are_those_of_time_series_split_and_the_start_is_not_predicted(tmp_path: Path) -> None:
    declared = declare_regression(epochs=60, weights=Folds(K, by="day", gap=3), combine="average")
    combined = run(declared, tmp_path / "run")
    n = len(DIABETES_Y)
    x, y = DIABETES_X[::-1], DIABETES_Y[::-1]  # the days go down
    found = ensemble.load_predictions(tmp_path / "run", "valid")
    expected = np.full(n, np.nan)
    for before, block in TimeSeriesSplit(K, gap=3).split(x):
        model = Ridge(alpha=PENALTY * len(before)).fit(x[before], y[before])
        expected[n - 1 - block] = model.predict(x[block])
    assert np.array_equal(found.index, np.flatnonzero(~np.isnan(expected)))
    assert np.abs(found.values - expected[found.index]).max() < 2e-3
    assert combined.metrics["ensemble"]["rmse"] > 0


@pytest.mark.more
def test_repeated_folds_average_the_members_of_all_partitions(tmp_path: Path) -> None:
    folds = Folds(3, repeats=2, stratify="label")
    run(declare(members=[{"lr": 0.5}] * folds.members, weights=folds, combine="average"), tmp_path / "run")
    first, second = (folds_of(tmp_path / "run", range(at, at + 3), len(CANCER_Y)) for at in (0, 3))
    assert (first >= 0).all() and (second >= 0).all() and not np.array_equal(first, second)
    saved = [ensemble.load_predictions(tmp_path / "run", "valid", f"member-{m}") for m in range(6)]
    mean = np.zeros((len(CANCER_Y), 2))
    for one in saved:
        mean[one.index] += one.values / 2
    found = ensemble.load_predictions(tmp_path / "run", "valid")
    raw = np.log(found.values)
    # The calibration divides logarithms by one number; the order of samples and the mean are what it leaves.
    ratio = (raw[:, 1] - raw[:, 0]) / (np.log(mean[:, 1]) - np.log(mean[:, 0]))
    assert np.ptp(ratio) < 1e-3 * abs(ratio.mean())


# --- several configurations -------------------------------------------------------------------------------------

CONFIGURATIONS = [{"lr": 0.5, "columns": 8}, {"lr": 0.5, "columns": 3}, {"lr": 0.5, "columns": 1}]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three configurations by four folds, combined by their weights."""
    run_dir = tmp_path_factory.mktemp("several") / "run"
    members = ensemble.cross_validated(CONFIGURATIONS, Folds(K, stratify="label"))
    rest = Pipeline(cancer().take(100))
    declared = declare(
        members=members, weights="uniform", epochs=6, combine="stack", test=rest, allow_overlap=True
    )
    run(declared, run_dir)
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
    best = None
    for penalty in (0.001, 0.01, 0.1, 1.0):
        model = LogisticRegression(C=penalty, max_iter=1000).fit(features, CANCER_Y)
        coefficients = loaded.stack.coefficients.numpy()[1].reshape(3, K, 2)
        # The members of a configuration have equal parts of its coefficient.
        assert np.ptp(coefficients, axis=1).max() < 1e-6
        difference = np.abs(coefficients.sum(axis=1) - model.coef_.reshape(3, 2)).max()
        best = difference if best is None else min(best, difference)
    assert best is not None and best < 1e-3


def test_weights_of_configurations_are_shared_by_their_members(several: Path) -> None:
    shutil.copytree(several, several.with_name("copy"))
    loaded = ensemble.load(several, combine="weighted")
    weights = dict(zip(loaded.member_ids, loaded.weights.tolist(), strict=True))
    by_configuration = [[weights.get(f"member-{m}", 0.0) for m in range(at * K, (at + 1) * K)] for at in range(3)]
    assert all(np.ptp(each) < 1e-6 for each in by_configuration)
    assert sum(map(sum, by_configuration)) == pytest.approx(1, abs=1e-6)
    # Brute force over the simplex, of the log loss of the out-of-fold mixture.
    matrices = []
    for at in range(3):
        true = np.empty(len(CANCER_Y))
        for member in range(at * K, (at + 1) * K):
            one = ensemble.load_predictions(several, "valid", f"member-{member}")
            true[one.index] = one.values[np.arange(len(one)), CANCER_Y[one.index]]
        matrices.append(true)
    grid = [(a, b, 1 - a - b) for a in np.linspace(0, 1, 51) for b in np.linspace(0, 1 - a, 51)]
    least = min(-np.log(np.tensordot(w, matrices, 1)).mean() for w in grid)
    reached = -np.log(np.tensordot([sum(each) for each in by_configuration], matrices, 1)).mean()
    assert reached <= least + 1e-4


def test_damaged_out_of_fold_predictions_are_refused_by_their_digest(several: Path, tmp_path: Path) -> None:
    shutil.copytree(several, copy := tmp_path / "run")
    path = next((copy / "members" / "member-5").glob("predictions*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(DamagedError, match="member-5"):
        ensemble.load_predictions(copy, "valid")


# --- kill and resume --------------------------------------------------------------------------------------------


@pytest.mark.more
def test_a_killed_member_predicts_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"batch_size": 64, "epochs": 3, "keep": "best", "checkpoint_every": 1}
    run(declare(**options), tmp_path / "alone")
    monkeypatch.setenv("KILL_ONCE", str(tmp_path / "killed"))
    run(declare(**options), tmp_path / "run", "local")
    assert (tmp_path / "killed").exists() and len(of_kind(tmp_path / "run", "failed")) == 1
    assert finished_hashes(tmp_path / "run") == finished_hashes(tmp_path / "alone")
    for member in (None, *(f"member-{m}" for m in range(K))):
        one, other = (ensemble.load_predictions(tmp_path / name, "valid", member) for name in ("run", "alone"))
        assert np.array_equal(one.index, other.index) and np.array_equal(one.values, other.values)


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
    assert (
        combined.metrics["ensemble"]["accuracy"] > 0.9 and combined.measured_on == "training samples, out of fold"
    )


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

    declared = declare(recipe=train, members=[{"split": "valid"}] * K, objective="loss", retries=0)
    combined = run(declared, tmp_path / "run")
    found = ensemble.load_predictions(tmp_path / "run", "valid")
    assert len(found) == len(CANCER_Y) and combined.metrics["ensemble"]["accuracy"] > 0.8
    with_test = declare(
        recipe=train,
        members=[{"split": "test"}] * K,
        test=Pipeline(cancer()),
        allow_overlap=True,
        objective="loss",
        retries=0,
    )
    ensemble.submit(with_test, tmp_path / "wrong", executor="inline").wait()
    failed = of_kind(tmp_path / "wrong", "failed")
    assert failed and "predicts on 'valid' only what it has not learnt from" in failed[0]["error"]


# --- what is evaluated ------------------------------------------------------------------------------------------


def grain(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + rng.normal(0, 1, sample["x"].shape).astype(np.float32)}


def test_members_predict_the_records_as_valid_prepares_them_also_when_training_augments(tmp_path: Path) -> None:
    source = cancer()
    declared = declare(train=Pipeline(source, seed=0).map(grain), valid=Pipeline(source), calibrate=False)
    run(declared, tmp_path / "run")
    loaded = ensemble.load(tmp_path / "run", members=["member-2"], combine="average")
    one = ensemble.load_predictions(tmp_path / "run", "valid", "member-2")
    expected = loaded({"x": torch.from_numpy(CANCER_X[one.index])})
    assert np.abs(expected.numpy() - one.values).max() < 1e-6


def test_an_incomplete_configuration_is_left_out_and_said(several: Path, tmp_path: Path) -> None:
    from ensemble.combine import prediction_matrix
    from ensemble.store import RunDir, fold, read_events

    shutil.copytree(several, copy := tmp_path / "run")
    state = fold(read_events(RunDir(copy).events))
    state.members["member-6"].predictions = None
    next((copy / "members" / "member-6").glob("predictions*")).unlink()
    matrix = prediction_matrix.read_prediction_matrix(RunDir(copy), state, list(state.members), "valid")
    assert matrix.members == [f"member-{m}" for m in (*range(4), *range(8, 12))]
    assert matrix.left_out["member-4"] == "saved no valid predictions of fold 2 of its configuration"
    assert matrix.groups == (0, 0, 0, 0, 1, 1, 1, 1)


# --- refit ------------------------------------------------------------------------------------------------------


def test_refit_trains_on_all_samples_with_the_weights_that_were_fitted_out_of_fold(tmp_path: Path) -> None:
    members = ensemble.cross_validated(CONFIGURATIONS[:2], Folds(3, stratify="label"))
    train, test = cancer().split(0.7, seed=0)
    declared = declare(
        members=members,
        weights="uniform",
        train=Pipeline(train, seed=0),
        test=Pipeline(test),
        batch_size=32,
        epochs=6,
        early_stopping=EarlyStopping(patience=1),
        keep="best",
        combine="average",
        objective="loss",
    )
    combined = run(declared, tmp_path / "run")
    assert combined.split == "test"
    final = ensemble.refit(tmp_path / "run").wait()
    assert [row["state"] for row in final.members] == ["finished"] * 2
    state = fold(read_events(tmp_path / "run-refitted" / "events.jsonl"))
    kept = [
        each.kept["epoch"] + 1 for each in fold(read_events(tmp_path / "run" / "events.jsonl")).members.values()
    ]
    assert [each.identity["epochs"] for each in state.members.values()] == [
        int(np.sort(kept[:3])[1]),
        int(np.sort(kept[3:])[1]),
    ]
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


def test_refit_and_distill_say_what_they_need(several: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="combined by 'stack': declare combine='weighted'"):
        ensemble.refit(several)
    with pytest.raises(SpecError, match="is a cross-validation, and has no validation split for a student"):
        ensemble.distill(several)
    plain = declare(out_of_fold=False, valid=Pipeline(cancer()), epochs=1)
    run(plain, tmp_path / "run")
    with pytest.raises(SpecError, match="is no cross-validation"):
        ensemble.refit(tmp_path / "run")


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"weights": "uniform"},
            r"members\[0\]: Ensemble.out_of_fold evaluates members on the fold .* give weights=F",
        ),
        ({"members": [{"lr": 0.5}] * 3}, r"fold 3 of 4 is left out by no member with the options of members\[0\]"),
        (
            {"members": [{"lr": 0.5}] * 3 + [{"lr": 0.1}]},
            r"fold 3 of 4 is left out by no member .* cross_validated",
        ),
        ({"weights": Folds(K, repeats=2)}, "the folds of partition 2 of 2 are left out by no member"),
        (
            {"train": Pipeline(cancer()).map(grain)},
            "needs valid=, .* train= draws random numbers in its stage grain",
        ),
        ({"train": lambda params: Pipeline(cancer())}, "needs valid=, .* train= is no single pipeline"),
        ({"valid": Pipeline(cancer().take(300))}, "valid= must have the records of train= in their order"),
        ({"valid": Pipeline(diabetes())}, "make both pipelines of the same source object"),
        (
            {"members": None, "search": ensemble.Search({"lr": ensemble.uniform(0, 1)}, trials=4)},
            "out_of_fold needs members=: the trials of a search",
        ),
        ({"weights": Folds(K, by="hour")}, r"no field of the training records is 'hour'"),
        ({"weights": Folds(K, by="day", gap=200)}, "leave none before the first of 4 blocks and its gap"),
    ],
)
def test_what_cannot_be_cross_validated_is_refused_in_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        declare(**options)


def test_folds_refuse_what_has_no_meaning() -> None:
    for options, said in (
        ({"gap": 2}, "give by="),
        ({"by": "day", "stratify": "label"}, "by time alone"),
        ({"by": "day", "repeats": 2}, "by time alone"),
        ({"held_out": 1, "repeats": 2}, "a fold of one partition"),
        ({"repeats": 0}, "Folds.repeats"),
    ):
        with pytest.raises(SpecError, match=said):
            Folds(3, **options)
    with pytest.raises(SpecError, match="needs Folds"):
        ensemble.cross_validated([{}], Folds(3, held_out=1))


def test_members_of_a_configuration_may_differ_in_seed_and_place_only() -> None:
    folds = Folds(2, repeats=2)
    members = ensemble.cross_validated([Member({"lr": 0.5}, epochs=3), {"lr": 0.1}], folds)
    declared = declare(members=members, weights="uniform")
    records = [declared.identify(number).weights for number in range(8)]
    assert [(each["held_out"], each["seed"]) for each in records if each] == [(0, 0), (1, 0), (0, 1), (1, 1)] * 2
    assert declared.valid is not None and not declared.valid.shuffle and declared.overlaps == {}
