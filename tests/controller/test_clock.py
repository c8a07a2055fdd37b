"""The clock by which a controller limits others."""

from __future__ import annotations

from ensemble.controller.clock import COUNTED_S, StallFreeClock


def test_a_stall_of_the_reader_hardly_counts() -> None:
    times = iter([100.0, 100.5, 104.0, 904.0, 905.0, 915.0, 925.0])
    clock = StallFreeClock(lambda: next(times))
    assert [clock.read() for _ in range(3)] == [100.5, 104.0, 104.0 + COUNTED_S]
    assert clock.read() == 105.0 + COUNTED_S
    assert clock.read() < clock.read(), "limits end also where every turn is slow"
