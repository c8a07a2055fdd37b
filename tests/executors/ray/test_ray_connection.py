"""The connection of a process to Ray is counted: several runs, and the user's program, use it at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.more]

HERE = Path(__file__).parent
PROGRAM = """
import os, sys, threading
import ray
from kit.execute_members import an_ensemble
from kit.leftovers import wait_until
from ensemble import Resources, resume, submit
from ensemble.executors import ClusterLostError

def start(path, epochs=2, **options):
    usual = {"gate_timeout_s": 240.0, "resources": Resources(cpus_per_worker=0.4)}
    made = an_ensemble([{"lr": 0.1, "step_s": 0.05}], epochs=epochs, **usual)
    return submit(made, path, executor="ray", **options)

def finish(run):
    assert [member["state"] for member in run.wait().members] == ["finished"], run

def of_two_runs(): # the second ends later than the first
    ended = []
    def train(path, epochs):
        finish(start(path, epochs))
        ended.append(path)
    threads = [threading.Thread(target=train, args=args) for args in (("first", 2), ("second", 8))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["first", "second"] and not ray.is_initialized()
    # agents that lose their Ray leave a directory to the next one
    wait_until(lambda: os.listdir(os.environ["TMPDIR"]) == [], "nothing is left", 60.0)

def init(**options):
    for _ in range(5): # a raylet has 30 seconds, also beside other load
        try:
            return ray.init(include_dashboard=False, log_to_driver=False, **options)
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()

def lose(path, close):
    trains = threading.Event()
    run = start(path, 2000, on_event=lambda event: trains.set() if event["type"] == "epoch" else None)
    trains.wait()
    close()
    try:
        run.wait()
    except ClusterLostError as error:
        assert "ray.shutdown" in str(error) and "ensemble resume" in str(error), error
    else:
        raise AssertionError("a run without Ray went on")

def of_the_program():
    init(num_cpus=2)
    for path in ("third", "fourth"):
        finish(start(path))
        assert ray.is_initialized(), "it is the program's"
    lose("lost", ray.shutdown)
    assert not ray.is_initialized(), "nobody starts a Ray unasked"

def of_the_run():
    def exchange():
        ray.shutdown()
        init(num_cpus=1)
    lose("goes on", exchange)
    assert ray.is_initialized() and ray.get(ray.put(5)) == 5, "it is the program's"
    ray.shutdown()
    run = resume("goes on")
    run.stop()
    run.wait()

if __name__ == "__main__":
    of_two_runs()
    of_the_program()
    of_the_run()
    assert not ray.is_initialized()
"""


def test_the_last_user_closes_the_connection_and_a_run_that_loses_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE.parent)])
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-X", "faulthandler", "program.py"]
    with (
        tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as own,
        tempfile.TemporaryDirectory(dir="/tmp") as users,
    ):
        more = {"PYTHONPATH": path, "TMPDIR": own, "HOME": str(tmp_path), "RAY_TMPDIR": users}
        done = subprocess.run(command, cwd=tmp_path, env={**usual, **more}, capture_output=True, text=True)
        assert done.returncode == 0, (done.returncode, done.stderr)
