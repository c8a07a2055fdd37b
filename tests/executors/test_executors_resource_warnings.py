"""What processes of a run open, they close: no ResourceWarning, of files, archives or the fork server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest

PROGRAM = """
import ensemble
from torch import nn
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources, stages

def model(params):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))

def main():
    tar = sources.tar("photos.tar", rename={"cls": "label", "jpg": "image"})
    for executor, source in (("local", tar), ("inline", sources.image_folder("photos"))):
        pipe = Pipeline(source).map(stages.decode_image("image")).map(stages.scale("image"))
        pipe = pipe.map(stages.cast("label", "int64")).map(stages.select("image", "label"))
        made = Ensemble(
            name=executor, recipe=Recipe(model=model, loss="cross_entropy", inputs=("image",), target="label"),
            members=[{"lr": 0.1}, {"lr": 0.2}], train=pipe, valid=pipe, epochs=2, batch_size=4,
        )
        result = ensemble.submit(made, executor, executor).wait()
        assert [member["state"] for member in result.members] == ["finished"] * 2
        ensemble.predict(executor, "photos.tar", executor + ".csv")

if __name__ == "__main__":
    main()
"""


@pytest.mark.more
def test_a_run_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for number in range(8):
            photo = cv2.imencode(".jpg", rng.integers(0, 255, (8, 8, 3), np.uint8))[1].tobytes()
            folder = tmp_path / "photos" / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.jpg").write_bytes(photo)
            for ending, content in (("jpg", photo), ("cls", str(number % 2).encode())):
                member = tarfile.TarInfo(f"{number}.{ending}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    command = [sys.executable, "-X", "dev", "-W", "always", "program.py"]
    environment = {**os.environ, "PYTHONWARNINGS": "always", "PYTHONDEVMODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr
    for file in tmp_path.rglob("*"):  # the output of members is among them
        assert file.suffix == ".py" or not file.is_file() or b"ResourceWarning" not in file.read_bytes()
