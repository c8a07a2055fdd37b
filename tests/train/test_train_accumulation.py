"""Gradient accumulation and clipping with one worker; with several: test_train_workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import train_child as cases
from kit.loop_cases import checkpoint, failed, of, train
from torch import nn

from ensemble.spec import Recipe
from ensemble.spec.task import IGNORED
from ensemble.train.accumulation import MicroBatches, split_batch
from ensemble.train.job import TrainingError
from ensemble.train.mixup import mix, mixed_losses, not_mixed, one_forward
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


def test_losses_are_given_once_for_each_part_that_is_asked_for() -> None:
    once, all_at_once = "once for each part", "called once for each batch"
    turn = MicroBatches(batch(5), 2)
    with pytest.raises(TrainingError, match=r"accumulate=2 .* once for each part of member.parts"):
        turn.pop()
    parts = turn.parts()
    next(parts)
    with pytest.raises(TrainingError, match=once):
        next(parts)
    turn = MicroBatches(batch(5), 2)
    parts = turn.parts()
    first = next(parts)
    assert turn.pop() == (first, False) and not turn.is_complete
    with pytest.raises(TrainingError, match=once):
        turn.pop()
    with pytest.raises(TrainingError, match=all_at_once):
        next(turn.parts())
    second = next(parts)
    assert turn.pop() == (second, True) and turn.is_complete and next(parts, None) is None
    whole = batch(3)  # without accumulation, or of nothing, parts need not be asked for
    for turn in (MicroBatches(whole, 1), MicroBatches(batch(0), 4)):
        assert turn.pop() == (turn.batch, True) and turn.is_complete
        with pytest.raises(TrainingError, match="add up losses" if turn.batch is whole else "accumulate=4"):
            turn.pop()
        with pytest.raises(TrainingError, match=all_at_once):
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


def batch_mixup(n: int = 16, **fields: Any) -> Batch:
    x = torch.arange(n, dtype=torch.float32)
    own = {"x": x[:, None], "label": torch.arange(n) % 3, "index": torch.arange(n), **fields}
    return Batch(own, epoch=0, step=4, global_size=2 * n)


def test_samples_are_mixed_in_pairs_by_one_share() -> None:
    plain = batch_mixup()
    mixed = mix(plain, "label", 0.4, seed=3, rank=0, step=7)
    assert 0 < mixed.share < 1 and mixed.partner_target is not None
    partner = (mixed["x"][:, 0] - mixed.share * plain["x"][:, 0]) / (1 - mixed.share)
    rows = partner.round().long()
    torch.testing.assert_close(partner, rows.float(), rtol=1e-4, atol=1e-4)
    assert sorted(rows.tolist()) == list(range(16)) and rows.tolist() != list(range(16))
    assert torch.equal(mixed.partner_target, plain["label"][rows])
    assert torch.equal(mixed["label"], plain["label"]) and torch.equal(mixed["index"], plain["index"])
    assert (mixed.epoch, mixed.step, mixed.global_size) == (0, 4, 32)


def test_the_share_is_that_of_the_step_and_partners_those_of_the_rank() -> None:
    def drawn(**changes: Any) -> tuple[float, list[float]]:
        made = mix(batch_mixup(), "label", **{"alpha": 1.0, "seed": 1, "rank": 0, "step": 0, **changes})
        return made.share, made["x"][:, 0].tolist()

    assert drawn() == drawn()
    assert drawn(rank=1)[0] == drawn()[0] and drawn(rank=1)[1] != drawn()[1]
    assert drawn(step=1)[0] != drawn()[0] and drawn(seed=2)[0] != drawn()[0]
    shares = [mix(batch_mixup(2), "label", 0.2, seed=0, rank=0, step=step).share for step in range(2000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.01), "of Beta(0.2, 0.2)"


def test_a_sample_without_a_target_is_nobodys_partner() -> None:
    label = torch.where(torch.arange(16) % 2 == 0, torch.arange(16) % 3, IGNORED)
    mixed = mix(batch_mixup(label=label), "label", 1.0, seed=0, rank=0, step=0)
    changed = batch_mixup(label=label, x=torch.where(label[:, None] == IGNORED, 1e6, batch_mixup()["x"]))
    again = mix(changed, "label", 1.0, seed=0, rank=0, step=0)
    assert torch.equal(mixed["x"][label != IGNORED], again["x"][label != IGNORED])
    assert mixed.partner_target is not None and (mixed.partner_target[label != IGNORED] != IGNORED).all()
    numbers = torch.where(label == IGNORED, torch.nan, label.double())
    pairs = mix(batch_mixup(label=numbers), "label", 1.0, seed=0, rank=0, step=0).partner_target
    assert pairs is not None and not pairs[label != IGNORED].isnan().any()


def test_each_of_the_two_losses_has_the_weight_of_its_sample() -> None:
    """As a bootstrap wants it: a sample that was drawn three times counts three times, wherever it is."""
    weight = torch.tensor([1.0, 0.5, 3.0, 2.0] * 4)
    mixed = mix(batch_mixup(weight=weight), "label", 1.0, seed=0, rank=0, step=0, weighted=True)
    rows = ((mixed["x"][:, 0] - mixed.share * batch_mixup()["x"][:, 0]) / (1 - mixed.share)).round().long()
    own, others = torch.rand(16), torch.rand(16)
    found = mixed.losses(lambda target: others if target is mixed.partner_target else own) * weight
    expected = mixed.share * weight * own + (1 - mixed.share) * weight[rows] * others
    torch.testing.assert_close(found, expected)
    assert torch.equal(mixed["weight"], weight)


def test_a_field_of_that_name_is_no_weight_of_samples_where_none_is_declared() -> None:
    weight = torch.tensor([1.0, 0.0, 3.0, 2.0] * 4)
    mixed = mix(batch_mixup(weight=weight), "label", 1.0, seed=0, rank=0, step=0)
    plain = mix(batch_mixup(), "label", 1.0, seed=0, rank=0, step=0)
    assert mixed.partner_weight is None and torch.equal(mixed["x"], plain["x"])
    rows = ((mixed["x"][:, 0] - mixed.share * batch_mixup()["x"][:, 0]) / (1 - mixed.share)).round().long()
    torch.testing.assert_close(mixed["weight"], mixed.share * weight + (1 - mixed.share) * weight[rows])
    target = mix(batch_mixup(weight=weight), "weight", 1.0, seed=0, rank=0, step=0)
    assert target.partner_weight is None and torch.equal(target["weight"], weight)


def test_a_model_that_is_called_with_what_cannot_be_mixed_is_refused() -> None:
    image = torch.zeros(16, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(TrainingError, match=r"called with 'image', which is uint8 \[16, 3, 4, 4\].*stages\.scale"):
        mix(batch_mixup(image=image), "label", 1.0, seed=0, rank=0, step=0, inputs=("x", "image"))
    mix(batch_mixup(image=image), "label", 1.0, seed=0, rank=0, step=0, inputs=("x",))
    of_the_sample = {"lengths": torch.arange(16), "mask": torch.ones(16, 5, dtype=torch.bool)}
    mix(batch_mixup(**of_the_sample), "label", 1.0, seed=0, rank=0, step=0, inputs=("x", "lengths", "mask"))


def test_without_mixup_a_batch_is_itself() -> None:
    plain = batch_mixup()
    same = not_mixed(plain, "label")
    assert all(same[name] is value for name, value in plain.items())
    assert torch.equal(same.losses(lambda target: target * 2.0), plain["label"] * 2.0)


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(TrainingError, match="no target 'y'"):
        mix(batch_mixup(), "y", 1.0, seed=0, rank=0, step=0)
    with pytest.raises(TrainingError, match="needs a field of floats"):
        mix(batch_mixup(x=torch.ones(16, dtype=torch.int64)), "label", 1.0, seed=0, rank=0, step=0)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 3), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return nn.functional.dropout(self.layer(x), 0.5)


def test_both_losses_are_of_one_forward_pass() -> None:
    model = Twice()

    def loss(net: nn.Module, batch_mixup: Any) -> Any:
        assert batch_mixup.global_size == 32
        outputs = net(batch_mixup["x"]) - net(-batch_mixup["x"])  # a model may be called several times
        return nn.functional.cross_entropy(outputs, batch_mixup["label"], reduction="none")

    mixed = mix(batch_mixup(), "label", 1.0, seed=0, rank=0, step=0)
    torch.manual_seed(0)
    losses = mixed_losses(loss, model, mixed)
    assert model.calls == 2 and "forward" not in vars(model)
    torch.manual_seed(0)
    outputs = model(mixed["x"]) - model(-mixed["x"])
    soft = nn.functional.one_hot(mixed["label"], 3) * mixed.share
    soft = soft + nn.functional.one_hot(mixed.partner_target, 3) * (1 - mixed.share)
    expected = nn.functional.cross_entropy(outputs, soft, reduction="none")
    torch.testing.assert_close(losses, expected)
    losses.sum().backward()
    assert model.layer.weight.grad is not None


def test_a_forward_pass_that_was_replaced_is_put_back() -> None:
    model = Twice()
    model.forward = compiled = lambda x: x + 1  # type: ignore[method-assign]
    with one_forward(model) as replay:
        first = model(torch.ones(1))
        replay()
        assert model(torch.zeros(1)) is first
    assert model.forward is compiled
