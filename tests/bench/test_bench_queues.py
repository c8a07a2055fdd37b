"""The queues of the pipelines study: means between two moments, and what they say of the limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.bench.pipelines.queues import Sample, summarize
from pipelines.feeder.statistics import QueueLevels

LEVEL = st.floats(0, 1)
#: Seconds, and the levels in them: ring, waiting, full.
SPANS = st.lists(st.tuples(st.floats(0.01, 10), LEVEL, LEVEL, LEVEL), min_size=2, max_size=8)


def feeder(spans: list[tuple[float, float, float, float]]) -> list[Sample]:
    """A feeder's samples at the ends of its spans, as its own integral over time has them."""
    now = 0.0
    levels = QueueLevels(lambda: now)
    samples = [Sample(now, levels.recorded_s, levels.means())]
    for seconds, ring, waiting, full in spans:
        levels.record(ring=ring, waiting=waiting, full=full)
        now += seconds
        samples.append(Sample(now, levels.recorded_s, levels.means()))
    return samples


@given(SPANS, st.data())
def test_the_levels_of_a_window_are_the_means_over_its_time(
    spans: list[tuple[float, float, float, float]], data: st.DataObject
) -> None:
    samples = feeder(spans)
    first = data.draw(st.integers(0, len(spans) - 1))
    last = data.draw(st.integers(first + 1, len(spans)))
    found = summarize([samples], samples[first].time_s, samples[last].time_s)
    inside = spans[first:last]
    total = sum(span[0] for span in inside)
    means = [sum(span[0] * span[level] for span in inside) / total for level in (1, 2, 3)]
    assert found is not None
    assert [found.mean, found.waiting, found.full] == pytest.approx(means, abs=1e-6)
    assert all(0 <= after_s <= total + 0.01 and 0 <= level <= 1 for after_s, level in found.course)


@pytest.mark.parametrize(
    ("ring", "waiting", "full", "limit"),
    [
        (0.1, 0.9, 0.0, "preparation"),
        (0.9, 0.0, 0.8, "members"),
        (0.5, 0.1, 0.0, "members"),
        (0.9, 0.6, 0.9, "members"),  # the one that waits, waits for a slower one
    ],
)
def test_members_that_wait_blame_preparation_and_full_ones_the_members(
    ring: float, waiting: float, full: float, limit: str
) -> None:
    found = summarize([feeder([(1.0, ring, waiting, full)] * 2)] * 2, 0.0, 2.0)
    assert found is not None and found.limit == limit
    assert found.course[0] == (0.03, ring)


def test_of_several_nodes_the_busiest_is_compared_with_the_busiest_link() -> None:
    def node(workers: float, link: float) -> list[Sample]:
        levels = {"ring": 0.1, "waiting": 0.9, "full": 0.0, "workers": workers, "link": link}
        return [Sample(0.0, 0.0, {}), Sample(1.0, 1.0, levels)]

    for link, limit in ((0.5, "preparation"), (0.95, "links")):
        found = summarize([node(0.9, link), node(0.0, 0.5), node(0.0, 0.5)], 0.0, 1.0)
        assert found is not None and found.limit == limit


def test_without_a_feeder_nothing_is_said_of_queues() -> None:
    assert summarize([], 0.0, 1.0) is None
    assert summarize([[Sample(0.5, 0.0, {})]], 0.0, 1.0) is None, "none has recorded anything"
