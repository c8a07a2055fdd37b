"""Values that no training can use: what is said names the field and the sample, and nothing is tried again."""

from __future__ import annotations

import contextlib
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
from ensemble import Ensemble, Recipe, Resources, Search, SpecError, Task, loguniform, seeds
from ensemble.cli.parser import main
from ensemble.store import RunDir, load_predictions
from ensemble.train.node_checks import NODE_DIRECTORY
from ensemble.train.recipe import build_model
from pipelines import Pipeline, sources

X = np.random.default_rng(0).normal(size=(23, 4)).astype(np.float32)
LABELS = (X[:, :3] > 0).astype(np.int64)
NUMBERS = X.sum(axis=1)


def linear(params: Any) -> nn.Module:
    return nn.Linear(4, 3)


def one_number(params: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))


MULTILABEL = Recipe(model=linear, loss="binary_cross_entropy", target="y", inputs=("x",), task=Task("multilabel"))


def test_labels_of_another_kind_in_other_splits_fail_no_member(tmp_path: Path) -> None:
    classes = np.arange(23) % 5  # by their number
    late = LABELS.copy()
    late[20] = 7
    for name, labels in {"classes": classes, "late": late}.items():
        outcome, events = train(
            tmp_path / name,
            MULTILABEL,
            train=Pipeline(sources.arrays(x=X, y=LABELS)),
            valid=None,
            test=Pipeline(sources.arrays(x=X, y=labels)),
            optimizer="sgd",
        )
        assert outcome == "finished", of(events, "failed")
        run = RunDir(tmp_path / name)
        assert "no predictions on 'test' are saved: multilabel: " in run.log("member-0").read_text()
    assert "has the label 7: labels are 0, 1, or shares between" in run.log("member-0").read_text()


@pytest.mark.parametrize("batch_size", [16, 64])
def test_a_soft_label_drops_the_figures_of_labels_whatever_its_batch(tmp_path: Path, batch_size: int) -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    labels = (x[:, :3] > 0).astype(np.float32)
    soft = labels.copy()
    soft[40, 1] = 0.5

    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"mine": outputs.sum(dim=1)}

    recipe = replace(MULTILABEL, metrics=metrics, objective="loss")
    outcome, events = train(
        tmp_path,
        recipe,
        train=Pipeline(sources.arrays(x=x, y=labels)),
        valid=Pipeline(sources.arrays(x=x, y=soft)),
        optimizer="sgd",
        batch_size=batch_size,
    )
    assert outcome == "finished", of(events, "failed")
    assert all(set(event["metrics"]) == {"loss", "mine"} for event in of(events, "epoch"))
    log = RunDir(tmp_path).log("member-0").read_text()
    assert log.count("no figures of the predictions on 'valid': multilabel: the target has fractions") == 1


def test_targets_without_the_metric_that_ranks_are_refused_at_the_first_step(tmp_path: Path) -> None:
    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"f1": outputs.sum(dim=1)}

    soft = np.where(LABELS == 1, 0.7, 0.3).astype(np.float32)
    recipe = replace(MULTILABEL, metrics=metrics, objective="f1")
    data = Pipeline(sources.arrays(x=X, y=soft))
    outcome, events = train(tmp_path, recipe, train=data, valid=data, optimizer="sgd")
    failed = loop_cases.failed(outcome, events)
    assert "f1: multilabel: the target has fractions" in failed["error"] and not of(events, "epoch")
    assert "needs another name than 'f1': rank by that name, with mode=" in failed["error"]
    assert RunDir(tmp_path).log("member-0").read_text().count("no figures of the predictions") == 0
    renamed = replace(
        recipe, metrics=lambda outputs, batch: {"mine": outputs.sum(dim=1)}, objective="mine", mode="max"
    )
    outcome, events = train(tmp_path / "renamed", renamed, train=data, valid=data, optimizer="sgd")
    assert outcome == "finished" and "mine" in of(events, "epoch")[0]["metrics"]


