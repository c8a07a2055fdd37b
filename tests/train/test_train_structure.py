"""What training changes beside weights: a member that is stopped and resumed ends as one that never was."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import train_child as cases
from kit.loop_cases import failed, finished, of, train
from kit.once import is_first
from torch import nn
from torch.nn.utils.prune import l1_unstructured

import ensemble
from ensemble import MemberCallback, Recipe
from ensemble.store import RunDir, read_state

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
        self.net = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)
        )
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


class Dies(MemberCallback):
    """Kills a worker, once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin_epoch(self, member: Any, epoch: int) -> None:
        if epoch == 3 and member.rank == 1 and is_first(self._folder / "died"):
            os._exit(9)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def identity(self) -> None:
        return None


@pytest.mark.more
@pytest.mark.parametrize("change", ["unfrozen", "group added"])
def test_workers_exchange_and_clip_what_is_trained_since_the_epoch_began(tmp_path: Path, change: str) -> None:
    """In float64, that the sums of two workers are those of one, up to rounding; a resume has the same bits."""
    recipe, callback = CHANGES[change]
    recipe = replace(recipe, model=wide, clip_norm=0.5)
    if change == "unfrozen":
        recipe, callback = replace(recipe, model=wide_frozen), At(unfreeze, "end_epoch")
    weights = []
    for name, workers, more in (("one", 1, []), ("two", 2, []), ("died", 2, [Dies(tmp_path)])):
        options = {**cases.DOUBLE, "batch_size": 6, "epochs": 4, "callbacks": [callback, *more]}
        result = ensemble.submit(cases.declare(recipe, workers, **options), tmp_path / name, "local").wait()
        assert result.members[0]["state"] == "finished", result.members
        weights.append(ensemble.load(tmp_path / name).members["member-0"].state_dict())
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-9, atol=1e-12)
        assert torch.equal(weights[1][name], weights[2][name])


class GradualWarmup(torch.optim.lr_scheduler.LRScheduler):
    """A warm-up after which another scheduler, an attribute, sets the rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, epochs: int, after: Any) -> None:
        self.epochs, self.after_scheduler = epochs, after
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [rate * (self.last_epoch + 1) / self.epochs for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if getattr(self, "last_epoch", -1) < self.epochs - 1:
            super().step()
        else:
            self.after_scheduler.step()


@pytest.mark.parametrize("order", ["prepared before", "prepared after"])
def test_a_scheduler_within_another_keeps_the_members_own_optimizer(tmp_path: Path, order: str) -> None:
    def loop(member: Any) -> None:
        model = cases.plain(member.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        warmup = GradualWarmup(optimizer, 2, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        for one in ("prepare", "state") if order == "prepared before" else ("state", "prepare"):
            _ = member.prepare(model, optimizer) if one == "prepare" else member.state("warmup", warmup)
        for _ in range(member.identity.epochs):
            for batch in member.dataloader("train"):
                optimizer.zero_grad()
                cases.loss(model, batch).mean().backward()
                optimizer.step()
            warmup.step()
            assert warmup.after_scheduler.optimizer is optimizer or member._is_idle
            member.report(rate=optimizer.param_groups[0]["lr"], **member.evaluate(measure))

    recipe = Recipe(model=cases.plain, train=loop, objective="loss")
    rates: dict[str, dict[int, float]] = {}
    weights = set()
    for name, stop in {"whole": None, **STOPS}.items():
        if stop is not None:
            assert train(tmp_path / name, recipe, cases.Script(stop, "stop"), epochs=6)[0] == "stopped"
        outcome, events = train(tmp_path / name, recipe, attempt=int(stop is not None), epochs=6)
        assert outcome == "finished", events
        rates[name] = {event["epoch"]: event["metrics"]["rate"] for event in of(events, "epoch")}
        assert rates[name].items() <= rates["whole"].items()
        weights.add(of(events, "finished")[0]["weights_sha256"])
    assert len(weights) == 1 and list(rates["whole"].values()) == [0.4, 0.2, 0.1, 0.05, 0.025, 0.0125]


def measure(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    return {"loss": cases.loss(model, batch)}


def test_passes_that_were_trained_before_read_one_batch_of_other_splits(tmp_path: Path) -> None:
    """The loop changes its model and its optimizer once more in these passes."""
    read: list[tuple[int, int]] = []

    def loop(member: Any) -> None:
        model = frozen(member.params)
        model.net[3] = nn.Identity()
        optimizer = head(model, member.params)
        model, optimizer = member.prepare(model, optimizer)
        for epoch in range(member.identity.epochs):
            if epoch == EPOCH:
                model.net[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model.net[0].parameters()), "lr": 0.05})
            for batch in member.dataloader("train"):
                optimizer.zero_grad()
                cases.loss(model, batch).mean().backward()
                optimizer.step()
            right = [model(batch["x"]).argmax(1) == batch["label"] for batch in member.dataloader("valid")]
            read.append((epoch, len(torch.cat(right))))
            member.report(**member.evaluate(measure))

    recipe = Recipe(model=frozen, train=loop, objective="loss")
    whole = finished(tmp_path / "whole", recipe, epochs=5)
    for name, stop in STOPS.items():
        assert train(tmp_path / name, recipe, cases.Script(stop, "stop"), epochs=5)[0] == "stopped"
        read.clear()
        assert finished(tmp_path / name, recipe, attempt=1, epochs=5) == {**whole, "attempt": 1}, name
        first = stop // 6
        assert read == [(epoch, 5 if epoch < first else 13) for epoch in range(5)]


@pytest.mark.more
def test_the_documented_loop_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/cross-validation.md").read_text()
    _, first, *others = page.split("```python\n")
    given: dict[str, Any] = {"__name__": "page"}
    own = next(part for part in others if "def train(member)" in part)
    exec(first.partition("```")[0].partition("result =")[0], given)
    exec(own.partition("```")[0].partition("ensemble.submit")[0], given)
    declared = replace(given["own"], epochs=15, checkpoint_every=1)
    result = ensemble.submit(declared, tmp_path / "whole", "inline").wait()
    run = ensemble.submit(
        declared, tmp_path / "cut", "inline", on_event=lambda event: event["type"] == "epoch" and run.stop()
    )
    assert "stopped" in {row["state"] for row in run.wait().members}
    again = ensemble.submit(declared, tmp_path / "cut", "inline").wait()
    pairs = zip(result.members, again.members, strict=True)
    assert all(one["state"] == "finished" and one["metrics"] == other["metrics"] for one, other in pairs)


SPEC = """
import os
from pathlib import Path

