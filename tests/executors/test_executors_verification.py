"""Members that are served samples of a pipeline which is said to be theirs, and is not."""

from __future__ import annotations

import dataclasses
import gc
import os
import selectors
import socket
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.event_dicts import ledger, read_events
from kit.execute_members import an_ensemble, samples
from kit.finished_runs import finished_hashes, of_kind
from verified_members import other_in_a_feeder, train_by_environment, train_that_drifts, train_that_hangs

import ensemble
from ensemble import Member, Resources
from ensemble.executors.checker import CheckerProcess
from ensemble.executors.checker_main import Checker
from ensemble.executors.spawn import ForkServer
from ensemble.store import RunDir
from ensemble.train.node_checks import NodeChecks, make_checker_address
from pipelines import Pipeline, sources
from pipelines.ipc import messages
from pipelines.samples.fields import GOOD
from pipelines.verification.checker import ServedSample

NARROW = Resources(cpus_per_worker=0.1, gpus_per_worker=0.0, memory_gb=1.0)


@pytest.mark.more
def test_a_stage_that_reads_another_environment_is_found_before_the_first_step_and_so_is_another_resident_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feeder has the environment of one of two members, and makes of the validation set what neither does."""
    monkeypatch.setenv("LOOK", "1")
    declared = an_ensemble(
        [{"lr": 0.1, "look": 1}, {"lr": 0.1, "look": 3}],
        train=train_by_environment, resources=NARROW,
        valid=samples(48, 1).map(other_in_a_feeder, id="other"),
    )  # fmt: skip
    alone, run = tmp_path / "alone", tmp_path / "run"
    ensemble.submit(declared, alone, "inline").wait()
    ensemble.submit(declared, run, "local").wait()
    differences = of_kind(run, "sample_difference")
    (of_stage,) = (event for event in differences if event["split"] == "train")
    assert (of_stage["action"], of_stage["field"], of_stage["result"]) == ("alone", "x", "different")
    assert of_stage["size"] > 0 and len(of_stage["position"]) == 1
    others = {(e["member"], e["split"], e["action"]) for e in differences if e["split"] != "train"}
    assert others == {(f"member-{number}", "valid", "alone") for number in range(2)}
    assert finished_hashes(run) == finished_hashes(alone)
    metrics = [{e["member"]: e["metrics"] for e in of_kind(path, "finished")} for path in (alone, run)]
    assert metrics[0] == metrics[1]
    private = {e["member"]: e["private_batches"] for e in of_kind(run, "epoch")}
    assert sorted(private.values()) == [0, 3] and private[of_stage["member"]] == 3
    assert ledger(read_events(run / "events.jsonl")).cpu_by_role()["verify"] > 0


@pytest.mark.more
def test_all_ranks_of_a_member_leave_a_stream_that_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOK", "1")
    members: list[Any] = [Member({"lr": 0.1, "look": look}, workers=2) for look in (1, 3)]
    for name, sharing in (("alone", "independent"), ("run", "auto")):
        declared = an_ensemble(
            members, train=train_by_environment, valid=None, sharing=sharing, resources=NARROW, retries=0
        )
        ensemble.submit(declared, tmp_path / name, "local").wait()
    (found,) = of_kind(tmp_path / "run", "sample_difference")
    assert finished_hashes(tmp_path / "run") == finished_hashes(tmp_path / "alone")
    private = {event["member"]: event["private_batches"] for event in of_kind(tmp_path / "run", "epoch")}
    assert private[found["member"]] == 3 and sorted(private.values()) == [0, 3]


def drift_after_an_epoch(run_dir: Path, marker: Path, **options: Any) -> ensemble.Result:
    """A run in which the feeder prepares other samples as soon as a member has ended an epoch."""
    members = [{"lr": 0.1, "marker": str(marker)}, {"lr": 0.2, "marker": str(marker)}]

    def begin_to_drift(event: dict[str, Any]) -> None:
        if event["type"] == "epoch":
            marker.touch()

    declared = an_ensemble(
        members, train=train_that_drifts, valid=None, epochs=4, batch_size=100, capacity=200, resources=NARROW,
        retries=0, **options,
    )  # fmt: skip
    return ensemble.submit(declared, run_dir, "local", on_event=begin_to_drift).wait()


@pytest.fixture(scope="module")
def weights_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Of the members of `drift_after_an_epoch`, each of which prepares alone."""
    run_dir = tmp_path_factory.mktemp("alone")
    members = [{"lr": lr, "marker": str(run_dir / "never")} for lr in (0.1, 0.2)]
    declared = an_ensemble(members, train=train_that_drifts, valid=None, epochs=4, batch_size=100)
    ensemble.submit(declared, run_dir / "run", "inline").wait()
    return finished_hashes(run_dir / "run")


def test_a_late_difference_makes_a_member_begin_anew_and_alone(
    tmp_path: Path, weights_alone: dict[str, str | None]
) -> None:
    result = drift_after_an_epoch(tmp_path / "run", tmp_path / "marker")
    assert [row["state"] for row in result.members] == ["finished"] * 2
    assert finished_hashes(tmp_path / "run") == weights_alone
    found = of_kind(tmp_path / "run", "sample_difference")
    assert {event["member"] for event in found} == {"member-0", "member-1"}
    assert {(event["action"], event["field"]) for event in found} == {("anew", "x")}
    assert all(event["size"] == pytest.approx(1.0, abs=1e-5) for event in found)
    failed = of_kind(tmp_path / "run", "failed")
    assert all(event["reason"] == "sharing" and event["retry"] for event in failed), "beyond the retries"
    last = {event["member"]: event for event in of_kind(tmp_path / "run", "started")}
    assert all((event["epoch"], event["step"], event["attempt"]) == (0, 0, 1) for event in last.values())
    text = RunDir(tmp_path / "run").report.read_text()
    assert "differ from what its own pipeline prepares" in text and "it begins again" in text


