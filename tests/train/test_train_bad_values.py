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
from kit.loop_cases import of, train
from torch import nn, optim

import ensemble
from ensemble import Ensemble, Recipe, Search, Task, loguniform, seeds
from ensemble.cli.parser import main
from ensemble.spec import SpecError
from ensemble.store import RunDir
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
