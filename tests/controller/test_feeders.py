"""The feeders of a cohort that spans several nodes: introduced to each other, equal in form, stopped together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.controller.actions import ClearRendezvous, Log, StartFeeder, StopFeeder
from ensemble.controller.attempt_table import AttemptTable
from ensemble.controller.feeders import Feeders, SharedStream
from ensemble.controller.node_table import NodeTable
from ensemble.controller.session_state import SessionState
from ensemble.schedule.needs import Node, Placement
from ensemble.schedule.placement import Start
from ensemble.spec import Ensemble, Recipe
from ensemble.store import RunDir, RunState
from pipelines import Peers, Pipeline, sources

NODES = {"a": Node("a", 2, (), 64.0, "a", interface="eth0"), "b": Node("b", 2, (), 4.0, "b", interface="eth1")}


def ready(start: StartFeeder, address: str | None, error: str | None = None) -> dict[str, Any]:
    where = {"node": start.node, "cohort": start.cohort, "number": start.number}
    return {"type": "feeder_ready", **where, "address": address, "error": error}


class Decided:
    """The feeders of a session, and what they decide."""

    def __init__(self, tmp_path: Path, sharing: str, members: int = 3) -> None:
        train, recipe = sources.arrays(x=np.zeros((64, 2), np.float32)), Recipe(model=len, loss=len, task="free")
        listed: dict[str, Any] = {"members": [{"n": n} for n in range(members)], "batch_size": 16}
        self.declared = Ensemble(name="feeders", recipe=recipe, train=Pipeline(train), sharing=sharing, **listed)
        stream = SharedStream(self.declared)
        stream.check()
        self.state = SessionState(run := RunState(), NodeTable(run, NODES.values()), AttemptTable(run))
        self.feeders = Feeders(self.state, self.declared, RunDir(tmp_path), stream)
        self.logged: list[Log] = []

    def starts(self, *nodes: str, cohort: int = 0) -> list[Start]:
        return [Start(Placement(self.declared.identify(i), node, (None,)), cohort) for i, node in enumerate(nodes)]

    def assign(self, together: list[Start], readers: set[str] | None = None) -> list[list[tuple[str, int]]]:
        who = readers if readers is not None else {start.placement.member for start in together}
        return [self.feeders.assign(start, together, who) for start in together]

    def of(self, kind: type[Any]) -> list[Any]:
        """The actions of a kind that were decided."""
        return [action for action in self.state.actions if isinstance(action, kind)]

    @property
    def started(self) -> list[StartFeeder]:
        return sorted(self.of(StartFeeder), key=lambda each: each.node)

    def answer(self, error: str | None = None) -> None:
        """Each feeder that was asked for has an address, or cannot be started."""
        for each in self.of(StartFeeder):
            address = None if error is not None else f"{each.node}-{each.cohort}"
            self.feeders.handle_ready(ready(each, address, error))
        self.logged += self.of(Log)
        self.state.actions.clear()


@pytest.mark.parametrize("sharing", ["auto", "single", "multi", "all"])
def test_feeders_of_one_cohort_on_several_nodes_are_peers_with_equal_rings(tmp_path: Path, sharing: str) -> None:
    decided = Decided(tmp_path, sharing)
    assert decided.assign(decided.starts("b", "a", "b")) == [[("b", 0)], [("a", 0)], [("b", 0)]]
    a, b = decided.started
    assert (a.node, a.cohort, a.expected) == ("a", 0, 1) and (b.node, b.cohort, b.expected) == ("b", 0, 2)
    assert a.capacity == b.capacity
    assert a.peers == Peers(str(tmp_path / "feeders" / "cohort-0"), 0, 2, "eth0")
    assert b.peers == Peers(str(tmp_path / "feeders" / "cohort-0"), 1, 2, "eth1")
    assert decided.feeders.is_starting(("b", 0)) and decided.feeders.address(("b", 0)) is None
    decided.answer()
    assert not decided.feeders.is_starting(("b", 0)) and decided.feeders.address(("b", 0)) == "b-0"
    decided.feeders.restart("b", 0, 2, "killed")
    (again,) = decided.started
    assert (again.node, again.peers, again.capacity) == ("b", b.peers, b.capacity), "in its old place"


def test_a_single_node_a_pipeline_a_node_and_nodes_that_cannot_be_reached_have_no_peers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sharing, cohorts in (("auto", ["aa", "b"]), ("node", ["ab"]), ("all", ["ab"])):
        if sharing == "all":
            monkeypatch.setitem(NODES, "b", replace(NODES["b"], interface=None))
        decided = Decided(tmp_path, sharing)
        for nodes in cohorts:  # a late node comes alone
            decided.assign(decided.starts(*nodes))
        assert [each.peers for each in decided.started] == [None, None]
    assert "no network interface of node b has its address" in caplog.text


def test_peers_stay_until_nobody_reads_their_stream(tmp_path: Path) -> None:
    decided = Decided(tmp_path, "all")
    decided.assign(decided.starts("a", "b"), readers={"member-1"})
    assert [each.expected for each in decided.started] == [0, 1], "a gate waits for those who read"
    assert isinstance(decided.state.actions[0], ClearRendezvous), "what a killed controller left"
    decided.assign(decided.starts("b", cohort=1))
    decided.answer()
    decided.feeders.stop_unneeded({("b", 0)})
    assert decided.of(StopFeeder) == [StopFeeder("b", 1)] and not decided.of(ClearRendezvous)
    decided.feeders.stop_unneeded(set())
    assert set(decided.of(StopFeeder)) == {StopFeeder("a", 0), StopFeeder("b", 0), StopFeeder("b", 1)}
    assert decided.of(ClearRendezvous) == [ClearRendezvous(0)]


@pytest.mark.parametrize(("is_replaced", "is_late"), [(False, False), (False, True), (True, True)])
def test_the_answer_to_a_start_that_was_stopped_is_not_taken_for_that_of_the_next(
    tmp_path: Path, is_replaced: bool, is_late: bool
) -> None:
    decided = Decided(tmp_path, "node")
    decided.assign(decided.starts("a"))
    if is_replaced:
        decided.answer()
        decided.feeders.restart("a", 0, 1, "killed")
    decided.feeders.stop_unneeded(set())
    decided.assign(decided.starts("a"))
    first, second = decided.of(StartFeeder)
    answers = [ready(first, None, "no memory"), ready(second, "a-0")]
    for answer in reversed(answers) if is_late else answers:
        decided.feeders.handle_ready(answer)
    assert decided.feeders.address(("a", 0)) == "a-0", "it runs, and is known to run"
    decided.feeders.stop_unneeded(set())
    kinds = [type(each) for each in decided.state.actions if not isinstance(each, Log)]
    assert kinds == [StartFeeder, StopFeeder, StartFeeder, StopFeeder], "never two of a cohort on one node"
    assert not [each for each in decided.of(Log) if each.event.type == "feeder_restarted"]


def test_a_ring_holds_what_was_asked_or_a_few_batches_within_what_a_node_keeps_for_all(tmp_path: Path) -> None:
    def choose(declared: int | None, sample_bytes: int, batch_sizes: list[int]) -> int:
        stream = SharedStream(replace(Decided(tmp_path, "node").declared, capacity=declared))
        stream.sample_bytes = sample_bytes
        return stream.choose_capacity(batch_sizes, 16)

    assert choose(5000, 100, [32]) == 5000
    assert choose(10, 100, [32]) == 36, "a batch needs a block beside it"
    assert choose(None, 3000, [32, 128]) == 4096
    assert choose(None, 150_000, [32, 256]) == 1024
    assert choose(None, 600_000, [32]) == 128, "four batches, not 512 as of a lone feeder"
    assert choose(None, 100_000_000, [32]) == 64, "two batches are the least"
    decided = Decided(tmp_path, "node")
    decided.feeders._stream.sample_bytes = size = 1_150_000
    for cohort in range(5):
        decided.assign(decided.starts("b", cohort=cohort))
    rings = [start.capacity for start in decided.of(StartFeeder)]
    assert sum(rings[:4]) * size <= NODES["b"].memory_gb * 2**30 / 15
    assert rings[0] == rings[1] == rings[2] > rings[3] > rings[4] == 32, "two batches are the least"


def test_why_members_whose_pipelines_have_nothing_in_common_share_nothing_is_said(caplog: Any) -> None:
    def train(params: dict[str, Any]) -> Pipeline:
        return Pipeline(sources.arrays(x=np.zeros((64, 2), np.float32)), seed=params["n"])

    listed: dict[str, Any] = {"members": [{"n": 1}, {"n": 2}], "train": train, "batch_size": 16}
    stream = SharedStream(Ensemble(name="apart", recipe=Recipe(model=len, loss=len, task="free"), **listed))
    stream.check()
    assert not stream.sharing and "seed" in str(stream.unshared)
    assert f"nothing is shared, every member prepares its own batches: {stream.unshared}" in caplog.text
