"""What the first batch shows is remarked: what cannot be combined, or is not what was meant."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import collect_notices
from kit.loop_cases import own_loop
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Resources
from ensemble.reporting import RunProjection
from ensemble.reporting.sections.quality import describe_failed_combination
from ensemble.reporting.status import status_notes
from ensemble.spec.task import IGNORED
from ensemble.store import RunDir, read_events
from pipelines import Pipeline, sources

X = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
LABEL = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 1)
NUMBER = X.sum(axis=1)


class Parts(nn.Module):
    def __init__(self, form: Any) -> None:
        super().__init__()
        self.line, self.form = nn.Linear(4, 3), form

    def forward(self, x: Any) -> Any:
        return self.form(self.line(x), x)


def made(form: Any = lambda scores, x: scores) -> Any:
    return lambda params: Parts(form)


def declare(recipe: Any, label: Any = LABEL, **options: Any) -> Ensemble:
    pipe = Pipeline(sources.arrays(x=X, label=label), seed=0)
    usual = {"train": pipe, "valid": pipe, "epochs": 1, "seed": 0, "members": [Member({"lr": 0.01})]}
    return Ensemble(name="looked", recipe=recipe, **{**usual, "batch_size": 20, **options})


def run(folder: Path, recipe: Any, label: Any = LABEL, executor: str = "inline", **options: Any) -> RunProjection:
    accepted = {"accept_code": options.pop("accept_code", False)}
    ensemble.submit(declare(recipe, label, **options), folder, executor, **accepted).wait()
    return RunProjection.from_events(read_events(RunDir(folder).events))


def remarks(run: RunProjection) -> list[str]:
    assert [member.state for member in run.state.members.values()] == ["finished"]
    return run.state.members["member-0"].remarks


def entropy(take: Any = lambda outputs: outputs, field: Any = lambda batch: batch["x"], **options: Any) -> Any:
    def loss(model: Any, batch: Any) -> Any:
        return F.cross_entropy(take(model(field(batch))), batch["label"], reduction="none", **options)

    return loss


scores, number = lambda params: nn.Linear(4, 3), lambda params: nn.Linear(4, 1)
PARTS = Recipe(model=made(lambda s, x: (x, s)), loss=entropy(lambda outputs: outputs[1]))


def predicting(change: Any, loss: Any = "cross_entropy", model: Any = scores) -> Recipe:
    predict = lambda model, batch: change(model(batch["x"]))  # noqa: E731
    return Recipe(model=model, loss=loss, task="classification", predict=predict)


def broadcast(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) - batch["label"]).square().mean(dim=1)


def dense(change: Any) -> Recipe:
    by_step = lambda model, batch: entropy()(model, batch).mean(1)  # noqa: E731
    return predicting(change, by_step, made(lambda s, x: torch.stack([s, s], 2)))


BOTH = np.stack([LABEL, LABEL], 1)
ON_THE_LAST = "the task has them on the last: end it by"


SOFT = Recipe(model=lambda params: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), loss="cross_entropy")


@pytest.mark.parametrize(
    ("recipe", "label", "says"),
    [
        (SOFT, LABEL, "the model ends in a softmax"),
        (predicting(lambda s: s), LABEL, "end it by .softmax(-1)"),
        (predicting(lambda s: s.log_softmax(-1)), LABEL, "end it by .exp()"),
        (predicting(lambda s: s.argmax(-1)), LABEL, "as argmax does"),
        (dense(lambda s: s), BOTH, f"{ON_THE_LAST} .softmax(1).movedim(1, -1)"),
        (dense(lambda s: s.softmax(1)), BOTH, f"{ON_THE_LAST} .movedim(1, -1)"),
        (Recipe(model=number, loss=broadcast, task="regression"), NUMBER, "changes with the other samples"),
        (Recipe(model=number, loss="mse"), NUMBER * 1e6, "declare Recipe(target_scale=("),
    ],
)
def test_the_first_batch_shows_it(tmp_path: Path, recipe: Recipe, label: Any, says: str) -> None:
    ran = run(tmp_path / "run", recipe, label)
    events = list(read_events(RunDir(tmp_path / "run").events))
    kinds = [event.type for event in events]
    assert kinds.index("remark") < kinds.index("epoch")  # known before the first epoch has ended
    notices = [notice.text for notice in collect_notices(events)]
    for texts in (remarks(ran), notices, status_notes(ran)):
        assert any(says in text for text in texts)
    if says == "end it by .softmax(-1)":
        assert "not probabilities" in (describe_failed_combination(ran.state) or "")
        assert any(text.startswith("there is no combined model: ") for text in notices)


@pytest.mark.more
def test_accumulation_is_named_where_a_loss_compares_the_samples_of_a_batch(tmp_path: Path) -> None:
    def contrast(model: Any, batch: Any) -> Any:
        items = model(batch["x"])
        return F.cross_entropy(items @ items.T, torch.arange(len(items))).expand(len(items))

    recipe = Recipe(model=scores, loss=contrast, task="regression")
    says = "accumulate=4 computes it over each part of a batch alone"
    for accumulate in (1, 4):
        ran = run(tmp_path / str(accumulate), recipe, NUMBER, accumulate=accumulate)
        assert any(says in text for text in remarks(ran)) == (accumulate == 4)


def gather(batch: Any) -> dict[str, Any]:
    return {"inputs": {"x": batch["x"]}, "label": batch["label"], "index": batch["index"]}


class OfDict(nn.Linear):
    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs["x"])


OF_DICT = Recipe(model=lambda p: OfDict(4, 3), loss=entropy(field=lambda batch: batch["inputs"]), collate=gather)
DRAWING = entropy(field=lambda batch: batch["x"] + torch.randn_like(batch["x"]))
NORMED = lambda p: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))  # noqa: E731


@pytest.mark.parametrize(
    ("recipe", "label"),
    [
        (Recipe(model=scores, loss="cross_entropy"), LABEL),
        (OF_DICT, LABEL),
        (predicting(lambda s: s.softmax(-1), DRAWING), LABEL),
        (predicting(lambda s: s.softmax(-1)), LABEL),
        (Recipe(model=made(lambda s, x: s.log_softmax(-1)), loss=entropy()), LABEL),
        (Recipe(model=number, loss="mse"), NUMBER),
        (Recipe(model=scores, loss=entropy(ignore_index=IGNORED)), np.where(np.arange(60) % 5, LABEL, IGNORED)),
        (Recipe(model=NORMED, loss="cross_entropy"), LABEL),
    ],
)
def test_what_is_right_is_not_remarked(tmp_path: Path, recipe: Recipe, label: Any) -> None:
    assert remarks(run(tmp_path / "run", recipe, label)) == []


@pytest.mark.parametrize("is_loop", [False, True])
def test_logits_of_an_object_and_what_a_loop_calls_its_model_with_predict(tmp_path: Path, is_loop: bool) -> None:
    model = made(lambda s, x: SimpleNamespace(logits=s, hidden=x))
    by_recipe = Recipe(model=model, loss=entropy(lambda outputs: outputs.logits))
    ran = run(tmp_path / "run", script(), **OWN) if is_loop else run(tmp_path / "run", by_recipe)
    assert remarks(ran) == [] and ran.state.combined is not None and ran.state.combined.members == ["member-0"]


def script(losses: Any = None, make: Any = None, predicts: bool = True) -> Any:
    return own_loop(
        lambda member, epoch: member.report(own=1.0),
        lambda member: member.predict_all() if predicts else None,
        make or made(),
        lambda member, model, batch: (losses or entropy())(model, batch),
    )


OWN: dict[str, Any] = {"objective": "own", "mode": "max"}


@pytest.mark.parametrize("task", [None, "regression"])
@pytest.mark.parametrize("number", [NUMBER, NUMBER.round() + 7])
def test_a_train_function_on_numbers_is_asked_for_its_task(tmp_path: Path, number: Any, task: str | None) -> None:
    make = made(lambda s, x: s[:, :1])
    losses = lambda model, batch: (model(batch["x"])[:, 0] - batch["label"]).square()  # noqa: E731
    ran = run(tmp_path / "run", Recipe(model=make, train=script(losses, make), task=task), number, **OWN)
    texts = " ".join(remarks(ran))
    assert ("declare Recipe(train=..., task=...), such as task='regression'" in texts) == (task is None), texts
    assert str(IGNORED) not in texts and (describe_failed_combination(ran.state) is None) == (task is not None)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls, self.sizes = nn.Linear(4, 3), 0, list[int]()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls, self.total = self.calls + 1, self.total + 1
        self.sizes.append(len(x))
        return self.line(x).softmax(1)


def test_a_model_that_counts_its_calls_does_not_count_those_of_the_look(tmp_path: Path) -> None:
    counts: list[tuple[int, int, float]] = []

    def losses(model: Any, batch: Any) -> Any:
        scores = model(batch["x"])
        counts.append((model.calls, len(model.sizes), float(model.total)))
        return F.cross_entropy(scores, batch["label"], reduction="none")

    ran = run(tmp_path / "run", script(losses, lambda params: Counting(), predicts=False), **OWN)
    assert "ends in a softmax" in remarks(ran)[0]  # it was called
    assert counts == [(1, 1, 1.0), (2, 2, 2.0), (3, 3, 3.0)]


def test_a_first_batch_of_which_nothing_is_left_is_passed_over(tmp_path: Path) -> None:
    """Of one sample a batch, the first is held out of one of two members."""
    folds = {"valid": None, "weights": Folds(2), "out_of_fold": True, "batch_size": 1}
    ran = run(tmp_path / "run", SOFT, members=[Member({"lr": 0.01})] * 2, **folds)
    for member in ran.state.members.values():
        assert any("ends in a softmax" in text for text in member.remarks)


@pytest.mark.more
def test_rank_0_of_several_looks(tmp_path: Path) -> None:
    ran = run(tmp_path / "run", SOFT, executor="local", resources=Resources(workers=2, cpus_per_worker=0.5))
    assert any("ends in a softmax" in text for text in remarks(ran))


def test_the_dry_run_looks_and_does_not_count_its_time(tmp_path: Path) -> None:
    def build(params: Any) -> Any:
        return Parts(lambda scores, x: time.sleep(0.0 if torch.is_grad_enabled() else 0.3) or scores.softmax(1))

    looked = ensemble.dry_run(declare(Recipe(model=build, loss=entropy())), executor="inline")
    assert any(note.startswith("member-0: the model ends in a softmax") for note in looked.notes)
    assert looked.members[0]["step_s"] < 0.1


def test_nan_in_the_validation_data_is_named_with_row_and_field(tmp_path: Path) -> None:
    x = X.copy()
    x[7, 0] = np.nan
    valid = Pipeline(sources.arrays(x=x, label=LABEL))
    ran = run(tmp_path / "run", Recipe(model=scores, loss="cross_entropy"), valid=valid)
    assert "'x' of sample 7 (arrays(x, label):row 7)" in " ".join(ran.state.members["member-0"].remarks)


SHARPNESS = 1.0


def sharpen(scores: Any) -> Any:
    return scores * SHARPNESS


def test_another_predict_combines_finished_members_without_training(tmp_path: Path, monkeypatch: Any) -> None:
    """The last is as before, but for a value that a helper reads which the loss calls, too."""
    saved, digests = set(), set()
    loss = entropy(lambda outputs: sharpen(outputs[1]))
    for sharpness, shift in ((1.0, 0), (1.0, 1), (2.0, 1)):
        monkeypatch.setitem(globals(), "SHARPNESS", sharpness)
        predict = lambda model, batch, shift=shift: sharpen(model(batch["x"])[1] - shift).softmax(-1)  # noqa: E731
        recipe = replace(PARTS, loss=loss, predict=predict)
        state = run(tmp_path / "run", recipe, executor="local", accept_code=True).state
        member = state.members["member-0"]
        assert state.combined is not None and state.combined.members == ["member-0"] and member.remarks == []
        saved.add(str(member.predictions))
        digests.add(member.weights_sha256)
        assert [event.type for event in read_events(RunDir(tmp_path / "run").events)].count("epoch") == 1
    assert len(saved) == 3 and len(digests) == 1


def test_another_edited_lambda_lets_no_finished_member_predict_again(tmp_path: Path) -> None:
    before = predicting(lambda s: s.softmax(-1))
    first = run(tmp_path / "run", before, executor="local")
    other = replace(before, model=made())  # the weights do not fit any more
    later = run(tmp_path / "run", other, executor="local", accept_code=True)
    assert later.state.members["member-0"].attempt == first.state.members["member-0"].attempt
    assert later.state.combined is not None and later.state.combined.members == ["member-0"]


def test_a_train_function_that_predicts_only_later_predicts_for_finished_members(tmp_path: Path) -> None:
    def silent(member: Any) -> None:
        script(predicts=False)(member)

    def talking(member: Any) -> None:
        silent(member)
        member.predict_all()

    for train, combined in ((silent, []), (talking, ["member-0"])):
        state = run(tmp_path / "run", train, executor="local", accept_code=True, **OWN).state
        assert state.combined is not None and state.combined.members == combined
    kinds = [event.type for event in read_events(RunDir(tmp_path / "run").events)]
    assert kinds.count("epoch") == 1, "nothing is trained again"
