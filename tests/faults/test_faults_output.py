"""What `ensemble run` prints while nodes of its cluster are lost and join: its own lines, and none of Ray's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults_cluster import Nodes, kill_all
from kit.event_dicts import read_events

SPEC = Path(__file__).parents[1] / "deploy" / "slow_spec.py"
PROGRESS = re.compile(r"\[\d+:\d\d\] ")
LOST = re.compile(r"node \S+ is lost: [A-Za-z ,.']+")  # words, without ids and codes
LIMIT_S = 400.0


def count_checkpoints(run_dir: Path) -> int:
    events = run_dir / "events.jsonl"
    return sum(event["type"] == "checkpoint" for event in read_events(events)) if events.exists() else 0


@pytest.mark.slow
@pytest.mark.ray
def test_a_lost_node_is_one_line_among_the_progress(tmp_path: Path) -> None:
    shutil.copy(SPEC, tmp_path)
    nodes = Nodes(2, cpus=2)
    command = [
        sys.executable,
        "-m",
        "ensemble.cli",
        "run",
        "slow_spec.py",
        "--run-dir",
        "run",
        "--set",
        "epochs=10",
    ]
    try:
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env=nodes.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as run:
            until = time.monotonic() + LIMIT_S
            while count_checkpoints(tmp_path / "run") < 4:
                assert run.poll() is None and time.monotonic() < until
                time.sleep(0.1)
            kill_all(nodes.of(1))
            nodes.alive.pop(1).wait()
            nodes.have(2)
            (tmp_path / "fast").touch()
            _, err = run.communicate(timeout=LIMIT_S)
    finally:
        nodes.close()
    assert run.returncode == 0, err
    others = [line for line in err.splitlines() if not PROGRESS.match(line)]
    assert len(others) == 1, err
    assert LOST.fullmatch(others[0]), err
