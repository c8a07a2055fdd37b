"""Values that no training can use, metrics of the whole split, and what a run says at its start and its end."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit import loop_cases
from kit.finished_runs import of_kind
from kit.loop_cases import of, train
from torch import Tensor, nn, optim

import ensemble
from ensemble import (
    EarlyStopping,
    Ensemble,
    MemberCallback,
    Recipe,
    Resources,
    Search,
    SpecError,
    loguniform,
    seeds,
)
from ensemble.cli.parser import main
from ensemble.store import RunDir, load_predictions
from ensemble.train.node_checks import NODE_DIRECTORY
from ensemble.train.recipe import build_model
from pipelines import Pipeline, sources

X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
LABELS = (X[:, :3] > 0).astype(np.int64)


MULTILABEL = Recipe(
    model=lambda params: nn.Linear(4, 3), loss="binary_cross_entropy", target="y", inputs=("x",), task="multilabel"
)


def pipe(y: Any) -> Pipeline:
    return Pipeline(sources.arrays(x=X[: len(y)], y=y))


def read_log(folder: Path) -> str:
    return RunDir(folder).log("member-0").read_text()


def totals(outputs: Any, batch: Any) -> dict[str, Any]:
    return {"mine": outputs.sum(dim=1)}


def test_labels_of_another_kind_in_other_splits_fail_no_member(tmp_path: Path) -> None:
    late = LABELS.copy()
    late[20] = 7
    for name, labels, says in (
        ("classes", np.arange(23) % 5, ""),  # by their number
        ("late", late, "has the label 7: labels are 0, 1, or shares between"),
    ):
        splits = {"train": pipe(LABELS), "valid": None, "test": pipe(labels)}
        outcome, events = train(tmp_path / name, MULTILABEL, **splits, optimizer="sgd")
        assert outcome == "finished", of(events, "failed")
        log = read_log(tmp_path / name)
        assert "no predictions on 'test' are saved: multilabel: " in log and says in log


@pytest.mark.parametrize("batch_size", [16, 64])
def test_a_soft_label_drops_the_figures_of_labels_whatever_its_batch(tmp_path: Path, batch_size: int) -> None:
    soft = LABELS.astype(np.float32)
    soft[40, 1] = 0.5
    recipe = replace(MULTILABEL, metrics=totals, objective="loss")
    splits = {"train": pipe(LABELS.astype(np.float32)), "valid": pipe(soft)}
    outcome, events = train(tmp_path, recipe, **splits, optimizer="sgd", batch_size=batch_size)
    assert outcome == "finished", of(events, "failed")
    assert all(set(event["metrics"]) == {"loss", "mine"} for event in of(events, "epoch"))
    says = "no figures of the predictions on 'valid': multilabel: the target has fractions"
    assert read_log(tmp_path).count(says) == 1


def test_targets_without_the_metric_that_ranks_are_refused_at_the_first_step(tmp_path: Path) -> None:
    soft = pipe(np.where(LABELS[:23] == 1, 0.7, 0.3).astype(np.float32))
    options = {"train": soft, "valid": soft, "optimizer": "sgd"}
    recipe = replace(MULTILABEL, metrics=lambda outputs, batch: {"f1": outputs.sum(dim=1)}, objective="f1")
    outcome, events = train(tmp_path, recipe, **options)
    failed = loop_cases.failed(outcome, events)
    assert "f1: multilabel: the target has fractions" in failed["error"] and not of(events, "epoch")
    renamed = replace(recipe, metrics=totals, objective="mine", mode="max")
    outcome, events = train(tmp_path / "renamed", renamed, **options)
    assert outcome == "finished" and "mine" in of(events, "epoch")[0]["metrics"]


def test_a_figure_that_gives_way_to_a_metric_of_the_whole_split_is_remarked(tmp_path: Path) -> None:
    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"mse": 100 * (outputs - batch["y"]) ** 2, "other": outputs}

    one_number = lambda params: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))  # noqa: E731
    recipe = Recipe(model=one_number, loss="mse", target="y", inputs=("x",), metrics=metrics, objective="mse")
    data = pipe(X.sum(axis=1)[:23])
    outcome, events = train(tmp_path, recipe, train=data, valid=data, optimizer="sgd")
    assert outcome == "finished"
    figures = of(events, "epoch")[-1]["metrics"]
    assert figures["mse"] == pytest.approx(figures["rmse"] ** 2)
    (remark,) = [event["text"] for event in of(events, "remark") if "Recipe.metrics" in event["text"]]
    assert remark.startswith("the figure 'mse' of Recipe.metrics is not used: a metric of the whole split")


@pytest.mark.parametrize(
    ("lr", "epochs", "is_said"), [(0.0, 3, True), (0.0, 2, False), (0.0, 39, False), (0.5, 3, False)]
)
def test_a_member_that_learns_nothing_for_some_epochs_is_remarked_once(
    tmp_path: Path, lr: float, epochs: int, is_said: bool
) -> None:
    """Of 39 epochs the first three, in which the learning rate may be warming up, say nothing."""
    guess = nn.Linear(4, 10)
    nn.init.zeros_(guess.weight), nn.init.zeros_(guess.bias)
    labels = 1 + np.argmax(X @ np.random.default_rng(1).normal(size=(4, 9)), axis=1)
    recipe = Recipe(
        model=lambda params: copy.deepcopy(guess), loss="cross_entropy", target="y", inputs=("x",),
        optimizer=lambda model, params: optim.SGD(model.parameters(), lr=lr),
    )  # fmt: skip
    stops = {"early_stopping": EarlyStopping(patience=2)} if epochs > 3 else {}
    outcome, events = train(tmp_path, recipe, train=pipe(labels), valid=pipe(labels), epochs=epochs, **stops)
    assert outcome == "finished"
    remarks = [event["text"] for event in of(events, "remark") if "learns nothing" in event["text"]]
    assert bool(remarks) == is_said and len(remarks) <= 1
    assert all("no better than that of a constant guess of 10 classes, 2.303" in remark for remark in remarks)


def test_a_member_that_learns_late_is_not_said_to_learn_nothing(tmp_path: Path) -> None:
    class LearnsLate(MemberCallback):
        def begin_epoch(self, member: Any, epoch: int) -> None:
            for group in member.optimizer.param_groups:
                group["lr"] = 0.0 if epoch < 4 else 0.5

    guess = nn.Linear(4, 10)
    nn.init.zeros_(guess.weight), nn.init.zeros_(guess.bias)
    labels = 1 + np.argmax(X @ np.random.default_rng(1).normal(size=(4, 9)), axis=1)
    recipe = Recipe(
        model=lambda params: copy.deepcopy(guess), loss="cross_entropy", target="y", inputs=("x",),
        optimizer=lambda model, params: optim.SGD(model.parameters(), lr=0.5),
    )  # fmt: skip
    options = {"epochs": 6, "callbacks": [LearnsLate()]}
    outcome, events = train(tmp_path, recipe, train=pipe(labels), valid=pipe(labels), **options)
    assert outcome == "finished"
    assert not [event for event in of(events, "remark") if "learns nothing" in event["text"]]


ROWS = Pipeline(sources.arrays(x=np.eye(16, 3, dtype="float32"), label=np.arange(16) % 2), seed=0)


def model(params: dict[str, Any]) -> Any:
    return nn.Linear(3, 2)


def declare(recipe: Any = None, **options: Any) -> Ensemble:
    given = {"members": [{"lr": 0.1}], "train": ROWS, "valid": ROWS, "allow_overlap": True, "epochs": 2, **options}
    return Ensemble(name="refused", recipe=recipe or Recipe(model=model, loss="cross_entropy"), **given)


def run(folder: Path, recipe: Any = None, **options: Any) -> Any:
    return ensemble.submit(declare(recipe, **options), folder, "inline").wait()


def test_an_optimizer_with_a_closure_steps_in_a_loop_of_its_own(tmp_path: Path) -> None:
    def step_by_itself(member: Any) -> None:
        net = nn.Linear(3, 2)
        _, optimizer = member.prepare(net, optim.LBFGS(net.parameters()))
        for _ in range(member.identity.epochs):
            for x, label in member.dataloader("train", fields=("x", "label")):

                def compute_loss(x: Any = x, label: Any = label) -> Any:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(net(x), label)
                    loss.backward()
                    return loss

                optimizer.step(compute_loss)
            member.report(accuracy=1.0)

    (row,) = run(tmp_path, step_by_itself).members
    assert (row["state"], row["epoch"]) == ("finished", 2)


def test_a_schedule_gets_the_steps_of_an_epoch(tmp_path: Path) -> None:
    seen: list[Any] = []

    def schedule(optimizer: Any, params: Any, steps: int, *, steps_per_epoch: int) -> Any:
        seen.append((steps, steps_per_epoch))
        return optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=steps_per_epoch)

    result = run(tmp_path, Recipe(model=model, loss="cross_entropy", schedule=schedule), epochs=3, batch_size=4)
    assert result.members[0]["state"] == "finished" and seen == [(12, 4)]


def test_no_validation_split_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ensemble.submit(declare(valid=None), tmp_path, "inline")
    assert any("there is no valid=: members are not ranked" in line for line in caplog.messages)
    assert "there is no valid=" in str(ensemble.dry_run(declare(valid=None), executor="inline").notes)
    search = Search({"lr": loguniform(0.1, 1)}, trials=2)
    with pytest.raises(SpecError, match=r"trials are ranked on the validation split: give Ensemble\(valid="):
        ensemble.submit(declare(valid=None, members=None, search=search), tmp_path / "search", "inline")


def show(result: Any, path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    main(["status", str(path)])
    return [str(result), capsys.readouterr().out]


def test_the_end_says_why_no_member_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = Search({"lr": loguniform(0.1, 1)}, trials=2, sampler="random", stop=lambda trial: True)
    for shown in show(run(tmp_path, members=None, search=search), tmp_path, capsys):
        says = "no member finished (2 pruned); the search's pruner, or its stop=, ended them: pruner='none'"
        assert says in " ".join(shown.split())


def test_the_seed_is_a_column_where_members_differ_by_it_alone(tmp_path: Path, capsys: Any) -> None:
    result = run(tmp_path, members=seeds(2, {"lr": 0.1}, start=70))
    for shown in show(result, tmp_path, capsys):
        lines = shown.splitlines()
        at = next(number for number, line in enumerate(lines) if "member " in line and "seed" in line)
        column = slice(lines[at].index("seed"), lines[at].index("seed") + len("seed"))
        assert {line[column].strip() for line in lines[at + 1 : at + 3]} == {"70", "71"}
    report = (tmp_path / "report.html").read_text()
    state = json.loads(report.split('id="documents">')[1].split("</script>")[0])["state"]
    params = state["members"]["columns"].index("params")
    assert [row[params]["seed"] for row in state["members"]["rows"].values()] == [70, 71]
    assert "seed" in state["run"]["varied"]
    assert " seed " not in str(run(tmp_path / "others", members=[{"lr": 0.1}, {"lr": 0.2}]))


def test_the_dry_run_counts_trainable_parameters_beside_all() -> None:
    half = lambda params: nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))  # noqa: E731
    shown = ensemble.dry_run(declare(Recipe(model=half, loss="cross_entropy")), executor="inline")
    assert (shown.members[0]["parameters"], shown.members[0]["trainable"]) == (26, 10)
    assert "26, 10 trained" in str(shown)


def test_the_first_member_of_a_node_downloads_for_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(NODE_DIRECTORY, str(tmp_path))
    downloads, all_at_once, file = [], threading.Barrier(4), tmp_path / "weights.pt"

    def download(params: dict[str, Any]) -> nn.Module:
        if not file.exists():
            downloads.append(1)
            with contextlib.suppress(threading.BrokenBarrierError):
                all_at_once.wait(0.5)
            torch.save({}, file)
        return nn.Identity()

    given: Any = (Recipe(model=download, loss="cross_entropy"), SimpleNamespace(params={}))
    threads = [threading.Thread(target=build_model, args=given) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert downloads == [1]


USERS, ITEMS = 6, 8


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(USERS, 4), nn.Embedding(ITEMS, 4)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(dim=1)


def in_batch(model: Towers, batch: Any) -> Tensor:
    """The other samples' items are the negatives."""
    assert model.training, "over pairs of the label 0 it has no meaning"
    model(batch["user"], batch["item"])
    scores = model.user(batch["user"]) @ model.item(batch["item"]).T
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)), reduction="none")


