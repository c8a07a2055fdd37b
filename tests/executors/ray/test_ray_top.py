"""A whole cluster as `ensemble top` shows it: real nodes, two runs, a job that is no run, a run of tomorrow."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from leftovers import wait_until
from started_cluster import StartedCluster, make_cluster

from ensemble.cli.parser import main
from ensemble.executors.ray import registry
from ensemble.executors.ray.cluster_view import compose
from ensemble.reporting.cluster import list_lines, tabulate_others
from ensemble.reporting.dashboard.projection import RunView
from ensemble.schedule.fairness import Amount, Holding, RunClaim, Want
from ensemble.store import RunDir

RUN = """
import sys
from execute_members import an_ensemble
import ensemble
run_dir, go, priority = sys.argv[1:]
members = [{"lr": 0.1, "fault": "wait", "after": 1, "marker": go}] * 2
one = ensemble.Resources(cpus_per_worker=1)
declared = an_ensemble(members, epochs=1, resources=one, priority=int(priority), sharing="independent")
ensemble.submit(declared, run_dir, executor="ray").wait()
"""
FOREIGN = """
import sys, ray
ray.init(log_to_driver=False)
@ray.remote(num_cpus=0.5)
class Holds:
    def ready(self): return 1
holds = Holds.remote()
ray.get(holds.ready.remote())
print("holds", flush=True)
sys.stdin.read()
"""
OF_TOMORROW = """
import json, ray
from ensemble.executors.ray.registry import NAME, NAMESPACE
ray.init(log_to_driver=False)
row = {"version": 99, "run_id": "x", "name": "of-tomorrow", "user": "ada", "host": "h", "pid": 1, "more": [1]}
ray.get(ray.get_actor(NAME, NAMESPACE).beat.remote("x", json.dumps(row).encode()))
"""
ACTORS = """
import ray
ray.init(log_to_driver=False)
print(len(ray.util.list_named_actors(all_namespaces=True)))
"""


@pytest.fixture
def cluster() -> Iterator[StartedCluster]:
    """A head with three cores, and a node with one."""
    with make_cluster() as made:
        made.start({}, cpus=3)
        yield made


def run_python(cluster: StartedCluster, text: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    return subprocess.Popen(command, env=cluster.environment, **pipes)  # type: ignore[call-overload,no-any-return]


def look(cluster: StartedCluster, *options: str) -> str:
    done = cluster.run("top", *options)
    out, said = done.communicate(timeout=300)
    assert done.returncode == 0, said
    return str(out)


def wait_for(cluster: StartedCluster, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    def read() -> dict[str, Any] | None:
        view: dict[str, Any] = json.loads(look(cluster, "--json", "-"))
        return view if holds(view) else None

    found: dict[str, Any] = wait_until(read, "the cluster is never so")
    return found


@pytest.mark.more
@pytest.mark.ray
def test_a_cluster_is_shown_with_its_runs_and_what_others_hold_and_is_left_as_it_was(
    cluster: StartedCluster, tmp_path: Path
) -> None:
    view = wait_for(cluster, lambda view: len(view["nodes"]) == 2)
    assert view["runs"] == [] and all(node["free"] == node["total"] for node in view["nodes"])
    assert "no run on 2 nodes" in look(cluster)
    assert run_python(cluster, ACTORS).communicate()[0] == "0\n", "nothing was created to read it"

    foreign = run_python(cluster, FOREIGN)
    assert foreign.stdout is not None and foreign.stdin is not None and foreign.stdout.readline() == "holds\n"
    go = tmp_path / "go"
    runs = [run_python(cluster, RUN, tmp_path / name, go, priority) for name, priority in (("a", 0), ("b", 2))]
    try:

        def all_are_there(view: dict[str, Any]) -> bool:
            known = {run["name"]: run for run in view["runs"]}
            return {"a", "b"} <= known.keys() and any(known["b"]["held"]["cpus"] >= 1 for _ in known)

        view = wait_for(cluster, all_are_there)
        for node in view["nodes"]:
            for what in ("cpus", "memory_gb"):
                parts = sum(part[what] for part in node["runs"].values()) + node["foreign"][what]
                assert node["free"][what] + parts == pytest.approx(node["total"][what], abs=0.01), node
        assert sum(node["foreign"]["cpus"] for node in view["nodes"]) >= 0.5
        b = next(run for run in view["runs"] if run["name"] == "b")
        assert b["priority"] == 2 and b["directory"] == str(tmp_path / "b") and b["user"]

        assert run_python(cluster, OF_TOMORROW).wait() == 0
        shown = look(cluster)
        assert "others: 0.5 cores" in shown and "of-tomorrow" in shown and "version 99" in shown

        others = RunDir(tmp_path / "a").cluster
        wait_until(others.exists, "run a does not tell its page of run b")
        table = RunView(RunDir(tmp_path / "a")).tables_document()["places"][-1]
        assert table["title"] == "Other runs of this cluster" and "b" in [row[0] for row in table["rows"]]
        go.touch()
        assert [run.wait() for run in runs] == [0, 0]
        assert not others.exists()
        wait_for(cluster, lambda view: not view["runs"])
        assert run_python(cluster, ACTORS).communicate()[0] == "0\n"
    finally:
        foreign.stdin.close()
        for each in (foreign, *runs):
            each.terminate()
            each.wait()

    cluster.environment.pop("RAY_AUTH_TOKEN_PATH")
    cluster.environment["HOME"] = str(tmp_path)  # where Ray would find one
    refused = cluster.run("top")
    out, said = refused.communicate(timeout=300)
    assert (refused.returncode, out) == (2, "")
    assert "token" in said and len(said.splitlines()) == 1


def test_without_an_address_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["top"]) == 2
    assert "--address HOST:PORT" in capsys.readouterr().err
    assert main(["top", "--address", "ray://head:10001"]) == 2
    assert "6379" in capsys.readouterr().err


# -- what is put together -----------------------------------------------------------------------------------------


def a_record(name: str, cpus: float = 8.0) -> dict[str, Any]:
    resources = {"CPU": cpus, "GPU": 2.0, "memory": 32 * 2.0**30}
    return {"NodeID": f"id-{name}", "NodeManagerHostname": name, "NodeManagerAddress": "10.0.0.1"} | {
        "Resources": resources
    }


def a_row(name: str, holds: dict[str, Amount], wants: tuple[Want, ...] = (), **claim: Any) -> tuple[float, bytes]:
    holdings = (Holding(id="1", parts=holds),) if holds else ()
    made = RunClaim(run=name, holdings=holdings, wants=wants, waited_s=90.0, **claim)
    row = registry.RunRow(
        run_id=name, name=name, user="ada", host="h", pid=1, directory=f"/runs/{name}", started=1.0, claim=made
    )
    return 0.5, msgspec.json.encode(row)


def test_runs_are_listed_by_priority_with_what_each_holds_and_waits_for() -> None:
    rows = [
        a_row("low", {"id-a": Amount(1, 4, 8)}, priority=0, limits={"gpus": 2}),
        a_row("high", {}, (Want((Amount(2, 2), Amount(2, 2)), 3),), priority=5),
        (1.0, b'{"version": 0, "run_id": 7, "name": "old"}'),
        (1.0, b"no row"),
    ]
    free = {"id-a": {"CPU": 2.0, "GPU": 1.0, "memory": 8 * 2.0**30}}
    view = {"t": 0.0, "address": "here:1", **compose([a_record("a")], free, rows)}
    [node] = view["nodes"]
    assert node["foreign"] == {"gpus": 0.0, "cpus": 2.0, "memory_gb": 16.0}
    lines = [line for line, _ in list_lines(view, None)]
    assert "4 runs of 1 user on 1 node" in lines[0]
    table = "\n".join(lines)
    assert table.index("\nhigh") < table.index("\nlow") < table.index("\nold")
    assert "3 × 2 GPUs, 2 cores + 2 GPUs, 2 cores; for 1 min 30 s" in table
    assert "another version of ray-ensemble (its row has version 0)" in table
    assert "low: 1 GPU, 4 cores, 8 GiB; others: 2 cores, 16 GiB" in table
    for line in list_lines(view, 70):
        assert all(len(part) <= 70 for part in line[0].splitlines())


def test_what_a_run_said_of_others_long_ago_is_not_shown(tmp_path: Path) -> None:
    run_dir, now = RunDir(tmp_path), time.time()
    assert tabulate_others(run_dir, now) is None
    [row] = compose([], {}, [a_row("b", {"n": Amount(0, 1)})])["runs"]
    run_dir.cluster.write_text(json.dumps({"t": now, "runs": [row]}))
    shown = tabulate_others(run_dir, now + 1)
    assert shown is not None and shown.as_dict()["rows"][0][:2] == ["b", "ada"]
    assert tabulate_others(run_dir, now + 60) is None
    run_dir.cluster.write_text('{"t": "later", "runs": 1}')
    assert tabulate_others(run_dir, now) is None
