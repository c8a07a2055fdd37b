"""Hosts in network namespaces: joined at a rate, apart from the machine's network, and gone however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.leftovers import wait_until

from benchmarks.launch import hosts
from benchmarks.launch.hosts import Hosts, rate_bps, remove_stale, unavailable
from ensemble.spec import SpecError

REASON = unavailable()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=str(REASON))

RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    began, got = time.perf_counter(), 0
    while part := connection.recv(1 << 20):
        got += len(part)
    print(got, time.perf_counter() - began)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
OWN = """
import signal, subprocess, sys
from benchmarks.launch.hosts import Hosts
with Hosts(2, "1gbit") as made:
    inside = subprocess.Popen(made.command(0, ["sleep", "600"]))
    print(inside.pid, made._remover.pid, *made.names, flush=True)
    signal.pause()
"""


def namespaces() -> set[str]:
    """All but those that others own who run tests at the same time."""
    return {name for name in hosts.namespaces() if not _belongs_to_others(name)}


def _belongs_to_others(name: str) -> bool:
    owner = int(name.split("-")[1]) if name.startswith("bench-") else 0
    ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    return owner not in ours and psutil.pid_exists(owner)


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def ended(pid: str) -> bool:
    """Whether a process that is not ours to wait for has ended, if perhaps nobody has asked for its status yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@given(st.integers(1, 10**6), st.sampled_from([("", 1), ("k", 10**3), ("m", 10**6), ("G", 10**9)]))
def test_a_rate_is_read_as_tc_reads_it(number: int, unit: tuple[str, int]) -> None:
    assert rate_bps(f"{number}{unit[0]}bit") == number * unit[1]


@pytest.mark.parametrize("rate", ["", "1", "gbit", "0mbit", "1gbyte", "-1gbit", "1 gbit", "1gbit; reboot"])
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(SpecError, match="1gbit"):
        Hosts(2, rate)


@needs_hosts
def test_hosts_reach_each_other_at_the_rate() -> None:
    before, payload = (namespaces(), interfaces()), 4_000_000
    with Hosts(2, "100mbit") as made:
        assert interfaces() == before[1], "the machine's own network has changed"
        python = [sys.executable, "-c"]
        with subprocess.Popen(
            made.command(1, [*python, RECEIVE, made.addresses[1]]), stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            subprocess.run(made.command(0, [*python, SEND, made.addresses[1], str(payload)]), check=True)
            got, seconds = receiver.stdout.readline().split()
        assert int(got) == payload
        assert 8 * payload / float(seconds) < 1.05 * rate_bps("100mbit")
    assert (namespaces(), interfaces()) == before


@needs_hosts
def test_an_exception_removes_hosts_and_what_runs_in_them() -> None:
    before = namespaces()
    started = []

    def fail() -> None:
        with Hosts(1) as made:
            started.append(subprocess.Popen(made.command(0, ["sleep", "600"])))
            comm = Path(f"/proc/{started[0].pid}/comm")
            wait_until(lambda: comm.read_text() == "sleep\n", "its start")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert started[0].wait(300) == -signal.SIGKILL
    assert namespaces() == before


@needs_hosts
@pytest.mark.parametrize("fatal", [signal.SIGTERM, signal.SIGKILL])
def test_an_owner_that_is_killed_leaves_no_host(fatal: signal.Signals) -> None:
    before = namespaces()
    with subprocess.Popen([sys.executable, "-c", OWN], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        inside, _remover, *names = owner.stdout.readline().split()
        assert before.isdisjoint(names) and namespaces() >= {*before, *names}
        owner.send_signal(fatal)
    wait_until(lambda: namespaces() == before and ended(inside), "its end")


@needs_hosts
def test_what_nobody_could_remove_the_next_hosts_do() -> None:
    before = namespaces()
    with subprocess.Popen([sys.executable, "-c", OWN], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        inside, remover, *names = owner.stdout.readline().split()
        os.kill(int(remover), signal.SIGKILL)
        assert set(names).isdisjoint(remove_stale()), "what a living process owns is not removed"
        owner.kill()
    with Hosts(1):
        assert namespaces().isdisjoint(names)
    assert namespaces() == before
    wait_until(lambda: ended(inside), "it is killed, and ends when it comes to run")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can stop being root")
def test_without_root_it_is_said_in_a_line() -> None:
    code = "import os; from benchmarks.launch.hosts import unavailable; os.seteuid(65534); print(unavailable())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["hosts in network namespaces need root"]
