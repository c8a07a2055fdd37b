"""What a member cannot be trained with is named at its start, and not tried again."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ensemble
from ensemble import Ensemble, Recipe, Search, loguniform, seeds
from ensemble.cli.parser import main
from ensemble.spec import SpecError
from pipelines import Pipeline, sources

nn, optim = torch.nn, torch.optim
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
    assert any(
        "there is no valid=" in note for note in ensemble.dry_run(declare(valid=None), executor="inline").notes
    )
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
