"""Names of folders, files and runs that are no UTF-8, through a whole run and all that it writes."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from artifact_runs import declare, write_photos
from torch import nn

import ensemble
from ensemble import Recipe
from ensemble.artifact import predict, read_record
from ensemble.cli.parser import main
from pipelines import Pipeline, sources, stages

pytestmark = pytest.mark.more

CLASSES = ["ant", r"caf\udce9", "z<b>|x"]


def test_a_run_on_folders_of_latin_1_in_a_folder_of_latin_1(tmp_path: Path, capsys: Any) -> None:
    root = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"d\xe9")))
    folders = [write_photos(root / split, seed=seed) for seed, split in enumerate(("train", "valid", "test"))]
    pipes = [Pipeline(sources.image_folder(folder)).map(stages.decode_image("image")) for folder in folders]
    splits = {folder.name: pipe.map(stages.scale("image")) for folder, pipe in zip(folders, pipes, strict=True)}
    run = Path(os.fsdecode(os.path.join(os.fsencode(root), b"r\xfcn")))
    flat = lambda params: nn.Sequential(nn.Flatten(), nn.Linear(3 * 24 * 32, 3))  # noqa: E731
    recipe = Recipe(model=flat, loss="cross_entropy", inputs=("image",))
    made = declare(recipe=recipe, optimizer="sgd", members=[{"lr": 0.01}, {"lr": 0.02}], batch_size=4, **splits)
    result = ensemble.submit(made, run, "local").wait()
    assert [member["state"] for member in result.members] == ["finished"] * 2
    assert ensemble.load(run).classes == tuple(CLASSES)

    assert main(["status", str(run)]) == main(["report", str(run)]) == main(["verify", str(run)]) == 0
    for file in run.rglob("*"):  # all that is text is UTF-8
        if file.suffix in (".json", ".jsonl", ".html", ".csv", ".txt"):
            file.read_bytes().decode()
    assert json.loads((run / "results.json").read_text())["per_class"]["classes"] == CLASSES
    assert r"caf\\udce9" in (run / "report.html").read_text()

    artifact = ensemble.export(run, root / "artifact")
    assert read_record(artifact)["classes"] == CLASSES
    assert r"ant, caf\udce9, z<b>\|x." in (artifact / "README.md").read_text()
    for number, model in enumerate((run, artifact)):
        table, lines = root / f"{number}.csv", root / f"{number}.jsonl"
        for out in (table, lines, root / f"{number}.parquet"):
            assert predict(model, root / "test", out, uncertainty=True) == 12
        rows = list(csv.DictReader(io.StringIO(table.read_text(encoding="utf-8"))))
        objects = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
        found = pq.read_table(io.BytesIO((root / f"{number}.parquet").read_bytes()))
        assert json.loads(found.schema.metadata[b"classes"]) == CLASSES
        named = found.column("class_name").to_pylist()
        assert named == [row["class_name"] for row in rows] == [one["class_name"] for one in objects]
        assert set(named) == set(CLASSES) and r"/caf\udce9/c\udce9.jpg" in " ".join(row["file"] for row in rows)
        for row, one in zip(rows, objects, strict=True):
            assert list(one["probabilities"]) == CLASSES
            probabilities = [float(row[f"probabilities.{name}"]) for name in CLASSES]
            assert probabilities == pytest.approx(list(one["probabilities"].values()))
            assert one["set_thr_names"] == [CLASSES[place] for place in one["set_thr"]]
    assert main(["predict", str(run), str(root / "absent"), "--out", str(root / "x.csv")]) == 2
    assert r"d\udce9" in capsys.readouterr().err
