"""Mixup: what is mixed with what, and that a loss is computed of one forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ensemble.spec.task import IGNORED
from ensemble.train.job import TrainingError
from ensemble.train.mixup import mix, mixed_losses, not_mixed, one_forward
from pipelines import Batch


def batch(n: int = 16, **fields: Any) -> Batch:
    x = torch.arange(n, dtype=torch.float32)
    own = {"x": x[:, None], "label": torch.arange(n) % 3, "index": torch.arange(n), **fields}
    return Batch(own, epoch=0, step=4, global_size=2 * n)


def test_samples_are_mixed_in_pairs_by_one_share() -> None:
    plain = batch()
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
        made = mix(batch(), "label", **{"alpha": 1.0, "seed": 1, "rank": 0, "step": 0, **changes})
        return made.share, made["x"][:, 0].tolist()

    assert drawn() == drawn()
    assert drawn(rank=1)[0] == drawn()[0] and drawn(rank=1)[1] != drawn()[1]
    assert drawn(step=1)[0] != drawn()[0] and drawn(seed=2)[0] != drawn()[0]
    shares = [mix(batch(2), "label", 0.2, seed=0, rank=0, step=step).share for step in range(2000)]
    assert np.mean(shares) == pytest.approx(0.5, abs=0.03)
    assert np.var(shares) == pytest.approx(1 / (4 * (2 * 0.2 + 1)), abs=0.01), "of Beta(0.2, 0.2)"


def test_a_sample_without_a_target_is_nobodys_partner() -> None:
    label = torch.where(torch.arange(16) % 2 == 0, torch.arange(16) % 3, IGNORED)
    mixed = mix(batch(label=label), "label", 1.0, seed=0, rank=0, step=0)
    changed = batch(label=label, x=torch.where(label[:, None] == IGNORED, 1e6, batch()["x"]))
    again = mix(changed, "label", 1.0, seed=0, rank=0, step=0)
    assert torch.equal(mixed["x"][label != IGNORED], again["x"][label != IGNORED])
    assert mixed.partner_target is not None and (mixed.partner_target[label != IGNORED] != IGNORED).all()
    numbers = torch.where(label == IGNORED, torch.nan, label.double())
    pairs = mix(batch(label=numbers), "label", 1.0, seed=0, rank=0, step=0).partner_target
    assert pairs is not None and not pairs[label != IGNORED].isnan().any()


def test_each_of_the_two_losses_has_the_weight_of_its_sample() -> None:
    """As a bootstrap wants it: a sample that was drawn three times counts three times, wherever it is."""
    weight = torch.tensor([1.0, 0.5, 3.0, 2.0] * 4)
    mixed = mix(batch(weight=weight), "label", 1.0, seed=0, rank=0, step=0, weighted=True)
    rows = ((mixed["x"][:, 0] - mixed.share * batch()["x"][:, 0]) / (1 - mixed.share)).round().long()
    own, others = torch.rand(16), torch.rand(16)
    found = mixed.losses(lambda target: others if target is mixed.partner_target else own) * weight
    expected = mixed.share * weight * own + (1 - mixed.share) * weight[rows] * others
    torch.testing.assert_close(found, expected)
    assert torch.equal(mixed["weight"], weight)


def test_a_field_of_that_name_is_no_weight_of_samples_where_none_is_declared() -> None:
    weight = torch.tensor([1.0, 0.0, 3.0, 2.0] * 4)
    mixed = mix(batch(weight=weight), "label", 1.0, seed=0, rank=0, step=0)
    plain = mix(batch(), "label", 1.0, seed=0, rank=0, step=0)
    assert mixed.partner_weight is None and torch.equal(mixed["x"], plain["x"])
    rows = ((mixed["x"][:, 0] - mixed.share * batch()["x"][:, 0]) / (1 - mixed.share)).round().long()
    torch.testing.assert_close(mixed["weight"], mixed.share * weight + (1 - mixed.share) * weight[rows])
    target = mix(batch(weight=weight), "weight", 1.0, seed=0, rank=0, step=0)
    assert target.partner_weight is None and torch.equal(target["weight"], weight)


def test_a_model_that_is_called_with_what_cannot_be_mixed_is_refused() -> None:
    image = torch.zeros(16, 3, 4, 4, dtype=torch.uint8)
    with pytest.raises(TrainingError, match=r"called with 'image', which is uint8 \[16, 3, 4, 4\].*stages\.scale"):
        mix(batch(image=image), "label", 1.0, seed=0, rank=0, step=0, inputs=("x", "image"))
    mix(batch(image=image), "label", 1.0, seed=0, rank=0, step=0, inputs=("x",))
    of_the_sample = {"lengths": torch.arange(16), "mask": torch.ones(16, 5, dtype=torch.bool)}
    mix(batch(**of_the_sample), "label", 1.0, seed=0, rank=0, step=0, inputs=("x", "lengths", "mask"))


def test_without_mixup_a_batch_is_itself() -> None:
    plain = batch()
    same = not_mixed(plain, "label")
    assert all(same[name] is value for name, value in plain.items())
    assert torch.equal(same.losses(lambda target: target * 2.0), plain["label"] * 2.0)


def test_what_cannot_be_mixed_is_refused() -> None:
    with pytest.raises(TrainingError, match="no target 'y'"):
        mix(batch(), "y", 1.0, seed=0, rank=0, step=0)
    with pytest.raises(TrainingError, match="needs a field of floats"):
        mix(batch(x=torch.ones(16, dtype=torch.int64)), "label", 1.0, seed=0, rank=0, step=0)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(1, 3), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return nn.functional.dropout(self.layer(x), 0.5)


def test_both_losses_are_of_one_forward_pass() -> None:
    model = Twice()

    def loss(net: nn.Module, batch: Any) -> Any:
        assert batch.global_size == 32
        outputs = net(batch["x"]) - net(-batch["x"])  # a model may be called several times
        return nn.functional.cross_entropy(outputs, batch["label"], reduction="none")

    mixed = mix(batch(), "label", 1.0, seed=0, rank=0, step=0)
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