def hit_rate(values: np.ndarray, target: np.ndarray, user: np.ndarray, k: int = 1) -> float:
    """The share of users among whose k best items one has the label 1."""
    assert user.shape == target.shape == values.shape
    best = [target[user == one][values[user == one].argsort()[::-1][:k]].max() for one in np.unique(user)]
    return float(np.mean(best))


USER, ITEM = (axis.ravel() for axis in np.meshgrid(np.arange(USERS), np.arange(ITEMS)))


def declare_fields(workers: int = 1, **options: Any) -> Ensemble:
    label = np.random.default_rng(0).random(len(USER)).round().astype(np.float32)
    pairs = Pipeline(sources.arrays(user=USER, item=ITEM, label=label))
    given = {"task": "regression", "split_metrics": [hit_rate], "objective": "hit_rate", "valid_loss": False}
    given |= {"mode": "max", "predict": lambda model, batch: model(batch["user"], batch["item"])}
    recipe = Recipe(model=lambda params: Towers(), loss=in_batch, **{**given, **options})
    about: dict[str, Any] = {"recipe": recipe, "train": pairs, "valid": pairs, "batch_size": 16, "epochs": 1}
    return Ensemble(name="m", members=[{"lr": 0.1}] * 2, resources=Resources(workers=workers), **about)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_metric_gets_the_fields_it_names_and_no_loss_is_evaluated(workers: int, tmp_path: Path) -> None:
    run = ensemble.submit(declare_fields(workers), tmp_path, "inline" if workers == 1 else "local")
    result = run.wait()
    for row in result.members:
        own = ensemble.load_predictions(tmp_path, "valid", row["member"])
        assert row["state"] == "finished" and set(row["metrics"]) == {"hit_rate", "mae", "rmse"}
        assert row["metrics"]["hit_rate"] == hit_rate(own.values, own.targets, USER[own.index])
        saved = load_predictions(RunDir(tmp_path).predictions(row["member"]), "valid")
        assert saved.fields["user"].tolist() == USER.tolist()
    both = ensemble.load_predictions(tmp_path, "valid")
    figures, members = result.combined.metrics, [row["metrics"]["hit_rate"] for row in result.members]
    assert figures["ensemble"]["hit_rate"] == hit_rate(both.values, both.targets, USER[both.index])
    assert figures["best"]["hit_rate"] in members
    assert figures["mean"]["hit_rate"] == pytest.approx(np.mean(members))
    low, high = result.combined.intervals["ensemble"]["hit_rate"]
    assert low < high


