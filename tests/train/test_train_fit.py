"""What the first batch and the splits show is remarked: what cannot be combined, or is not what was meant."""

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
from kit.event_dicts import collect_notices, fold
from kit.event_dicts import read_events as read_dicts
from kit.loop_cases import own_loop
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Folds, Member, Recipe, Resources, quantiles
from ensemble.reporting import RunProjection
from ensemble.reporting.sections.quality import describe_failed_combination
from ensemble.reporting.status import status_notes
from ensemble.spec.task import IGNORED
from ensemble.store import RunDir, read_events
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
    if says == "append .softmax(-1)":
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


def expect_remark(events: list[dict[str, Any]], *parts: str, member: str = "member-0", alone: bool = True) -> None:
    """The member has this remark before its first epoch has ended; `alone`: and no other."""
    own = [event for event in events if event.get("member") == member]
    texts = [event["text"] for event in own if event["type"] == "remark"]
    remarked = [text for text in texts if all(part in text for part in parts)]
    assert len(remarked) == 1 if alone else remarked, texts
    kinds = [event["type"] for event in own]
    assert kinds.index("remark") < kinds.index("epoch")


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


def own_loss(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="none", ignore_index=-1)


@pytest.mark.parametrize(("loss", "label"), [(own_loss, -1), ("cross_entropy", 3), ("binary_cross_entropy", 2)])
def test_a_label_of_test_without_a_class_is_remarked_early(tmp_path: Path, loss: Any, label: int) -> None:
    is_binary = loss == "binary_cross_entropy"
    most = 1 if is_binary else 2
    fitting = LABEL.clip(0, most)
    splits = {"train": pipe(fitting), "valid": pipe(fitting, X + 1), "test": pipe(spoil(fitting, 7, label), X + 3)}
    options = {"task": "classification", "members": [{"lr": 0.01, "classes": 1}]} if is_binary else {}
    events = submit(tmp_path / "run", loss, **splits, **options)
    expect_remark(events, "Ensemble.test", f"row 7) has the label {label}", f"0 ... {most}")


def test_what_others_do_not_take_is_remarked_early(tmp_path: Path) -> None:
    events = submit(tmp_path / "classes", members=[{"lr": 0.01}, {"lr": 0.01, "classes": 5}])
    assert [event["member"] for event in events if event["type"] == "remark"] == ["member-1"]
    expect_remark(events, "predicts 5 classes on training, member-0 3", member="member-1")
    events = submit(tmp_path / "samples", test=pipe(x=np.concatenate([X, X], axis=1)))
    expect_remark(events, "samples of Ensemble.test raised")
    kinds = [event["type"] for event in events]
    assert kinds.count("remark") == 1 and kinds.index("epoch") < kinds.index("failed")


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


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda values: values.mean(dim=1), "gives"),
        (lambda values: values[0] / 0, "NaN"),
        (lambda v: v.missing, "failed"),
        (lambda values: values.mean(dim=0), None),
    ],
)
def test_a_function_that_does_not_combine_is_remarked_early(tmp_path: Path, function: Any, reason: Any) -> None:
    events = submit(tmp_path / "run", combine=function, members=[{"lr": 0.01}, {"lr": 0.02}])
    if reason is None:
        assert not [event for event in events if event["type"] == "remark"]
    else:
        member = next(event["member"] for event in events if event["type"] == "remark")
        expect_remark(events, "Ensemble.combine=", reason, member=member, alone=False)


def test_too_few_validation_samples_for_a_stack_are_said_at_the_start() -> None:
    few = an_ensemble(combine="stack", valid=pipe(LABEL[:5], X[:5] + 1))
    assert any("'stack' needs 6" in notice for notice in few.list_notices())
    assert not an_ensemble(combine="stack").list_notices()


def own_numbers(model: Any, batch: Any) -> Any:
    return (model(batch["x"]).squeeze(-1) - batch["label"]).square()


QUANTILES = {"loss": "pinball", "task": quantiles(0.1, 0.5, 0.9), "combine": "stack"}
FREE = {"loss": own_numbers, "task": "free", "predict": lambda model, batch: model(batch["x"])}


@pytest.mark.parametrize(
    ("options", "outputs", "reason"), [(QUANTILES, 3, "'weighted' or 'gr"), (FREE, 1, "combine")]
)
def test_a_combination_that_is_not_for_the_task_is_remarked_early(
    tmp_path: Path, options: Any, outputs: int, reason: str
) -> None:
    splits = {name: pipe(X[:, 0], X + shift) for shift, name in enumerate(("train", "valid", "test"))}
    members = [{"lr": 0.01, "classes": outputs}]
    events = submit(tmp_path / "run", **splits, **options, objective="loss", members=members)
    expect_remark(events, reason, alone=False)


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
