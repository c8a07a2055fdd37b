"""`predict` writes the predictions for any source of records, from an artifact or a run, in the records' order."""

from __future__ import annotations

import csv
import functools
import json
import os
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from artifact_runs import CROP, NAMES, SCALE, declare, make_images, train
from torch.nn.functional import cross_entropy

import ensemble
from ensemble.artifact import ArtifactError, predict
from ensemble.artifact import predictor as predicting
from ensemble.artifact.columns import make_columns
from ensemble.artifact.data import open_source
from ensemble.artifact.preparation import prepare_for_program
from ensemble.cli.parser import main
from ensemble.spec.class_names import find_known_classes
from ensemble.spec.task import Task
from ensemble.store import RunDir, load_predictions
from pipelines import Pipeline, sources, stages
from pipelines.errors import PipelineError


def encode(image: np.ndarray[Any, Any]) -> bytes:
    return bytes(cv2.imencode(".png", np.ascontiguousarray(image[::-1].transpose(1, 2, 0)))[1])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same 30 images as pixels, PNG files, a tar file, Parquet."""
    folder = tmp_path_factory.mktemp("photos")
    pixels = make_images(21, 30)["image"]
    files = [encode(image) for image in pixels]
    (folder / "flat").mkdir()
    (folder / "parquet").mkdir()
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for number, content in enumerate(files):
            (folder / "flat" / f"{number:03}.png").write_bytes(content)
            tar.add(folder / "flat" / f"{number:03}.png", f"{number:03}.png")
    table = pa.table({"image": files, "label": list(range(30)), "note": ["x"] * 30})
    pq.write_table(table.slice(0, 11), folder / "parquet" / "a.parquet")
    pq.write_table(table.slice(11), folder / "parquet" / "b.parquet", row_group_size=5)
    np.savez(folder / "pixels.npz", image=pixels)
    np.save(folder / "pixels.npy", pixels)
    return {"folder": folder, "pixels": pixels}


@pytest.fixture(scope="module")
def decoding(tmp_path_factory: pytest.TempPathFactory, photos: dict[str, Any]) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("decoding")
    images = make_images(3)
    below, right = np.random.default_rng(0).integers(0, 5, (2, 60))
    larger = [np.pad(one, ((0, 0), (0, below[n]), (0, right[n]))) for n, one in enumerate(images["image"])]
    files = [encode(image) for image in larger]
    source = sources.arrays(image=files, label=images["label"])
    pipe = Pipeline(source).map(stages.decode_image("image")).map(CROP).map(SCALE)
    run = train(folder / "run", declare(members=[{"width": 2, "lr": 0.1}], train=pipe, valid=pipe, test=None))
    return {"run": run, "artifact": ensemble.export(run, folder / "artifact", uncertainty=False)}


def compute(run: Path, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    made = np.stack([SCALE(CROP({"image": image}))["image"] for image in images])
    return ensemble.load(run)({"image": torch.from_numpy(made)}).numpy()


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    table = pq.read_table(path)
    names = [name for name in table.column_names if not name.startswith("set_")]  # sets differ in size
    return {name: np.array(table.column(name).to_pylist()) for name in names}


def same(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> bool:
    """To rounding: how many samples are computed at once may change the last bit."""
    return found.shape == wanted.shape and bool(np.allclose(found, wanted, rtol=1e-5, atol=1e-6))


def test_the_predictions_of_a_runs_split_are_those_of_its_combined_members(run: Path, tmp_path: Path) -> None:
    assert predict(run, split="test", out=tmp_path / "p.parquet", batch_size=7) == 60
    found = read(tmp_path / "p.parquet")
    saved = [load_predictions(RunDir(run).predictions(f"member-{i}"), "test") for i in range(3)]
    model = ensemble.load(run)
    pooled = np.mean([each.values for each in saved], axis=0)
    logs = np.log(np.maximum(pooled, 1e-12)) / model.temperature
    wanted = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    assert list(found) == ["index", "class", "probabilities"]
    assert found["index"].tolist() == saved[0].index.tolist() == list(range(60))
    assert same(found["probabilities"], wanted)
    assert (found["class"] == wanted.argmax(axis=1)).mean() > 0.98  # unless two are equal to rounding


def test_an_artifact_predicts_arrays(
    run: Path, artifact: Path, photos: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(predicting, "GROUP_BYTES", 500)
    wanted = compute(run, photos["pixels"])
    for name, batch_size in (("pixels.npz", 1), ("pixels.npy", 3), ("pixels.npz", 1000)):
        assert predict(artifact, photos["folder"] / name, tmp_path / "p.parquet", batch_size=batch_size) == 30
        found = read(tmp_path / "p.parquet")
        assert list(found) == ["index", "class", "class_name", "probabilities"]
        assert found["index"].tolist() == list(range(30)) and same(found["probabilities"], wanted)
        assert found["class_name"].tolist() == [NAMES[best] for best in found["class"]]
        if batch_size == 3:
            assert 1 < pq.ParquetFile(tmp_path / "p.parquet").metadata.num_row_groups < 10


@pytest.mark.parametrize(("name", "model"), [("flat", "run"), ("parquet", "artifact"), ("photos.tar", "artifact")])
def test_every_format_is_prepared_as_in_training(
    decoding: Any, photos: Any, tmp_path: Path, name: str, model: str
) -> None:
    assert predict(decoding[model], photos["folder"] / name, tmp_path / "p.parquet", batch_size=16) == 30
    found = read(tmp_path / "p.parquet")
    assert same(found["probabilities"], compute(decoding["run"], photos["pixels"]))
    assert found["index"].tolist() == list(range(30))
    files = [f"{photos['folder']}/{name}{'/' if name == 'flat' else ':'}{number:03}.png" for number in range(30)]
    assert found["file"].tolist() == files if name != "parquet" else "file" not in found


def test_images_of_several_sizes_are_cut_before_they_are_put_together(decoding: Any, tmp_path: Path) -> None:
    (tmp_path / "sizes").mkdir()
    rng = np.random.default_rng(1)
    images = [rng.integers(0, 256, (3, 8 + i, 20 - i), np.uint8) for i in range(6)]
    for number, image in enumerate(images):
        (tmp_path / "sizes" / f"{number}.png").write_bytes(encode(image))
    assert predict(decoding["artifact"], tmp_path / "sizes", tmp_path / "p.parquet") == 6
    cut = np.stack([CROP({"image": image})["image"] for image in images])
    assert same(read(tmp_path / "p.parquet")["probabilities"], compute(decoding["run"], cut))
    with pytest.raises(
        ArtifactError, match=r"has no uncertainty.pt2: the task has none, or it was exported without"
    ):
        predict(decoding["artifact"], tmp_path / "sizes", tmp_path / "p", uncertainty=True)


def test_uncertainties_are_columns(run: Path, artifact: Path, photos: dict[str, Any], tmp_path: Path) -> None:
    for model, out in ((run, tmp_path / "run"), (artifact, tmp_path / "artifact")):
        predict(model, photos["folder"] / "pixels.npz", out, uncertainty=True)
    found, other = read(tmp_path / "artifact"), read(tmp_path / "run")
    names = ["total", "aleatoric", "epistemic", "disagreement"]
    assert list(found)[-4:] == list(other)[-4:] == names
    sets = pq.read_table(tmp_path / "artifact").column("set_aps").to_pylist()
    assert all(best in chosen for best, chosen in zip(found["class"], sets, strict=True))
    assert 1 < np.mean([len(chosen) for chosen in sets]) <= 4
    made = np.stack([SCALE(CROP({"image": image}))["image"] for image in photos["pixels"]])
    wanted = ensemble.load(run, uncertainty=True)({"image": torch.from_numpy(made)})
    for name in names:
        assert same(found[name], wanted[name].numpy()) and same(other[name], wanted[name].numpy())
    assert found["epistemic"].max() > 1e-4


def double(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "image": sample["image"] // 2}


@pytest.mark.more
def test_a_stage_of_the_users_is_done_by_the_run_and_asked_of_callers(photos: Any, tmp_path: Path) -> None:
    pipe = Pipeline(sources.arrays(**make_images(0))).map(double).map(CROP).map(SCALE)
    run = train(tmp_path / "run", declare(members=[{"width": 2, "lr": 0.1}], train=pipe, valid=pipe, test=None))
    made = ensemble.export(run, tmp_path / "artifact", uncertainty=False)
    with pytest.raises(ArtifactError, match=r"the stage double .* a function of its spec, .* give --prepared"):
        predict(made, photos["folder"] / "pixels.npz", tmp_path / "p")
    np.savez(tmp_path / "halved.npz", image=photos["pixels"] // 2)
    predict(made, tmp_path / "halved.npz", tmp_path / "alone", prepared=True)
    predict(run, photos["folder"] / "pixels.npz", tmp_path / "run.parquet")
    wanted = compute(run, photos["pixels"] // 2)
    assert same(read(tmp_path / "alone")["probabilities"], wanted)
    assert same(read(tmp_path / "run.parquet")["probabilities"], wanted)
    card = (made / "README.md").read_text()
    assert "`double` (a function of the spec, not in this folder)" in card and "ensemble predict" not in card


def test_numbers_of_other_types_are_cast_and_other_shapes_refused(artifact: Path, tmp_path: Path) -> None:
    images = make_images(1, 5)["image"]
    np.savez(tmp_path / "ok.npz", image=images, more=np.zeros(5))
    assert predict(artifact, tmp_path / "ok.npz", tmp_path / "p") == 5
    for error, message, columns in (
        (PipelineError, r"'image' holds 0\.\d+, which uint8 cannot hold", {"image": images / 255}),
        (ArtifactError, r"'image' is complex64 .*, but the program takes", {"image": images.astype(np.complex64)}),
        (ArtifactError, r"'image' is uint8 \[1, 8, 8\], but the program takes", {"image": images[:, :1]}),
        (ArtifactError, "the data have photo, more: image is missing", {"photo": images, "more": np.zeros(5)}),
    ):
        np.savez(tmp_path / "bad.npz", **columns)
        with pytest.raises(error, match=message):
            predict(artifact, tmp_path / "bad.npz", tmp_path / "p")


def test_a_file_is_written_whole_or_not_at_all(decoding: dict[str, Path], photos: Any, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for file in sorted((photos["folder"] / "flat").iterdir())[:9]:
        (folder / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out" / "p.parquet"
    out.parent.mkdir()
    assert predict(decoding["artifact"], folder, out, batch_size=2) == 9
    before = out.read_bytes()
    (folder / "999.png").write_bytes(b"no image")
    with pytest.raises(PipelineError, match=r"999\.png"):
        predict(decoding["artifact"], folder, out, batch_size=2)
    assert out.read_bytes() == before and os.listdir(out.parent) == ["p.parquet"]


def test_records_are_read_as_their_predictions_are_kept(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources.arrays(image=np.zeros((1000, 3, 8, 8), np.uint8))
    counted = Mock(side_effect=source._read)
    monkeypatch.setattr(source, "_read", counted)
    monkeypatch.setattr(predicting, "open_source", lambda data, image, fields, **_: source)
    predictor = predicting.open_predictor(artifact, "x", None, uncertainty=False, prepared=False, device="cpu")
    tables = predicting._compute(predictor, 50)
    for batches in (1, 2, 3):
        assert len(next(tables)[0]) == 50 and 0 < counted.call_count < 50 * batches + 10


def test_columns_follow_the_task() -> None:
    """Of steps and of several numbers a sample; test_artifact_tasks has the columns of all tasks."""
    cases: list[tuple[Task, tuple[int, ...], Any]] = [
        (Task("classification"), (5, 7, 3), lambda v: {"class": v.argmax(-1), "probabilities": v}),
        (Task("gaussian"), (5, 4, 2), lambda v: {"mean": v[..., 0], "variance": v[..., 1]}),
        (Task("regression"), (5, 2), lambda v: {"prediction": v}),
    ]
    for task, shape, expected in cases:
        values = np.random.default_rng(0).random(shape).astype(np.float32)
        table = make_columns(np.arange(5), {"values": values, "total": values.reshape(5, -1)[:, 0]}, task, ())
        columns = expected(values)
        assert table.column_names == ["index", *columns, "total"]
        assert all(same(np.array(table.column(name).to_pylist()), column) for name, column in columns.items())
    values = np.array([[0.9, np.nan], [0.9, 0.1]], np.float32)  # NaN: its label is unknown
    table = make_columns(np.arange(2), {"values": values}, Task("multilabel"), ["a", "b"])
    assert table.column("labels").to_pylist() == [None, [0]]
    assert table.column("label_names").to_pylist() == [None, ["a"]]
    steps = np.stack([values, values[::-1]])
    table = make_columns(np.arange(2), {"values": steps}, Task("classification"), ["a", "b"])
    assert table.column("class").to_pylist() == [[None, 0], [0, None]]
    assert table.column("class_name").to_pylist() == [[None, "a"], ["a", None]]


def test_names_are_those_of_the_column_that_is_the_target_and_of_labels_that_stay(tmp_path: Path) -> None:
    """A label that a stage of the user's changes is not what the data's names are of."""
    images = make_images(0)
    features = {"fine": {"names": NAMES}, "label": {"names": ["no", "of", "the", "four"]}}
    table = pa.table(
        {"image": [encode(image) for image in images["image"]], "fine": images["label"], "label": [0] * 60}
    )
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, tmp_path / "data.parquet")

    def flip(label: Any) -> Any:
        return 3 - label

    start = Pipeline(sources.parquet(str(tmp_path / "data.parquet"))).map(stages.decode_image("image"))
    pipe = start.map(stages.drop("label")).map(stages.rename(fine="label"))
    for made, names in ((pipe, tuple(NAMES)), (pipe.map(flip, field="label"), ()), (pipe.map(len, field="x"), ())):
        declared = declare(train=made, valid=made, test=None)
        assert find_known_classes(declared, Task("classification")) == names
    kept = pipe.map(lambda sample: sample)
    assert find_known_classes(declare(train=kept, valid=kept, test=None), Task("classification")) == tuple(NAMES)


USAGE = {
    "{artifact} --out {p}": "give data to predict for, or --split with a run",
    "{artifact} --split test --out {p}": "is an artifact, which has no data",
    "{artifact} nothing.npz --out {p}": "there is no file or folder 'nothing.npz'",
    "{artifact} {run}/run.json --out {p}": "is of no known format; data are .parquet",
    "{folder} x.npz --out {p}": "is neither an artifact nor a run directory",
    "{run} x.npz --prepared --out {p}": "--prepared is for artifacts",
    "{artifact} x.npz --out {p}.xlsx": "as Parquet, CSV or JSON lines: name the file p.parquet, .csv or .jsonl",
    "{artifact} x.npz --out {folder}": "it is a folder, or its folder does not exist",
}


def test_usage_errors(run: Path, artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"run": run, "artifact": artifact, "folder": tmp_path, "p": tmp_path / "p"}
    for words, message in USAGE.items():
        assert main(["predict", *(word.format(**given) for word in words.split())]) == 2
        out, err = capsys.readouterr()
        assert out == "" and len(err.splitlines()) == 1 and message in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_csv_and_json_lines_keep_fields(
    artifact: Path, photos: Any, tmp_path: Path, suffix: str, capsys: Any
) -> None:
    data, out = tmp_path / "named.npz", tmp_path / f"p{suffix}"
    names = [f"{number:04d}" for number in range(30)]
    np.savez(data, image=photos["pixels"], name=np.array(names))
    predict(artifact, data, tmp_path / "p.parquet")
    columns = pq.read_table(tmp_path / "p.parquet").to_pydict()
    words = ["predict", str(artifact), str(data), "--out", str(out), "--keep", "name", "--uncertainty"]
    assert main([*words, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"out": str(out), "rows": 30}]
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file)) if suffix == ".csv" else [json.loads(line) for line in file]
    assert [row["name"] for row in rows] == names and [int(row["class"]) for row in rows] == columns["class"]
    for row, probabilities, name in zip(rows, columns["probabilities"], columns["class_name"], strict=True):
        if suffix == ".csv":
            row["probabilities"] = {each: row[f"probabilities.{each}"] for each in NAMES}
            row |= {key: json.loads(row[key]) for key in ("set_aps", "set_aps_names")}
        assert np.allclose([float(row["probabilities"][each]) for each in NAMES], probabilities, rtol=1e-6)
        assert row["class_name"] == name and row["set_aps_names"] == [NAMES[number] for number in row["set_aps"]]
    assert main(words) == 2, "a file that is not provably one of predictions is not replaced"
    assert main([*words[:4], str(tmp_path / "q.csv"), "--keep", "nothing"]) != 0


def test_images_of_another_size_are_named_with_both_sizes_and_the_remedy(tmp_path: Path) -> None:
    np.savez(tmp_path / "large.npz", image=np.zeros((2, 3, 16, 8), np.uint8))
    fields = {"image": {"shape": ["batch", 3, 8, 8], "dtype": "uint8"}}
    record = {"fields": fields, "stages": {"of_caller": []}}
    with pytest.raises(ArtifactError, match=r"large\.npz:row 0: .*3, 16, 8.*3, 8, 8.*resize the images to 8 x 8"):
        prepare_for_program(record, functools.partial(open_source, tmp_path / "large.npz"))


class Weighed(torch.nn.Module):
    """Takes a batch whole, and reads more of it than its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.body(batch["x"]) * batch["label"].ne(-1)[:, None]  # type: ignore[no-any-return]


