"""Runs plain.py and its three ports on the same data and trials, in turn, and writes what each needed.

python examples/port/measure.py DATA --out port.json [--repeats 3] [--trials 8] [--epochs 3] [--samples 6000]

Seconds, CPU-seconds and memory are of the whole process tree: CPU time as the kernel adds it up when processes
end, or as last seen where one is nobody's child any more; memory as the highest sum of PSS (pages divided by the
processes that share them), looked at twice a second. It prints the table of docs/how-to/port-a-script.md.
"""

import argparse
import contextlib
import difflib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
SCRIPTS = ("plain", "attach_only", "train_function", "recipe")


def count_changes(name):
    """Lines of a port that are not in plain.py, and lines of that which are gone; without empty ones."""
    sides = [[x for x in (HERE / f"{s}.py").read_text().splitlines() if x.strip()] for s in ("plain", name)]
    changes = [line[0] for line in difflib.ndiff(*sides)]
    return changes.count("+"), changes.count("-")


def look(process, cpu_s):
    """MiB of a process and all below it; their CPU-seconds so far go into `cpu_s`, by process."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                total += each.memory_full_info().pss
                cpu_s[each.pid] = sum(each.cpu_times()[:2])
    return total / 2**20


def run(name, options):
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/result.json"
        command = [sys.executable, str(HERE / f"{name}.py"), options.data, "--out", out]
        for option in ("trials", "epochs", "samples", "together"):
            command += [f"--{option}", str(getattr(options, option))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        began, peak, seen = time.monotonic(), 0.0, {}
        before = os.times()
        with open(f"{folder}/log", "w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            watched = psutil.Process(process.pid)
            while True:
                peak = max(peak, look(watched, seen))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
                    break
            if process.returncode:
                log.seek(0)
                raise SystemExit(f"{name}.py failed:\n{log.read()}")
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        result = json.loads(Path(out).read_text())
        seconds = time.monotonic() - began
    return {"seconds": seconds, "cpu_s": max(cpu, sum(seen.values())), "pss_mib": peak, **result}


def summarize(runs):
    rows = []
    for name in SCRIPTS:
        added, removed = count_changes(name)
        own = runs[name]
        medians = {key: statistics.median(r[key] for r in own) for key in ("seconds", "cpu_s", "pss_mib", "best")}
        rows.append({"script": name, "lines_added": added, "lines_removed": removed, **medians})
    return rows


def format_table(rows):
    """The table of the page."""
    lines = [
        "| script | lines added | lines removed | seconds | CPU-seconds | peak memory, MiB | best accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = f"{row['seconds']:.0f} | {row['cpu_s']:.0f} | {row['pss_mib']:.0f} | {row['best']:.3f}"
        lines.append(f"| `{row['script']}.py` | {row['lines_added']} | {row['lines_removed']} | {figures} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    parser.add_argument("--out", required=True)
    defaults = {"repeats": 3, "trials": 8, "epochs": 3, "samples": 6000, "together": 4}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    runs = {name: [] for name in SCRIPTS}
    for repeat in range(options.repeats):
        for name in SCRIPTS[repeat % 4 :] + SCRIPTS[: repeat % 4]:
            runs[name].append(run(name, options))
    rows = summarize(runs)
    used = {name: getattr(options, name) for name in defaults}
    Path(options.out).write_text(json.dumps({"options": used, "rows": rows, "runs": runs}, indent=1) + "\n")
    print(format_table(rows))


if __name__ == "__main__":
    main()
