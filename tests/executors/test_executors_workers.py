"""Worker processes and the sockets over which they are told what to do."""

from __future__ import annotations

import errno
import os
import resource
import selectors
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit.execute_members import an_ensemble, make_job

from ensemble import Member
from ensemble.executors.base import dispatch
from ensemble.executors.limits import raise_descriptor_limit
from ensemble.executors.process_pool import ProcessPool
from ensemble.executors.spawn import ForkServer, find_processes, make_node_environment
from ensemble.store import RunDir

Event = dict[str, Any]


class Host:
    def __init__(self, directory: Path, selector: selectors.BaseSelector, *, forks: bool = True) -> None:
        self.selector, self.said, self._directory = selector, list[Event](), directory
        self.workers = ProcessPool("here", selector, self.said.append, self._server if forks else self._refuse)

    def _server(self) -> ForkServer:
        return ForkServer(self._directory)

    def _refuse(self) -> ForkServer:
        raise OSError(errno.EAGAIN, "no fork server")

    def launch(self, run_dir: RunDir, **params: Any) -> None:
        identity = an_ensemble([{"lr": 0.1, **params}], epochs=1).identify(0)
        self.workers.launch([make_job(identity, run_dir)], [None])

    def wait_for(self, kind: str) -> Event:
        while not (found := [event for event in self.said if event["type"] == kind]):
            dispatch(self.selector, None)
        return found[0]

    def wait_for_worker(self) -> int:
        while not (pids := self.workers.list_pids()):
            dispatch(self.selector, None)
        (pid,) = pids
        return pid


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", an_ensemble([{"lr": 0.1}], epochs=1))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with selectors.DefaultSelector() as selector:
        made = Host(tmp_path_factory.mktemp("node"), selector)
        yield made
        made.workers.close()


@pytest.fixture
def host(shared: Host) -> Host:
    shared.said.clear()
    return shared


def test_a_member_may_have_more_hyperparameters_than_a_socket_holds(host: Host, run_dir: RunDir) -> None:
    host.launch(run_dir, note="x" * 2_000_000)
    assert host.wait_for("exited")["outcome"] == "finished"


def test_a_worker_that_does_not_listen_keeps_nobody_waiting(host: Host, run_dir: RunDir) -> None:
    host.launch(run_dir)
    os.kill(host.wait_for_worker(), signal.SIGSTOP)  # others than this test may have children here
    for cohort in range(8):
        host.workers.send("member-0", "join", feeder="x" * 500_000, cohort=cohort)
    host.workers.kill("member-0")
    assert "SIGKILL" in host.wait_for("exited")["detail"]


def test_what_a_worker_used_before_it_was_killed_is_told(host: Host, run_dir: RunDir, tmp_path: Path) -> None:
    host.launch(run_dir, fault="kill", after=2, burn_s=0.3, marker=str(tmp_path / "once"))
    assert "SIGKILL" in host.wait_for("exited")["detail"]
    used = [event for event in host.said if event["type"] == "usage" and event["member"] == "member-0"]
    assert [event["type"] for event in host.said][-2:] == ["usage", "exited"]
    assert used[-1]["role"] == "train" and used[-1]["cpu_s"] >= 0.6


def test_descriptors_past_those_of_select_are_like_any_other(host: Host, run_dir: RunDir) -> None:
    """As with a thousand ranks on a node, each with a socket and a pidfd here; many members may have many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"at most {hard} descriptors here")
    others: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert raise_descriptor_limit(an_ensemble([{"lr": 0.1}] * 8)) == 1024, "few need no more"
        many: list[Any] = [Member({"lr": 0.1}, workers=10)] * 100
        assert raise_descriptor_limit(an_ensemble(many)) == hard
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
        with open(os.devnull) as null:
            others = [os.dup(null.fileno()) for _ in range(1100)]
            host.launch(run_dir)
            assert host.wait_for("exited")["outcome"] == "finished"
        assert "filedescriptor out of range" not in run_dir.log("member-0").read_text()
    finally:
        for each in others:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_those_that_are_ended_at_the_close_are_listed_once_more(host: Host, run_dir: RunDir) -> None:
    """The power of their last moments is attributed after that. A launch after this one has a new fork server."""
    host.launch(run_dir)
    pid = host.wait_for_worker()
    host.workers.close()
    assert host.workers.list_processes()[pid].member == "member-0"
    assert host.workers.list_processes() == {}


def test_one_that_could_not_be_started_leaves_nothing(tmp_path: Path, run_dir: RunDir) -> None:
    here = psutil.Process()
    children = here.children()
    with selectors.DefaultSelector() as selector:
        host, before = Host(tmp_path, selector, forks=False), here.num_fds()
        with pytest.raises(OSError, match="no fork server"):
            host.launch(run_dir)
        assert here.children() == children and here.num_fds() == before and not selector.get_map()


@pytest.mark.skipif(os.geteuid() != 0, reason="the number of the next process is chosen by root")
def test_a_process_whose_number_was_anothers_is_found_and_can_be_ended(tmp_path: Path) -> None:
    number = -1
    while True:
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(number - 1)) if number > 0 else None
        with subprocess.Popen(["sleep", "1000"], env=make_node_environment(tmp_path)) as process:
            try:
                is_reused, number = process.pid == number, process.pid
                [found] = find_processes(tmp_path)
                found.kill()
                assert process.wait() == -signal.SIGKILL
            finally:
                process.kill()
        if is_reused:  # else another process was given the number before
            break
