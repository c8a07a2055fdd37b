"""A Ray Data dataset is executed once and read from files: the page's example, with a Ray, then without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from started_cluster import start_head

pytestmark = [pytest.mark.ray, pytest.mark.more]

ROOT = Path(__file__).parents[3]
READ = """
import hashlib, json, os, sys
if {blocked}:
    sys.modules["ray"] = None  # an import of it fails
import prepared
from pipelines import Feeder, Pipeline, attach
source = prepared.read(os.path.abspath("prepared"))
pipe = Pipeline(source, seed=0, shuffle="blocks", shuffle_window=2)
def hash_image(batch):
    return hashlib.sha256(batch["image"].numpy().tobytes()).hexdigest()
def read(loader):
    return [[*batch["index"].tolist(), hash_image(batch)] for batch in loader]
alone = read(pipe.loader(32, epochs=2))
if {blocked}:
    with Feeder(pipe, workers=2, expect=1, gate_timeout_s=600) as feeder:
        assert read(attach(feeder.address, pipe, batch_size=32, epochs=range(2))) == alone
print(json.dumps([pipe.fingerprint, len(pipe.source), list(pipe.source[599]["image"].shape), alone]))
"""
REFUSED = """
import json, os, ray
import numpy as np
from pipelines import PipelineError, sources
rows = ray.data.range(10, override_num_blocks=2)
datasets = {
    "unequal": rows.map(lambda row: {"x": np.zeros((2, 1 + row["id"] % 2))}),
    "objects": rows.map(lambda row: {"x": Exception()}),
    "empty": rows.map_batches(lambda batch: {"x": batch["id"][:0]}),
}
reasons = {}
for name, dataset in datasets.items():
    dataset.write_parquet(os.path.abspath(name), mode="overwrite")
    try:
        sources.parquet(f"{name}/*.parquet")
    except PipelineError as error:
        reasons[name] = str(error)
batch = rows.map(lambda row: {"x": np.full((2, 2), row["id"]), "y": str(row["id"])}).take_batch(10)
record = sources.arrays(**batch)[9]
print(json.dumps([reasons, os.path.exists("empty"), record["x"].shape, record["y"]]))
"""


def run(folder: Path, code: str, **variables: str) -> list[object]:
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    usual["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env={**usual, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: list[object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_dataset_is_executed_once_and_read_by_all_without_a_ray(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/data.md").read_text()
    block = re.search('```python title="prepared.py"\n(.*?)```', page, re.DOTALL)
    assert block is not None
    (tmp_path / "prepared.py").write_text(block[1])
    (tmp_path / "prepared.part").mkdir()
    (tmp_path / "prepared.part" / "half.parquet").write_text("what an interrupted write has left")
    with start_head({"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}, cpus=2) as variables:
        first = run(tmp_path, READ.format(blocked=False), **variables)
        assert first[1:3] == [600, [3, 8, 8]] and not (tmp_path / "prepared.part").exists()
        reasons, is_written, shape, text = run(tmp_path, REFUSED, **variables)
    assert run(tmp_path, READ.format(blocked=True)) == first, "a resume needs no Ray, and reads the same bits"
    assert isinstance(reasons, dict) and (shape, text, is_written) == ([2, 2], "9", False)
    assert "column 'x' has tensors of unequal shapes" in reasons["unequal"]
    assert "column 'x' has pickled Python objects" in reasons["objects"]
    assert "matches no file" in reasons["empty"]
