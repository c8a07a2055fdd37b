"""What is wrong with data to evaluate on, or with the combination, is known in the first epoch at the latest."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.event_dicts import fold, read_events
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe, quantiles
from ensemble.store import RunDir
from pipelines import Pipeline, PipelineError, sources

ROWS = 40
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
LABEL = (X[:, 0] > 0).astype(np.int64) + (X[:, 1] > 1)


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
    return read_events(RunDir(folder).events)


def expect_remark(events: list[dict[str, Any]], *parts: str, member: str = "member-0", alone: bool = True) -> None:
    """The member has this remark before its first epoch has ended; `alone`: and no other."""
    own = [event for event in events if event.get("member") == member]
    texts = [event["text"] for event in own if event["type"] == "remark"]
    remarked = [text for text in texts if all(part in text for part in parts)]
    assert len(remarked) == 1 if alone else remarked, texts
    kinds = [event["type"] for event in own]
    assert kinds.index("remark") < kinds.index("epoch")


def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is held: validation data are prepared anew at each pass."""
    monkeypatch.setattr("pipelines.environment.machine_limits.available_bytes", lambda: 0)


UNTAKEN = {"test": LABEL, "valid": LABEL.astype(np.int8), "of several": np.stack([LABEL, LABEL], axis=1)}


STREAMED = pytest.param("streamed", marks=pytest.mark.filterwarnings("ignore:.*is prepared anew at each pass"))


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
    events = read_events(RunDir(tmp_path / "run").events)
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


@pytest.mark.filterwarnings("ignore:.*is prepared anew at each pass")
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
    events = read_events(RunDir(run).events)
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
    with pytest.warns(UserWarning, match="'valid' is prepared anew at each pass"):
        streamed = figures("streamed")
    assert streamed == held and held[0][1]
