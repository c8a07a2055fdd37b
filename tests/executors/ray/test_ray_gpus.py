"""Nodes with several GPUs under Ray: logical ones, and a stand-in for NVIDIA's library that names four."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_child import Run, make_machine
from gpus_child import SHARES, WORKER
from kit import nvml_stand_in
from kit.event_dicts import fold, read_events
from one_head import start_head
from started_cluster import make_cluster

from ensemble.store import RunDir

# Which GPUs a run plans with and lends: tests/executors/ray/test_ray_demand.py, test_ray_agent.py, without a Ray.
pytestmark = [pytest.mark.ray, pytest.mark.more]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with four GPUs, where workers say which they were given and do not train."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "sitecustomize.py").write_text(WORKER)
    usual = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    paths = [str(folder), str(HERE.parents[2]), str(HERE.parents[1] / "support"), str(HERE), str(HERE.parent)]
    library = {**nvml_stand_in.build(folder), "STAND_IN_GPUS": ",".join(["A100:80"] * 4)}
    return {**usual, **library, "PYTHONPATH": os.pathsep.join(paths)}


def drive(mode: str, run_dir: Path, environment: dict[str, str]) -> list[str]:
    """The states in which the members ended."""
    command = [sys.executable, str(HERE / "gpus_child.py"), mode, str(run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = re.findall(r"^\w+ (\[.*\])$", done.stdout, re.M)
    return [str(state) for state in ast.literal_eval(said)]


def given(run_dir: Path) -> dict[str, list[str]]:
    """The GPUs that the workers of each member were shown: those that they were placed on, no attempt in vain."""
    events = read_events(run_dir / "events.jsonl")
    placed: dict[str, Any] = {event["member"]: event for event in events if event["type"] == "placed"}
    shown = {}
    for member in fold(events).members.values():
        assert (member.state, member.attempts) == ("finished", 1), member.error
        said = re.findall(r"^GPU (\S*) (\S+)$", RunDir(run_dir).log(member.id).read_text(), re.M)
        assert {order for _, order in said} == {"PCI_BUS_ID"}, "CUDA counts as NVML does"
        shown[member.id] = sorted(gpu for gpu, _ in said)
        assert shown[member.id] == sorted(map(str, placed[member.id]["devices"]))
    return shown


def of_kind(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir / "events.jsonl") if event["type"] == kind]


def test_every_gpu_of_a_node_is_used_and_each_rank_has_one_of_its_own(
    tmp_path: Path, machine: dict[str, str]
) -> None:
    assert drive("own", tmp_path, machine) == ["finished"] * 5
    shown = given(tmp_path / "whole")
    assert len(set(shown["member-4"])) == 2, "a member of two ranks has two"
    assert {gpu for gpus in shown.values() for gpu in gpus} == {"GPU-0", "GPU-1", "GPU-2", "GPU-3"}


@pytest.mark.parametrize(
    ("gpus", "narrowed", "expected"),
    [
        pytest.param(
            ",".join(["H100:80"] * 8), None, [f"GPU-{n}" for n in range(8)], id="eight", marks=pytest.mark.slow
        ),
        pytest.param(
            "A100:80:3,A100:80", None, ["GPU-1", "MIG-0-0", "MIG-0-1", "MIG-0-2"], id="mig", marks=pytest.mark.slow
        ),
        pytest.param(",".join(["A100:80"] * 4), "3,1", ["GPU-1", "GPU-3"], id="numbers", marks=pytest.mark.slow),
        pytest.param(",".join(["A100:80"] * 4), "GPU-2,GPU-0", ["GPU-0", "GPU-2"], id="uuids"),
    ],
)
def test_a_ray_of_the_runs_own_uses_each_gpu_that_its_user_or_slurm_lets_it_see(
    tmp_path: Path, machine: dict[str, str], gpus: str, narrowed: str | None, expected: list[str]
) -> None:
    environment = {**machine, "STAND_IN_GPUS": gpus}
    if narrowed is not None:
        environment["CUDA_VISIBLE_DEVICES"] = narrowed
    assert drive(f"each{len(expected)}", tmp_path, environment) == ["finished"] * len(expected)
    assert sorted(gpu for [gpu] in given(tmp_path / "each").values()) == expected


@pytest.fixture(scope="module")
def cluster(machine: dict[str, str]) -> Iterator[dict[str, str]]:
    """A cluster of one node that lends the GPUs 2 and 3."""
    with start_head({**machine, "CUDA_VISIBLE_DEVICES": "2,3"}, ["--num-cpus", "2"]) as head:
        yield {**machine, **head}


@pytest.mark.slow
def test_a_raylet_that_was_narrowed_lends_the_gpus_that_it_sees(tmp_path: Path, cluster: dict[str, str]) -> None:
    assert drive("whole", tmp_path, cluster) == ["finished"] * 5
    shown = given(tmp_path / "whole")
    assert {gpu for gpus in shown.values() for gpu in gpus} == {"GPU-2", "GPU-3"}
    assert shown["member-4"] == ["GPU-2", "GPU-3"]


def test_shares_that_fit_on_two_gpus_run_at_once(tmp_path: Path, cluster: dict[str, str]) -> None:
    assert drive("fractions", tmp_path, cluster) == ["finished"] * 4
    assert {gpu for [gpu] in given(tmp_path / "fractions").values()} == {"GPU-2", "GPU-3"}
    members = fold(read_events(tmp_path / "fractions" / "events.jsonl")).members.values()
    spans = [(0.4 if member.id in ("member-0", "member-1") else 0.6, *member.spans) for member in members]
    for _, span in spans:
        beside = [(share, other) for share, other in spans if other.devices == span.devices]
        shares = [share for share, other in beside if other.placed <= span.placed < (other.ended or 0)]
        assert 0 < sum(shares) <= 1.0 + 1e-9


def test_members_of_all_shares_train_at_once_on_two_nodes(tmp_path: Path, machine: dict[str, str]) -> None:
    with make_cluster(**machine) as cluster:
        cluster.start(variables={"CUDA_VISIBLE_DEVICES": "0,1"}, cpus=4)
        node = ["--address", f"127.0.0.1:{cluster.port}", "--num-cpus", "4"]
        cluster.start_node({"CUDA_VISIBLE_DEVICES": "2,3"}, *node)
        assert drive("mixed", tmp_path, cluster.environment) == ["finished"] * len(SHARES)
    placed = {event["member"]: event for event in of_kind(tmp_path / "mixed", "placed")}
    where: dict[str, list[float]] = {}
    for member, shown in given(tmp_path / "mixed").items():
        share, on = SHARES[int(member.removeprefix("member-"))], placed[member]
        print(f"{member}: share {share:g}, {on['node']}, {on['device']}, {shown[0]}")
        assert on["device"] == ("cpu" if share == 0 else "A100") and (shown == ["None"]) == (share == 0)
        where.setdefault(shown[0], []).append(share)
    assert where.keys() == {"None", "GPU-0", "GPU-1", "GPU-2", "GPU-3"}
    assert all(sum(shares) == 1.0 for gpu, shares in where.items() if gpu != "None"), where
    assert [1.0] in where.values(), "a whole one is nobody else's"
    assert len({on["node"] for on in placed.values()}) == 2


def test_what_somebody_else_holds_is_waited_for_and_then_used(tmp_path: Path, cluster: dict[str, str]) -> None:
    assert drive("waits", tmp_path, cluster) == ["finished"] * 2
    assert sorted(given(tmp_path / "waits").values()) == [["GPU-2"], ["GPU-3"]]
    missing = [event["missing"] for event in of_kind(tmp_path / "waits", "resources")]
    assert any(text.startswith("1 x (1 GPU") for text in missing) and missing[-1] == ""


@pytest.mark.slow
def test_a_cluster_does_not_lend_a_broken_gpu_again(tmp_path: Path) -> None:
    environment = make_machine(tmp_path, ",".join(["A100:80"] * 4))
    with start_head(environment, ["--num-cpus", "2"]) as head:
        run = Run.on_cluster(tmp_path, {**environment, **head}, "breaks", "xid 79", "fails", "1")
    assert set(run.states.values()) == {"finished"}, run.said
    run.find_quarantined("XID 79: GPU has fallen")


@pytest.mark.slow
def test_members_use_of_lent_gpus_what_others_leave(tmp_path: Path) -> None:
    environment = make_machine(tmp_path, "A100:80,A100:80", "GPU-0 held 79\nGPU-1 held 40\n")
    with start_head(environment, ["--num-cpus", "2"]) as head:
        run = Run.on_cluster(tmp_path, {**environment, **head}, "freed")
    assert set(run.states.values()) == {"finished"}, run.said
    assert run.given("member-0") == [{"GPU-1"}]
