"""Checks and measures the project on a GPU, case by case: see docs/how-to/gpu.md. `tests/gpu/run.sh` runs it.

Each case is a process with a time limit, so one that crashes or hangs does not stop the others, and the rows that
it had are kept. The JSON file is complete after every case; the same command again runs what has no result yet.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
sys.path[:0] = [path for path in (str(ROOT), str(HERE)) if path not in sys.path]

from gpu_cases import CASES, Case  # noqa: E402
from report import as_markdown  # noqa: E402

from ensemble.executors.mps import stop_stale_daemon  # noqa: E402

#: Seconds for all cases: what calls this may end it after ten minutes.
TOTAL_S = 525.0
_REHEARSAL_S = 240.0  # for a case on a CPU, which others may use
_LEAST_S = 10.0  # in which no case gets anywhere
#: The states in which a case has its result.
SETTLED = ("passed", "absent")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; returns 0 if all have passed or are absent here, 1 if not."""
    options = _parse(arguments)
    results = _load(options.out, options.device)
    if results is None:
        print(f"{options.out} has results of another device: name another file with --out", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    environment, deadline = _make_environment(options.device), time.monotonic() + options.limit_s
    chosen = [case for case in CASES if not options.only or case.name in options.only]
    for case in chosen:
        if not options.again and results["cases"].get(case.name, {}).get("state") in SETTLED:
            print(f"{case.name}: has a result (--again measures it again)", flush=True)
            continue
        limit_s = min(case.limit_s if options.device == "cuda" else _REHEARSAL_S, deadline - time.monotonic())
        result = _run(case, options.device, limit_s, environment) if limit_s >= _LEAST_S else {"state": "no time"}
        results["cases"][case.name] = {"summary": case.summary, **result}
        _save(options.out, results)
        print(f"{case.name}: {result['state']}, {result.get('seconds', 0):.0f} s", flush=True)
    print("\n" + as_markdown(results))
    return int(any(results["cases"][case.name]["state"] not in SETTLED for case in chosen))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu/run.sh", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse in a small size")
    default = Path(os.environ.get("OUT") or ".") / "gpu.json"
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"results, JSON ({default})")
    parser.add_argument("--again", action="store_true", help="also run cases that have a result in FILE")
    names = [case.name for case in CASES]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CASE", help="of " + ", ".join(names))
    parser.add_argument("--limit-s", type=float, default=TOTAL_S, metavar="S", help=f"for all ({TOTAL_S:g})")
    return parser.parse_args(arguments)


def _load(path: Path, device: str) -> dict[str, Any] | None:
    """The results in the file, or new ones; None if it is of another device."""
    if not path.exists():
        return {"format": 1, "kind": device, "revision": _find_revision(), "cases": {}}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results if results["kind"] == device else None


def _save(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _find_revision() -> str | None:
    """The commit that is checked out; None where this is no checkout."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _make_environment(device: str) -> dict[str, str]:
    """Of the cases' processes: they find the project, and see one GPU."""
    from ensemble.meter.devices import list_gpus

    paths = [str(ROOT), str(HERE), str(HERE.parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if device == "cuda" and len(gpus := list_gpus()) > 1:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[0].id
    return environment


def _run(case: Case, device: str, limit_s: float, environment: dict[str, str]) -> dict[str, Any]:
    """Run one case in a process of its own; returns its result."""
    folder, start = Path(tempfile.mkdtemp(prefix="gpu-")), time.monotonic()
    rows, log = folder / "rows", folder / "log"
    command = [sys.executable, "-m", "gpu_cases", case.name, device, str(limit_s), str(rows)]
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # its end ends the case
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": str(folder)},
                start_new_session=True,
            )
        try:
            process.wait(timeout=limit_s)
            timed_out = False
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # members end with their executor
            process.communicate()
        found = _read_rows(rows)
        return {**_conclude(process.returncode, timed_out, found, log), "seconds": time.monotonic() - start}
    finally:
        for service in folder.glob("*/mps"):  # of a run that was killed
            stop_stale_daemon(service.parent)
        shutil.rmtree(folder, ignore_errors=True)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that a case wrote; a last line that is not complete is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _conclude(code: int, timed_out: bool, found: list[dict[str, Any]], log: Path) -> dict[str, Any]:
    """The result of a case from its exit status, rows and log."""
    rows = [row for row in found if "what" in row]
    device = next((row["device"] for row in found if "device" in row), None)
    absent = next((row["absent"] for row in found if "absent" in row), None)
    state = "timed out" if timed_out else "failed" if code else "absent" if absent is not None else "passed"
    result: dict[str, Any] = {"state": state, "device": device, "rows": rows}
    if absent is not None:
        result["reason"] = absent
    if state in ("failed", "timed out"):
        result |= {"exit_status": code, "log": log.read_text(errors="replace")[-4000:]}
    return result


if __name__ == "__main__":
    sys.exit(main())
