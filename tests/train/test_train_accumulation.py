"""Gradient accumulation and clipping with one worker; with several: test_train_workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import train_child as cases
from kit.loop_cases import checkpoint, failed, of, train
from torch import nn

from ensemble.spec import Recipe
from ensemble.train.accumulation import MicroBatches, split_batch
from ensemble.train.job import TrainingError
from pipelines import Batch


def weights(folder: Path) -> dict[str, Any]:
    return dict(checkpoint(folder)["model"])


def batch(rows: int) -> Batch:
    fields = {"x": torch.arange(2.0 * rows).reshape(rows, 2), "index": torch.arange(rows)}
    return Batch(fields, epoch=1, step=2, global_size=99)


@given(rows=st.integers(0, 40), parts=st.integers(1, 12))
def test_parts_are_the_rows_in_order_and_nearly_equal(rows: int, parts: int) -> None:
    whole = batch(rows)
    found = split_batch(whole, parts)
    assert len(found) == max(1, min(rows, parts))
    assert torch.cat([part["index"] for part in found]).tolist() == list(range(rows))
    assert torch.equal(torch.cat([part["x"] for part in found]), whole["x"])
    sizes = [len(part["index"]) for part in found]
    assert max(sizes) - min(sizes) <= 1
    assert all((p.global_size, p.epoch, p.step) == (99, 1, 2) for p in found)
    if len(found) == 1:
        assert found[0] is whole, "which is as it was without accumulation"


def test_losses_are_given_once_for_each_part() -> None:
    turn = MicroBatches(batch(5), 2)
    with pytest.raises(TrainingError, match=r"accumulate=2 .* once for each part of member.parts"):
        turn.pop()
    parts = turn.parts()
    first = next(parts)
    with pytest.raises(TrainingError, match="once for each part"):
        next(parts)
    turn = MicroBatches(batch(5), 2)
    parts = turn.parts()
    first = next(parts)
    assert turn.pop() == (first, False) and not turn.is_complete
    with pytest.raises(TrainingError, match="once for each part"):
        turn.pop()
    with pytest.raises(TrainingError, match="called once for each batch"):
        next(turn.parts())
    second = next(parts)
    assert turn.pop() == (second, True) and turn.is_complete and next(parts, None) is None


def test_without_accumulation_parts_need_not_be_asked_for() -> None:
    whole = batch(3)
    for turn in (MicroBatches(whole, 1), MicroBatches(batch(0), 4)):
        assert turn.pop() == (turn.batch, True) and turn.is_complete
        with pytest.raises(TrainingError, match="add up losses" if turn.batch is whole else "accumulate=4"):
            turn.pop()
        with pytest.raises(TrainingError, match="called once for each batch"):
            next(turn.parts())
    turn = MicroBatches(whole, 1)
    assert [part is whole and turn.pop() == (whole, True) for part in turn.parts()] == [True]


def own_loop(member: Any) -> None:
    model = cases.plain(member.params)
    model, _ = member.prepare(model, torch.optim.SGD(model.parameters(), lr=member.params["lr"]))
    for _ in member.epochs():
        for batch in member.batches():
            for part in member.parts(batch):
                with member.autocast():
                    losses = cases.loss(model, part)
                member.backward(losses)
            member.step()


def test_a_train_function_accumulates_as_the_built_in_loop_does(tmp_path: Path) -> None:
    assert train(tmp_path / "a", own_loop, accumulate=3)[0] == "finished"
    assert train(tmp_path / "b", cases.SMOOTH, accumulate=3)[0] == "finished"
    theirs = weights(tmp_path / "b")
    for name, value in weights(tmp_path / "a").items():
        assert torch.equal(value, theirs[name])


def test_memory_is_needed_for_one_part_only(tmp_path: Path) -> None:
    seen: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        if model.training:
            seen.append(len(batch["index"]))
        return cases.loss(model, batch)

    train(tmp_path, Recipe(model=cases.plain, loss=loss, task="classification"), accumulate=2, epochs=1)
    assert seen == [2, 3] * 4 + [1, 2]


def test_a_loss_that_is_not_a_number_in_the_first_part_ends_the_member(tmp_path: Path) -> None:
    parts = iter(range(10))

    def loss(model: nn.Module, batch: Any) -> Any:
        losses = cases.loss(model, batch)
        return losses * torch.nan if next(parts) == 0 else losses

    end = failed(*train(tmp_path, Recipe(model=cases.plain, loss=loss, task="classification"), accumulate=3))
    assert end["reason"] == "nan" and "epoch 0, step 0" in end["error"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        # float64 is not narrowed by autocast: the scale alone is what differs
        {"precision": "fp16"},
        {"precision": "fp16", "loss_scale": 3.0e4, "accumulate": 2},
        {"precision": "bf16", "loss_scale": 1.0e3},
    ],
    ids=str,
)
@pytest.mark.parametrize("clip_norm", [0.2, 1e3])
def test_the_true_gradient_of_the_global_batch_is_clipped(tmp_path: Path, options: Any, clip_norm: float) -> None:
    data = cases.data(dtype="float64")
    recipe = replace(cases.SMOOTH, clip_norm=clip_norm)
    given = {"params": {"dtype": "float64"}, "train": data, "valid": None, "epochs": 2}
    outcome, events = train(tmp_path, recipe, **given, **options)
    assert outcome == "finished"

    torch.manual_seed(0)
    model = cases.plain({"dtype": "float64"})
    start = weights_at_start(recipe)
    model.load_state_dict(start)
    clipped = 0
    for rows in data.loader(batch_size=5, epochs=range(2)):
        grads = torch.autograd.grad(cases.loss(model, rows).mean(), list(model.parameters()))
        norm = torch.sqrt(sum((g * g).sum() for g in grads))
        clipped += bool(norm > clip_norm)
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= 0.05 * grad * min(1.0, clip_norm / float(norm))
    assert clipped == (10 if clip_norm < 1 else 0)
    said = of(events, "epoch")[-1]["grad_norm"]  # of the last step, unscaled, before it was clipped
    assert said == pytest.approx(float(norm), rel=1e-4)
    for name, value in weights(tmp_path).items():
        # torch adds 1e-6 to the norm before it divides by it
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-5 if clipped else 1e-12, atol=1e-7)


def weights_at_start(recipe: Any) -> Any:
    from ensemble.train.seeding import seed_everything

    seed_everything(0, torch.device("cpu"))
    return recipe.model({"dtype": "float64"}).state_dict()
