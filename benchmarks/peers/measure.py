"""Runs the members of a case by each system, in turn, and measures their whole process trees."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.systems import PACKAGES, READERS, SERVERS, WRITERS
from benchmarks.results import Report
from ensemble.meter.memory import tree_memory_gb

OURS = "ray-ensemble"
#: Systems of this project's environment, except `dataloader`: the package whose version says which.
OWN = {OURS: OURS, "ray_tune": "ray", "ray_data": "ray"}
SYSTEMS = (*OWN, "dataloader", *PACKAGES)
#: Widths of the members' networks, and seconds after which a member begins, by its number.
CASES = {"equal": ((16,), 0.0), "unlike": ((16, 16, 16, 48), 0.0), "late": ((16,), 2.0)}
MOST_S = 300  # of one run; members of some systems wait for ever for a server that has forgotten them
_SUBREAPER = 36  # prctl(2)
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system with so many members in a case.

    Attributes:
        cpu_s, seconds: of all processes, from the start of the first to the end of the last, imports included.
        samples_per_s: that all members have trained together, by those seconds.
        cpu_ms_a_sample: CPU time for each sample that a member has trained on.
        memory_mib: the highest sum of PSS, looked at twice a second.
        error: why there are no figures, or fewer runs.
    """

    case: str
    members: int
    system: str
    version: str
    samples: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    samples_per_s: float = 0.0
    cpu_ms_a_sample: float = 0.0
    memory_mib: float = 0.0
    runs: int = 1
    error: str = ""


