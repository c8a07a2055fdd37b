"""The doctor looks at the machine that it runs on: quickly, whole, and without ever failing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ensemble.cli import doctor
from ensemble.cli.doctor_power import (
    ACPI,
    EXTERNAL,
    NVML,
    RAPL,
    Finding,
    Machine,
    Source,
    compare,
    examine_power,
    find_battery,
    read_source,
)
from ensemble.meter.power import PowerError, PowerSource, Reading

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "Python",
    "kernel",
    "cores",
    "memory",
    "shared memory (memfd)",
    "/dev/shm",
    "file locks",
    "GPUs",
    "crops of JPEG files",
    "MPS",
    "RAPL",
    "AMD energy driver",
    "ACPI power meter",
    "external meter",
    "NVML",
    "CPU time",
    "power estimate",
    "Ray",
    "Optuna",
    "torch",
    "gloo",
    "NCCL",
    "MPI",
    "Horovod",
}


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
    assert "importing torch, which takes long" in child.stderr.readline()
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


def test_importing_the_doctor_imports_nothing_heavy() -> None:
    code = (
        "import sys, ensemble.cli.doctor; print({'torch', 'ray', 'rich', 'optuna', 'psutil'} & set(sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "set()"


ABSENT = tuple(Source(name, reason="there is none") for name in (RAPL, ACPI, EXTERNAL, NVML))


def find_rule(machine: Machine, words: str) -> Finding:
    (finding,) = [finding for finding in compare(machine) if words in finding.rule]
    return finding


def test_a_machine_without_meters_does_not_meet_what_asks_for_one() -> None:
    machine = Machine(ABSENT, clock_error_s=math.inf, battery="BAT0")
    for words, reason in [
        ("whole node", "processors are estimated"),
        ("5 %", "factor of two"),
        ("in step", "unsynchronized"),
        ("battery", "BAT0"),
        ("one sample a second", "up to 30 s"),
    ]:
        finding = find_rule(machine, words)
        assert finding.conformity == "does not meet" and reason in finding.because


def test_what_one_look_cannot_decide_is_said() -> None:
    machine = Machine((Source(RAPL, ("package-0",)), Source(EXTERNAL, ("node",))), clock_error_s=None)
    for words in ("whole node", "5 %", "all nodes of", "60 samples", "in step"):
        assert find_rule(machine, words).conformity == "cannot be checked", words
    assert find_rule(Machine(ABSENT, clock_error_s=0.02), "in step") == Finding(
        "Inference: the clocks of node and meter are in step (NTP)",
        "meets",
        "this clock is off by at most 20 ms; the meter's is not known",
    )
    assert find_rule(Machine(ABSENT, clock_error_s=2.0), "in step").conformity == "does not meet"


def test_processors_and_gpus_alone_are_not_the_whole_node() -> None:
    machine = Machine((Source(RAPL, ("package-0",)), Source(NVML, ("gpu-0",))))
    finding = find_rule(machine, "whole node")
    assert finding.conformity == "does not meet" and "only package-0, gpu-0 are measured" in finding.because
    assert find_rule(Machine((Source(NVML, ("gpu-0",)),)), "5 %").conformity == "does not meet"


@pytest.mark.parametrize(("model", "conformity"), [("NVIDIA H100", "does not meet"), ("T4", "cannot be checked")])
def test_gpus_whose_sensor_sees_a_quarter_of_the_time_are_named(model: str, conformity: str) -> None:
    finding = find_rule(Machine(ABSENT, gpus=(model, model)), "GPU")
    assert finding.conformity == conformity
    assert not [finding for finding in compare(Machine(ABSENT)) if "GPU" in finding.rule]


def test_a_counter_for_root_only_is_a_finding_with_its_remedy() -> None:
    reason = "energy_uj is readable by root only: `sudo chmod a+r energy_uj`"
    assert find_rule(Machine((Source(RAPL, reason=reason, is_denied=True),)), "may read").because == reason
    assert find_rule(Machine(ABSENT), "may read").conformity == "meets"


def test_a_source_that_this_user_may_not_read_is_known_by_its_error() -> None:
    refused = PowerSource(RAPL, "cpu", "measured", refuse_to_read)
    source = read_source(refused)
    assert source.is_denied
    assert find_rule(Machine((source,)), "may read") == Finding(
        "beyond its rules: this user may read what measures", "does not meet", "/m.csv: Permission denied"
    )


def refuse_to_read() -> list[Reading]:
    raise PowerError("/m.csv: Permission denied", is_denied=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "No such file"), ("garbage\n", "holds no line"), ("{later},100\n", "s ahead of this")],
)
def test_a_meter_that_cannot_be_read_is_said_with_the_reason(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    if text is not None:
        (tmp_path / "meter.csv").write_text(text.format(later=time.time() + 5000))
    (finding,) = [each for each in examine_power(tmp_path / "meter.csv") if "whole node" in each.rule]
    assert reason in finding.because


EXAMINE = """
import os, sys
from pathlib import Path
from ensemble.cli.doctor_power import examine_power
examine_power()  # imports what another user may not read
if os.getuid() == 0:
    os.setuid(65534)
(finding,) = [each for each in examine_power(Path(sys.argv[1])) if "may read" in each.rule]
print(finding.conformity, finding.because)
"""


def test_a_file_of_another_user_is_denied(tmp_path: Path) -> None:
    meter = tmp_path / "meter.csv"
    meter.touch(mode=0)
    command = [sys.executable, "-c", EXAMINE, str(meter)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("does not meet") and "Permission denied" in said


def test_a_battery_of_a_mouse_is_none_of_the_machine(tmp_path: Path) -> None:
    for name, kind, scope in [("AC", "Mains", ""), ("mouse", "Battery", "Device")]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "type").write_text(kind + "\n")
        (tmp_path / name / "scope").write_text(scope + "\n")
    assert find_battery(tmp_path) == ""
    (tmp_path / "BAT1").mkdir()
    (tmp_path / "BAT1" / "type").write_text("Battery\n")
    assert find_battery(tmp_path) == "BAT1"
    assert find_battery(tmp_path / "none") == ""


@pytest.mark.more
def test_the_command_prints_each_rule_and_writes_rows(tmp_path: Path) -> None:
    meter = tmp_path / "meter.csv"
    meter.write_text(f"{time.time()},100\n")
    command = [sys.executable, "-m", "ensemble.cli", "doctor", "--power", "--meter", str(meter), "--json", "-"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    rows = json.loads(run.stdout)
    assert all(set(row) == {"rule", "conformity", "because"} and row["because"] for row in rows)
    assert {row["conformity"] for row in rows} <= {"meets", "does not meet", "cannot be checked"}
    (scope,) = [row for row in rows if "whole node" in row["rule"]]
    assert "external meter is read" in scope["because"]
    run = subprocess.run(command[:-4], env=env, check=True, capture_output=True, text=True)
    assert "PTDaemon" in run.stdout and "does not meet" in run.stdout
