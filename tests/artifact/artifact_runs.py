"""Runs that the tests of artifacts export: small models, really trained by the inline executor."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import ensemble
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources, stages

CLASSES = 4
NAMES = ["ant", "bee", "cow", "doe"]
FOLDERS = [b"ant", b"caf\xe9", b"z<b>|x"]  # of classes; one is Latin-1
CROP = stages.center_crop("image", 8)
SCALE = stages.scale("image", mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))


def make_images(seed: int, count: int = 60) -> dict[str, np.ndarray[Any, Any]]:
    """Images uint8 [n, 3, 10, 12] of four classes, with noise that members differ on."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, CLASSES, count)
    image = rng.integers(0, 200, (count, 3, 10, 12)).astype(np.uint8)
    for number, one in enumerate(label):
        top, left = 2 + 3 * (one // 2), 2 + 4 * (one % 2)
        image[number, :, top : top + 3, left : left + 4] += 55
    return {"image": image, "label": label}


class Convolutions(nn.Module):
    """A small network with what computes otherwise in training: batch normalization and dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.last = nn.Linear(64 * width, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(image)))
        return self.last(F.dropout(x, 0.1, self.training).flatten(1))


def write_photos(root: Path, size: tuple[int, int] = (24, 32), seed: int = 0, extension: str = ".jpg") -> Path:
    """A folder of three classes of photos, each with a colour of its own; one file's name is Latin-1."""
    rng = np.random.default_rng(seed)
    for number, folder in enumerate(FOLDERS):
        path = os.path.join(os.fsencode(root), folder)
        os.makedirs(path)
        for name in (b"a", b"b", b"c\xe9", b"d"):
            picture = rng.integers(0, 100, (*size, 3), np.uint8)
            picture[..., number] += 120
            with open(os.path.join(path, name + extension.encode()), "wb") as file:
                file.write(cv2.imencode(extension, cv2.GaussianBlur(picture, (5, 5), 2))[1].tobytes())
    return root


def build(params: dict[str, Any]) -> nn.Module:
    return Convolutions(params["width"])


def loss(net: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(net(batch["image"]), batch["label"], reduction="none")


def prepare(source: Any, *before: Any) -> Pipeline:
    """The stages of validation and test: those given, then crop and scale."""
    pipeline = Pipeline(source, seed=0)
    for stage in (*before, CROP, SCALE):
        pipeline = pipeline.map(stage)
    return pipeline


def declare(**options: Any) -> Ensemble:
    names = ("train", "valid", "test")
    usual = {name: prepare(sources.arrays(**make_images(seed))) for seed, name in enumerate(names)}
    usual |= {"name": "images", "recipe": Recipe(model=build, loss=loss), "epochs": 2, "batch_size": 16}
    usual |= {"members": [{"width": width, "lr": 0.05} for width in (2, 3, 4)], "combine": "average"}
    return Ensemble(**(usual | options))


def train(run_dir: Path, declared: Ensemble) -> Path:
    result = ensemble.submit(declared, run_dir=run_dir, executor="inline").wait()
    assert [row["state"] for row in result.members] == ["finished"] * len(declared.members or ())
    return run_dir


def link_torch(folder: Path) -> Path:
    """A folder with torch and what it requires, and no other package."""
    folder.mkdir()
    waiting, seen = ["torch"], set[str]()
    while waiting:
        name = waiting.pop()
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        if found.name in seen:
            continue
        seen.add(found.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():  # several packages may lie in one folder, such as nvidia
                (folder / top).symlink_to(Path(str(found.locate_file(top))).resolve())
        wanted = [each for each in found.requires or () if "extra ==" not in each]
        waiting += [re.split(r"[^\w.-]", each)[0] for each in wanted]
    return folder


def run_alone(packages: Path, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a folder, in a process that finds the standard library and these packages only."""
    forbidden = ("ensemble", "pipelines", "ray", "optuna", "pyarrow", "numba", "artifact_runs")
    setup = f"import sys\nsys.path.append({str(packages)!r})\n{code}\nimport importlib.util\n"
    setup += f"assert not set({forbidden!r}) & set(sys.modules)\n"
    setup += f"assert not any(map(importlib.util.find_spec, {forbidden!r}))\n"
    about = {"cwd": folder, "env": {"OMP_NUM_THREADS": "1"}, "capture_output": True, "text": True, "timeout": 300}
    about |= {"check": False}
    return subprocess.run([sys.executable, "-I", "-S", "-c", setup], **about)
