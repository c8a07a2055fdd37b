"""How nodes find each other in a directory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipelines import Peers
from pipelines.rendezvous import FRESH_S, Meeting, Waiter, near_each_other


def meetings(directory: Path, nodes: int, identity: str = "same") -> list[Meeting]:
    return [Meeting(Peers(str(directory / "peers"), node, nodes), identity, near=64) for node in range(nodes)]


def test_all_nodes_meet_and_each_is_invited_once(tmp_path: Path) -> None:
    nodes = meetings(tmp_path, 3)
    for meeting in nodes[:2]:
        meeting.wait_here(-1)
    for meeting in nodes:
        meeting.call(everybody=True)
    assert [meeting.invitation() for meeting in nodes] == [None] * 3, "one is not there yet"
    nodes[2].wait_here(-1)
    for meeting in nodes:
        meeting.call(everybody=True)
    invitations = [meeting.invitation() for meeting in nodes]
    assert [i and (i.generation, i.rank, i.nodes) for i in invitations] == [(1, r, (0, 1, 2)) for r in range(3)]
    assert len({i.store for i in invitations if i}) == 1
    assert [meeting.invitation() for meeting in nodes] == [None] * 3
    assert stat.S_IMODE(os.stat(tmp_path / "peers").st_mode) == 0o700


def test_those_who_are_left_meet_without_the_one_that_died(tmp_path: Path) -> None:
    nodes = meetings(tmp_path, 3)
    for meeting in nodes:
        meeting.wait_here(100)
    dead = tmp_path / "peers" / "wait-0.json"
    long_ago = os.stat(dead).st_mtime - FRESH_S - 1
    os.utime(dead, (long_ago, long_ago))
    nodes[1].call(everybody=False)
    invitation = nodes[2].invitation()
    assert invitation is not None and invitation.nodes == (1, 2)
    assert nodes[0].invitation() is None


def test_a_feeder_that_was_started_again_is_not_taken_for_the_one_before(tmp_path: Path) -> None:
    before = meetings(tmp_path, 2)
    for meeting in before:
        meeting.wait_here(-1)
    before[0].call(everybody=True)
    again = Meeting(Peers(str(tmp_path / "peers"), 1, 2), "same", near=64)
    assert again.invitation() is None
    again.wait_here(-1)
    before[0].call(everybody=False)
    invitation = again.invitation()
    assert invitation is not None and invitation.generation == 2


def test_other_pipelines_do_not_meet_and_are_named(tmp_path: Path) -> None:
    here, there = meetings(tmp_path, 2)
    there = Meeting(there.peers, "another", near=64)
    for meeting in (here, there):
        meeting.wait_here(-1)
        meeting.call(everybody=False)
    assert here.invitation() is None
    assert here.strangers() == [1]


def test_who_comes_later_is_seen_by_the_group_when_it_is_near(tmp_path: Path) -> None:
    here, late = meetings(tmp_path, 2)
    late.wait_here(1000)
    assert here.newcomers((0,), head=900) == []
    late.wait_here(940)
    assert here.newcomers((0,), head=900) == [1]
    late.leave()
    assert here.newcomers((0,), head=900) == []


def test_half_written_notes_are_no_notes(tmp_path: Path) -> None:
    here, there = meetings(tmp_path, 2)
    here.wait_here(-1)
    there.wait_here(-1)
    (tmp_path / "peers" / "wait-1.json").write_text('{"v": 1, "boot')
    assert [waiter.node for waiter in here.waiters()] == [0]


@given(st.lists(st.integers(-1, 400), max_size=6), st.integers(1, 100))
def test_only_streams_that_are_near_each_other_go_on_together(heads: list[int], near: int) -> None:
    chosen = near_each_other([Waiter(i, str(i), "same", head) for i, head in enumerate(heads)], near)
    there = [waiter.head for waiter in chosen if waiter.head >= 0]
    assert not there or max(there) - min(there) <= near
    assert {waiter.node for waiter in chosen} >= {i for i, head in enumerate(heads) if head < 0}
    for low in heads:  # no larger set would do
        if low >= 0:
            assert len(there) >= sum(low <= head <= low + near for head in heads)
