"""Tries versions of libraries, as `make test-versions` does, or `try_versions.py ray==2.57.1,optuna==4.9.0 ...`.

Without arguments: the oldest and the newest Ray and Optuna that pyproject.toml allows. For each argument it makes
an environment with these versions beside the other packages of the Python that runs it; `python3.13,torch==2.15.0`
names another Python and has the newest of all others. There it runs the demo, a search on each executor that is
killed and resumed, and tests. It prints rows for docs/reference/versions.md.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIED = ("ray", "optuna")
TESTS = ("tests/executors/ray/test_ray_compat.py", "tests/search/test_search_optuna.py")
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
PYTEST = ("-q", "--timeout=300", "-p", "no:cacheprovider", "-k", "not constraints")  # these need Optuna 5
LIMIT_S = 1800.0
NAMES = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:])"
NAMES += ", '|', sys.version.split()[0])"


def read_dependencies() -> list[str]:
    """Return what pyproject.toml requires."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]


def read_bounds() -> tuple[list[str], list[str]]:
    """Return requirements for the oldest and for the newest versions in pyproject.toml's ranges."""
    lines = (line for line in read_dependencies() if "," in line)
    ranges = dict(re.fullmatch(r"(\w+)(?:\[\w+\])?(>=.*)", line).groups() for line in lines)
    lowest = [f"{name}=={ranges[name].removeprefix('>=').partition(',')[0]}.*" for name in TRIED]
    return lowest, [name + ranges[name] for name in TRIED]


def make_environment(folder: Path, requirements: Sequence[str]) -> str:
    """Make an environment that has these packages before all of this one; return its Python.

    With a requirement such as `python3.13`, it is one of that Python and has nothing of this one.

    Raises:
        subprocess.CalledProcessError: pip does not install them, as where no package index is reached.
    """
    others = [text for text in requirements if text.startswith("python3")]
    subprocess.run([*(others or [sys.executable]), "-m", "venv", "--without-pip", str(folder)], check=True)
    [packages], python = folder.glob("lib/python*/site-packages"), str(folder / "bin" / "python")
    requirements = [text for text in requirements if text not in others]
    options = ["--python", python, "install", "--quiet"]
    if others:
        options += [*read_dependencies(), *TEST_TOOLS]
    else:
        ours = next(path for path in sys.path if path.endswith("site-packages"))
        (packages / "others.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
        # A torch for CUDA needs other libraries than this one.
        alone = not any(text.startswith("torch") for text in requirements)
        options += ["--target", str(packages), *["--no-deps"] * alone]
    command = [sys.executable, "-m", "pip", *options, *requirements]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return python


def execute(*command: str) -> str:
    """Run a command to its end; a failure is an AssertionError with the last that it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    output = (done.stdout + done.stderr)[-4000:]
    assert done.returncode == 0, f"{' '.join(command)}: exit status {done.returncode}\n{output}"
    return done.stdout


def search_with_kill(python: str, executor: str, run_dir: Path) -> None:
    """Run examples/search.py, kill it by SIGKILL once a trial has finished, and run it to its end."""
    options = ["--executor", executor, "--run-dir", str(run_dir), "--set", "trials=8", "--set", "epochs=3"]
    command = [python, "-m", "ensemble.cli", "run", "examples/search.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    log, until = run_dir / "events.jsonl", time.monotonic() + LIMIT_S
    with open(run_dir.with_suffix(".out"), "w+", encoding="utf-8") as out:
        first = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
        while not (log.exists() and '"type":"finished"' in log.read_text(encoding="utf-8")):
            assert first.poll() is None and time.monotonic() < until, out.seek(0) or out.read()[-4000:]
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL, "the search ended before it was killed"
    execute(*command)
    rows = json.loads(execute(python, "-m", "ensemble.cli", "status", str(run_dir), "--json"))
    assert len(rows) == 8 and {row["state"] for row in rows} <= {"finished", "pruned"}, rows


def try_versions(requirements: Sequence[str]) -> list[str]:
    """Return what was run with these versions and how it went, as cells of a row."""
    with tempfile.TemporaryDirectory(prefix="versions-") as name:
        folder = Path(name)
        python = make_environment(folder / "env", requirements)
        cells = execute(python, "-c", NAMES, *TRIED, "torch").strip().split(" | ")
        parts = {"demo": lambda: execute(python, "-m", "ensemble.cli", "demo", "--run-dir", str(folder / "demo"))}
        for executor in ("inline", "local", "ray"):
            parts[executor] = lambda executor=executor: search_with_kill(python, executor, folder / executor)
        parts["tests"] = lambda: execute(python, "-m", "pytest", *PYTEST, *TESTS)
        for part, run in parts.items():
            began = time.monotonic()
            try:
                run()
                cells.append(f"{time.monotonic() - began:.0f} s")
            except (AssertionError, subprocess.TimeoutExpired) as error:
                print(f"{', '.join(requirements)}: {part}: {error}", file=sys.stderr)
                cells.append("failed")
            print(f"{cells[0]}: {part} {cells[-1]}", file=sys.stderr, flush=True)
    return [*cells, datetime.date.today().isoformat()]


if __name__ == "__main__":
    sets = [argument.split(",") for argument in sys.argv[1:]] or read_bounds()
    rows = [try_versions(requirements) for requirements in sets]
    for row in rows:
        print(f"| {' | '.join(row)} |")
    sys.exit(any("failed" in row for row in rows))
