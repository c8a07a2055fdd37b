"""What training changes beside weights: a member that is stopped and resumed ends as one that never was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import failed, finished, train
from torch import nn
from torch.nn.utils.prune import l1_unstructured

import ensemble
from ensemble import MemberCallback, Recipe

STOPS = {"before it": 12, "within its epoch": 14, "after it": 18}  # by commands looked for: 6 an epoch of 5 steps
EPOCH = 2


class At(MemberCallback):
    """Calls a function where the epoch begins in which something changes; or at another hook, each time."""

    def __init__(self, change: Any = None, hook: str = "") -> None:
        self._hook, self._change = hook, change

    def begin_training(self, member: Any) -> None:
        if self._hook == "begin_training":
            self._change(member)

    def begin_epoch(self, member: Any, epoch: int) -> None:
        if self._hook == "begin_epoch" or (not self._hook and epoch == EPOCH):
            self._change(member)

    def end_epoch(self, member: Any, epoch: int, metrics: dict[str, float]) -> None:
        if self._hook == "end_epoch":
            self._change(member)

    def state_dict(self) -> dict[str, Any]:
        return {}


class Odd(nn.Module):
    """Has what a module may hold beside its weights, and calls it in `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.temperature, self.shift = 1.0, None
        self.register_buffer("bank", torch.zeros(1, 3))
        self.register_buffer("expanded", torch.ones(1, 1).expand(1, 3))
        self.register_buffer("empty", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x) * self.expanded / self.temperature + self.bank.mean(dim=0)
        y = y if self.empty is None else y + self.empty
        return y if self.shift is None else y + self.shift


def odd(params: dict[str, Any]) -> nn.Module:
    return Odd()


def frozen(params: dict[str, Any]) -> nn.Module:
    model = Odd()
    model.net[0].requires_grad_(False)
    return model


def wide(params: dict[str, Any]) -> nn.Module:
    """Without dropout and batch normalization, of which each worker has its own."""
    model = Odd().double()
    model.net[1], model.net[3] = nn.Identity(), nn.Identity()
    return model


def wide_frozen(params: dict[str, Any]) -> nn.Module:
    model = wide(params)
    model.net[0].requires_grad_(False)  # type: ignore[index]
    return model


def head(model: Any, params: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.net[4].parameters(), lr=0.3, momentum=0.9)


def unfreeze(member: Any) -> None:
    member.model.net[0].requires_grad_(True)


def freeze(member: Any) -> None:
    member.model.net[0].requires_grad_(False)


def add_group(member: Any) -> None:
    member.optimizer.add_param_group({"params": list(member.model.net[0].parameters()), "lr": 0.05})


def anneal(member: Any) -> None:
    member.model.temperature, member.model.shift, member.model.net[3].p = 0.5, 0.25, 0.6


def grow(member: Any) -> None:
    bank = torch.linspace(0, 2, 15).view(5, 3)
    member.model.bank, member.model.empty = bank, torch.ones(3)


def freeze_norm(member: Any) -> None:
    member.model.net[1].eval()


def leave_in_eval(member: Any) -> None:
    member.model.eval()


NOISY = Recipe(model=odd, loss=cases.loss, optimizer=head, task="classification")
ALL = replace(NOISY, optimizer=cases.optimizer)
#: What changes -> the recipe, and the callback that changes it.
CHANGES: dict[str, tuple[Recipe, MemberCallback]] = {
    "unfrozen": (replace(ALL, model=frozen, clip_norm=0.5), At(unfreeze)),
    "frozen": (ALL, At(freeze)),
    "group added": (NOISY, At(add_group)),
    "numbers": (ALL, At(anneal)),
    "buffers": (ALL, At(grow)),
    "batch norm, each epoch": (ALL, At(freeze_norm, "begin_epoch")),
    "batch norm, once": (ALL, At(freeze_norm)),
    "batch norm, at the start": (ALL, At(freeze_norm, "begin_training")),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_resume_continues_with_what_training_has_changed(tmp_path: Path, what: str) -> None:
    recipe, callback = CHANGES[what]
    options: dict[str, Any] = {"recipe": recipe, "callbacks": [callback], "epochs": 4}
    whole = finished(tmp_path / "whole", **options)
    without = finished(tmp_path / "without", recipe, epochs=4)
    assert whole["weights_sha256"] != without["weights_sha256"], "it has an effect"
    for name, stop in STOPS.items():
        assert train(tmp_path / name, inbox=cases.Script(stop, "stop"), **options)[0] == "stopped"
        assert finished(tmp_path / name, attempt=1, **options) == {**whole, "attempt": 1}, f"stopped {name}"


def test_a_mode_that_a_hook_leaves_behind_does_no_harm(tmp_path: Path) -> None:
    plain = finished(tmp_path / "plain", ALL, epochs=3)
    left = finished(tmp_path / "left", ALL, epochs=3, callbacks=[At(leave_in_eval, "end_epoch")])
    assert left == plain


def test_a_loaded_member_has_the_numbers_and_buffers_with_which_it_ended(tmp_path: Path) -> None:
    both = [At(anneal), At(grow)]
    made = cases.declare(ALL, 1, callbacks=both, epochs=4)
    assert ensemble.submit(made, tmp_path, "inline").wait().members[0]["state"] == "finished"
    model = ensemble.load(tmp_path).members["member-0"]
    assert (model.temperature, model.shift, model.bank.shape) == (0.5, 0.25, (5, 3))
    assert torch.equal(model.expanded, torch.ones(1, 3)) and torch.equal(model.empty, torch.ones(3))


def prune(member: Any) -> None:
    l1_unstructured(member.model.net[0], "weight", 0.5)


def test_a_model_with_parameters_that_only_training_adds_is_refused_at_a_resume_by_name(tmp_path: Path) -> None:
    options: dict[str, Any] = {"recipe": ALL, "callbacks": [At(prune)], "epochs": 4}
    assert train(tmp_path, inbox=cases.Script(18, "stop"), **options)[0] == "stopped"
    error = failed(*train(tmp_path, attempt=1, **options))
    assert "'net.0.weight" in error["error"] and not error["retry"]


@pytest.mark.parametrize("change", ["unfrozen", "group added"])
def test_workers_exchange_and_clip_what_is_trained_since_the_epoch_began(tmp_path: Path, change: str) -> None:
    """In float64, that the sums of two workers are those of one, up to rounding."""
    recipe, callback = CHANGES[change]
    recipe = replace(recipe, model=wide_frozen if change == "unfrozen" else wide, loss=cases.loss, clip_norm=0.5)
    weights = []
    for workers in (1, 2):
        run = cases.declare(
            recipe, workers, callbacks=[callback], epochs=4, **{**cases.DOUBLE, "batch_size": 6}
        )
        result = ensemble.submit(run, tmp_path / str(workers), "local").wait()
        assert result.members[0]["state"] == "finished", result.members
        weights.append(ensemble.load(tmp_path / str(workers)).members["member-0"].state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-9, atol=1e-12)
