"""What `ensemble run` prints while nodes of its cluster are lost and join: its own lines, and none of Ray's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults_cluster import Nodes
from kit.finished_runs import of_kind
from kit.leftovers import wait_until

SPEC = Path(__file__).parents[1] / "deploy" / "slow_spec.py"
PROGRESS = re.compile(r"\[\d+:\d\d\] ")
LOST = re.compile(r"node \S+ is lost: [A-Za-z ,.']+")  # words, without ids and codes
LIMIT_S = 400.0


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
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    try:
        with subprocess.Popen(command, cwd=tmp_path, env=nodes.environment, **pipes) as run:
            wait_until(
                lambda: run.poll() is not None or len(of_kind(tmp_path / "run", "checkpoint")) >= 4, "epochs"
            )
            nodes.kill(1)
            nodes.have(2)
            (tmp_path / "fast").touch()
            _, err = run.communicate(timeout=LIMIT_S)
    finally:
        nodes.close()
    assert run.returncode == 0, err
    others = [line for line in err.splitlines() if not PROGRESS.match(line)]
    assert len(others) == 1, err
    assert LOST.fullmatch(others[0]), err
