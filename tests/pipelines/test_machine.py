"""Memory and cores that can be had: the least of what the machine and each control group leave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.environment.machine_limits import available_bytes, limit_bytes, usable_cpus
from pipelines.ipc.child_processes import child_environment

MIB = 2**20


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A machine with 1000 MiB available, its /proc and its control groups."""
    written(tmp_path / "proc/meminfo", "MemTotal:  2048000 kB\nMemAvailable:  1024000 kB\nHugePages_Total:  0\n")
    return tmp_path


def written(path: Path, text: str | int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def unified(group: Path, limit: str | int, current: int = 0, cached: int = 0) -> None:
    written(group / "memory.max", limit)
    written(group / "memory.current", current)
    written(group / "memory.stat", f"anon 7\ninactive_file {cached}\nshmem 9\nactive_file 0\nslab_reclaimable 0")


def both(host: Path) -> tuple[float, float]:
    """(available, limit) in MiB."""
    own = (host / "proc", host / "groups")
    return available_bytes(*own) / MIB, limit_bytes(*own) / MIB


def test_without_control_groups_it_is_the_machines(host: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB
    assert both(host) == (1000, total)
    written(host / "proc/self/cgroup", "0::/service\n3:cpuset:/service\n1:name=systemd:/")
    unified(host / "groups/service", "max", 10 * MIB)
    assert both(host) == (1000, total)


def test_the_least_of_all_groups_that_hold_the_process_counts(host: Path) -> None:
    written(host / "proc/self/cgroup", "0::/slice/service")
    unified(host / "groups/slice/service", 300 * MIB, 100 * MIB)
    assert both(host) == (200, 300)
    for limit, current, expected in ((310, 250, (60, 300)), (90, 100, (0, 90))):
        unified(host / "groups/slice", limit * MIB, current * MIB)
        assert both(host) == expected
    unified(host / "groups/other", MIB)
    assert both(host) == (0, 90)


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../.."])
def test_in_a_container_the_root_is_its_own_group_and_files_that_the_kernel_can_give_up_are_free(
    host: Path, path: str
) -> None:
    written(host / "proc/self/cgroup", f"0::{path}")
    unified(host / "groups", 300 * MIB, 290 * MIB, cached=250 * MIB)
    assert both(host) == (260, 300)


def test_version_1_has_other_names(host: Path) -> None:
    written(host / "proc/self/cgroup", "4:cpu,memory:/job\n0::/")
    group = host / "groups/memory/job"
    written(group / "memory.limit_in_bytes", 300 * MIB)
    written(group / "memory.usage_in_bytes", 200 * MIB)
    written(group / "memory.stat", f"cache 5\ntotal_active_file {30 * MIB}\ntotal_inactive_file {20 * MIB}")
    written(group.parent / "memory.limit_in_bytes", 9223372036854771712)
    written(group.parent / "memory.usage_in_bytes", 2**40)
    assert both(host) == (150, 300)
    assert 0 < available_bytes() <= limit_bytes(), "here it is more than nothing and no more than there is"


def test_the_least_cpu_quota_of_all_groups_counts_as_that_of_memory_does(host: Path) -> None:
    def count() -> float:
        return usable_cpus(host / "proc", host / "groups")

    allowed = len(os.sched_getaffinity(0))
    assert count() == allowed
    written(host / "proc/self/cgroup", "0::/user.slice/job.scope\n4:cpu,cpuacct:/batch/job")
    written(host / "groups/user.slice/job.scope/cpu.max", "max 100000")
    written(host / "groups/user.slice/cpu.max", "75000 100000")
    assert count() == 0.75, "version 2, of the slice that the group lies in"
    written(host / "groups/cpu,cpuacct/batch/cpu.cfs_quota_us", "25000")
    written(host / "groups/cpu,cpuacct/batch/cpu.cfs_period_us", "50000")
    written(host / "groups/cpu,cpuacct/batch/job/cpu.cfs_quota_us", "-1")
    written(host / "groups/cpu,cpuacct/batch/job/cpu.cfs_period_us", "100000")
    assert count() == 0.5, "version 1, of the group above"


PINNED = """
import os, subprocess, sys
import torch  # loads OpenMP, which pins this thread
from pipelines.ipc.child_processes import child_environment
from pipelines.environment.machine_limits import usable_cpus
print(len(os.sched_getaffinity(0)), usable_cpus())
shows = "import os; print(len(os.sched_getaffinity(0)), 'OMP_PROC_BIND' in os.environ)"
print(subprocess.check_output([sys.executable, "-c", shows], env=child_environment(), text=True), end="")
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core, to which all is pinned")
def test_children_of_a_process_that_openmp_has_pinned_use_all_its_cores() -> None:
    cores = set(sorted(os.sched_getaffinity(0))[:2])
    environment = {**child_environment(), "OMP_PROC_BIND": "true"}
    given = {"text": True, "env": environment, "preexec_fn": lambda: os.sched_setaffinity(0, cores)}
    pinned, children = subprocess.check_output([sys.executable, "-c", PINNED], **given).splitlines()
    if not pinned.startswith("1 "):
        pytest.skip("the OpenMP of this torch does not pin the main thread")
    assert (pinned, children) == ("1 2.0", "2 False")
