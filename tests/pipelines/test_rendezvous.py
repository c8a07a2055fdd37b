"""How nodes find each other in a directory."""

from __future__ import annotations

import dataclasses
import itertools
import os
import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines import Peers, PipelineError
from pipelines.multinode.rendezvous import FRESH_S, GroupAssignment, Rendezvous, WaitingNode, select_nearby


def meetings(directory: Path, nodes: int) -> list[Rendezvous]:
    return [Rendezvous(Peers(str(directory / "peers"), node, nodes), "same", near=64) for node in range(nodes)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_all_nodes_meet_in_one_group_whoever_looks_first(tmp_path: Path, order: tuple[int, ...]) -> None:
    nodes = meetings(tmp_path, 3)
    for meeting in nodes[:2]:
        assert meeting.poll(-1, everybody=True) is None
    groups: dict[int, GroupAssignment] = {}
    for node in order * 3:
        invitation = None if node in groups else nodes[node].poll(-1, everybody=True)
        if invitation is not None:
            groups[node] = invitation
    for node in range(3):
        assert groups[node] == GroupAssignment(1, node, (0, 1, 2), groups[0].store)
    assert stat.S_IMODE(os.stat(tmp_path / "peers").st_mode) == 0o700
    nodes[0].remove_group(1)
    assert os.listdir(tmp_path / "peers") == []


def test_after_failures_there_are_longer_pauses_up_to_half_a_minute(tmp_path: Path) -> None:
    (node,) = meetings(tmp_path, 1)
    for failures, pause_s in ((0, 2), (1, 4), (2000, 30)):
        node.failures, now_s = failures, time.monotonic()
        node.record_failure()
        assert not node.is_due(now_s + pause_s - 0.5) and node.is_due(time.monotonic() + pause_s)


def test_those_who_are_left_meet_without_the_one_that_died(tmp_path: Path) -> None:
    nodes = meetings(tmp_path, 3)
    for meeting in nodes:
        meeting.announce(100)
    note = tmp_path / "peers" / "wait-0.json"
    os.utime(note, (os.stat(note).st_mtime - FRESH_S - 1,) * 2)
    for node in (1, 2):
        invitation = nodes[node].poll(100, everybody=False)
        assert invitation is not None and invitation.nodes == (1, 2)
    assert nodes[0].find_assignment() is None
    assert nodes[1].joinable_nodes((1, 2), 100) == [], "a note that grew old is nobody who waits"


def test_a_feeder_that_was_started_again_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    before = meetings(tmp_path, 2)
    before[1].announce(-1)
    assert before[0].poll(-1, everybody=True) is not None
    again = Rendezvous(Peers(str(tmp_path / "peers"), 1, 2), "same", near=64)
    assert again.find_assignment() is None
    again.announce(-1)
    invitation = before[0].poll(-1, everybody=False)
    assert invitation is not None and invitation.generation == 2
    assert again.poll(-1, everybody=False) == dataclasses.replace(invitation, rank=1)


def test_a_transport_is_told_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, there = meetings(Path(), 2)
    there.announce(-1)
    assignment = here.poll(-1, everybody=True)
    assert assignment is not None and assignment.store == str(tmp_path / "peers" / "store-1")
    (tmp_path / "peers").chmod(0o777)
    with pytest.raises(PipelineError, match="other users may write"):
        meetings(tmp_path, 1)


def test_other_pipelines_do_not_meet_and_are_named_and_half_written_notes_are_none(tmp_path: Path) -> None:
    here, there = meetings(tmp_path, 2)
    there = Rendezvous(there.peers, "another", near=64)
    there.announce(-1)
    assert here.poll(-1, everybody=False) is None
    assert here.mismatched_nodes() == [1]
    assert there.poll(-1, everybody=False) is None
    (tmp_path / "peers" / "wait-1.json").write_text('{"v": 1, "boot')
    assert [waiter.node for waiter in here.waiting_nodes()] == [0]


def test_who_comes_later_is_seen_by_the_group_when_it_is_near(tmp_path: Path) -> None:
    here, late = meetings(tmp_path, 2)
    late.announce(1000)
    assert here.joinable_nodes((0,), head=900) == []
    late.announce(940)
    assert here.joinable_nodes((0,), head=900) == [1]
    late.withdraw()
    assert here.joinable_nodes((0,), head=900) == []


@given(st.lists(st.integers(-1, 400), max_size=6), st.integers(1, 100))
def test_only_streams_that_are_near_each_other_go_on_together(heads: list[int], near: int) -> None:
    chosen = select_nearby([WaitingNode(i, str(i), "same", head) for i, head in enumerate(heads)], near)
    there = [waiter.head for waiter in chosen if waiter.head >= 0]
    assert not there or max(there) - min(there) <= near
    assert {waiter.node for waiter in chosen} >= {i for i, head in enumerate(heads) if head < 0}
    for low in heads:  # no larger set would do
        if low >= 0:
            assert len(there) >= sum(low <= head <= low + near for head in heads)
