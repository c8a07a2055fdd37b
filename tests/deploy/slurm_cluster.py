"""A Slurm cluster of two nodes on this machine, for tests.

A node is a host of `benchmarks.launch.hosts` (a network of its own, without a default route) whose slurmd also
has processes, a host name, a /tmp and a /dev/shm of its own. The controller, slurmctld, runs on the first one.
Munge, by which Slurm's programs authenticate each other, gets a socket and a key of its own. With accounting the
first host also runs MariaDB, on its own loopback interface, and slurmdbd, with data in the cluster's directory.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from benchmarks.launch.hosts import Hosts
from benchmarks.launch.hosts import unavailable as hosts_unavailable

NODES = 2
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
REPOSITORY = Path(__file__).parents[2]
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "mount")
_OF_ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db")
_START_S = 300.0
# cred_expire: a job is queued again for that many seconds from now, by default 120; 5 is the least.
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=n0({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/controller
SlurmctldPidFile={directory}/slurmctld.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdSpoolDir={directory}/spool.%n
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmdLogFile={directory}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
FirstJobId={first_job}
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=n0 NodeAddr={addresses[0]} CPUs=2
NodeName=n1 NodeAddr={addresses[1]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePass={directory}/munge.socket
AccountingStorageEnforce=associations,limits,qos
PriorityType=priority/multifactor
PriorityWeightQOS=1000
PreemptType=preempt/qos
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
"""
_DATABASE = """\
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
DbdHost=n0
DbdAddr={address}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
PidFile={directory}/slurmdbd.pid
LogFile={directory}/slurmdbd.log
"""
# `$1` becomes the host's name; what is at `$2` and `$3` stays where it is, in a /tmp that is otherwise empty.
_OWN_MACHINE = """
hostname "$1" && mount --bind "$2" /mnt && mount --bind "$3" /media &&
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm && mkdir -p "$2" "$3" &&
mount --bind /mnt "$2" && mount --bind /media "$3" && umount /mnt /media && shift 3 && exec "$@"
"""


def unavailable(*, accounting: bool = False) -> str | None:
    """Why there can be no such cluster on this machine, in one line; None where one could be."""
    needed = (*_PROGRAMS, *_OF_ACCOUNTING) if accounting else _PROGRAMS
    missing = [name for name in needed if shutil.which(name, path=PATH) is None]
    return f"needs {', '.join(missing)}" if missing else hosts_unavailable()


class SlurmCluster:
    """Two nodes, n0 and n1, of two processors each, which exist while the context lasts.

    Args:
        shared: a directory that all nodes see; `slurm` in it is for the cluster's files.
        accounting: whether accounts, users and QoS are kept and enforced (`sacctmgr`).
    """

    def __init__(self, shared: Path, *, accounting: bool = False) -> None:
        self.shared, self._directory, self._accounting = shared, shared / "slurm", accounting
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self._hosts = Hosts(NODES)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "RAY_"))},
            "SLURM_CONF": str(self._directory / "slurm.conf"),
            "PATH": PATH,
        }

    def __enter__(self) -> SlurmCluster:
        with self._stack:
            self._stack.enter_context(self._hosts)
            self._stack.callback(self._end_processes)
            self._start()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start(self) -> None:
        directory = self._directory
        (directory / "controller").mkdir(parents=True)
        addresses = self._hosts.addresses
        text = _CONFIGURATION.format(directory=directory, addresses=addresses, first_job=os.getpid())
        accounting = _ACCOUNTING.format(address=addresses[0], directory=directory) if self._accounting else ""
        (directory / "slurm.conf").write_text(accounting + text)
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key, socket = directory / "munge.key", directory / "munge.socket"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"socket": socket, "key-file": key}
        files |= {name: directory / f"munge.{name}" for name in ("pid-file", "seed-file", "log-file")}
        options = [f"--{name}={path}" for name, path in files.items()]
        self._spawn(self._hosts.command(0, ["munged", "--foreground", "--force", *options]))
        self._wait_until(socket.exists, "munged did not start")
        if self._accounting:
            self._start_accounting(addresses[0])
        self._spawn_named("slurmctld -D -i")
        for number in range(NODES):
            name = f"n{number}"
            (directory / f"spool.{name}").mkdir()
            own = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            machine = ["sh", "-c", _OWN_MACHINE, "sh", name, str(self.shared), str(REPOSITORY)]
            slurmd = ["slurmd", "-D", "-N", name]
            self._spawn(self._hosts.command(number, [*own, *machine, *slurmd]))
        self._wait_until(self._is_idle, "the nodes did not come up")

    def _start_accounting(self, address: str) -> None:
        data, configuration = self._directory / "database", self._directory / "slurmdbd.conf"
        configuration.touch(0o600)
        configuration.write_text(_DATABASE.format(directory=self._directory, address=address))
        self.run("mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db")
        options = ["--no-defaults", "--user=root", f"--datadir={data}", f"--socket={data}/socket"]
        options.append("--skip-grant-tables")
        self._spawn(self._hosts.command(0, ["mariadbd", *options, "--bind-address=127.0.0.1"]))
        self._wait_until((data / "socket").exists, "mariadbd did not start")
        self._spawn_named("slurmdbd -D")
        self._wait_until(
            lambda: self.execute(["sacctmgr", "show", "cluster"]).returncode == 0, "slurmdbd did not start"
        )
        self.run("sacctmgr", "--immediate", "add", "cluster", "tests")

    def _spawn_named(self, command: str) -> None:
        self._spawn(self._hosts.command(0, ["unshare", "--uts", "sh", "-c", f"hostname n0; exec {command}"]))

    def _spawn(self, command: Sequence[str]) -> None:
        with open(self._directory / "output.log", "ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
                )
            )

    def _is_idle(self) -> bool:
        done = self.execute(["sinfo", "--noheader", "--format=%D %T"])
        return done.stdout.split() == [str(NODES), "idle"]

    def _wait_until(self, is_met: Callable[[], bool], message: str) -> None:
        until = time.monotonic() + _START_S
        while not is_met():
            ended = [process.args for process in self._processes if process.poll() is not None]
            if ended or time.monotonic() > until:
                logs = "\n".join(path.read_text() for path in sorted(self._directory.glob("*.log")))
                raise RuntimeError(f"{message}; ended: {ended}\n{logs}")
            time.sleep(0.1)

    def _end_processes(self) -> None:
        """End what was started, in reverse order; with the first process of a node all of the node's end."""
        for process in reversed(self._processes):
            for each in (*psutil.Process(process.pid).children(), process):
                each.kill()
            process.wait()

    def execute(self, command: Sequence[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(self._hosts.command(0, command), env=self._environment, cwd=cwd, **pipes)

    def run(self, *command: str, cwd: Path | None = None) -> str:
        done = self.execute(command, cwd)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def describe(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job)))
