"""Damaged records of the data on which members are evaluated: named before anything trains, mended at no cost."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import read_events
from PIL import Image

import ensemble
from ensemble.cli.parser import main
from ensemble.spec import SpecError
from ensemble.spec.spec_file import load_spec
from ensemble.store import StoreError
from pipelines import PipelineError

SPEC = """
import torch
from ensemble import Ensemble, Energy, Recipe, Resources
from pipelines import Pipeline, sources, stages

def model(params):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))

def images(source, **options):
    return Pipeline(source, seed=0, **options).map(stages.decode_jpeg("image")).map(stages.scale("image"))

def spec(sharing="auto", skip="", parts=False):
    folders = {{name: sources.image_folder({path!r} + "/" + name) for name in ("train", "valid", "test")}}
    if parts:
        folders["train"], folders["valid"] = folders["train"].split(0.5)
    leaves_out = {{"on_error": "skip", "max_skipped": 1.0}}
    splits = {{name: images(source, **(leaves_out if name == skip else {{}})) for name, source in folders.items()}}
    return Ensemble(
        name="damaged", recipe=Recipe(model=model, loss="cross_entropy"), **splits, epochs=2, batch_size=8,
        members=[{{"lr": 0.01}}, {{"lr": 0.02}}], optimizer="sgd", sharing=sharing, retries=2,
        energy=Energy(measure_idle_s=0), devices="cpu",
        resources=Resources(workers=1, cpus_per_worker=0.5, threads=1, memory_gb=1.0),
    )