def name_users(batch: Any) -> dict[str, Any]:
    """Texts and numbers in lists, which are no tensors."""
    names = [f"Zoë {user}" for user in batch["user"].tolist()]
    return {**batch, "name": names, "of": batch["item"].tolist(), "record": [{"name": name} for name in names]}


def test_fields_may_be_texts_and_lists(tmp_path: Path) -> None:
    def named(values: np.ndarray, target: np.ndarray, name: np.ndarray, of: np.ndarray) -> float:
        assert len(name) == len(of) == len(values)
        return hit_rate(values, target, np.array([int(text.removeprefix("Zoë ")) for text in name]))

    declared = declare_fields(split_metrics=[named, hit_rate], objective="named", collate=name_users)
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    for figures in (*(row["metrics"] for row in result.members), *result.combined.metrics.values()):
        assert figures["named"] == figures["hit_rate"]


def test_a_field_that_no_metric_can_have_is_named_first(tmp_path: Path) -> None:
    def by_record(values: np.ndarray, target: np.ndarray, record: np.ndarray) -> float:
        return 0.5

    def by_users(values: np.ndarray, target: np.ndarray, users: np.ndarray) -> float:
        return 0.5

    for metric, says in (
        (by_record, "the field 'record' is a list, no tensor [b, ...], and no numbers or texts"),
        (by_users, "the batch has no field 'users'; did you mean 'user'?"),
    ):
        folder, name = tmp_path / metric.__name__, metric.__name__
        declared = declare_fields(split_metrics=[metric], objective=name, collate=name_users)
        (row, _) = ensemble.submit(declared, folder, "inline").wait().members
        assert says in row["error"] and row["attempts"] == 1 and not of_kind(folder, "epoch")


