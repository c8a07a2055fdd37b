"""A run on hundreds of nodes whose agents answer late or never: it ends, and its decisions cost what they must.

Cost is CPU time of ten times the nodes and members against that of one time: 10 where it grows with their number,
100 where it grows with nodes times members.
"""

from __future__ import annotations

import logging

import pytest
from many_nodes import CORES, LATEST_S, Crowd

MOST_RATIO = 25.0


def train(nodes: int, monkeypatch: pytest.MonkeyPatch) -> Crowd:
    crowd = Crowd(nodes, members=2 * CORES * nodes, seed=0, monkeypatch=monkeypatch)
    crowd.run(most_s=900)
    return crowd


def check(crowd: Crowd, members: int) -> None:
    assert len(crowd.finished) == members
    assert all(member.attempts == 1 for member in crowd.session.state.run.members.values())
    assert not any(crowd.running.values())
    silent = {event.node for event in crowd.session.state.run.unusable.values()}
    assert silent == crowd.silent, "those that never answer are given up, and no others"


def test_members_train_while_agents_answer_late_and_those_that_never_do_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd = Crowd(30, members=240, seed=1, monkeypatch=monkeypatch)
    while not crowd.finished:
        crowd.step()
    answered = sum(agent.described is not None for agent in crowd.model.agents.values())
    assert crowd.now < 1000 + LATEST_S + 90 and answered > 0
    crowd.run(most_s=900)
    while crowd.silent & crowd.model.agents.keys():
        crowd.step()
    check(crowd, 240)


@pytest.mark.more
@pytest.mark.parametrize("nodes", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_ten_times_the_nodes_and_members_cost_some_ten_times_as_much(
    nodes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    few = train(nodes // 10, monkeypatch)
    many = train(nodes, monkeypatch)
    assert len(many.finished) == 10 * len(few.finished) == 2 * CORES * nodes
    for whose in ("session", "model"):
        ratio = many.cpu_s[whose] / few.cpu_s[whose]
        assert ratio < MOST_RATIO, f"{whose}: {few.cpu_s[whose]:.2f} s, {many.cpu_s[whose]:.2f} s"