"""
SIZES = {"train": 32, "valid": 12, "test": 12}


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(path, quality=95)


def damage(*paths: Path) -> None:
    for path in paths:
        path.write_bytes(path.read_bytes()[:40])


class Frame:
    """A spec on images of two classes, and what its log says."""

    def __init__(self, path: Path) -> None:
        self.data, self.run, self.spec = path / "data", path / "run", path / "spec.py"
        for split, size in SIZES.items():
            for number in range(size):
                write_image(self.image(split, number), 1000 * len(split) + number)
        self.spec.write_text(SPEC.format(path=str(self.data)))

    def image(self, split: str, number: int) -> Path:
        return self.data / split / "ab"[number % 2] / f"{number:03}.jpg"

    def submit(self, executor: str = "inline", **options: Any) -> ensemble.Result:
        settings = [f"{name}={value}" for name, value in options.items()]
        return ensemble.submit(load_spec(str(self.spec), settings), self.run, executor, spec_file=self.spec).wait()

    def read_kept(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.run.rglob("*") if path.is_file()}

    def events(self, *types: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run / "events.jsonl") if event["type"] in types]


@pytest.fixture
def frame(tmp_path: Path) -> Frame:
    return Frame(tmp_path)


@pytest.mark.parametrize(
    "executor",
    [
        "inline",
        pytest.param("local", marks=pytest.mark.more),
        pytest.param("ray", marks=[pytest.mark.more, pytest.mark.ray]),
    ],
)
def test_all_damaged_records_are_named_before_anything_trains_and_replacing_them_is_all_it_takes(
    frame: Frame, executor: str
) -> None:
    bad = [frame.image(split, n) for split, n in (("valid", 3), ("test", 0), ("test", 5))]
    damage(*bad)
    with pytest.raises(PipelineError, match="nothing was trained") as refused:
        frame.submit(executor)
    for path in bad:
        assert str(path) in str(refused.value)
    for way_out in ("Replace the files", 'on_error="skip"', "max_skipped"):
        assert way_out in str(refused.value)
    assert not frame.events("started", "epoch", "checkpoint", "failed"), "no step, and no attempt is used up"
    (stopped,) = frame.events("run_stopped")
    assert str(bad[0]) in stopped["reason"]
    for number, path in enumerate(bad):
        write_image(path, number)
    result = ensemble.resume(frame.run).wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert result.combined is not None and result.combined["split"] == "test"


def test_data_to_evaluate_on_that_were_replaced_are_evaluated_again_and_nothing_is_trained(
    frame: Frame,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ensemble.combine.combination.CALIBRATION_SAMPLES", 12)
    frame.submit()
    finished = {event["member"]: event for event in frame.events("finished")}
    tested = {member: ensemble.load_predictions(frame.run, "test", member).values for member in finished}
    combined = frame.events("combined")[-1]["metrics"]
    write_image(frame.image("valid", 1), 77)
    assert main(["resume", str(frame.run)]) == 0
    said = capsys.readouterr().err + caplog.text
    assert re.search(r"valid has changed \(its source, classes or stages\)", said), said
    assert len(frame.events("epoch")) == 4, "those of the first start"
    for event in frame.events("finished")[2:]:
        earlier, member = finished.pop(event["member"]), event["member"]
        assert event["weights_sha256"] == earlier["weights_sha256"]
        assert event["predictions"]["valid"] != earlier["predictions"]["valid"]
        assert event["metrics"]["loss"] != earlier["metrics"]["loss"]
        assert np.array_equal(ensemble.load_predictions(frame.run, "test", member).values, tested[member])
    assert not finished
    assert [event["metrics"] == combined for event in frame.events("combined")] == [True, False], "calibrated anew"
    assert main(["resume", str(frame.run)]) == 0
    assert len(frame.events("run_started")) == 2, "nothing is left to be done"


def test_a_resume_beside_another_process_that_drives_the_run_replaces_nothing_of_it(frame: Frame) -> None:
    frame.submit()
    write_image(frame.image("valid", 1), 77)  # so that a resume makes the declaration anew
    hold = (
        "import sys; from ensemble.store import EventLog; it = EventLog(sys.argv[1]); print(flush=True); input()"
    )
    words = [sys.executable, "-c", hold, str(frame.run / "events.jsonl")]

    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"\n", "it has the lock"
        before = frame.read_kept()
        with pytest.raises(StoreError, match="is in progress"):
            ensemble.resume(frame.run)
        assert frame.read_kept() == before
        other.communicate(b"\n")
    assert other.returncode == 0
    ensemble.resume(frame.run).wait()
    assert frame.read_kept()[frame.run / "ensemble.pkl"] != before[frame.run / "ensemble.pkl"]
    assert list(frame.events("run_started")[-1]["changed_splits"]) == ["valid"]


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(frame: Frame) -> None:
    frame.submit()
    write_image(frame.image("train", 1), 77)
    before = frame.read_kept()
    with pytest.raises(SpecError, match="not an address for a mirror"):
        ensemble.resume(frame.run, epochs=3, accept_data=True, mirror="nonsense")
    frame.spec.write_text(frame.spec.read_text() + "\nEDITED = 1\n")
    with pytest.raises(StoreError, match="a resume uses the code that is kept"):
        ensemble.resume(frame.run, epochs=3, accept_data=True, accept_code=True)
    assert frame.read_kept() == before


def test_other_training_data_ask_to_be_accepted_and_rows_of_other_parts_do_not_count(frame: Frame) -> None:
    frame.submit(parts=True)
    declared = load_spec(str(frame.spec), ["parts=True"])
    parts = [[pipe.source.where(index) for index in range(2)] for pipe in (declared.train, declared.valid)]
    write_image(Path(parts[1][0]), 78)
    ensemble.resume(frame.run).wait()
    assert len(frame.events("epoch")) == 4 and list(frame.events("run_started")[-1]["changed_splits"]) == ["valid"]
    write_image(Path(parts[0][1]), 79)
    with pytest.raises(StoreError, match=r"the training pipeline has changed .*--accept-data"):
        ensemble.resume(frame.run, epochs=3)
    ensemble.resume(frame.run, epochs=3, accept_data=True).wait()
    assert len(frame.events("epoch")) == 6
    ensemble.resume(frame.run, epochs=4).wait()
    assert len(frame.events("epoch")) == 8, "what was accepted stays so"


def test_a_full_dry_run_names_all_damaged_records(frame: Frame, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(frame.spec), "--executor", "inline", "--run-dir", str(frame.run), "--dry-run"]
    damage(frame.image("train", 7))
    assert main(words) == 0 and main([*words, "full"]) == 2
    assert str(frame.image("train", 7)) in capsys.readouterr().err
    damage(*(frame.image("test", number) for number in range(11)))
    assert main([*words, "full"]) == 2
    said = capsys.readouterr().err
    assert f"test: 11 records: sample 0 ({frame.image('test', 0)})" in said and "; and 1 more" in said
    write_image(frame.image("train", 7), 5)
    assert main([*words, "full", "--set", "skip=test"]) == 0
    assert "11 of 12 records of test cannot be prepared and are left out" in capsys.readouterr().out


def test_a_damaged_training_record_ends_members_in_the_first_epoch_and_touches_no_weight(frame: Frame) -> None:
    damage(frame.image("train", 7))
    result = frame.submit()
    assert [row["state"] for row in result.members] == ["failed"] * 2
    assert not frame.events("epoch", "checkpoint")
    assert str(frame.image("train", 7)) in frame.events("failed")[0]["error"]
    write_image(frame.image("train", 7), 5)
    damage(frame.image("test", 0))
    with pytest.raises(PipelineError, match="test: sample 0"):
        frame.submit()
    result = frame.submit(skip="test")  # it is left out where that is declared later
    assert [row["state"] for row in result.members] == ["finished"] * 2
