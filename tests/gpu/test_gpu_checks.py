"""`tests/gpu/run.sh` in its small size on the CPU, so that nothing in it fails for the first time on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import CASES
from kit import nvml_stand_in

HERE = Path(__file__).parent
QUICK = ("environment", "codecs")
#: What a machine with a GPU may lack: the checks must not need it.
NOT_NEEDED = ("ray", "optuna", "cmaes", "simplejpeg", "cv2", "sklearn", "scipy", "pyarrow", "rich")
NOT_NEEDED += ("pytest", "hypothesis", "torchvision", "peft")

_WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        absent = name.partition(".")[0] in {NOT_NEEDED!r}
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


def run(tmp_path: Path, *arguments: str, device: str = "cpu", rc: int = 0) -> tuple[str, dict[str, Any]]:
    """Run the checks without the packages that they must not need; returns what was printed, and the results."""
    without, out = tmp_path / "without", tmp_path / "gpu.json"
    without.mkdir(exist_ok=True)
    (without / "sitecustomize.py").write_text(_WITHOUT)
    done = subprocess.run(
        [str(HERE / "run.sh"), "--device", device, "--out", str(out), *arguments],
        env={**os.environ, "PYTHONPATH": str(without)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,  # longer than the limit of the checks themselves
    )
    assert done.returncode == rc, done.stdout + done.stderr
    return done.stdout + done.stderr, json.loads(out.read_text()) if out.exists() else {}


def check_rows(case: dict[str, Any]) -> None:
    """Every check holds, and every figure that is missing has its reason."""
    assert case["rows"]
    for row in case["rows"]:
        assert row.get("passed", True) is True, row
        if row["what"] != "packages":
            missing = {key for key, value in row.items() if value is None and key != "speedup"}
            assert missing == set(row.get("reasons", {})), row


@pytest.mark.more
def test_quick_cases_are_rehearsed_and_their_results_kept(tmp_path: Path) -> None:
    printed, results = run(tmp_path, "--only", *QUICK)
    assert list(results["cases"]) == list(QUICK)
    for name, case in results["cases"].items():
        assert (case["state"], case["device"]) == ("passed", "CPU")
        check_rows(case)
        assert f"## {name}: passed" in printed
    product = next(row for row in results["cases"]["environment"]["rows"] if "joules" in row)
    assert product["joules"] is None and product["reasons"]["joules"] == "measured on a GPU only"
    assert "missing, measured on a GPU only: " in printed
    report = [sys.executable, str(HERE / "report.py"), str(tmp_path / "gpu.json")]
    assert printed.endswith(subprocess.run(report, check=True, capture_output=True, text=True).stdout + "\n")
    before = results["cases"]["codecs"]["seconds"]
    printed, results = run(tmp_path, "--only", *QUICK)
    assert printed.count("has a result") == 2 and results["cases"]["codecs"]["seconds"] == before
    printed, _ = run(tmp_path, "--only", "codecs", device="cuda", rc=2)
    assert "results of another device" in printed


@pytest.mark.more
def test_a_case_that_fails_does_not_stop_the_next_and_is_run_again(tmp_path: Path) -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    out = tmp_path / "gpu.json"
    command = [str(HERE / "run.sh"), "--out", str(out), "--only", *QUICK]
    for limit, states in (("600", ["failed", "failed"]), ("1", ["no time", "no time"])):
        done = subprocess.run(
            [*command, "--limit-s", limit], env=hidden, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 1 and "has a result" not in done.stdout
        cases = json.loads(out.read_text())["cases"]
        assert [cases[name]["state"] for name in QUICK] == states
        assert all("torch sees no CUDA device" in case["log"] for case in cases.values() if "log" in case)


def test_energy_is_that_of_the_gpus_and_the_cases_see_the_first(tmp_path: Path) -> None:
    code = """
import json, checks
from gpu_cases.common import GpuEnergy, Setting
energy = GpuEnergy(Setting("cuda", 1.0))
print(json.dumps([energy.reason, energy.read(), checks._make_environment("cuda").get("CUDA_VISIBLE_DEVICES")]))
"""
    env = {**os.environ, **nvml_stand_in.build(tmp_path), "STAND_IN_GPUS": "H100:80,H100:80"}
    env["PYTHONPATH"] = f"{HERE}:{HERE.parents[1]}"
    env.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [None, 0.5, "GPU-0"]


#: With those of QUICK, all cases.
SLOW = (("precision", "loss_scaling", "nccl"), ("packing",), ("sharing", "copies", "mps"), ("fused",))
SLOW += (("adapters", "prefix", "images"),)


@pytest.mark.slow
@pytest.mark.parametrize("names", SLOW, ids="-".join)
def test_every_other_case_is_rehearsed(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert {*QUICK, *(name for each in SLOW for name in each)} == {case.name for case in CASES}
    _, results = run(tmp_path, "--only", *names)
    assert list(results["cases"]) == list(names)
    for name, case in results["cases"].items():
        assert case["state"] == ("absent" if name == "mps" else "passed"), case
        check_rows(case)
