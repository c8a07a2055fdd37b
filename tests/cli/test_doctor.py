"""The doctor looks at the machine that it runs on: quickly, whole, and without ever failing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ensemble.cli import doctor
from ensemble.extend import TABLES

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    *(kind.replace("_", " ") for kind in TABLES),
    "Python",
    "kernel",
    "cores",
    "memory",
    "/dev/shm",
    "GPUs",
}
EXPECTED |= {"shared memory (memfd)", "file locks", "crops of JPEG files"}
EXPECTED |= {"MPS", "RAPL", "ACPI power meter", "NVML", "CPU time", "power estimate", "Ray", "Optuna"}
EXPECTED |= {"torch", "gloo", "NCCL", "MPI", "Horovod"}


@pytest.fixture(scope="module")
def rows() -> list[doctor.Row]:
    return doctor.examine(timeout_s=300.0)  # however busy the machine is


def test_everything_is_looked_at_and_what_is_absent_has_a_reason(rows: list[doctor.Row]) -> None:
    assert {row["what"] for row in rows} == EXPECTED
    for row in rows:
        assert set(row) == {"what", "value", "available", "reason"}
        assert row["value"] if row["available"] else row["reason"]
        assert "\n" not in row["value"] + row["reason"]
    assert json.loads(json.dumps(rows)) == rows
    by = {row["what"]: row for row in rows}
    assert by["gloo"]["available"] and by["shared memory (memfd)"]["available"], by
    assert all(", tested " in by[what]["value"] for what in ("Python", "torch", "Ray", "Optuna"))
    assert f"{len(os.sched_getaffinity(0))} by affinity" in by["cores"]["value"]


def test_a_slow_import_of_torch_does_not_keep_the_rest_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENSEMBLE_WATTS_PER_CORE", "plenty")  # a look that goes wrong is a row
    by = {row["what"]: row for row in doctor.examine(timeout_s=0.01)}
    assert "plenty" in by["power estimate"]["reason"] and "SpecError" not in by["power estimate"]["reason"]
    assert set(by) == EXPECTED
    assert not by["torch"]["available"] and "0.01 s" in by["torch"]["reason"]
    assert by["torch"]["value"]  # the version is known all the same
    assert not by["gloo"]["available"] and by["gloo"]["reason"].startswith("not known")


def test_the_table_shows_every_row_and_reason(rows: list[doctor.Row]) -> None:
    extra = {"what": "extra", "value": "", "available": False, "reason": "[bold] is no markup"}
    text = "\n".join(line for line, _ in doctor.list_lines([*rows, extra], 80))
    assert all(row["what"] in text for row in rows)
    assert "[bold] is no markup" in text
