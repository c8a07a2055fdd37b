"""Callbacks of members: their hooks, their state in checkpoints, their identity."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit import train_child as cases
from kit.checkpoints import newest_checkpoint
from kit.loop_cases import own_loop
from kit.once import is_first
from torch import nn

import ensemble
from ensemble import EarlyStopping, Ensemble, GradientNorm, Member, MemberCallback, Recipe, SpecError
from ensemble.reporting import RunProjection
from ensemble.spec.callbacks import HOOKS, overrides
from ensemble.store import MemberState, RunDir, RunState, StoreError, load_checkpoint, read_events
from ensemble.train.averaging import Averaging
from ensemble.train.callbacks import Callbacks
from ensemble.train.checkpoint import keep_weights_only
from ensemble.train.job import NO_IMPROVEMENT

PLAIN = Recipe(model=cases.plain, loss=cases.loss, task="classification")


def declare(recipe: Any = None, members: Any = None, **options: Any) -> Ensemble:
    usual = {"epochs": 2, "batch_size": 8, "seed": 0, "params": {"lr": 0.1}}
    made = cases.declare(recipe or PLAIN, 1, **{**usual, **options})
    return replace(made, members=members) if members else made


def read_state(folder: Path) -> RunState:
    return RunProjection.from_events(read_events(RunDir(folder).events)).state


def finish(folder: Path, recipe: Any = None, on_event: Any = None, **options: Any) -> RunState:
    result = ensemble.submit(declare(recipe, **options), folder, "inline", on_event=on_event).wait()
    assert {row["state"] for row in result.members} == {"finished"}, result.members
    return read_state(folder)


def train(folder: Path, recipe: Any = None, **options: Any) -> MemberState:
    return finish(folder, recipe, **options).members["member-0"]


def saved(folder: Path, attempt: int = 0) -> Any:
    return load_checkpoint(newest_checkpoint(RunDir(folder), "member-0", attempt))["callbacks"]


def test_all_hooks_are_called_in_their_order(tmp_path: Path) -> None:
    lines: list[str] = []

    class Everything(MemberCallback):
        def begin_training(self, member: Any) -> None:
            lines.append(f"begin {type(member.model).__name__} {type(member.optimizer).__name__}")

        def begin_epoch(self, member: Any, epoch: int) -> None:
            lines.append(f"begin_epoch {epoch}")

        def wrap_loss(self, member: Any, loss: Any) -> Any:
            lines.append("wrap_loss")
            return loss

        def after_backward(self, member: Any) -> None:
            assert all(weight.grad is not None for weight in member.model.parameters())
            lines.append("after_backward")

        def end_step(self, member: Any, *, applied: bool) -> None:
            lines.append(f"end_step {member.position['step']} {applied}")

        def other_weights(self, member: Any) -> None:
            return None

        def evaluated(self, member: Any, metrics: Any) -> None:
            lines.append(f"evaluated {sorted(metrics)}")

        def end_epoch(self, member: Any, epoch: int, metrics: dict[str, float]) -> None:
            lines.append(f"end_epoch {epoch}")
            metrics["number"] = epoch

    callback = Everything()
    assert len(HOOKS) == 8 and all(overrides(callback, hook) for hook in HOOKS)
    finish(tmp_path / "run", callbacks=[callback])
    steps = [line for step in (1, 2, 3) for line in ("after_backward", f"end_step {step} True")]
    ends = [(f"begin_epoch {n}", *steps, "evaluated ['accuracy', 'loss']", f"end_epoch {n}") for n in (0, 1)]
    assert lines == ["begin Net SGD", "wrap_loss", *ends[0], *ends[1]]
    best = train(tmp_path / "best", callbacks=[callback], keep="best", epochs=4, members=[{"lr": 0.5}])
    assert best.kept and best.metrics["number"] == best.kept["epoch"], "what it adds is of the best epoch"


class Halved(MemberCallback):
    """Trains on half of the loss, ends the member at a loss, and counts steps."""

    def __init__(self, factor: float = 0.5, last: int = 99) -> None:
        self.factor, self._last, self._steps = factor, last, 0

    def wrap_loss(self, member: Any, loss: Any) -> Any:
        return lambda model, batch: self.factor * loss(model, batch)

    def end_step(self, member: Any, *, applied: bool) -> None:
        self._steps += 1

    def end_epoch(self, member: Any, epoch: int, metrics: dict[str, float]) -> None:
        metrics["steps"] = self._steps
        if epoch == self._last:
            member.stop("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: Any) -> None:
        self._steps = state["steps"]


def test_a_callback_changes_the_loss_as_half_the_rate_would(tmp_path: Path) -> None:
    halved = train(tmp_path / "halved", callbacks=[Halved()]).weights_sha256
    slower = train(tmp_path / "slower", members=[{"lr": 0.05}]).weights_sha256
    whole = train(tmp_path / "whole", callbacks=[Halved(1.0)]).weights_sha256
    plain = train(tmp_path / "plain").weights_sha256
    assert halved == slower != whole == plain
    ended = train(tmp_path / "ended", epochs=5, callbacks=[Halved(last=1)])
    assert ended.early_stopping == {"reason": "enough", "epochs": 5} and ended.epoch == 2
    # a train function wraps the loss; one that does not is in `mistakes/of_train_loops.py`
    wraps = own_loop(
        lambda member, epoch: member.report(accuracy=1.0),
        losses=lambda member, *of: member.wrap_loss(cases.loss)(*of),
    )
    plain_loop = own_loop(losses=lambda member, *of: 0.5 * cases.loss(*of))
    by_itself = train(tmp_path / "by_itself", plain_loop).weights_sha256
    assert train(tmp_path / "wraps", wraps, callbacks=[Halved()]).weights_sha256 == by_itself


def test_members_have_copies_and_callbacks_of_their_own(tmp_path: Path) -> None:
    callback = Halved()
    members = [{"lr": 0.1}, Member({"lr": 0.1}, seed=0, callbacks=[]), Member({"lr": 0.1}, seed=0)]
    first, without, again = finish(tmp_path / "run", callbacks=[callback], members=members).members.values()
    assert first.weights_sha256 == again.weights_sha256 != without.weights_sha256
    assert first.metrics["steps"] == again.metrics["steps"] == 6 and "steps" not in without.metrics
    assert callback._steps == 0, "the declared one is nobody's"
    assert first.identity["callbacks"] == [[f"{__name__}.Halved", {"factor": 0.5}]]
    assert without.identity["callbacks"] == []


def fails_once(folder: Path) -> Recipe:
    """Its loss raises in its fifth step, once."""
    steps = []

    def fail(model: Any, batch: Any) -> Any:
        steps.extend([1] * model.training)
        if len(steps) == 5 and is_first(folder / "once"):
            raise OSError("once")
        return cases.loss(model, batch)

    return replace(PLAIN, loss=fail)


def train_disturbed(folder: Path, **options: Any) -> tuple[MemberState, Any]:
    """What comes of a member that fails once, as of one that does not, and what is saved of its callbacks."""
    failed = train(folder / "failed", fails_once(folder), **options)
    undisturbed = train(folder / "undisturbed", **options)
    assert (failed.attempt, failed.weights_sha256) == (1, undisturbed.weights_sha256)
    assert failed.metrics == undisturbed.metrics
    return failed, saved(folder / "failed", 1)


def test_the_state_of_callbacks_is_in_checkpoints(tmp_path: Path) -> None:
    options = {"callbacks": [Halved(), GradientNorm()], "averaging": "ema", "epochs": 3}
    member, states = train_disturbed(tmp_path, **options)
    assert member.metrics["steps"] == 9 and 0 < member.metrics["gradient_norm"] < 10
    names = ["ensemble.train.averaging.Averaging", "Halved", "ensemble.spec.callbacks.GradientNorm"]
    assert [name for name, _ in states] == names and states[1][1] == {"steps": 9}


class Decaying(MemberCallback):
    """Trains on a part of the loss that follows from what it has counted; has no state_dict of its own."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self._seen, self._part = scale, Counter[str](), 1.0

    def begin_epoch(self, member: Any, epoch: int) -> None:
        self._seen["epochs"] += 1

    def wrap_loss(self, member: Any, loss: Any) -> Any:
        return lambda model, batch: self.scale * self._part * loss(model, batch)

    def end_step(self, member: Any, *, applied: bool) -> None:
        self._seen["steps"] += 1
        self._part = 1 / (self._seen["epochs"] + self._seen["steps"])


