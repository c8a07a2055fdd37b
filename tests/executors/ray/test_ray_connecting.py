"""A Ray that does not answer: `ensemble run` ends on a signal, resumably; `RayConnection` after its time limit.

A start that was given up disturbs neither the program nor a later one.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kit.leftovers import wait_until
from started_cluster import make_cluster

pytestmark = [pytest.mark.ray, pytest.mark.more]

ROOT = Path(__file__).parents[3]
SPEC = """
from kit.execute_members import an_ensemble

def spec():
    return an_ensemble([{"lr": 0.1}], epochs=1)
"""
SIGNALS = [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A listener that accepts connections and never answers, at the address that Ray puts for loopback.

    A new process is asked for it: in one that is connected to Ray it is the address of that Ray's node.
    """
    node = execute("from ray.util import get_node_ip_address; print(get_node_ip_address())")
    with socket.create_server((node.stdout.strip(), 0)) as listener:
        yield listener


def environment(**more: str) -> dict[str, str]:
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**usual, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]), **more}


def execute(program: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment(**more), text=True, capture_output=True)


def start_run(directory: Path, *options: str, **more: str) -> subprocess.Popen[str]:
    (directory / "first.py").write_text(SPEC)
    command = [sys.executable, "-m", "ensemble.cli", "run", "first.py", "--run-dir", "run", *options]
    return subprocess.Popen(
        command, cwd=directory, env=environment(**more), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def accept(listener: socket.socket, run: subprocess.Popen[str]) -> socket.socket:
    """The next connection of a run that waits for a cluster."""
    while not select.select([listener], [], [], 0.5)[0]:
        assert run.poll() is None, run.communicate()
    return listener.accept()[0]


def interrupt(run: subprocess.Popen[str], number: signal.Signals, directory: Path, status: int) -> None:
    """Send a signal, and check that the run ends by it before Ray by itself would look at it."""
    # It takes a second or two, by Ray half a minute. A busy machine took long up to here, too.
    before_s, log = time.time() - psutil.Process(run.pid).create_time(), directory / "run" / "ray.log"
    run.send_signal(number)
    out, err = run.communicate(timeout=max(25.0, 5 * before_s))
    err = "".join(line for line in err.splitlines(keepends=True) if not line.startswith("there is no valid="))
    message = f"interrupted before training started; {directory / 'run'} can be run again\n"
    assert (run.returncode, out) == (status, "")
    # Ray's own words are in a file, which is named, or there are none.
    assert err == (f"messages of Ray are in {log}\n" if log.exists() else "") + message


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_ends_a_run_that_waits_for_a_silent_cluster(
    silent: socket.socket, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    """While a Ray of its own starts: tests/test_interrupts.py."""
    address, log = "{}:{}".format(*silent.getsockname()), tmp_path / "run" / "ray.log"
    with start_run(tmp_path, RAY_ADDRESS=address) as run:
        connections = [accept(silent, run) for _ in range(2)]  # our own look, then Ray
        if number == signal.SIGTERM:  # after some seconds Ray reports that it has no answer
            wait_until(lambda: log.exists() and log.stat().st_size > 0, "Ray's report")
        interrupt(run, number, tmp_path, status)
    for connection in connections:
        connection.close()
    with start_run(tmp_path, "--executor", "inline") as again:
        _, err = again.communicate()
        assert again.returncode == 0, err


def test_a_silent_cluster_is_given_up_after_a_time_limit_which_leaves_ray_to_the_program(
    silent: socket.socket,
) -> None:
    address = "{}:{}".format(*silent.getsockname())
    program = """
import signal
from ensemble.executors.ray.session import RayConnection
from ensemble.spec import SpecError
def handle(number, frame): ...
try:
    RayConnection(limit_s=2.0)
except SpecError as error:
    print(error)
from ray._private import utils
utils.set_sigterm_handler(handle)
assert signal.getsignal(signal.SIGTERM) is handle, "the program calls what the start has replaced"
RayConnection(limit_s=0.5)
"""
    done = execute(program, RAY_ADDRESS=address)
    assert f"no Ray answers at RAY_ADDRESS={address}: it accepts connections, but" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ensemble.spec.validation.SpecError: an earlier start of Ray, which timed out, still")
    assert done.returncode == 1 and address in last


def test_a_connection_that_comes_too_late_is_ended() -> None:
    program = """
import contextlib, threading
from ensemble.executors.ray.session import RayConnection
from ensemble.spec import SpecError
with contextlib.suppress(SpecError):
    RayConnection(limit_s=2.0)
    raise AssertionError("the head did not hang")
input("given up\\n")
for each in threading.enumerate():
    if each.name == "ray":  # it connects
        each.join()
session = RayConnection()
assert session.nodes()
session.close()
import ray
assert not ray.is_initialized(), "the session took the late connection for one of the program"
"""
    with make_cluster() as cluster:
        cluster.start()
        [head] = cluster.find("gcs_server")
        head.suspend()  # connections are accepted and get no answer
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, "-c", program]
        variables = environment(**cluster.find_variables())
        with subprocess.Popen(command, env=variables, text=True, **pipes) as late:  # type: ignore
            assert late.stdout is not None
            said = late.stdout.readline()
            head.resume()
            _, err = late.communicate("\n")
    assert (said, late.returncode) == ("given up\n", 0), err


OPENS = "from ensemble.executors.ray.session import RayConnection as R; print(len(R(limit_s=300.0).nodes()))"


@pytest.mark.parametrize("token", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_cluster_is_joined_with_its_token_or_without_where_it_asks_for_none(tmp_path: Path, token: bool) -> None:
    home = {"HOME": str(tmp_path)}  # without ~/.ray/auth_token
    with make_cluster(RAY_AUTH_MODE="token" if token else "disabled") as cluster:
        cluster.start()
        clients = cluster.find_variables()
        if not token:
            del clients["RAY_AUTH_MODE"], clients["RAY_AUTH_TOKEN_PATH"]
        done = execute(OPENS, **clients, **home)
        assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
        if not token:
            return
        mode, address = clients["RAY_AUTH_MODE"], clients["RAY_ADDRESS"]
        for stranger in ({"RAY_AUTH_MODE": mode}, {}):
            done = execute(OPENS, RAY_ADDRESS=address, **stranger, **home)
            assert done.returncode == 1
            said = [line for line in done.stderr.splitlines() if "validation.SpecError" in line]
            assert len(said) == 1 and address in said[0] and "token" in done.stderr
    assert not (tmp_path / ".ray").exists()


@pytest.mark.more
def test_a_signal_ends_a_run_whose_own_ray_does_not_start(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as temporary:
        with start_run(tmp_path, TMPDIR=temporary) as run:

            def list_children() -> dict[str, psutil.Process]:
                return {process.name(): process for process in psutil.Process(run.pid).children(recursive=True)}

            wait_until(lambda: "raylet" in list_children(), "raylet")
            started = list_children()
            started["raylet"].suspend()
            interrupt(run, signal.SIGTERM, tmp_path, 143)
        assert [process for process in started.values() if process.is_running()] == []
        assert os.listdir(temporary) == []
