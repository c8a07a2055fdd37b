"""All ranks of a member that leaves it to the feeder where to begin are given the same epoch."""

from __future__ import annotations

from typing import Any

import pytest
from core_pipes import Feeder, Job, leaves_nothing, pipe, wait_until  # noqa: F401

from pipelines import attach
from pipelines.feeder import consumers


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_ranks_of_a_restarted_member_begin_together_though_the_first_life_was_never_complete(
    order: tuple[int, int],
) -> None:
    def member(rank: int) -> Any:
        return attach(feeder.address, pipe("numpy"), 8, 2, name="member", rank=rank, world=2)

    with Feeder(pipe("numpy"), capacity=16) as feeder:
        others = iter(Job(epochs=(0, 40), name="goes on").attach(feeder.address))
        next(others)
        member(0).close()  # dies before its other rank has asked
        for _ in range(16):
            next(others)
        ranks = [member(rank) for rank in order]
        assert [loader.reading.epochs for loader in ranks] == [range(2, 4)] * 2
        others.close()
        for loader in ranks:
            loader.close()


def test_a_rank_that_was_sent_on_alone_has_not_left_its_member() -> None:
    with Feeder(pipe("numpy"), capacity=16, policy="detach") as feeder:
        others = iter(Job(epochs=(0, 40), name="goes on").attach(feeder.address))
        early = attach(feeder.address, pipe("numpy"), 8, 9, name="member", rank=0, world=2)
        for _ in range(16):
            next(others)
        assert feeder.stats()["detached"] == 1
        late = attach(feeder.address, pipe("numpy"), 8, 9, name="member", rank=1, world=2)
        assert late.reading.epochs == early.reading.epochs
        for loader in (others, early, late):
            loader.close()


def test_members_whose_ranks_never_all_come_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumers, "_MAX_JOINING", 3)
    with Feeder(pipe("numpy"), capacity=64) as feeder:
        ranks = [attach(feeder.address, pipe("numpy"), 8, 1, name=f"m{i}", rank=0, world=2) for i in range(5)]
        assert list(feeder._consumers._joining) == ["m2", "m3", "m4"]
        for loader in ranks:
            loader.close()
        wait_until(lambda: not feeder._consumers._joining)
