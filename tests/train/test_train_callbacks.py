"""Callbacks of members: their hooks, their state in checkpoints, their identity."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.checkpoints import newest_checkpoint
from kit.loop_cases import own_loop
from kit.once import is_first
from torch import nn
from torch.nn import functional

import ensemble
from ensemble import EarlyStopping, Ensemble, GradientNorm, Member, MemberCallback, Recipe, SpecError
from ensemble.reporting import RunProjection
from ensemble.spec.callbacks import HOOKS, overrides
from ensemble.store import RunDir, RunState, StoreError, load_checkpoint, read_events
from ensemble.train.callbacks import Callbacks
from ensemble.train.checkpoint import keep_weights_only
from ensemble.train.job import NO_IMPROVEMENT, TrainingError
from pipelines import Pipeline, sources

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
LABEL = (X[:, 0] > 0).astype(np.int64)


def loss(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def declare(recipe: Any = None, **options: Any) -> Ensemble:
    pipe = Pipeline(sources.arrays(x=X, label=LABEL), seed=0)
    recipe = recipe or Recipe(model=lambda params: nn.Linear(4, 2), loss=loss)
    usual = {"train": pipe, "valid": pipe, "epochs": 2, "batch_size": 8, "seed": 0, "members": [{"lr": 0.1}]}
    return Ensemble(name="hooked", recipe=recipe, **{**usual, **options})


def finish(folder: Path, declared: Ensemble, **options: Any) -> RunState:
    result = ensemble.submit(declared, folder, "inline", **options).wait()
    assert {row["state"] for row in result.members} == {"finished"}, result.members
    return RunProjection.from_events(read_events(RunDir(folder).events)).state


class Everything(MemberCallback):
    def __init__(self, file: Path) -> None:
        self._file = file

    def _note(self, line: str) -> None:
        with self._file.open("a") as lines:
            print(line, file=lines)

    def begin_training(self, member: Any) -> None:
        self._note(f"begin {type(member.model).__name__} {type(member.optimizer).__name__}")

    def begin_epoch(self, member: Any, epoch: int) -> None:
        self._note(f"begin_epoch {epoch}")

    def wrap_loss(self, member: Any, loss: Any) -> Any:
        self._note("wrap_loss")
        return loss

    def after_backward(self, member: Any) -> None:
        assert all(each.grad is not None for each in member.model.parameters())
        self._note("after_backward")

    def end_step(self, member: Any, *, applied: bool) -> None:
        self._note(f"end_step {member.position['step']} {applied}")

    def other_weights(self, member: Any) -> None:
        return None

    def evaluated(self, member: Any, metrics: Any) -> None:
        self._note(f"evaluated {sorted(metrics)}")

    def end_epoch(self, member: Any, epoch: int, metrics: dict[str, float]) -> None:
        self._note(f"end_epoch {epoch}")


def test_all_hooks_are_called_in_their_order(tmp_path: Path) -> None:
    callback = Everything(tmp_path / "lines")
    assert len(HOOKS) == 8 and all(overrides(callback, hook) for hook in HOOKS)
    finish(tmp_path / "run", declare(callbacks=[callback]))
    epoch = [f"{line}" for step in (1, 2, 3) for line in ("after_backward", f"end_step {step} True")]
    expected = ["begin Linear SGD", "wrap_loss"]
    for number in (0, 1):
        ends = ["evaluated ['accuracy', 'loss']", f"end_epoch {number}"]
        expected += [f"begin_epoch {number}", *epoch, *ends]
    assert (tmp_path / "lines").read_text().splitlines() == expected


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


def weights(state: RunState) -> str | None:
    return state.members["member-0"].weights_sha256


def test_a_callback_changes_the_loss_as_half_the_rate_would(tmp_path: Path) -> None:
    halved = finish(tmp_path / "halved", declare(callbacks=[Halved()]))
    slower = finish(tmp_path / "slower", declare(members=[{"lr": 0.05}]))
    whole = finish(tmp_path / "whole", declare(callbacks=[Halved(1.0)]))
    plain = finish(tmp_path / "plain", declare())
    assert weights(halved) == weights(slower) != weights(whole) == weights(plain)


def test_members_have_copies_and_callbacks_of_their_own(tmp_path: Path) -> None:
    callback = Halved()
    members = [{"lr": 0.1}, Member({"lr": 0.1}, seed=0, callbacks=[]), Member({"lr": 0.1}, seed=0)]
    state = finish(tmp_path / "run", declare(callbacks=[callback], members=members))
    first, without, again = (state.members[f"member-{number}"] for number in range(3))
    assert first.weights_sha256 == again.weights_sha256 != without.weights_sha256
    assert first.metrics["steps"] == again.metrics["steps"] == 6 and "steps" not in without.metrics
    assert callback._steps == 0, "the declared one is nobody's"
    assert first.identity["callbacks"] == [[f"{__name__}.Halved", {"factor": 0.5}]]
    assert without.identity["callbacks"] == []


def test_a_callback_ends_a_member(tmp_path: Path) -> None:
    member = finish(tmp_path / "run", declare(epochs=5, callbacks=[Halved(last=1)])).members["member-0"]
    assert member.early_stopping == {"reason": "enough", "epochs": 5} and member.epoch == 2


class FailsOnce:
    def __init__(self, marker: Path) -> None:
        self.marker, self.calls = marker, 0

    def __call__(self, model: Any, batch: Any) -> Any:
        self.calls += model.training
        if self.calls == 5 and is_first(self.marker):
            raise OSError("once")
        return loss(model, batch)


def test_the_state_of_callbacks_is_in_checkpoints(tmp_path: Path) -> None:
    recipe = Recipe(model=lambda params: nn.Linear(4, 2), loss=FailsOnce(tmp_path / "once"), task="classification")
    callbacks = [Halved(), GradientNorm()]
    failed = finish(tmp_path / "failed", declare(recipe, callbacks=callbacks, averaging="ema", epochs=3))
    undisturbed = finish(tmp_path / "undisturbed", declare(callbacks=callbacks, averaging="ema", epochs=3))
    assert failed.members["member-0"].attempt == 1 and weights(failed) == weights(undisturbed)
    metrics = failed.members["member-0"].metrics
    assert metrics == undisturbed.members["member-0"].metrics
    assert metrics["steps"] == 9 and 0 < metrics["gradient_norm"] < 10
    saved = load_checkpoint(newest_checkpoint(RunDir(tmp_path / "failed"), "member-0", 1))
    assert [name for name, _ in saved["callbacks"]] == [
        "ensemble.train.averaging.Averaging",
        "Halved",
        "ensemble.spec.callbacks.GradientNorm",
    ]
    assert saved["callbacks"][1][1] == {"steps": 9}


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
    recipe = Recipe(model=lambda params: nn.Linear(4, 2), loss=FailsOnce(tmp_path / "once"), task="classification")
    options = {"callbacks": [Decaying()], "epochs": 3, "checkpoint_minutes": 1e-9}
    failed = finish(tmp_path / "failed", declare(recipe, **options))
    file = newest_checkpoint(RunDir(tmp_path / "failed"), "member-0", 1)
    assert file is not None
    saved = load_checkpoint(file)
    assert saved["callbacks"][0][1]["_seen"] == {"epochs": 3, "steps": 9}
    undisturbed = finish(tmp_path / "undisturbed", declare(**options))
    assert failed.members["member-0"].attempt == 1 and weights(failed) == weights(undisturbed)


def test_a_state_may_begin_with_an_epoch(tmp_path: Path) -> None:
    class Late(Decaying):
        def begin_epoch(self, member: Any, epoch: int) -> None:
            self._epoch = epoch

        def state_dict(self) -> dict[str, Any]:
            return {"_epoch": self._epoch}

    finish(tmp_path / "run", declare(callbacks=[Late()]))
    file = newest_checkpoint(RunDir(tmp_path / "run"), "member-0", 0)
    assert file is not None and [
        (name.split(".")[-1], kept) for name, kept in load_checkpoint(file)["callbacks"]
    ] == [("Late", {"_epoch": 1})]


def test_metrics_that_a_callback_adds_are_those_of_the_best_epoch(tmp_path: Path) -> None:
    class Numbered(MemberCallback):
        def end_epoch(self, member: Any, epoch: int, metrics: dict[str, float]) -> None:
            metrics["number"] = epoch

    made = declare(callbacks=[Numbered()], keep="best", epochs=4, members=[{"lr": 0.5}])
    member = finish(tmp_path / "run", made).members["member-0"]
    assert member.kept and member.metrics["number"] == member.kept["epoch"]


def test_the_norm_of_sparse_gradients_is_that_of_dense_ones(tmp_path: Path) -> None:
    class Words(nn.Module):
        def __init__(self, sparse: bool) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 2, sparse=sparse)

        def forward(self, x: Any) -> Any:
            return self.words((x.abs() * 3).long().clamp(max=8)).mean(dim=1)

    recipe = Recipe(model=lambda params: Words(params["sparse"]), loss=loss)
    members = [Member({"lr": 0.1, "sparse": sparse}, seed=0) for sparse in (False, True)]
    state = finish(tmp_path / "run", declare(recipe, callbacks=[GradientNorm()], members=members))
    dense, sparse = (each.metrics["gradient_norm"] for each in state.members.values())
    assert sparse == pytest.approx(dense, rel=1e-5) and sparse > 0


def test_callbacks_are_inherited_over_clones_and_by_a_student(tmp_path: Path) -> None:
    members = [Member({"lr": 0.1}, callbacks=[Halved(0.25)]), Member({"lr": 0.1}, callbacks=[])]
    wanted = {"started": [("member-0", "member-2"), ("member-1", "member-3"), ("member-2", "member-4")]}

    def on_event(event: dict[str, Any]) -> None:
        if event["type"] == "started" and (todo := wanted["started"]) and event["member"] == todo[0][0]:
            ensemble.attach(tmp_path / "run").clone(todo.pop(0)[0], {"seed": 7 + len(todo)})

    made = declare(callbacks=[Halved(0.5)], members=members, sharing="independent")
    state = finish(tmp_path / "run", made, on_event=on_event)
    assert not wanted["started"]
    found = {
        name: (member.identity["callbacks"], "steps" in member.metrics) for name, member in state.members.items()
    }
    own = ([[f"{__name__}.Halved", {"factor": 0.25}]], True)
    assert found == {
        name: own if number in (0, 2, 4) else ([], False) for number, name in enumerate(sorted(state.members))
    }
    student = ensemble.distill(tmp_path / "run", tmp_path / "student", member="member-4").wait()
    assert student.members[0]["state"] == "finished"
    again = RunProjection.from_events(read_events(RunDir(tmp_path / "student").events)).state
    assert again.members["member-0"].identity["callbacks"] == own[0]


def test_a_member_with_callbacks_cannot_be_added(tmp_path: Path) -> None:
    finish(tmp_path / "run", declare())
    with pytest.raises(SpecError, match=r"Member.callbacks cannot be added"):
        ensemble.attach(tmp_path / "run").add(Member({"lr": 0.2}, callbacks=[Halved()]))


def test_callbacks_that_are_not_those_of_the_identity_are_refused() -> None:
    made = declare(callbacks=[Halved()])
    with pytest.raises(TrainingError, match="the callbacks of member-0 were"):
        Callbacks(made, dataclasses.replace(made.identify(0), callbacks=[]), None, lambda: None)


def test_each_of_several_callbacks_of_one_class_gets_its_own_state() -> None:
    declared = declare(callbacks=[Halved(0.5), Halved(0.25)])
    first, second = (Callbacks(declared, declared.identify(0), None, lambda: None) for _ in range(2))  # type: ignore
    for number, callback in enumerate(first._declared):
        callback._steps = number  # type: ignore[attr-defined]
    second.load_state_dict(first.state_dict())
    assert [callback._steps for callback in second._declared] == [0, 1]  # type: ignore[attr-defined]


def test_weights_that_are_kept_alone_have_no_callbacks(tmp_path: Path) -> None:
    stopping = declare(early_stopping=EarlyStopping(patience=1), epochs=9, members=[{"lr": 1e-12}])
    before = finish(tmp_path / "run", stopping).members["member-0"]
    file = newest_checkpoint(RunDir(tmp_path / "run"), "member-0", 0)
    assert file is not None
    keep_weights_only(file, tmp_path / "reduced", None)
    assert before.early_stopping is not None and "best" in before.early_stopping
    kept = load_checkpoint(tmp_path / "reduced")
    assert kept["callbacks"] == [] and kept["position"]["stop_reason"] == NO_IMPROVEMENT


def test_another_callback_is_another_member_and_an_observer_is_not(tmp_path: Path) -> None:
    finish(tmp_path / "run", declare(callbacks=[Halved()]))
    finish(tmp_path / "run", declare(callbacks=[GradientNorm(), Halved()]))
    with pytest.raises(StoreError, match="callbacks"):
        ensemble.submit(declare(callbacks=[Halved(0.25)]), tmp_path / "run", "inline").wait()


@pytest.mark.parametrize("given", [GradientNorm, [GradientNorm], [print], "ema"])
def test_what_is_no_callback_is_refused(given: Any) -> None:
    for make in (lambda: declare(callbacks=given), lambda: Member({}, callbacks=given)):
        with pytest.raises(SpecError, match=r"callbacks must be a list of MemberCallback objects"):
            make()


def test_an_identity_is_of_json_values() -> None:
    class OfArrays(MemberCallback):
        def __init__(self) -> None:
            self.table = np.zeros(3)

    with pytest.raises(SpecError, match=r"OfArrays.identity\(\)"):
        declare(callbacks=[OfArrays()])


def test_no_attribute_hides_a_hook() -> None:
    callback = Halved()
    callback.end_step = 3  # type: ignore[assignment, method-assign]
    with pytest.raises(SpecError, match="Halved has an attribute 'end_step', as a hook is called"):
        declare(callbacks=[callback])


def test_a_train_function_that_leaves_out_a_wrapped_loss_is_refused(tmp_path: Path) -> None:
    def train(wraps: bool) -> Any:
        return own_loop(
            lambda member, epoch: member.report(accuracy=1.0),
            make=lambda params: nn.Linear(4, 2),
            losses=lambda member, *of: (member.wrap_loss(loss) if wraps else loss)(*of),
        )

    finish(tmp_path / "wraps", declare(train(True), callbacks=[Halved()]))
    left_out = declare(train(False), callbacks=[Halved()])
    (row,) = ensemble.submit(left_out, tmp_path / "run", "inline").wait().members
    assert row["state"] == "failed" and "train on loss = member.wrap_loss(loss)" in row["error"]
