"""CPU time of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ensemble.meter import CpuClock, RaySampler, Sampler, cpu_seconds, tree_cpu_seconds
from ensemble.meter.ray_processes import ProcessInfo, classify_ray_process, ray_processes

BURN = "import time\nwhile time.process_time() < {s}: pass\nprint('done', flush=True)\ninput()"
PARENT = (
    "import subprocess, sys\nsubprocess.run([sys.executable, '-c', {code!r}])\nprint('done', flush=True)\ninput()"
)


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has done its work and waits for its end."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        try:
            yield child
        finally:
            child.kill()


def test_the_time_of_a_process_is_what_it_used() -> None:
    with process(BURN.format(s=0.3)) as child:
        assert cpu_seconds(child.pid) == pytest.approx(0.3, abs=0.1)
    assert cpu_seconds(child.pid) is None
    assert tree_cpu_seconds(child.pid) is None


def test_a_tree_counts_children_that_have_ended() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with process(PARENT.format(code=burn)) as parent:
        alone, tree = cpu_seconds(parent.pid), tree_cpu_seconds(parent.pid)
        assert alone is not None and tree is not None
        assert tree - alone == pytest.approx(0.3, abs=0.1)


def test_the_sampler_keeps_the_last_value_of_a_process_that_ended() -> None:
    with process(BURN.format(s=0.2)) as child:
        sampler = Sampler("n0", {child.pid: ("train", "member-0", 1)})
        (alive,) = sampler.sample()
        assert (alive["node"], alive["role"], alive["member"], alive["rank"]) == ("n0", "train", "member-0", 1)
        assert (alive["pid"], alive["origin"]) == (child.pid, "measured")
        assert alive["cpu_s"] >= 0.19
        assert 0 <= time.time() - alive["since"] < 60
    (ended,) = sampler.sample()
    assert ended["cpu_s"] == alive["cpu_s"]
    assert sampler.sample() == []  # told once more, then known
    assert sampler.totals() == {("train", "member-0", 1): alive["cpu_s"]}


def test_a_change_of_role_cuts_the_account() -> None:
    pid = os.getpid()
    sampler = Sampler("n0", {pid: ("startup", "member-0", 0)})
    sampler.watch({pid: ("train", "member-0", 0)})
    before = time.process_time()
    while time.process_time() - before < 0.1:
        pass
    startup, train = sampler.sample()
    assert (startup["role"], train["role"]) == ("startup", "train")
    # Two readings, each cut to a clock tick of 10 ms: 0.09 at least, and 0.09 is no number of binary fractions.
    assert 0.0899 <= train["cpu_s"] < startup["cpu_s"] + 1.0
    whole = cpu_seconds(pid)
    assert whole is not None
    assert startup["cpu_s"] + train["cpu_s"] == pytest.approx(whole, abs=0.05)
    assert train["since"] > startup["since"]
    assert [fields["role"] for fields in sampler.sample()] == ["train"]


def test_the_count_of_a_role_goes_on_when_the_process_turns_to_another_member() -> None:
    pid = os.getpid()
    sampler = Sampler("n0", {pid: ("train", "member-0", 0)})
    sampler.watch({pid: ("train", "member-1", 0)})
    first, second = sampler.sample()
    assert (first["member"], second["member"]) == ("member-0", "member-1")
    assert second["cpu_s"] >= first["cpu_s"] > 0
    assert sampler.totals()["train", "member-1", 0] < first["cpu_s"]


def test_a_process_that_is_not_there_is_not_reported() -> None:
    with process(BURN.format(s=0)) as child:
        pass
    assert Sampler("n0", {child.pid: ("train", "member-0", 0)}).sample() == []


def test_the_clock_counts_work_and_not_waiting() -> None:
    clock = CpuClock()
    time.sleep(0.05)
    assert clock.lap() < 0.04
    while clock.seconds() < 0.1:
        pass
    assert clock.lap() >= 0.05
    assert CpuClock.total() >= clock.seconds()


def test_what_a_daemon_used_before_the_run_is_not_the_runs() -> None:
    with process(BURN.format(s=0.2)) as daemon:
        table = [ProcessInfo(daemon.pid, 1, "raylet", "ray/raylet")]
        sampler = RaySampler("n0", table=lambda: table)
        assert sum(fields["cpu_s"] for fields in sampler.sample()) < 0.1


# Names and command lines as Ray 2.60 shows them on Linux.
PYTHON = "/venv/bin/python"
RAY = "/venv/lib/python3.11/site-packages/ray"
SESSION = "session_2026-01-01_00-00-00_1_10"
TABLE = [
    ProcessInfo(10, 1, "python", "python train.py"),
    ProcessInfo(11, 10, "gcs_server", f"{RAY}/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray/{SESSION}/logs"),
    ProcessInfo(
        12, 10, "python", f"{PYTHON} -u {RAY}/autoscaler/_private/monitor.py --logs-dir=/tmp/ray/{SESSION}"
    ),
    ProcessInfo(13, 10, "python", f"{PYTHON} {RAY}/dashboard/dashboard.py --session-dir=/tmp/ray/{SESSION}"),
    ProcessInfo(14, 10, "python", f"{PYTHON} -u {RAY}/_private/log_monitor.py --session-dir=/tmp/ray/{SESSION}"),
    ProcessInfo(15, 10, "raylet", f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/{SESSION}/s"),
    ProcessInfo(20, 15, "ray::DashboardAgent", "ray::DashboardAgent"),
    ProcessInfo(21, 15, "ray::RuntimeEnvAgent", "ray::RuntimeEnvAgent"),
    ProcessInfo(22, 15, "ray::NodeAgent", "ray::NodeAgent.run"),
    ProcessInfo(23, 15, "ray::IDLE", "ray::IDLE"),
    ProcessInfo(
        24, 15, "python", f"{PYTHON} {RAY}/_private/workers/default_worker.py --session=/tmp/ray/{SESSION}"
    ),
    ProcessInfo(30, 13, "python", f"{PYTHON} -B -c from multiprocessing.forkserver import main"),
    ProcessInfo(31, 30, "ray-dashboard-J", "ray-dashboard-JobHead-0 (python -B -c ...)"),
    ProcessInfo(40, 22, "python", f"{PYTHON} -m pipelines.feeder.process"),
    ProcessInfo(
        50, 1, "raylet", f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/session_other/s"
    ),
    ProcessInfo(51, 50, "ray::IDLE", "ray::IDLE"),
    ProcessInfo(60, 1, "bash", "bash"),
]


def test_rays_daemons_are_told_from_the_runs_processes() -> None:
    assert ray_processes(TABLE, SESSION) == {
        11: "gcs_server",
        12: "monitor",
        13: "dashboard",
        14: "log_monitor",
        15: "raylet",
        20: "dashboard_agent",
        21: "runtime_env_agent",
        23: "idle_worker",
        24: "idle_worker",
        30: "dashboard",
        31: "dashboard",
    }
    assert set(ray_processes(TABLE)) - set(ray_processes(TABLE, SESSION)) == {50, 51}
    assert classify_ray_process("raylet", "raylet") == "raylet"
    assert classify_ray_process("python", "vim ray.txt") is None


def test_daemons_are_one_figure_and_idle_workers_one_each() -> None:
    with process(BURN.format(s=0.1)) as daemon, process(BURN.format(s=0.1)) as idle:
        table = [
            ProcessInfo(daemon.pid, 1, "raylet", "ray/raylet"),
            ProcessInfo(idle.pid, daemon.pid, "ray::IDLE", "ray::IDLE"),
        ]
        sampler = RaySampler("n0", since=0.0, refresh_s=0.0, table=lambda: table)
        whole, worker = sampler.sample()
        assert (whole["role"], whole["pid"], worker["pid"]) == ("ray", daemon.pid, idle.pid)
        assert whole["cpu_s"] >= 0.09 and worker["cpu_s"] >= 0.09
        table[1] = ProcessInfo(idle.pid, daemon.pid, "ray::Worker", "ray::Worker.run")
        assert [fields["pid"] for fields in sampler.sample()] == [daemon.pid]
    assert sampler.sample()[0]["cpu_s"] >= whole["cpu_s"]  # of what has ended, too
    assert RaySampler("n0", table=list).sample() == []


def test_the_time_in_a_role_follows_no_clock_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = time.time
    sampler = Sampler("n0", {os.getpid(): ("ray", None, None)})
    sampler.watch({os.getpid(): ("train", "member-0", 0)})
    monkeypatch.setattr(time, "time", lambda: clock() - 3600.0)
    told = {event["role"]: event for event in sampler.sample()}
    assert 0.0 <= told["train"]["for_s"] < 60.0 and told["ray"]["for_s"] < 3600.0