def test_members_are_not_ranked_by_a_loss_that_is_not_computed() -> None:
    with pytest.raises(SpecError, match=r"ranked by 'loss', which a Recipe without metrics= did not report"):
        declare_fields(objective=None, mode=None)


def epochs_of(name: str) -> Any:
    lr = optim.lr_scheduler
    return {
        "cosine": lambda o, params, steps: lr.CosineAnnealingLR(o, T_max=3),
        "warmed": lambda o, params, steps: lr.SequentialLR(
            o, [lr.LinearLR(o), lr.CosineAnnealingLR(o, steps)], [1]
        ),
        "steps": lambda o, params, steps: lr.CosineAnnealingLR(o, T_max=steps),
        "plateau": lambda o, params, steps: lr.ReduceLROnPlateau(o),
    }[name]


@pytest.mark.parametrize(("name", "is_remarked"), [("cosine", True), ("warmed", False), ("steps", False)])
def test_a_schedule_that_seems_to_count_epochs_is_remarked(tmp_path: Path, name: str, is_remarked: bool) -> None:
    run(
        tmp_path,
        Recipe(model=model, loss="cross_entropy", inputs=("x",), schedule=epochs_of(name)),
        epochs=3,
        batch_size=4,
    )
    assert ("seems to count epochs" in read_log(tmp_path)) is is_remarked


