"""What a member cannot be trained with is named at its start, and not tried again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ensemble  # noqa: E402
from ensemble import Ensemble, Recipe, Search, loguniform, seeds  # noqa: E402
from ensemble.cli.parser import main  # noqa: E402
from ensemble.spec import SpecError  # noqa: E402
from pipelines import Pipeline, sources  # noqa: E402

nn, optim = torch.nn, torch.optim
ROWS = Pipeline(sources.arrays(x=np.eye(16, 3, dtype="float32"), label=np.arange(16) % 2), seed=0)


def model(params: dict[str, Any]) -> Any:
    return nn.Linear(3, 2)


def frozen(params: dict[str, Any]) -> Any:
    return model(params).requires_grad_(False)


def declare(recipe: Any = None, **options: Any) -> Ensemble:
    given = {"members": [{"lr": 0.1}], "train": ROWS, "valid": ROWS, "allow_overlap": True, "epochs": 2, **options}
    return Ensemble(name="refused", recipe=recipe or Recipe(model=model, loss="cross_entropy"), **given)


def take_turns(member: Any) -> None:
    nets = nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 1)])
    member.prepare(nets, [optim.SGD(net.parameters(), lr=0.1) for net in nets])


def prepare_twice(member: Any) -> None:
    for net in (nn.Linear(3, 2), nn.Linear(2, 1)):
        member.prepare(net, optim.SGD(net.parameters(), lr=0.1))


def step_by_closure(member: Any) -> None:
    net = nn.Linear(3, 2)
    member.prepare(net, optim.LBFGS(net.parameters()))
    for _ in member.epochs():
        for batch in member.batches():
            member.backward(net(batch["x"]).sum(1))
            member.step()


def mix_loops(member: Any) -> None:
    net = nn.Linear(3, 2)
    member.prepare(net, optim.SGD(net.parameters(), lr=0.1))
    for _ in member.epochs():
        assert list(member.dataloader("train"))


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


def step_beside(member: Any) -> None:
    net = nn.Linear(3, 2)
    _, optimizer = member.prepare(net, optim.SGD(net.parameters(), lr=0.1))
    for _ in member.epochs():
        for batch in member.batches():
            net(batch["x"]).sum().backward()
            optimizer.step()
            member.step()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": frozen}, "none of the model's 2 parameters is trained: requires_grad is False"),
        ({"model": lambda params: nn.Flatten()}, "none of the model's 0 parameters is trained"),
        ({"metrics": lambda outputs, batch: {"note": "fine"}}, "the metric 'note' must be a number, got 'fine'"),
        ({"metrics": lambda outputs, batch: outputs}, "Recipe.metrics must return a dict, got Tensor"),
        (
            {"optimizer": lambda net, params: optim.LBFGS(net.parameters())},
            "LBFGS computes .*train= of .*member.dataloader",
        ),
        (
            {"optimizer": lambda net, params: (1, 2)},
            r"got tuple; .*of a GAN\).*train= of .*member.dataloader",
        ),
        (take_turns, r"got list; .*of a GAN\).*further models and optimizers by member.state\(name, ...\)"),
        (prepare_twice, r"is called once, .*of a GAN\).*train= .*member.dataloader.*nor member.step\(\)"),
        (step_by_closure, r"LBFGS computes .*train= .*member.dataloader.*nor member.step\(\)"),
        (mix_loops, r"epoch 1 was left after 0 of 1 steps: .*train= .*member.dataloader.*nor member.step\(\)"),
        (step_beside, r"member.step\(\) comes after .*train= .*member.dataloader.*nor member.step\(\)"),
    ],
    ids=[
        "frozen",
        "empty",
        "text",
        "tensor",
        "closure",
        "tuple",
        "turns",
        "twice",
        "own closure",
        "mixed",
        "beside",
    ],
)
def test_it_is_named_and_not_tried_again(given: Any, said: str, tmp_path: Path) -> None:
    recipe = given if callable(given) else Recipe(**{"model": model, "loss": "cross_entropy", **given})
    (row,) = ensemble.submit(declare(recipe), tmp_path, "inline").wait().members
    assert row["state"] == "failed" and row["attempts"] == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(row["error"])


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
    """The end's summary, and what `ensemble status` prints."""
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


def test_the_seed_is_a_column_where_members_differ_by_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = ensemble.submit(declare(members=seeds(2, {"lr": 0.1}, start=70)), tmp_path, "inline").wait()
    for shown in show(result, tmp_path, capsys):
        lines = shown.splitlines()
        at = next(number for number, line in enumerate(lines) if "member " in line and "seed" in line)
        column = slice(lines[at].index("seed"), lines[at].index("seed") + len("seed"))
        assert {line[column].strip() for line in lines[at + 1 : at + 3]} == {"70", "71"}
    report = (tmp_path / "report.html").read_text()
    assert '<th scope="col">seed</th>' in report and "<td>71</td>" in report
    others = declare(members=[{"lr": 0.1}, {"lr": 0.2}])
    assert " seed " not in str(ensemble.submit(others, tmp_path / "others", "inline").wait())


def test_the_dry_run_counts_trainable_parameters_beside_all() -> None:
    def half(params: dict[str, Any]) -> Any:
        return nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 2))

    found = ensemble.dry_run(declare(Recipe(model=half, loss="cross_entropy")), executor="inline")
    assert (found.members[0]["parameters"], found.members[0]["trainable"]) == (26, 10)
    assert "26, 10 trained" in str(found)
