"""The doctor looks at the machine that it runs on: quickly, whole, and without ever failing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.cli import doctor
from ensemble.extend import TABLES

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {*(kind.replace("_", " ") for kind in TABLES)}
EXPECTED |= {
    "Python",
    "kernel",
    "cores",
    "memory",
    "shared memory (memfd)",
    "/dev/shm",
    "file locks",
    "GPUs",
    "crops of JPEG files",
}
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


def test_what_this_project_needs_is_found(rows: list[doctor.Row]) -> None:
    by = {row["what"]: row for row in rows}
    for what in ("Python", "torch", "gloo", "Ray", "Optuna", "shared memory (memfd)"):
        assert by[what]["available"], by[what]
    assert f"{len(os.sched_getaffinity(0))} by affinity" in by["cores"]["value"]


def test_a_slow_import_of_torch_does_not_keep_the_rest_waiting() -> None:
    by = {row["what"]: row for row in doctor.examine(timeout_s=0.01)}
    assert set(by) == EXPECTED
    assert not by["torch"]["available"] and "0.01 s" in by["torch"]["reason"]
    assert by["torch"]["value"]  # the version is known all the same
    assert not by["gloo"]["available"] and by["gloo"]["reason"].startswith("not known")


def test_an_import_of_torch_that_takes_long_is_waited_for_with_a_word(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        f"open({str(gate)!r}).read()\n"  # until the other end is opened, and closed
        "class version: cuda = None\n"
        "__version__, get_num_threads = '9.9', lambda: 3\n"
    )
    (tmp_path / "torch" / "distributed.py").write_text("def is_available(): return False\n")
    child = subprocess.Popen(
        [sys.executable, "-m", "ensemble.cli", "doctor", "--json", "-"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    assert "importing torch, which may take minutes" in child.stderr.readline()
    with open(gate, "w"):
        pass
    out, _ = child.communicate(timeout=300)
    by = {row["what"]: row for row in json.loads(out)}
    assert by["torch"]["available"] and by["torch"]["value"].startswith("9.9, 3 threads")


def test_a_look_that_goes_wrong_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENSEMBLE_WATTS_PER_CORE", "plenty")
    by = {row["what"]: row for row in doctor.examine(timeout_s=0.01)}
    assert "plenty" in by["power estimate"]["reason"] and "SpecError" not in by["power estimate"]["reason"]
    assert "Optuna" in by


def test_a_torch_that_cannot_be_imported_is_said(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libsomething.so.9 is missing')\n")
    code = "import json; from ensemble.cli import doctor; print(json.dumps(doctor.examine(300.0)))"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    run = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    by = {row["what"]: row for row in json.loads(run.stdout)}
    assert "libsomething.so.9 is missing" in by["torch"]["reason"]


def test_the_table_shows_every_row_and_reason(rows: list[doctor.Row]) -> None:
    extra = {"what": "extra", "value": "", "available": False, "reason": "[bold] is no markup"}
    text = "\n".join(line for line, _ in doctor.list_lines([*rows, extra], 80))
    assert all(row["what"] in text for row in rows)
    assert "[bold] is no markup" in text