def test_a_schedule_that_is_stepped_with_a_metric_is_refused(tmp_path: Path) -> None:
    recipe = Recipe(model=model, loss="cross_entropy", inputs=("x",), schedule=epochs_of("plateau"))
    (member,) = run(tmp_path, recipe).members
    assert member["state"] == "failed"
    log = read_log(tmp_path)
    assert "ReduceLROnPlateau" in log and "member.state(" in log and "TypeError" not in log


@pytest.mark.parametrize(("number", "precision"), [(1e5, "fp16"), (1990.0, "bf16")])
def test_numbers_that_16_bits_do_not_hold_are_named(tmp_path: Path, number: float, precision: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)).astype("f4"), rng.normal(size=40).astype("f4")
    if precision == "fp16":
        x[7, 1] = number
    else:
        y = (number + 5 * y).round().astype("f4")
    data = Pipeline(sources.arrays(x=x, y=y), seed=0)
    recipe = Recipe(
        model=lambda params: nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), loss="mse", inputs=("x",), target="y"
    )
    options = {"train": data, "valid": data, "allow_overlap": True, "epochs": 1, "batch_size": 20}
    spec = Ensemble(name="half", recipe=recipe, members=[{"lr": 0.01}], precision=precision, **options)
    ensemble.submit(spec, run_dir=tmp_path, executor="inline").wait()
    log = read_log(tmp_path)
    if precision == "fp16":
        assert "65504" in log and "sample 7" in log and "learning rate" not in log
    else:
        assert len([line for line in log.splitlines() if "remark text=" in line and "target_scale=" in line]) == 1
