"""Accounts and QoS of Slurm, as the page on sharing a cluster sets them up, and a run that is subject to them."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import REPOSITORY, SlurmCluster, unavailable
from slurm_job import MEMBERS, Job

PAGE = REPOSITORY / "docs" / "how-to" / "users-of-a-cluster.md"
# Users of the page, and users of every Debian, as which the test's jobs run.
USERS = {"ann": "root", "bob": "nobody"}


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    if (reason := unavailable(accounting=True)) is not None:
        pytest.skip(reason)
    shared = Path(tempfile.mkdtemp(prefix="slurm-"))
    shared.chmod(0o755)  # jobs of another user, too, find munge's socket and slurm.conf there
    try:
        with SlurmCluster(shared, accounting=True) as cluster:
            yield cluster
    finally:
        shutil.rmtree(shared)


def commands() -> list[list[str]]:
    [block] = re.findall(r"```sh\n((?:sacctmgr .*\n)+)```", PAGE.read_text())
    return [
        [re.sub(r"\b(ann|bob)\b", lambda user: USERS[user[0]], word) for word in line.split()]
        for line in block.splitlines()
    ]


@pytest.mark.ray
@pytest.mark.more
def test_a_qos_holds_a_run_back_and_another_preempts_it(cluster: SlurmCluster) -> None:
    for command in commands():
        cluster.run(*command)
    own, shared = ["--account=vision", "--nodes=1"], cluster.shared
    first = Job(cluster, shared / "first", "--set", "epochs=40", sbatch=own)
    first.wait_for_checkpoints(2)
    second = Job(cluster, shared / "second", "--set", "epochs=40", sbatch=own)
    second.wait_until(lambda: second.describe()["Reason"] == "QOSMaxNodePerUserLimit")
    assert cluster.run("sinfo", "--noheader", "--states=idle", "--format=%D").strip() == "1", (
        "it is not for want of nodes"
    )
    first.hurry()
    assert first.wait() == ("COMPLETED", "0:0"), first.log()
    second.wait_for_checkpoints(2)

    urgent = ["sbatch", "--parsable", "--uid=nobody", "--nodes=2", "--exclusive", "--output=/dev/null"]
    number = cluster.run(*urgent, "--account=speech", "--wrap=hostname", cwd=Path("/")).strip()
    second.wait_until(lambda: second.describe()["Restarts"] == "1")
    assert len(second.events("run_stopped")) == 1, second.log()
    assert second.events("failed") == [], "the members had the time to write checkpoints"
    second.hurry()
    assert second.wait() == ("COMPLETED", "0:0"), second.log()
    assert cluster.describe(number)["JobState"] == "COMPLETED"
    assert any(event["epoch"] > 0 for event in second.events("started"))
    assert len({event["member"] for event in second.events("finished")}) == MEMBERS
    refused = cluster.execute([*urgent, "--account=vision", "--wrap=hostname"], cwd=Path("/"))
    assert refused.returncode != 0 and "Invalid account" in refused.stderr
