"""Predictions that do not fit the task are remarked before training; labels and splits that do not are refused."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import fold
from kit.event_dicts import read_events as read_dicts
from kit.loop_cases import own_loop
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Member, Recipe
from ensemble.reporting import RunProjection
from ensemble.spec.task import IGNORED
from ensemble.store import RunDir, read_events
from ensemble.train.rehearsal import rehearse_here
from pipelines import Pipeline, PipelineError, sources

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


def explain(folder: Path, *args: Any, **options: Any) -> list[str]:
    """What is remarked where the member is rehearsed."""
    declared = declare(*args, **options)
    return rehearse_here(declared, declared.identify(0), str(folder)).remarks


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
ON_THE_LAST = "the task has them on the last: append"


SOFT = Recipe(model=lambda params: nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), loss="cross_entropy")


@pytest.mark.parametrize(
    ("recipe", "label", "says"),
    [
        (SOFT, LABEL, "the model ends in a softmax"),
        (predicting(lambda s: s), LABEL, "append .softmax(-1)"),
        (predicting(lambda s: s.log_softmax(-1)), LABEL, "append .exp()"),
        (predicting(lambda s: s.argmax(-1)), LABEL, "like argmax"),
        (dense(lambda s: s), BOTH, f"{ON_THE_LAST} .softmax(1).movedim(1, -1)"),
        (dense(lambda s: s.softmax(1)), BOTH, f"{ON_THE_LAST} .movedim(1, -1)"),
        (Recipe(model=number, loss=broadcast, task="regression"), NUMBER, "changes with the other samples"),
    ],
)
def test_what_does_not_fit_is_remarked(tmp_path: Path, recipe: Recipe, label: Any, says: str) -> None:
    assert any(says in text for text in explain(tmp_path, recipe, label))


@pytest.mark.more
def test_accumulation_is_named_where_a_loss_compares_the_samples_of_a_batch(tmp_path: Path) -> None:
    def contrast(model: Any, batch: Any) -> Any:
        items = model(batch["x"])
        return F.cross_entropy(items @ items.T, torch.arange(len(items))).expand(len(items))

    recipe = Recipe(model=scores, loss=contrast, task="regression")
    says = "accumulate=4 computes it over each part of a batch alone"
    for accumulate in (1, 4):
        texts = explain(tmp_path / str(accumulate), recipe, NUMBER, accumulate=accumulate)
        assert any(says in text for text in texts) == (accumulate == 4)


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
    assert explain(tmp_path, recipe, label) == []


def test_predict_is_tried_on_samples_of_valid(tmp_path: Path) -> None:
    """Which may have other fields than those of train."""
    named = Pipeline(sources.arrays(x=X, y=X, label=LABEL), seed=0)
    recipe = Recipe(model=scores, loss="cross_entropy", inputs="x", predict=lambda m, b: m(b["y"]).softmax(-1))
    assert explain(tmp_path, recipe, valid=named) == []


def test_logits_of_an_object_predict(tmp_path: Path) -> None:
    model = made(lambda s, x: SimpleNamespace(logits=s, hidden=x))
    ran = run(tmp_path / "run", Recipe(model=model, loss=entropy(lambda outputs: outputs.logits)))
    assert remarks(ran) == [] and ran.state.combined is not None and ran.state.combined.members == ["member-0"]


def script() -> Any:
    return own_loop(
        lambda member, epoch: member.report(own=1.0),
        make=made(),
        losses=lambda member, model, batch: entropy()(model, batch),
    )


OWN: dict[str, Any] = {"objective": "own", "mode": "max"}


def test_the_dry_run_looks_and_does_not_count_its_time(tmp_path: Path) -> None:
    def build(params: Any) -> Any:
        return Parts(lambda scores, x: time.sleep(0.0 if torch.is_grad_enabled() else 0.3) or scores.softmax(1))

    looked = ensemble.dry_run(declare(Recipe(model=build, loss=entropy()), rehearsal="refuse"), executor="inline")
    assert any("the model ends in a softmax" in note for note in looked.notes)
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
        script()(member)

    def talking(member: Any) -> None:
        silent(member)
        member.predict_all(lambda model, batch: model(batch["x"]).softmax(1))

    for train, combined in ((silent, []), (talking, ["member-0"])):
        state = run(tmp_path / "run", train, executor="local", accept_code=True, **OWN).state
        assert state.combined is not None and state.combined.members == combined
    kinds = [event.type for event in read_events(RunDir(tmp_path / "run").events)]
    assert kinds.count("epoch") == 1, "nothing is trained again"


ROWS = 60


def model(params: Any) -> Any:
    torch.manual_seed(0)
    return nn.Linear(4, params.get("classes", 3))


def pipe(label: Any = LABEL, x: Any = X) -> Pipeline:
    return Pipeline(sources.arrays(x=x, label=label), seed=0)


def spoil(label: Any, row: int, value: Any) -> Any:
    spoilt = np.array(label)
    spoilt[row] = value
    return spoilt


def an_ensemble(loss: Any = "cross_entropy", **options: Any) -> Ensemble:
    recipe = {name: options.pop(name) for name in ("collate", "task", "predict") if name in options}
    splits = {"train": pipe(), "valid": pipe(x=X + 1), "test": pipe(x=X + 2)}
    defaults: dict[str, Any] = {"batch_size": 10, "members": [{"lr": 0.01}], **splits}
    return Ensemble(name="checked", recipe=Recipe(model=model, loss=loss, **recipe), **{**defaults, **options})


def submit(folder: Path, *args: Any, **options: Any) -> list[dict[str, Any]]:
    ensemble.submit(an_ensemble(*args, **options), folder, "inline").wait()
    return read_dicts(RunDir(folder).events)


def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held: validation data are prepared again at each pass."""
    monkeypatch.setattr("pipelines.environment.machine_limits.available_bytes", lambda: 0)