def test_a_figure_that_gives_way_to_a_metric_of_the_whole_split_is_remarked(tmp_path: Path) -> None:
    def metrics(outputs: Any, batch: Any) -> dict[str, Any]:
        return {"mse": 100 * (outputs - batch["y"]) ** 2, "other": outputs}

    recipe = Recipe(model=one_number, loss="mse", target="y", inputs=("x",), metrics=metrics, objective="mse")
    data = Pipeline(sources.arrays(x=X, y=NUMBERS))
    outcome, events = train(tmp_path, recipe, train=data, valid=data, optimizer="sgd")
    assert outcome == "finished"
    figures = of(events, "epoch")[-1]["metrics"]
    assert figures["mse"] == pytest.approx(figures["rmse"] ** 2)
    (remark,) = [event["text"] for event in of(events, "remark") if "Recipe.metrics" in event["text"]]
    assert remark.startswith("the figure 'mse' of Recipe.metrics is not used: a metric of the whole split")


ROWS = Pipeline(sources.arrays(x=np.eye(16, 3, dtype="float32"), label=np.arange(16) % 2), seed=0)


def model(params: dict[str, Any]) -> Any:
    return nn.Linear(3, 2)


def declare(recipe: Any = None, **options: Any) -> Ensemble:
    given = {"members": [{"lr": 0.1}], "train": ROWS, "valid": ROWS, "allow_overlap": True, "epochs": 2, **options}
    return Ensemble(name="refused", recipe=recipe or Recipe(model=model, loss="cross_entropy"), **given)


def step_by_itself(member: Any) -> None:
    net = nn.Linear(3, 2)
    _, optimizer = member.prepare(net, optim.LBFGS(net.parameters()))
    for _ in range(member.identity.epochs):
        for batch in member.dataloader("train"):

            def compute_loss(batch: Any = batch) -> Any:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(net(batch["x"]), batch["label"])
                loss.backward()
                return loss

            optimizer.step(compute_loss)
        member.report(accuracy=1.0)


def test_an_optimizer_with_a_closure_steps_in_a_loop_of_its_own(tmp_path: Path) -> None:
    (row,) = ensemble.submit(declare(step_by_itself), tmp_path, "inline").wait().members
    assert (row["state"], row["epoch"]) == ("finished", 2)


def test_a_schedule_gets_the_steps_of_an_epoch(tmp_path: Path) -> None:
    seen: list[Any] = []

    def schedule(optimizer: Any, params: Any, steps: int, *, steps_per_epoch: int) -> Any:
        seen.append((steps, steps_per_epoch))
        return optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=3, steps_per_epoch=steps_per_epoch)

    recipe = Recipe(model=model, loss="cross_entropy", schedule=schedule)
    result = ensemble.submit(declare(recipe, epochs=3, batch_size=4), tmp_path, "inline").wait()
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
    result = ensemble.submit(declare(members=None, search=search, epochs=2), tmp_path, "inline").wait()
    for shown in show(result, tmp_path, capsys):
        flat = " ".join(shown.split())
        assert (
            "no member finished (2 pruned); the search's pruner, or its stop=, ended them: pruner='none'" in flat
        )


def test_the_seed_is_a_column_where_members_differ_by_it_alone(tmp_path: Path, capsys: Any) -> None:
    result = ensemble.submit(declare(members=seeds(2, {"lr": 0.1}, start=70)), tmp_path, "inline").wait()
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
    others = declare(members=[{"lr": 0.1}, {"lr": 0.2}])
    assert " seed " not in str(ensemble.submit(others, tmp_path / "others", "inline").wait())


def test_the_dry_run_counts_trainable_parameters_beside_all() -> None:
    def half(params: dict[str, Any]) -> Any:
        return nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))

    found = ensemble.dry_run(declare(Recipe(model=half, loss="cross_entropy")), executor="inline")
    assert (found.members[0]["parameters"], found.members[0]["trainable"]) == (26, 10)
    assert "26, 10 trained" in str(found)


