"""CPU time of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples

from ensemble.meter import CpuClock, cpu_seconds, read_start
from ensemble.meter.ray_processes import ProcessInfo, RaySampler, classify_ray_process, ray_processes
from pipelines.ipc.child_processes import reap

BURN = "import time\nwhile time.process_time() < {s}: pass\nprint('done', flush=True)\ninput()"


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has done its work and waits for its end."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        try:
            yield child
        finally:
            child.kill()


def test_the_time_of_a_process_is_what_it_used_and_its_start_is_known() -> None:
    with process(BURN.format(s=0.3)) as child:
        assert cpu_seconds(child.pid) == pytest.approx(0.3, abs=0.1)
        used_ns = int(Path(f"/proc/{child.pid}/schedstat").read_text().split()[0])
        assert cpu_seconds(child.pid) == pytest.approx(used_ns / 1e9, abs=0.001)  # it has one thread, which waits
        own, its = read_start(os.getpid()), read_start(child.pid)
        assert own is not None and its is not None and own < its
    assert cpu_seconds(child.pid) is None and read_start(child.pid) is None


def burn(cpu_s: float) -> None:
    until = time.process_time() + cpu_s
    while time.process_time() < until:
        pass


@examples(20)
@given(st.lists(st.tuples(st.sampled_from(["train", "orchestrate", "prepare"]), st.booleans()), max_size=8))
def test_roles_add_up_to_what_the_process_used_and_no_count_falls(steps: list[tuple[str, bool]]) -> None:
    before_s = time.process_time()
    clock, last = CpuClock(), dict[str, float]()
    for role, moves in steps:
        burn(0.001)
        if moves:
            clock.move("prepare", 0.0015)  # more than the role may have
        else:
            clock.switch(role)
        for each in ("startup", "train", "orchestrate", "prepare"):
            cpu_s = clock.report("n", each)["cpu_s"]
            assert cpu_s >= last.get(each, 0.0)
            last[each] = cpu_s
    assert sum(last.values()) <= time.process_time() - before_s and sum(last.values()) >= 0.001 * len(steps)


def test_what_a_child_used_is_counted_when_it_was_waited_for_unless_it_has_an_account() -> None:
    clock, before_s = CpuClock(has_children=True), time.process_time()
    with process(BURN.format(s=0.4)):
        pass
    waited_s = clock.report("n", "startup")["cpu_s"]
    assert waited_s >= 0.4
    own = subprocess.Popen(
        [sys.executable, "-c", BURN.format(s=0.4)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert (reap(own) or 0.0) >= 0.4
    used_s = clock.report("n", "startup")["cpu_s"] - waited_s
    assert 0.0 <= used_s <= time.process_time() - before_s


# Names and command lines as Ray 2.60 shows them on Linux.
PYTHON = "/venv/bin/python"
RAY = "/venv/lib/python3.11/site-packages/ray"
SESSION = "session_2026-01-01_00-00-00_1_10"
DAEMONS = [
    (11, 10, "gcs_server", f"{RAY}/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray/{SESSION}/logs"),
    (12, 10, "python", f"{PYTHON} -u {RAY}/autoscaler/_private/monitor.py --logs-dir=/tmp/ray/{SESSION}"),
    (13, 10, "python", f"{PYTHON} {RAY}/dashboard/dashboard.py --session-dir=/tmp/ray/{SESSION}"),
    (14, 10, "python", f"{PYTHON} -u {RAY}/_private/log_monitor.py --session-dir=/tmp/ray/{SESSION}"),
    (15, 10, "raylet", f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/{SESSION}/s"),
    (24, 15, "python", f"{PYTHON} {RAY}/_private/workers/default_worker.py --session=/tmp/ray/{SESSION}"),
    (20, 15, "ray::DashboardAgent", "ray::DashboardAgent"),
    (21, 15, "ray::RuntimeEnvAgent", "ray::RuntimeEnvAgent"),
    *((22, 15, "ray::NodeAgent", "ray::NodeAgent.run"), (23, 15, "ray::IDLE", "ray::IDLE")),
    (30, 13, "python", f"{PYTHON} -B -c from multiprocessing.forkserver import main"),
    (31, 30, "ray-dashboard-J", "ray-dashboard-JobHead-0 (python -B -c ...)"),
]
OTHERS = [(10, 1, "python", "python train.py"), (40, 22, "python", f"{PYTHON} -m pipelines.feeder.process")]
OTHERS += [(50, 1, "raylet", f"{RAY}/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/ray/session_other/s")]
OTHERS += [(51, 50, "ray::IDLE", "ray::IDLE"), (60, 1, "bash", "bash")]
TABLE = [ProcessInfo(*row) for row in sorted(DAEMONS + OTHERS)]


def test_rays_daemons_are_told_from_the_runs_processes() -> None:
    expected = {11: "gcs_server", 12: "monitor", 13: "dashboard", 14: "log_monitor", 15: "raylet"}
    expected |= {20: "dashboard_agent", 21: "runtime_env_agent", 23: "idle_worker", 24: "idle_worker"}
    assert ray_processes(TABLE, SESSION) == expected | {30: "dashboard", 31: "dashboard"}
    assert set(ray_processes(TABLE, "")) - set(ray_processes(TABLE, SESSION)) == {50, 51}
    assert classify_ray_process("raylet", "raylet") == "raylet"
    assert classify_ray_process("python", "vim ray.txt") is None


def test_daemons_are_one_figure_and_idle_workers_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    with process(BURN.format(s=0.1)) as daemon, process(BURN.format(s=0.1)) as idle:
        table = [
            ProcessInfo(daemon.pid, 1, "raylet", "ray/raylet"),
            ProcessInfo(idle.pid, daemon.pid, "ray::IDLE", "ray::IDLE"),
        ]
        sampler = RaySampler("n0", "", refresh_s=0.0, table=lambda: table)
        whole, worker = sampler.sample()
        assert (whole["node"], whole["role"], whole["member"], whole["rank"]) == ("n0", "ray", None, None)
        assert (whole["pid"], whole["origin"], worker["pid"]) == (daemon.pid, "measured", idle.pid)
        assert whole["cpu_s"] >= 0.09 and worker["cpu_s"] >= 0.09
        assert 0 <= time.time() - worker["since"] < 1800
        real = time.time
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: real() - 3600.0)
            assert 0.0 <= sampler.sample()[1]["for_s"] < 1800.0  # it follows no clock that is set
        table[1] = ProcessInfo(idle.pid, daemon.pid, "ray::Worker", "ray::Worker.run")
        assert [fields["pid"] for fields in sampler.sample()] == [daemon.pid]
    for _ in range(3):
        assert sampler.sample()[0]["cpu_s"] >= whole["cpu_s"]  # of what has ended, too
    assert RaySampler("n0", "", table=list).sample() == []
    with process(BURN.format(s=0.1)) as idle:
        table = [ProcessInfo(idle.pid, 1, "ray::IDLE", "ray::IDLE")]
        sampler = RaySampler("n0", "", table=lambda: table)
        (alive,) = sampler.sample()
    (ended,) = sampler.sample()
    assert (ended["pid"], ended["cpu_s"]) == (idle.pid, alive["cpu_s"]) and sampler.sample() == [], "once more"