@pytest.mark.more  # what a difference does, in one process: tests/pipelines/test_verification.py
@pytest.mark.parametrize(("mode", "state", "actions"), [("fail", "failed", {"fails"}), (False, "finished", set())])
def test_a_late_difference_ends_a_member_or_nothing_is_compared_where_that_is_asked_for(
    mode: Any, state: str, actions: set[str], tmp_path: Path, weights_alone: dict[str, str | None]
) -> None:
    result = drift_after_an_epoch(tmp_path / "run", tmp_path / "marker", verify_sharing=mode)
    assert [(row["state"], row["attempts"]) for row in result.members] == [(state, 1)] * 2
    assert {event["action"] for event in of_kind(tmp_path / "run", "sample_difference")} == actions
    errors = [event["error"] for event in of_kind(tmp_path / "run", "failed")]
    assert all("shared samples of train differ from what its own pipeline prepares" in error for error in errors)
    if not mode:
        assert "verify" not in ledger(read_events(tmp_path / "run" / "events.jsonl")).cpu_by_role()
        assert finished_hashes(tmp_path / "run") != weights_alone, "it trains on what it is served"


@pytest.mark.more
def test_a_checker_that_hangs_ends_all_comparing_on_its_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    members = [{"lr": lr} for lr in (0.1, 0.2)]
    declared = an_ensemble(
        members, train=train_that_hangs, valid=samples(48, 1), epochs=2, prepare_timeout_s=3.0, retries=0,
        resources=NARROW,
    )  # fmt: skip
    result = ensemble.submit(declared, run_dir, "local").wait()
    assert [row["state"] for row in result.members] == ["finished"] * 2
    found = of_kind(run_dir, "sample_difference")
    assert {(e["member"], e["result"]) for e in found} == {(f"member-{i}", "left_out") for i in range(2)}
    assert all(event["private_batches"] == 0 for event in of_kind(run_dir, "epoch"))
    assert RunDir(run_dir).log("checker").read_text().count("Timeout (0:00:03)") == 1, "nobody has waited again"
    (said,) = (record.getMessage() for record in caplog.records if "not compared any more" in record.getMessage())
    assert "longer than prepare_timeout_s" in said


class Node:
    """A node's checker that was not asked yet, and a fork server, which may be dead."""

    def __init__(self, directory: Path, selector: selectors.BaseSelector) -> None:
        self.server, self.is_dead, self.selector = ForkServer(directory), False, selector
        run_dir = str(directory / "run")
        self.checker = CheckerProcess("here", directory, run_dir, selector, print, self.ask, lambda: 1)

    def ask(self, request: Callable[[ForkServer], None]) -> None:
        if not self.is_dead:
            request(self.server)

    def meet(self) -> None:
        """What the node does when somebody has connected."""
        (key,) = (key for key, _ in self.selector.select())
        key.data()

    def start(self) -> None:
        message, pidfd = self.server.receive()
        self.checker.has_started(message["pid"], pidfd)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with selectors.DefaultSelector() as selector:
        made = Node(tmp_path, selector)
        yield made
        made.checker.close()
    made.server.close()


def test_a_checker_outlives_its_fork_server_and_one_that_dies_before_it_has_forked_is_asked_again(
    node: Node,
) -> None:
    with ipc_connection(node.checker) as connection:
        for node.is_dead in (True, False):
            node.meet()
            if node.is_dead:
                node.checker.watch()
        node.start()
        assert node.checker.pid is not None
        node.server.process.kill()
        node.checker.watch()
        node.checker.watch()
        connection.send(b"{")  # and a request that cannot be read
        assert messages.receive_json(connection)[0]["found"]["result"] == "left_out"


def test_a_node_without_a_process_for_its_checker_goes_on_without_one(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node.server.process.kill()
    node.server.process.wait()
    with ipc_connection(node.checker):
        node.meet()
    assert "its checker cannot be started" in caplog.text and not node.selector.get_map()
    assert make_checks(tmp_path).check(a_sample()).kind == "left_out"


def ipc_connection(process: CheckerProcess) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(make_checker_address(process._directory)))
    return connection


def a_sample() -> ServedSample:
    values = {"x": np.zeros(())}
    return ServedSample(stages=0, epoch=0, place=0, index=0, status=GOOD, structure=None, columns=values)


def make_checks(directory: Path) -> NodeChecks:
    return NodeChecks(make_checker_address(directory), "train", {}, is_exact=True, limit_s=120, on_wait=None)


@pytest.mark.parametrize(("megabytes", "least", "most"), [(0, 8, 8), (100, 1, 3)])
def test_a_checker_keeps_the_pipelines_for_which_it_has_memory_and_sees_no_gpu(
    megabytes: int, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    made: weakref.WeakKeyDictionary[Pipeline, Any] = weakref.WeakKeyDictionary()

    def train(params: dict[str, Any]) -> Pipeline:
        pipeline = Pipeline(sources.arrays(x=np.arange(8.0), label=np.arange(8) % 2), shuffle=False)
        made[pipeline] = np.empty((megabytes, 2**20), np.uint8)
        return pipeline

    members = [{"lr": 0.1 * n} for n in range(1, 9)]
    checker = Checker(an_ensemble(members, train=train, valid=None))
    made.clear()
    served = a_sample()
    columns = {"x": np.zeros(()), "label": np.zeros((), int)}
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    for params in members:
        about = {"split": "train", "params": params, "is_exact": True, "environment": environment}
        assert checker.check(dataclasses.replace(served, columns=columns).pack(about)).kind == "equal"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    gc.collect()
    assert least <= len(made) <= most