def test_the_first_member_of_a_node_downloads_for_the_others(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv(NODE_DIRECTORY, str(tmp_path))
    downloads, all_at_once = [], threading.Barrier(4)

    def model(params: dict[str, Any]) -> nn.Module:
        file = tmp_path / "weights.pt"
        if not file.exists():
            downloads.append(1)
            with_others(all_at_once)
            torch.save({}, file)
        return nn.Identity()

    member: Any = SimpleNamespace(params={})
    recipe = Recipe(model=model, loss="cross_entropy")
    threads = [threading.Thread(target=build_model, args=(recipe, member)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert downloads == [1]


def with_others(barrier: threading.Barrier) -> None:
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(0.5)


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


def declare_fields(workers: int = 1, **options: Any) -> Ensemble:
    rng = np.random.default_rng(0)
    user, item = (each.ravel() for each in np.meshgrid(np.arange(USERS), np.arange(ITEMS)))
    pairs = sources.arrays(user=user, item=item, label=rng.random(len(user)).round().astype(np.float32))
    given = {"task": "regression", "split_metrics": [hit_rate], "objective": "hit_rate", "valid_loss": False}
    recipe = Recipe(model=lambda params: Towers(), loss=in_batch, **{"mode": "max", **given, **options})
    pipe = Pipeline(pairs)
    about = {"name": "m", "recipe": recipe, "members": [{"lr": 0.1}] * 2, "train": pipe, "valid": pipe}
    about |= {"batch_size": 16, "epochs": 1, "resources": Resources(workers=workers)}
    return Ensemble(**about)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_metric_gets_the_fields_it_names_and_no_loss_is_evaluated(workers: int, tmp_path: Path) -> None:
    run = ensemble.submit(declare_fields(workers), tmp_path, "inline" if workers == 1 else "local")
    result = run.wait()
    saved = [ensemble.load_predictions(tmp_path, "valid", row["member"]) for row in result.members]
    user = np.meshgrid(np.arange(USERS), np.arange(ITEMS))[0].ravel()
    for row, own in zip(result.members, saved, strict=True):
        assert row["state"] == "finished" and set(row["metrics"]) == {"hit_rate", "mae", "rmse"}
        assert row["metrics"]["hit_rate"] == hit_rate(own.values, own.targets, user[own.index])
    both = ensemble.load_predictions(tmp_path, "valid")
    figures, members = result.combined.metrics, [row["metrics"]["hit_rate"] for row in result.members]
    assert figures["ensemble"]["hit_rate"] == hit_rate(both.values, both.targets, user[both.index])
    assert figures["best"]["hit_rate"] in members and figures["mean"]["hit_rate"] == pytest.approx(
        np.mean(members)
    )
    low, high = result.combined.intervals["ensemble"]["hit_rate"]
    assert low < high
    kept = [load_predictions(RunDir(tmp_path).predictions(f"member-{at}"), "valid").fields for at in (0, 1)]
    assert [fields["user"].tolist() for fields in kept] == [user.tolist()] * 2


def name_users(batch: Any) -> dict[str, Any]:
    """Texts and numbers in lists, which are no tensors."""
    name = [f"Zoë {each}" for each in batch["user"].tolist()]
    return {**batch, "name": name, "of": batch["item"].tolist(), "record": [{"name": each} for each in name]}


def test_fields_may_be_texts_and_lists(tmp_path: Path) -> None:
    def named(values: np.ndarray, target: np.ndarray, name: np.ndarray, of: np.ndarray) -> float:
        assert len(name) == len(of) == len(values)
        return hit_rate(values, target, np.array([int(each.removeprefix("Zoë ")) for each in name]))

    declared = declare_fields(split_metrics=[named, hit_rate], objective="named", collate=name_users)
    result = ensemble.submit(declared, tmp_path, "inline").wait()
    for figures in (*(row["metrics"] for row in result.members), *result.combined.metrics.values()):
        assert figures["named"] == figures["hit_rate"]


def judged_by_records(values: np.ndarray, target: np.ndarray, record: np.ndarray) -> float:
    return 0.5


def judged_by_users(values: np.ndarray, target: np.ndarray, users: np.ndarray) -> float:
    return 0.5


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (judged_by_records, "the field 'record' is a list, no tensor [b, ...], and no numbers or texts"),
        (judged_by_users, "the batch has no field 'users'; did you mean 'user'?"),
    ],
)
def test_a_field_that_no_metric_can_have_is_named_first(tmp_path: Path, metric: Any, says: str) -> None:
    declared = declare_fields(split_metrics=[metric], objective=metric.__name__, collate=name_users)
    (row, _) = ensemble.submit(declared, tmp_path, "inline").wait().members
    assert says in row["error"] and row["attempts"] == 1 and not of_kind(tmp_path, "epoch")


def test_members_are_not_ranked_by_a_loss_that_is_not_computed() -> None:
    with pytest.raises(SpecError, match=r"ranked by 'loss', which a Recipe without metrics= did not report"):
        declare_fields(objective=None, mode=None)
