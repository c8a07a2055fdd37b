"""`.ci/run` fails on what a green test run can hide, and prints the totals last.

It runs here beside a Makefile that plays the tests, with the commands it would install already present.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GREEN = "12 passed, 1 skipped in 3.00s"
CUDA = "SKIPPED [1] tests/gpu/test_x.py:3: no CUDA device here"
BROWSER = "SKIPPED [1] tests/watch/test_x.py:3: no Chromium on this machine"
HOROVOD = "SKIPPED [1] tests/comm/test_x.py:3: Horovod is not installed (make horovod builds it)"
SLURM = "SKIPPED [1] tests/deploy/test_x.py:3: needs slurmctld, slurmd, sbatch, munged"
PROMETHEUS = "SKIPPED [1] tests/reporting/metrics/test_x.py:3: no prometheus"
DATA = "SKIPPED [1] tests/e2e/test_x.py:3: needs CIFAR-10: set ENSEMBLE_DATA"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    directory = tmp_path / "clone"
    (directory / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", directory / ".ci")
    (directory / "bin").mkdir()
    commands = ("chromium", "ip", "cc", "g++", "cmake", "patch", "mpicxx", "mpirun")
    for command in (*commands, "slurmctld", "slurmd", "sbatch", "munged", "prometheus"):
        (directory / "bin" / command).write_text("#!/bin/sh\n")
        (directory / "bin" / command).chmod(0o755)
    return directory


def ci(
    clone: Path, *, prints: str, tests: str = "true", demo: str = "true", horovod: str = "true"
) -> tuple[int, list[str]]:
    """Run it against tests that print `prints` and end as the command `tests` does; its status and lines."""
    (clone / "printed").write_text(prints + "\n")
    (clone / "Makefile").write_text(
        f"setup:\n\t@echo set up\nhorovod:\n\t@echo the build; {horovod}\n"
        f"test:\n\t@cat printed; echo data=$$ENSEMBLE_DATA ci=$$CI; {tests}\ndemo:\n\t@echo the demo; {demo}\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("ENSEMBLE_DATA", "MAKEFLAGS", "MAKELEVEL")}
    environment["PATH"] = f"{clone / 'bin'}:{environment['PATH']}"
    done = subprocess.run(
        [clone / ".ci" / "run"], env=environment, text=True, timeout=60,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


def test_green_tests_and_demo_pass_with_the_totals_last(clone: Path) -> None:
    status, lines = ci(clone, prints=f"{CUDA}\n{GREEN}")
    assert (status, lines[-1]) == (0, GREEN)
    assert "the demo" in lines


def test_failing_tests_fail_with_the_totals_last_and_no_demo(clone: Path) -> None:
    status, lines = ci(clone, prints="1 failed, 11 passed in 3.00s", tests="false")
    assert status != 0
    assert lines[-1] == "1 failed, 11 passed in 3.00s"
    assert "the demo" not in lines


@pytest.mark.parametrize(("names", "passes", "status"), [("abc", True, 0), ("abc", False, 1), ("abcd", True, 1)])
def test_up_to_three_tests_that_went_wrong_in_any_part_are_run_again_alone(
    clone: Path, names: str, passes: bool, status: int
) -> None:
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho alone: $*\n{'true' if passes else 'false'}\n")
    python.chmod(0o755)
    first, *others = (f"tests/{name}.py::test_{name}" for name in names)
    wrong = [
        f"FAILED {first} - why",
        f"ERROR {first} - what it left",
        *(f"ERROR {one} - set-up" for one in others),
    ]
    done, lines = ci(
        clone, prints="\n".join([CUDA, *wrong, "1 failed, 12 passed, 3 errors in 3.00s"]), tests="false"
    )
    assert done == status
    assert any(line.startswith("alone: ") and "--last-failed" in line for line in lines) == (len(names) < 4)
    assert ("the demo" in lines) == (status == 0)


@pytest.mark.parametrize("skipped", [BROWSER, HOROVOD, SLURM, PROMETHEUS])
def test_a_skip_of_what_is_provided_fails(clone: Path, skipped: str) -> None:
    status, lines = ci(clone, prints=f"{CUDA}\n{skipped}\n{GREEN}")
    assert status != 0
    assert skipped in lines[lines.index("the demo") if "the demo" in lines else 3 :]
    assert lines[-1] == GREEN


def test_a_test_on_data_may_be_skipped_only_where_there_is_no_data(clone: Path) -> None:
    assert ci(clone, prints=f"{DATA}\n{GREEN}")[0] == 0
    data = clone.parent / "shared" / "data"
    data.mkdir(parents=True)
    status, lines = ci(clone, prints=f"{DATA}\n{GREEN}")
    assert status != 0
    assert f"data={data} ci=true" in lines


def test_horovod_is_built_before_the_tests_which_are_not_run_where_that_fails(clone: Path) -> None:
    _, lines = ci(clone, prints=GREEN)
    assert lines.index("set up") < lines.index("the build") < lines.index(GREEN)
    status, lines = ci(clone, prints=GREEN, horovod="false")
    assert status != 0
    assert GREEN not in lines and "no totals" in lines[-1]


def test_a_failing_demo_fails(clone: Path) -> None:
    status, lines = ci(clone, prints=GREEN, demo="false")
    assert status != 0
    assert lines[-1] == GREEN
    assert "ci: make demo failed" in lines


def test_tests_that_never_got_to_their_totals_fail(clone: Path) -> None:
    status, lines = ci(clone, prints="Traceback", tests="false")
    assert status != 0
    assert "no totals" in lines[-1]