def read_the_label(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).softmax(dim=-1)  # type: ignore[no-any-return]


def test_a_field_that_the_users_code_reads_and_the_records_lack_is_named_with_the_remedy(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pipe = Pipeline(sources.arrays(x=rng.random((16, 4), np.float32), label=rng.integers(0, 3, 16)))
    loss = lambda model, batch: cross_entropy(model(batch), batch["label"], reduction="none")  # noqa: E731
    recipe = ensemble.Recipe(model=lambda params: Weighed(), loss=loss, predict=read_the_label)
    run = train(tmp_path / "run", declare(recipe=recipe, members=[{"lr": 0.1}], train=pipe, valid=pipe, test=None))
    np.savez(tmp_path / "new.npz", x=rng.random((5, 4), np.float32))
    words = r"new\.npz:row 0: .* the batch has no field 'label' .*write a Recipe\.predict"
    with pytest.raises(ArtifactError, match=words):
        predict(run, tmp_path / "new.npz", tmp_path / "p.csv")


def test_samples_that_a_collate_function_turns_round_have_their_own_predictions() -> None:
    predictor: Any = SimpleNamespace(
        collate=lambda batch: {name: values.flip(0) for name, values in batch.items()}
    )
    vars(predictor).update(compute=lambda batch: {"values": batch["x"]}, device="cpu", task=Task("regression"))
    vars(predictor).update(classes=(), conformal=(), source=None, kept={})
    predictor.pipeline = Pipeline(sources.arrays(x=np.arange(7, dtype=np.float32)), shuffle=False)
    table = pa.concat_tables([part for part, _ in predicting._compute(predictor, 4)])
    assert table.column(0).to_pylist() == list(range(7)) == table.column(1).to_pylist()