def test_a_resume_within_an_epoch_goes_on_with_private_attributes(tmp_path: Path) -> None:
    _, states = train_disturbed(tmp_path, callbacks=[Decaying()], epochs=3, checkpoint_minutes=1e-9)
    assert states[0][1]["_seen"] == {"epochs": 3, "steps": 9}

    class Late(Decaying):  # its state begins with an epoch
        def begin_epoch(self, member: Any, epoch: int) -> None:
            self._epoch = epoch

        def state_dict(self) -> dict[str, Any]:
            return {"_epoch": self._epoch}

    finish(tmp_path / "run", callbacks=[Late()])
    ((name, state),) = saved(tmp_path / "run")
    assert name.endswith("Late") and state == {"_epoch": 1}


def test_the_norm_of_sparse_gradients_is_that_of_dense_ones(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.words = nn.Embedding(9, cases.CLASSES, sparse=sparse)

        def forward(self, x: Any) -> Any:
            return self.words((x.abs() * 3).long().clamp(max=8)).mean(dim=1)

    recipe = replace(PLAIN, model=lambda params: Words(params["sparse"]))
    members = [Member({"lr": 0.1, "sparse": sparse}, seed=0) for sparse in (False, True)]
    state = finish(tmp_path / "run", recipe, callbacks=[GradientNorm()], members=members)
    dense, sparse = (member.metrics["gradient_norm"] for member in state.members.values())
    assert sparse == pytest.approx(dense, rel=1e-5) and sparse > 0


def test_callbacks_are_inherited_over_clones_and_by_a_student(tmp_path: Path) -> None:
    members = [Member({"lr": 0.1}, callbacks=[Halved(0.25)]), Member({"lr": 0.1}, callbacks=[])]
    clones = [("member-0", "member-2"), ("member-1", "member-3"), ("member-2", "member-4")]

    def on_event(event: dict[str, Any]) -> None:
        if event["type"] == "started" and clones and event["member"] == clones[0][0]:
            ensemble.attach(tmp_path / "run").clone(clones.pop(0)[0], {"seed": 7 + len(clones)})

    options: dict[str, Any] = {"callbacks": [Halved(0.5)], "members": members, "sharing": "independent"}
    state = finish(tmp_path / "run", on_event=on_event, **options)
    assert not clones
    own = [[f"{__name__}.Halved", {"factor": 0.25}]]
    for number in range(5):
        member = state.members[f"member-{number}"]
        assert member.identity["callbacks"] == (own if number % 2 == 0 else [])
        assert ("steps" in member.metrics) == (number % 2 == 0)
    student = ensemble.distill(tmp_path / "run", tmp_path / "student", member="member-4").wait()
    assert student.members[0]["state"] == "finished"
    assert read_state(tmp_path / "student").members["member-0"].identity["callbacks"] == own


def test_each_of_several_callbacks_of_one_class_gets_its_own_state() -> None:
    declared = declare(callbacks=[Halved(0.5), Halved(0.25)])
    first, second = (Callbacks(declared, declared.identify(0), None, lambda: None) for _ in range(2))  # type: ignore
    for number, callback in enumerate(first._declared):
        callback._steps = number  # type: ignore[attr-defined]
    second.load_state_dict(first.state_dict())
    assert [callback._steps for callback in second._declared] == [0, 1]  # type: ignore[attr-defined]


def test_weights_that_are_kept_alone_have_no_callbacks(tmp_path: Path) -> None:
    stopping = {"early_stopping": EarlyStopping(patience=1), "epochs": 9, "members": [{"lr": 1e-12}]}
    before = train(tmp_path / "run", **stopping)
    whole = newest_checkpoint(RunDir(tmp_path / "run"), "member-0", 0)
    keep_weights_only(str(whole), tmp_path / "reduced", None)
    assert before.early_stopping is not None and "best" in before.early_stopping
    kept = load_checkpoint(tmp_path / "reduced")
    assert kept["callbacks"] == [] and kept["position"]["stop_reason"] == NO_IMPROVEMENT


def test_another_callback_is_another_member_and_an_observer_is_not(tmp_path: Path) -> None:
    finish(tmp_path / "run", callbacks=[Halved()])
    finish(tmp_path / "run", callbacks=[GradientNorm(), Halved()])
    with pytest.raises(StoreError, match="callbacks"):
        finish(tmp_path / "run", callbacks=[Halved(0.25)])
    with pytest.raises(SpecError, match=r"Member.callbacks cannot be added"):
        ensemble.attach(tmp_path / "run").add(Member({"lr": 0.2}, callbacks=[Halved()]))


def test_what_is_no_callback_is_refused() -> None:
    class OfArrays(MemberCallback):
        def __init__(self) -> None:
            self.table = np.zeros(3)

    hidden = Halved()
    hidden.end_step = 3
    for given in (GradientNorm, [GradientNorm], [print], "ema"):
        for make in (declare, partial(Member, {})):
            with pytest.raises(SpecError, match=r"callbacks must be a list of MemberCallback objects"):
                make(callbacks=given)
    for callback, says in ((OfArrays(), r"OfArrays.identity\(\)"), (hidden, "Halved has an attribute 'end_step'")):
        with pytest.raises(SpecError, match=says):
            declare(callbacks=[callback])


def test_a_step_that_the_loss_scale_skips_is_not_averaged() -> None:
    averaging, member = Averaging({"name": "ema", "decay": 0.5}, 1), SimpleNamespace(model=nn.Linear(2, 1))
    averaging.end_step(member, applied=True)  # type: ignore[arg-type]
    before = {name: values.clone() for name, values in averaging.state_dict()["averages"].items()}
    nn.init.constant_(member.model.weight, 7.0)
    averaging.end_step(member, applied=False)  # type: ignore[arg-type]
    torch.testing.assert_close(averaging.state_dict()["averages"], before)
    assert averaging.count == 1
