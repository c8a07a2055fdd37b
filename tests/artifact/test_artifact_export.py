"""An exported run predicts with torch alone, bitwise as `load` does; what cannot be exported says why."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import random
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from artifact_runs import CLASSES, CROP, NAMES, SCALE, build, declare, link_torch, make_images, run_alone, train
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Recipe
from ensemble.artifact import ArtifactError, is_artifact, read_record
from ensemble.artifact import program as programs
from ensemble.cli.parser import main
from pipelines import Pipeline, sources


def prepared(images: np.ndarray[Any, Any]) -> torch.Tensor:
    made = [SCALE(CROP({"image": image}))["image"] for image in images]
    return torch.from_numpy(np.stack(made))


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().numpy().tobytes()


def test_torch_alone_predicts_bitwise_as_load_and_the_card_say(run: Path, artifact: Path, tmp_path: Path) -> None:
    images = make_images(7, 33)["image"]
    torch.save(torch.from_numpy(images), tmp_path / "images")
    _, lines, moved = (part.split("```")[0] for part in (artifact / "README.md").read_text().split("```python\n"))
    assert len(lines.splitlines()) == 3 and '"cuda"' in moved  # of which there may be none here
    code = f"""
{lines}
assert values.shape == (8, {CLASSES})
{moved.replace("cuda", "cpu")}
assert model({{"image": torch.zeros(2, 3, 9, 8, dtype=torch.uint8)}}).shape == (2, {CLASSES})
torch.set_num_threads(1)
images = torch.load({str(tmp_path / "images")!r}, weights_only=True)
values = torch.export.load("model.pt2").module()({{"image": images}})
unsure = torch.export.load("uncertainty.pt2").module()({{"image": images}})
torch.save({{"alone": values, **unsure}}, {str(tmp_path / "values")!r})
"""
    done = run_alone(link_torch(tmp_path / "packages"), artifact, code)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "values", weights_only=True)
    batch = {"image": prepared(images)}
    values = ensemble.load(run)(batch)
    unsure = ensemble.load(run, uncertainty=True)(batch)
    assert len(set(ensemble.load(run).weights.tolist())) == 1 and values.shape == (33, CLASSES)
    assert bits(found["alone"]) == bits(values)
    assert set(unsure) == {"values", "total", "aleatoric", "epistemic", "disagreement"}
    assert {name: bits(found[name]) for name in unsure} == {name: bits(value) for name, value in unsure.items()}


def test_a_program_takes_batches_of_any_size_and_crops_images_of_any_size(run: Path, artifact: Path) -> None:
    program, model = programs.load_program(artifact / "model.pt2"), ensemble.load(run)
    for count in (0, 1, 2, 3, 41):
        images = make_images(3, 41)["image"][:count]
        batch = prepared(images) if count else torch.empty(0, 3, 8, 8)
        assert bits(program({"image": torch.from_numpy(images)})) == bits(model({"image": batch}))
    for height, width in ((8, 8), (9, 8), (31, 17)):
        images = np.random.default_rng(height).integers(0, 256, (3, 3, height, width), np.uint8)
        assert bits(program({"image": torch.from_numpy(images)})) == bits(model({"image": prepared(images)}))


@pytest.mark.more
def test_without_preprocessing_the_program_takes_what_the_pipeline_gives(run: Path, tmp_path: Path) -> None:
    made = ensemble.export(run, tmp_path / "bare", preprocessing=False, uncertainty=False)
    record = read_record(made)
    assert record["fields"] == {"image": {"shape": ["batch", 3, 8, 8], "dtype": "float32"}}
    assert [stage["record"]["stage"] for stage in record["stages"]["of_caller"]] == ["center_crop", "scale"]
    batch = {"image": prepared(make_images(5)["image"])}
    assert bits(programs.load_program(made / "model.pt2")(batch)) == bits(ensemble.load(run)(batch))
    assert not (made / "uncertainty.pt2").exists() and record["uncertainty"] is None
    card = (made / "README.md").read_text()
    assert "1. `center_crop(" in card and "ensemble predict . DATA" in card


def test_the_record_says_what_is_in_the_artifact(run: Path, artifact: Path) -> None:
    record = read_record(artifact)
    shape = ["batch", 3, "image_height", "image_width"]
    assert record["fields"] == {"image": {"shape": shape, "dtype": "uint8", "least": [8, 8]}}
    assert record["outputs"] == {"values": {"shape": ["batch", CLASSES], "dtype": "float32"}}
    assert record["task"] == {"kind": "classification"} and record["classes"] == NAMES
    assert record["weights"] == {f"member-{i}": pytest.approx(1 / 3) for i in range(3)}
    assert json.loads((artifact / "ledger.json").read_text())["run"]["cpu_s"] > 0
    weights = load_file(artifact / "model.safetensors")
    state = ensemble.load(run).state_dict()
    assert {name: bits(value) for name, value in weights.items()} == {k: bits(v) for k, v in state.items()}
    with zipfile.ZipFile(artifact / "model.pt2") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    [inputs] = [content for name, content in files.items() if "sample_inputs" in name]
    given, named = torch.load(io.BytesIO(inputs), weights_only=True)
    assert named == {} and not given[0]["image"].any(), "no sample, nor a line of the user's code"
    everything = b"".join([*files.values(), *(file.read_bytes() for file in artifact.iterdir())])
    assert b"artifact_runs.py" not in everything and b"F.relu(" not in everything
    assert make_images(1)["image"][0].tobytes() not in everything


def test_the_card_has_data_members_metrics_calibration_cost_and_versions(run: Path, artifact: Path) -> None:
    card = (artifact / "README.md").read_text()
    heads = [line.removeprefix("## ") for line in card.splitlines() if line.startswith("## ")]
    assert heads[:6] == ["How to load it", "Preprocessing", "Data", "Members", "Metrics", "Calibration"]
    assert heads[6] == ("Uncertainty" if "Uncertainty" in heads else "What it cost")
    assert "| member-2 | 0.3333 | width=4, lr=0.05 |" in card and "| valid | 60 |" in card
    assert f"| torch | {importlib.metadata.version('torch')} |" in card and "J (estimated) |" in card
    combined = json.loads((run / "results.json").read_text())["combined"]
    accuracy = next(line for line in card.splitlines() if line.startswith("| accuracy"))
    assert f"| {combined['metrics']['ensemble']['accuracy']:.4f} [" in accuracy, accuracy
    assert "| aps | 0.9000 |" in card


def test_exporting_leaves_all_else_as_it_was(run: Path, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(run.rglob("*")), torch.random.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    random.seed(1)
    drawn = random.getstate()
    ensemble.export(run, tmp_path / "out", uncertainty=False)
    assert sorted(run.rglob("*")) == before[0] and torch.equal(torch.random.get_rng_state(), before[1])
    assert torch.backends.mha.get_fastpath_enabled() == before[2] and random.getstate() == drawn
    assert sorted(os.listdir(tmp_path)) == ["here", "out"] and os.listdir(tmp_path / "here") == []
    assert capfd.readouterr() == ("", "")


def test_a_program_that_computes_something_else_is_refused(run: Path, artifact: Path) -> None:
    images = torch.from_numpy(make_images(3)["image"])
    model = ensemble.load(run)
    other = prepared(make_images(3)["image"]) + 1e-3
    with pytest.raises(ArtifactError, match=r"load\(\) give different values \(by .* for a batch of 60\)"):
        programs.check_equal(artifact / "model.pt2", model, [({"image": images}, {"image": other})])


class Branching(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x[:, 0])
        if y.sum() > 0:
            return y
        return -y


def test_what_cannot_be_exported_has_an_alternative(tmp_path: Path, capfd: Any) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 5, 4)).astype(np.float32)
    pipe = Pipeline(sources.arrays(x=x, label=rng.integers(0, 2, 32)))
    recipe = Recipe(model=lambda params: Branching(4, 2), loss="cross_entropy", inputs=("x",))
    run = train(tmp_path / "run", declare(recipe=recipe, members=[{"lr": 0.1}], train=pipe, valid=pipe, test=None))
    capfd.readouterr()
    assert main(["export", str(run), str(tmp_path / "out")]) == 2
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert "if y.sum() > 0:" in err and "RUN_DIR` needs no export" in err and "test_artifact_export.py:" in err, (
        err
    )
    assert not (tmp_path / "out").exists()


class Tied(nn.Module):
    """Two layers of the same weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(192, width), nn.Linear(192, width)
        self.second.weight = self.first.weight
        self.norm, self.last = nn.BatchNorm1d(width), nn.Linear(width, CLASSES)
        self.scale = torch.arange(1.0, width + 1)  # neither parameter nor buffer

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        flat = image.flatten(1)
        return self.last(self.norm(self.first(flat) + F.relu(self.second(flat)) * self.scale))


