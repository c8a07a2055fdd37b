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


def test_the_least_of_all_groups_that_hold_the_process_counts(host: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB
    assert both(host) == (1000, total), "without control groups it is the machine's"
    written(host / "proc/self/cgroup", "0::/slice/service\n3:cpuset:/service\n1:name=systemd:/")
    unified(host / "groups/slice/service", "max", 10 * MIB)
    assert both(host) == (1000, total)
    unified(host / "groups/slice/service", 300 * MIB, 100 * MIB)
    assert both(host) == (200, 300)
    for limit, current, expected in ((310, 250, (60, 300)), (90, 100, (0, 90))):
        unified(host / "groups/slice", limit * MIB, current * MIB)
        assert both(host) == expected
    unified(host / "groups/other", MIB)
    assert both(host) == (0, 90)


def test_version_1_has_other_names(host: Path) -> None:
    written(host / "proc/self/cgroup", "4:cpu,memory:/job\n0::/")
    stat = f"cache 5\ntotal_active_file {30 * MIB}\ntotal_inactive_file {20 * MIB}"
    for group, limit, usage in (("", 9223372036854771712, 2**40), ("job", 300 * MIB, 200 * MIB)):
        written(host / "groups/memory" / group / "memory.limit_in_bytes", limit)
        written(host / "groups/memory" / group / "memory.usage_in_bytes", usage)
    written(host / "groups/memory/job/memory.stat", stat)
    assert both(host) == (150, 300)
    assert 0 < available_bytes() <= limit_bytes(), "here it is more than nothing and no more than there is"


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../.."])
def test_in_a_container_the_root_is_its_own_group_and_files_that_the_kernel_can_give_up_are_free(
    host: Path, path: str
) -> None:
    written(host / "proc/self/cgroup", f"0::{path}")
    unified(host / "groups", 300 * MIB, 290 * MIB, cached=250 * MIB)
    assert both(host) == (260, 300)


def test_the_least_cpu_quota_of_all_groups_counts_as_that_of_memory_does(host: Path) -> None:
    own, groups = (host / "proc", host / "groups"), host / "groups"
    assert usable_cpus(*own) == len(os.sched_getaffinity(0))
    written(host / "proc/self/cgroup", "0::/user.slice/job.scope\n4:cpu,cpuacct:/batch/job")
    written(groups / "user.slice/job.scope/cpu.max", "max 100000")
    written(groups / "user.slice/cpu.max", "75000 100000")
    assert usable_cpus(*own) == 0.75, "version 2, of the slice that the group lies in"
    for group, quota, period in (("batch", 25000, 50000), ("batch/job", -1, 100000)):
        written(groups / "cpu,cpuacct" / group / "cpu.cfs_quota_us", quota)
        written(groups / "cpu,cpuacct" / group / "cpu.cfs_period_us", period)
    assert usable_cpus(*own) == 0.5, "version 1, of the group above"


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
