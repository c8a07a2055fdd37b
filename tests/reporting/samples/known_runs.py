"""Runs whose predictions say of which record they are: the model returns the number that it finds in the content.

Nothing is learnt. The target is the number, but for some records, which are so the most wrong; a member adds its
`shift`, by which members disagree.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import re
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch import nn

import ensemble
from ensemble import Ensemble, Recipe
from pipelines import Pipeline, sources, stages

RECORDS = 60
SHIFTS = (0.0, 0.25)


class Reads(nn.Module):
    """Returns the number in the content."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(shift))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + self.shift


def model(params: dict[str, Any]) -> nn.Module:
    return Reads(params["shift"])


def target_of(number: int) -> float:
    """What the records say; of every seventh far from what is predicted, and of each by another distance."""
    return number + (100.0 + number if number % 7 == 0 else number / 1000)


def write_images(folder: Path) -> Any:
    """Grey images of one brightness each; their names say nothing of it."""
    folder.mkdir()
    labels = {}
    for number in range(RECORDS):
        name = f"{(number * 17) % RECORDS:03d}.png"
        cv2.imwrite(str(folder / name), np.full((40, 30, 3), 4 * number, np.uint8))
        labels[name] = target_of(number)
    return sources.image_folder(folder, labels=labels)


def write_texts(folder: Path) -> Any:
    folder.mkdir()
    texts = [f"the review <b>number {number}</b> of {RECORDS}" for number in range(RECORDS)]
    rows = [{"text": text, "label": target_of(number)} for number, text in enumerate(texts)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sources.jsonl(folder / "texts.jsonl")


def write_table(folder: Path) -> Any:
    folder.mkdir()
    lines = [f"{number},{number % 5},{target_of(number)}" for number in range(RECORDS)]
    (folder / "table.csv").write_text("\n".join(["age,rooms,label", *lines]) + "\n")
    return sources.csv(folder / "table.csv")


def make_series(folder: Path) -> Any:
    folder.mkdir()
    rows = np.zeros((RECORDS, 50), np.float32)
    for number in range(RECORDS):
        rows[number, number % 50] = 1.0 + number  # the place and the height of its one peak
    return sources.arrays(series=rows, label=np.array([target_of(each) for each in range(RECORDS)]))


def read_content(sample: dict[str, Any]) -> dict[str, Any]:
    """The number in the content, whatever kind it is of."""
    if "image" in sample:
        number = float(sample["image"].mean()) / 4
    elif "text" in sample:
        number = float(sample["text"].split()[3].partition("<")[0])
    elif "series" in sample:
        number = float(sample["series"].max()) - 1
    else:
        number = float(sample["age"])
    return {"value": np.float32(number), "target": np.float32(sample["label"])}


MAKERS = {"image": write_images, "text": write_texts, "table": write_table, "series": make_series}


def declare(source: Any, **options: Any) -> Ensemble:
    """Two members on parts of a source, in an order that is shuffled."""
    first, second = source.split(0.4, seed=3)
    train, valid = Pipeline(first, seed=1), Pipeline(second, seed=2)
    if "image" in source[0]:
        train, valid = (each.map(stages.decode_image("image")) for each in (train, valid))
    return Ensemble(**{
        "name": "known",
        "recipe": Recipe(model=model, loss="mse", inputs=("value",), target="target", task="regression"),
        "members": [{"shift": shift, "lr": 1e-12} for shift in SHIFTS],
        "optimizer": "sgd",
        "train": train.map(read_content),
        "valid": valid.map(read_content),
        "combine": "average",
        "batch_size": 7,
        **options,
    })  # fmt: skip


class Takes(nn.Module):
    """Names the class of the number in the content, of every seventh the next one."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(4.0 + shift))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        number = value.round().long()
        return self.scale * nn.functional.one_hot((number + (number % 7 == 0)) % 3, 3)


def classify(params: dict[str, Any]) -> nn.Module:
    return Takes(params["shift"])


def read_class(sample: dict[str, Any]) -> dict[str, Any]:
    found = read_content(sample)
    return {"value": found["value"], "target": int(found["value"].round()) % 3}


def declare_classes(source: Any) -> Ensemble:
    """The same with three classes."""
    recipe = Recipe(model=classify, loss="cross_entropy", inputs=("value",), target="target")
    first, second = source.split(0.4, seed=3)
    pipelines = (
        Pipeline(each, seed=1).map(stages.decode_image("image")).map(read_class) for each in (first, second)
    )
    train, valid = pipelines
    return declare(source, recipe=recipe, train=train, valid=valid)


def read_photo(sample: dict[str, Any]) -> dict[str, Any]:
    """The brightness of a photograph, and as a target what follows from its name."""
    value = np.float32(sample["image"].mean() / 4)
    return {"value": value, "target": np.float32(zlib.crc32(sample["key"].encode()) % 1000)}


def declare_photos(archive: Path) -> Ensemble:
    source = sources.tar(archive, rename={"jpg": "image", "jpeg": "image"})
    parts = source.split(0.5, seed=3)
    train, valid = (Pipeline(each, seed=1).map(stages.decode_jpeg("image", min_size=64)) for each in parts)
    return declare(source, train=train.map(read_photo), valid=valid.map(read_photo))


def run(path: Path, declared: Ensemble) -> Path:
    """Runs it in this process."""
    ensemble.submit(declared, path, executor="inline").wait()
    return path


class Lines:
    """A data set of the user's own, which reads a file anew each time, and does worse where it is told to.

    Args:
        folder: with `lines.txt`; a file `trap` in it has what happens at which index: "hang", "memory", "shared",
            "exit", "print".
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        trap = self.folder / "trap"
        if trap.exists():
            spring(json.loads(trap.read_text()).get(str(index)))
        number = int((self.folder / "lines.txt").read_text().split()[index])
        return {"age": number, "label": target_of(number)}


def spring(trap: str | None) -> None:
    if trap == "hang":
        time.sleep(10_000)
    elif trap == "memory":
        kept = [bytearray(2**28) for _ in range(64)]
        kept[0][0] = 1
    elif trap == "shared":  # which no limit of a process counts
        memory = [mmap.mmap(-1, 2**26) for _ in range(64)]
        for each in memory:
            for start in range(0, len(each), 4096):
                each[start] = 1
    elif trap == "exit":
        os._exit(7)
    elif trap == "print":
        for _ in range(200):
            print("x" * 10**6, flush=True)
            print("y" * 10**6, flush=True, file=sys.stderr)


def write_lines(folder: Path) -> Any:
    folder.mkdir()
    (folder / "lines.txt").write_text(" ".join(str((each * 7) % RECORDS) for each in range(RECORDS)))
    return sources.dataset(Lines(folder))


def read_number(fields: list[dict[str, Any]]) -> float:
    """The number in the content of a record as it is shown."""
    field = {each["name"]: each for each in fields}
    if "image" in field:
        data = base64.b64decode(field["image"]["picture"].partition(",")[2])
        return float(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).mean()) / 4
    if "text" in field:
        return float(re.findall(r"<b>number (\d+)</b>", field["text"]["text"])[0])
    if "series" in field:
        points = [tuple(map(float, each.split(","))) for each in field["series"]["lines"][0].split()]
        place = int(np.argmin([y for _, y in points]))  # the peak, as SVG's y goes down
        height = float(field["series"]["text"].rpartition("… ")[2]) - 1
        assert place == height % 50
        return height
    return float(field["age"]["text"])