@pytest.mark.more
def test_members_of_several_architectures_are_one_program(tmp_path: Path) -> None:
    def model(params: dict[str, Any]) -> nn.Module:
        return Tied(params["width"]) if params["tied"] else build(params)

    members = [{"width": 3, "tied": tied, "lr": 0.05} for tied in (True, False)]
    options = {"averaging": "ema", "combine": "stack"}
    declared = declare(recipe=replace(declare().recipe, model=model), members=members, **options)
    run = train(tmp_path / "run", declared)
    made = ensemble.export(run, tmp_path / "out", uncertainty=False)
    images = make_images(5, 9)["image"]
    values = ensemble.load(run)({"image": prepared(images)})
    assert bits(programs.load_program(made / "model.pt2")({"image": torch.from_numpy(images)})) == bits(values)
    weights = load_file(made / "model.safetensors")
    state = ensemble.load(run).state_dict()
    assert {name: bits(value) for name, value in weights.items()} == {k: bits(v) for k, v in state.items()}


@pytest.mark.more
def test_the_card_of_a_run_that_was_not_combined_has_its_calibration(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    events = tmp_path / "run" / "events.jsonl"
    lines = events.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["type"] not in ("combined", "ended")]
    events.write_text("\n".join(kept) + "\n")
    made = ensemble.export(tmp_path / "run", tmp_path / "out", uncertainty=False)
    factor = ensemble.load(tmp_path / "run").calibration
    assert len(kept) < len(lines) and factor != 1 and read_record(made)["calibration"]["value"] == factor
    card = (made / "README.md").read_text()
    assert f"By temperature on the validation split: {factor:.4g}." in card
    assert "None: the run was not combined." in card


def test_the_command_lists_the_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["export", str(run), str(tmp_path / "out"), "--classes", "a,b,c,d", "--without-uncertainty"]
    assert main([*names, "--json", str(tmp_path / "files.json")]) == 0
    out = capsys.readouterr().out
    files = {Path(row["file"]).name: row["bytes"] for row in json.loads((tmp_path / "files.json").read_text())}
    assert set(files) == {"model.pt2", "model.safetensors", "artifact.json", "README.md", "ledger.json"}
    assert f"{files['model.pt2']:,} bytes" in out and is_artifact(tmp_path / "out")
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "x")]) == 2
    for classes in (["a", "b"], ["a", "a", "b", "c"]):
        with pytest.raises(ArtifactError, match="classes must be 4 different names, got"):
            ensemble.export(run, tmp_path / "x", classes=classes)
    assert build({"width": 2}).training  # the models of the spec are not touched