UNTAKEN = {"test": LABEL, "valid": LABEL.astype(np.int8), "of several": np.stack([LABEL, LABEL], axis=1)}


STREAMED = pytest.param("streamed", marks=pytest.mark.filterwarnings("ignore:.*is prepared again at each pass"))


@pytest.mark.parametrize("name", [*UNTAKEN, STREAMED])
def test_a_label_that_the_loss_does_not_take_is_named_first(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    if name == "streamed":
        stream(monkeypatch)
    split, value = ("valid", -1) if name == "valid" else ("test", -2 if name == "of several" else -1)
    label = spoil(UNTAKEN.get(name, LABEL), (7, 1) if name == "of several" else 7, value)
    with pytest.raises(PipelineError, match="nothing was trained") as refused:
        submit(tmp_path / "run", **{split: pipe(label, X + 3)}, epochs=2)
    message = str(refused.value)
    assert re.search(rf"Ensemble.{split}: sample 7 \(.*row 7\) has the label {value}", message)
    assert "-100" in message and f"leave out {split}=" in message
    events = read_dicts(RunDir(tmp_path / "run").events)
    assert not [event for event in events if event["type"] in ("started", "epoch", "failed")]


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("cross_entropy", {"test": pipe(spoil(LABEL, 7, -100), X + 3)}),
        ("mse", {"train": pipe(X[:, :3]), "valid": pipe(X[:, :3] - 9, X + 1), "test": pipe(X[:, :3] - 9, X + 2)}),
        ("cross_entropy", {"test": pipe(spoil(LABEL, 7, -1), X + 3), "collate": lambda batch: batch}),
    ],
    ids=["ignored", "numbers", "collated"],
)
def test_labels_that_may_be_meant_are_taken(tmp_path: Path, loss: str, options: dict[str, Any]) -> None:
    events = submit(tmp_path / "run", loss, **options)
    assert [event["member"] for event in events if event["type"] == "finished"] == ["member-0"]


PREPARE_S = 0.002


class Mend:
    """A stage that takes its time, and refuses some samples while a file is there."""

    def __init__(self, marker: Path, *rows: int) -> None:
        self.marker, self.rows = str(marker), rows

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        until = time.thread_time() + PREPARE_S
        while time.thread_time() < until:
            pass
        if sample["row"] in self.rows and Path(self.marker).exists():
            raise ValueError("damaged")
        return {name: value for name, value in sample.items() if name != "row"}


@pytest.mark.filterwarnings("ignore:.*is prepared again at each pass")
def test_bad_records_of_a_streamed_split_stop_the_run_all_named_and_a_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream(monkeypatch)
    source = sources.arrays(x=X + 2, label=LABEL, row=np.arange(ROWS))
    mended = Pipeline(source, seed=0).map(Mend(tmp_path / "bad", 3, 11), version=1)
    declared = an_ensemble(test=mended, epochs=2, members=[{"lr": 0.01}, {"lr": 0.02}])
    clean = ensemble.submit(declared, tmp_path / "clean", "inline").wait()
    (tmp_path / "bad").touch()
    run = tmp_path / "run"
    with pytest.raises(PipelineError, match="nothing was trained: test: 2 records: ") as refused:
        ensemble.submit(declared, run, "inline").wait()
    for part in ("row 3", "row 11", "Replace the files", 'on_error="skip"', "max_skipped="):
        assert part in str(refused.value)
    events = read_dicts(RunDir(run).events)
    assert not [event for event in events if event["type"] in ("started", "failed", "epoch")]
    used = {event["role"]: event["cpu_s"] for event in events if event["type"] == "usage" and event["member"]}
    assert used["prepare"] >= ROWS * PREPARE_S, "what is read is in the account"
    (tmp_path / "bad").unlink()
    result = ensemble.resume(run, executor="inline").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert [row["metrics"] for row in result.members] == [row["metrics"] for row in clean.members]


def measure_held() -> int:
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:resident" in line]
    ends = [[int(number, 16) for number in line.split()[0].split("-")] for line in lines]
    return sum(end - start for start, end in ends)


def test_a_member_without_a_feeder_holds_validation_data_alone_while_it_trains(tmp_path: Path) -> None:
    held: list[int] = []
    large = np.zeros((ROWS, 50_000), np.float32)

    def loss(model: Any, batch: Any) -> Any:
        if model.training:
            held.append(measure_held())
        return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none")

    valid, test = (Pipeline(sources.arrays(x=X + shift, label=LABEL, more=large), seed=0) for shift in (1, 2))
    before = measure_held()
    submit(tmp_path / "run", loss, valid=valid, test=test, epochs=2)
    assert large.nbytes <= max(held) - before < 1.5 * large.nbytes


def test_too_few_validation_samples_for_a_stack_are_said_at_the_start() -> None:
    few = an_ensemble(combine="stack", valid=pipe(LABEL[:5], X[:5] + 1))
    assert any("'stack' needs 6" in notice for notice in few.list_notices())
    assert not an_ensemble(combine="stack").list_notices()


def test_figures_are_the_same_of_streamed_validation_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(name: str) -> list[Any]:
        events = submit(tmp_path / name, epochs=2, seed=3)
        members = fold(events).members.values()
        return [[member.weights_sha256, member.predictions, member.metrics] for member in members] + [
            event["metrics"] for event in events if event["type"] == "epoch"
        ]

    held = figures("held")
    stream(monkeypatch)
    with pytest.warns(UserWarning, match="'valid' is prepared again at each pass"):
        streamed = figures("streamed")
    assert streamed == held and held[0][1]