class Environment:
    """The Python of the other systems: an environment in a folder, with torch and what could be installed."""

    def __init__(self, folder: Path, systems: Sequence[str], report: Report) -> None:
        self.python = folder / "bin" / "python"
        self.errors: dict[str, str] = {}
        wanted = [PACKAGES[system] for system in systems if system in PACKAGES]
        if wanted and not self.python.exists():
            report(f"peers: an environment in {folder}")
            venv.create(folder, with_pip=True)
        base = [f"torch=={metadata.version('torch').partition('+')[0]}", "numpy", "pillow"]
        for package in [None, *wanted] if wanted else []:
            asked = base if package is None else [package, *base]
            installed = subprocess.run(
                [self.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *asked],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if installed.returncode:
                why = f"not installed: {(installed.stderr.strip().splitlines() or ['pip failed'])[-1]:.120}"
                self.errors |= dict.fromkeys(wanted if package is None else [package], why)
        if wanted:  # some need torchvision, which may be built for another torch
            subprocess.run([self.python, _ROOT / "deploy" / "mend_torchvision.py"], check=False)

    def python_of(self, system: str) -> str:
        """The interpreter that runs a system."""
        return str(self.python) if system in PACKAGES else sys.executable


def run_case(
    case: str, count: int, systems: Sequence[str], options: dict[str, Any], environment: Environment, repeats: int
) -> list[Row]:
    """Run members by each system, in turn, `repeats` times; medians."""
    runs: dict[str, list[Row]] = {system: [] for system in systems}
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what a system leaves behind is waited for here
    try:
        for system in [*systems] * repeats:
            runs[system].append(_run(case, count, system, options, environment))
    finally:
        ctypes.CDLL(None).prctl(_SUBREAPER, 0, 0, 0, 0)
    return [_median(rows) for rows in runs.values()]


def _median(rows: Sequence[Row]) -> Row:
    from benchmarks.results import median_row

    failed, complete = [row for row in rows if row.error], [row for row in rows if not row.error]
    if not complete:
        return failed[0]
    error = f"{len(failed)} of {len(rows)} runs: {failed[0].error}" if failed else ""
    return replace(median_row(complete), error=error)


def _run(case: str, count: int, system: str, options: dict[str, Any], environment: Environment) -> Row:
    package = PACKAGES.get(system, "")
    version = package.partition("==")[2] or metadata.version(OWN.get(system, "torch"))
    about: dict[str, Any] = {"case": case, "members": count, "system": system, "version": version}
    if package in environment.errors:
        return Row(**about, error=environment.errors[package])
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        widths, delay_s = CASES[case]
        members = [
            {
                "width": widths[n % len(widths)],
                "lr": 0.02 * (1 + n % 4),
                "delay_s": delay_s * n * (n >= count // 2),
                "number": n,
                "out": f"{folder}/{n}.json",
            }
            for n in range(count)
        ]  # fmt: skip
        common = {**options, "system": system, "folder": f"{folder}/data"}
        python, module = environment.python_of(system), "benchmarks.peers.systems"
        if system in WRITERS:
            subprocess.run(_command(python, module, {**common, "do": "write"}), check=True, cwd=_ROOT)
        if system in READERS:
            commands = [_command(python, module, {**common, **member}) for member in members]
        else:
            asked = {**common, "members": members, "out": f"{folder}/0.json"}
            commands = [_command(python, "benchmarks.peers.ours", asked)]
        server = [_command(python, module, {**common, "do": "serve"})] if system in SERVERS else []
        used = _measure(server, commands, Path(folder))
        results = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("*.json")]
        if "error" in used or len(results) != len(commands):
            return Row(**about, error=str(used.get("error") or "a member wrote no result")[-160:])
    samples = sum(result["samples"] for result in results)
    per_sample = {"samples_per_s": samples / used["seconds"], "cpu_ms_a_sample": 1e3 * used["cpu_s"] / samples}
    return Row(**about, samples=samples, **used, **per_sample)


def _command(python: str, module: str, options: dict[str, Any]) -> list[str]:
    return [python, "-m", module, json.dumps(options)]


def _measure(servers: list[list[str]], commands: list[list[str]], folder: Path) -> dict[str, Any]:
    """Run servers until all commands have ended; what all of it used."""
    before, began_s, peak = os.times(), time.monotonic(), 0.0
    used_s: dict[tuple[int, float], float] = {}
    log = folder / "log.txt"
    with log.open("wb") as output:
        started = [
            subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, cwd=_ROOT)
            for command in (*servers, *commands)
        ]
        waited = started[len(servers) :]
        try:
            while any(process.poll() is None for process in waited) and time.monotonic() < began_s + MOST_S:
                peak = max(peak, sum(tree_memory_gb(process.pid) or 0.0 for process in started))
                used_s |= _list_cpu_seconds()
                time.sleep(0.5)
        finally:
            seconds = time.monotonic() - began_s
            hanging = sum(process.poll() is None for process in waited)
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
                process.wait()
            _reap_others()
    if hanging:
        return {"error": f"{hanging} of {len(waited)} members had not ended after {MOST_S} s"}
    after = os.times()
    if any(process.returncode for process in waited):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {"error": (lines or ["it failed"])[-1]}
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    cpu_s = max(
        cpu_s, sum(used_s.values())
    )  # Ray's processes are killed, with whom the kernel forgets their children's
    return {"seconds": seconds, "cpu_s": cpu_s, "memory_mib": 1024 * peak}


def _list_cpu_seconds() -> dict[tuple[int, float], float]:
    """What each process below this one has used so far."""
    seconds = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            seconds[process.pid, process.create_time()] = times.user + times.system
    return seconds


def _reap_others() -> None:
    """Wait for what was left behind, such as DataLoader workers; end it where it does not end by itself."""
    children = psutil.Process().children(recursive=True)
    for process in psutil.wait_procs(children, timeout=5)[1]:
        with contextlib.suppress(psutil.Error):
            process.kill()
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass


def ratio(rows: Sequence[Row], of: str, to: str, figure: str) -> float:
    """The median of a figure of one system over that of another, over all cases that both have done."""
    by_case = {(row.case, row.members, row.system): getattr(row, figure) for row in rows if row.samples}
    both = [(by_case[case, n, of], by_case.get((case, n, to))) for case, n, system in by_case if system == of]
    return float(statistics.median([value / other for value, other in both if other] or [math.nan]))
