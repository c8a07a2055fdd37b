"""How `run_ranks` starts ranks under Open MPI, also on hosts in network namespaces.

`mpirun` starts a daemon on each host by a remote shell, usually ssh; here that is a script which enters the
namespace (ip-netns(8)). Daemons on one machine would take each other for one host: each gets a host name of its
own (uts_namespaces(7)). What Open MPI is to know stands in its environment (OMPI_MCA_..., mpirun(1)), which it
hands on.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ensemble.bench.launch.hosts import tool
from ensemble.bench.launch.ranks import Job

_AGENT = """#!/bin/sh
host=$1; shift
exec {ip} netns exec "$host" unshare --uts sh -c 'hostname "$0"; eval "$*"' "$host" "$@"
"""


def rank() -> int:
    """This process's, as `mpirun` started it."""
    return int(os.environ["OMPI_COMM_WORLD_RANK"])


def command(job: Job) -> list[str]:
    """What starts all ranks; each goes on in `ensemble.bench.launch.rank_main`."""
    from ensemble.comm.horovod import mpi_command

    each = [sys.executable, "-P", "-m", "ensemble.bench.launch.rank_main", job.directory, "mpi"]
    names = job.namespaces
    if names[0] is None:
        return mpi_command(job.world, each, job.interface)
    # A part of the command line for each rank: they are numbered in that order, wherever they are.
    first, *others = (["-H", f"{names[host]}:{job.world}", *each] for host in job.placement)
    whole = mpi_command(1, first, job.interface)
    for other in others:
        whole += [":", "-np", "1", *other]
    return _within(names[0], whole)


def _within(name: str, arguments: Sequence[str]) -> list[str]:
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
    return [tool("ip"), "netns", "exec", name, *named, *arguments]


def environment(job: Job) -> dict[str, str]:
    """Of what `command` starts; writes the remote shell."""
    said = {"OMPI_MCA_orte_tmpdir_base": job.directory}  # what it leaves when it is killed goes with the directory
    if job.world > len(os.sched_getaffinity(0)):
        said["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else a rank that waits keeps a core from those that work
    if job.namespaces[0] is not None:
        agent = Path(job.directory, "agent")
        agent.write_text(_AGENT.format(ip=shlex.quote(tool("ip"))))
        agent.chmod(0o700)
        said |= {"OMPI_MCA_plm": "rsh", "OMPI_MCA_plm_rsh_agent": str(agent)}
        said |= {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1"}
        said |= {f"OMPI_MCA_{layer}_tcp_if_include": job.interface for layer in ("btl", "oob")}
    return {**os.environ, **said}