import torch
from kit import train_child as cases
from kit.once import is_first

from ensemble import MemberCallback, Recipe


class Scaler:
    def __init__(self):
        self.mean, self.seen = torch.zeros(6), 0

    def add(self, member):
        self.mean, self.seen, self.model = self.mean + 1, self.seen + 1, member.model


class Scaled(MemberCallback):
    def __init__(self, folder):
        self.folder, self._scaler = folder, None

    def end_epoch(self, member, epoch, metrics):
        self._scaler = self._scaler or Scaler()
        self._scaler.add(member)
        assert type(self._scaler) is Scaler and self._scaler.model is member.model
        metrics["seen"] = self._scaler.seen + float(self._scaler.mean.mean())

    def begin_epoch(self, member, epoch):
        if epoch in (2, 3) and is_first(Path(self.folder, f"died {epoch}")):
            os._exit(9)


def spec(folder):
    recipe = Recipe(model=cases.plain, loss=cases.loss, task="classification")
    return cases.declare(recipe, 1, callbacks=[Scaled(folder)], epochs=5, rehearsal=None)


if __name__ == "__main__":
    import sys

    import ensemble
    import own_spec

    ensemble.submit(own_spec.spec(sys.argv[1]), "run", "inline").wait()
"""


def test_objects_of_the_specs_own_classes_are_theirs_after_a_resume(tmp_path: Path) -> None:
    """Written where the spec is imported, read and written in one that has it by value, and read again."""
    (tmp_path / "own_spec.py").write_text(SPEC)
    paths = [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2]), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    call = functools.partial(
        subprocess.run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    died = call([sys.executable, "own_spec.py", str(tmp_path)])
    assert died.returncode == 9, died.stderr
    command = ["run", "own_spec.py", "--set", f"folder={tmp_path}", "--run-dir", "run"]
    ran = call([sys.executable, "-m", "ensemble.cli", *command])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (member,) = read_state(RunDir(tmp_path / "run").events).members.values()
    assert (member.state, member.attempt, member.metrics["seen"]) == ("finished", 2, 10.0)
