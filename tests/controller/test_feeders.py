"""The feeders of a cohort that spans several nodes: introduced to each other, equal in form, stopped together."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.controller.feeders import Feeders
from ensemble.schedule import Node, Placement, Start
from ensemble.spec import Ensemble, Recipe
from ensemble.store import RunDir
from pipelines import Peers, Pipeline, sources

NODES = {
    "a": Node("a", 2, (), 64.0, "a", interface="eth0"),
    "b": Node("b", 2, (), 4.0, "b", interface="eth1"),
}


class Started:
    """Stands for an executor: notes which feeders it was asked for."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int, int, int, Peers | None]] = []
        self.stopped: list[tuple[str, int]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        """Stands for the log."""

    def start_feeder(self, *told: Any, late: bool = False) -> str:
        self.started.append(told)  # type: ignore[arg-type]
        return f"{told[0]}-{told[1]}"

    def stop_feeder(self, node: str, cohort: int) -> None:
        self.stopped.append((node, cohort))


def made(tmp_path: Path, sharing: str, members: int = 3) -> tuple[Started, Feeders, Ensemble]:
    declared = Ensemble(
        name="feeders",
        recipe=Recipe(model=len, loss=len),
        train=Pipeline(sources.arrays(x=np.zeros((64, 2), np.float32))),
        members=[{"n": n} for n in range(members)],
        sharing=sharing,
        batch_size=16,
    )
    executor = Started()
    feeders = Feeders(executor, declared, RunDir(tmp_path), executor.emit)  # type: ignore[arg-type]
    feeders.check()
    return executor, feeders, declared


def starts(declared: Ensemble, *nodes: str, cohort: int = 0) -> list[Start]:
    return [Start(Placement(declared.identify(i), node, (None,)), cohort) for i, node in enumerate(nodes)]


def addresses(feeders: Feeders, together: list[Start], readers: set[str] | None = None) -> list[str | None]:
    who = readers if readers is not None else {start.placement.member for start in together}
    return [feeders.address(start, together, who, NODES) for start in together]


@pytest.mark.parametrize("sharing", ["auto", "single", "multi", "all"])
def test_feeders_of_one_cohort_on_several_nodes_are_peers_with_equal_rings(tmp_path: Path, sharing: str) -> None:
    executor, feeders, declared = made(tmp_path, sharing)
    assert addresses(feeders, starts(declared, "b", "a", "b")) == ["b-0", "a-0", "b-0"]
    (a, b) = sorted(executor.started)
    assert (a[:3], b[:3]) == (("a", 0, 1), ("b", 0, 2)) and a[3] == b[3]
    assert a[4] == Peers(str(tmp_path / "feeders" / "cohort-0"), 0, 2, "eth0")
    assert b[4] == Peers(str(tmp_path / "feeders" / "cohort-0"), 1, 2, "eth1")
    feeders.restart("b", 0, 2, "killed")
    assert executor.started[-1] == b, "in its old place"


def test_a_single_node_a_pipeline_a_node_and_a_late_node_have_no_peers(tmp_path: Path) -> None:
    executor, feeders, declared = made(tmp_path, "auto")
    addresses(feeders, starts(declared, "a", "a"))
    addresses(feeders, starts(declared, "b"))
    assert [told[4] for told in executor.started] == [None, None]
    executor, feeders, declared = made(tmp_path, "node")
    addresses(feeders, starts(declared, "a", "b"))
    assert [told[4] for told in executor.started] == [None, None]


def test_a_node_that_cannot_be_reached_leaves_each_its_own_pipeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, feeders, declared = made(tmp_path, "all")
    monkeypatch.setitem(NODES, "b", Node("b", 2, (), 4.0, "b", interface=None))
    addresses(feeders, starts(declared, "a", "b"))
    assert [told[4] for told in executor.started] == [None, None]
    assert "no interface of node b has its address" in caplog.text


def test_peers_stay_until_nobody_reads_their_stream(tmp_path: Path) -> None:
    executor, feeders, declared = made(tmp_path, "all")
    addresses(feeders, starts(declared, "a", "b"), readers={"member-1"})
    assert [told[2] for told in sorted(executor.started)] == [0, 1], "a gate waits for those who read"
    addresses(feeders, starts(declared, "b", cohort=1))
    meeting = RunDir(tmp_path).feeders(0)
    meeting.mkdir(parents=True)
    feeders.stop_unneeded({("b", 0)})
    assert executor.stopped == [("b", 1)] and meeting.exists()
    feeders.stop_unneeded(set())
    assert sorted(executor.stopped) == [("a", 0), ("b", 0), ("b", 1)] and not meeting.exists()


def test_what_a_killed_controller_left_is_removed_before_feeders_meet(tmp_path: Path) -> None:
    _, feeders, declared = made(tmp_path, "all")
    old = RunDir(tmp_path).feeders(0)
    old.mkdir(parents=True)
    (old / "group-7.json").write_text("{}")
    addresses(feeders, starts(declared, "a", "b"))
    assert not old.exists() or stat.S_IMODE(old.stat().st_mode) == 0o700
