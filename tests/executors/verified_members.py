"""Pipelines that are said to be one and are not; in a module of its own, so that workers can import it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
from kit.execute_members import samples

from pipelines import Pipeline


def look(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] * np.float32(os.environ.get("LOOK", "1"))}


def train_by_environment(params: dict[str, Any]) -> Pipeline:
    os.environ["LOOK"] = str(params["look"])
    return samples(96, 0).map(look, id="look")


class DriftsInAFeeder:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        drifts = is_feeder() and Path(self.marker).exists()
        return {**sample, "x": sample["x"] + np.float32(drifts)}


def train_that_hangs(params: dict[str, Any]) -> Pipeline:
    return samples(96, 0).map(hang_in_a_checker, id="hangs")


def train_that_drifts(params: dict[str, Any]) -> Pipeline:
    return samples(2000, 0).map(DriftsInAFeeder(params["marker"]), id="drifts")


def is_feeder() -> bool:
    return sys.argv[0].endswith("feeder/process.py")


def hang_in_a_checker(sample: dict[str, Any]) -> dict[str, Any]:
    if any(frame.filename.endswith("checker_main.py") for frame in traceback.extract_stack()):
        time.sleep(200)
    return sample


def other_in_a_feeder(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": sample["x"] + np.float32(is_feeder())}
