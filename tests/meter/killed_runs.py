"""A run whose driver is killed three times, after more epochs each: `killed_runs.py EXECUTOR` in an empty folder.

Its own CPU-seconds are written to `own.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

KILLS, EPOCHS_BETWEEN = 3, 6
SPEC = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from burning_members import declare

def spec():
    return declare(members=2, epochs=20, step_s=0.03)
"""


def main(executor: str) -> None:
    """Run, kill and go on, to the end."""
    Path("spec.py").write_text(SPEC)
    command = [sys.executable, "-m", "ensemble.cli", "run", "spec.py", "--executor", executor, "--run-dir", "run"]
    for kill in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and count_epochs(Path("run/events.jsonl")) < (kill + 1) * EPOCHS_BETWEEN:
                time.sleep(0.1)
            process.kill()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    Path("own.json").write_text(json.dumps(time.process_time()))


def count_epochs(log: Path) -> int:
    """How many epochs a run has logged, if it has a log."""
    return log.read_text().count('"type":"epoch"') if log.exists() else 0


if __name__ == "__main__":
    main(sys.argv[1])
