"""An external meter's file, and parts of a node that sum to what the whole node is measured to use."""

from __future__ import annotations

import math
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from event_dicts import ledger
from hypothesis import given
from hypothesis import strategies as st

from ensemble.meter.ledger import Ledger
from ensemble.meter.origin import from_ticks, to_ticks
from ensemble.meter.power import Absent, PowerMeter, PowerSource, Reading
from ensemble.meter.power.common import Kind, PowerError, Trapezoid
from ensemble.meter.power.external import (
    AHEAD_S,
    GAP_S,
    LineBuffer,
    MeterRow,
    PowerCurve,
    locate,
    open_external,
    parse_row,
)
from ensemble.meter.power.pending_interval import PendingInterval
from ensemble.meter.power.residual_power import ResidualPower
from ensemble.spec import Energy

UNMEASURED = Energy(measure_idle_s=0)
T = 1_700_000_000.0


@pytest.mark.parametrize(
    "line",
    [
        b"time,watts",
        b"",
        b"# meter 7",
        b"12",
        b"12,",
        b"12,a",
        b"1,2,3",
        b"nan,5",
        b"1,inf",
        b"1,-3",
        b"\xff\xfe,1",
    ],
)
def test_what_is_no_row_is_left_out(line: bytes) -> None:
    assert parse_row(line) is None


@pytest.mark.parametrize("line", [b"1700000000.5,250.25", b" 1700000000.5 , 250.25 \r", b"1.7000000005e9,250.25"])
def test_rows_are_two_numbers(line: bytes) -> None:
    assert parse_row(line) == MeterRow(1_700_000_000.5, 250.25)


@given(st.lists(st.integers(0, 60), max_size=12))
def test_rows_are_the_same_however_the_file_is_cut(cuts: list[int]) -> None:
    text = b"time,watts\n1,10\ngarbage\n2,20\n3,3"
    buffer, rows, at = LineBuffer(), [], 0
    for cut in [*sorted(cuts), len(text)]:
        rows += buffer.add(text[at:cut])
        at = max(at, min(cut, len(text)))
    assert rows == [(1, 10), (2, 20)], "the last line has not ended"
    assert buffer.add(b"0\n") == [(3, 30)]


def test_a_line_without_end_is_not_kept() -> None:
    buffer = LineBuffer()
    for _ in range(100):
        assert buffer.add(b"x" * 1000) == []
    assert len(buffer.rest) < 5000
    assert buffer.add(b"7,7\n8,8\n") == [(8, 8)]


def energy_j(known: list[Trapezoid]) -> float:
    return sum(each.energy_j for each in known)


def test_energy_is_the_area_below_the_lines_between_rows() -> None:
    curve = PowerCurve()
    assert curve.add([MeterRow(T, 100.0)], T) == []
    assert energy_j(curve.add([MeterRow(T + 1, 300.0), MeterRow(T + 3, 300.0)], T + 3)) == 200.0 + 600.0
    assert energy_j(curve.add([MeterRow(T + 4, 100.0)], T + 4)) == 200.0


def test_time_that_goes_back_adds_nothing() -> None:
    curve = PowerCurve(MeterRow(T, 100.0))
    rows = [
        MeterRow(T + 1, 100.0),
        MeterRow(T + 1, 900.0),
        MeterRow(T - 50, 900.0),
        MeterRow(T + 0.5, 900.0),
        MeterRow(T + 2, 100.0),
    ]
    assert energy_j(curve.add(rows, T + 2)) == 200.0


def test_a_row_from_the_future_does_not_stop_the_rows_after_it() -> None:
    curve = PowerCurve(MeterRow(T, 100.0))
    assert (
        energy_j(
            curve.add([MeterRow(T * 1000, 100.0), MeterRow(T + AHEAD_S + 2, 100.0), MeterRow(T + 1, 100.0)], T + 1)
        )
        == 100.0
    )


def test_of_a_gap_nothing_is_known() -> None:
    curve = PowerCurve(MeterRow(T, 100.0))
    now = T + 2 * GAP_S
    assert curve.add([MeterRow(now, 100.0)], now) == []
    assert energy_j(curve.add([MeterRow(now + 1, 100.0)], now + 1)) == 100.0


def test_a_line_is_clipped_at_its_height() -> None:
    line = Trapezoid(0.0, 10.0, 100.0, 200.0)
    assert line.clip(5.0) == Trapezoid(5.0, 10.0, 150.0, 200.0)
    assert (line.clip(-1.0), line.clip(20.0).energy_j) == (line, 0.0)


def append(file: Path, *rows: tuple[float, float], end: str = "\n") -> None:
    with open(file, "a") as out:
        out.write("\n".join(f"{t},{watts}" for t, watts in rows) + end)


class Meter:
    """An external meter with the file of one, and a clock that is set by hand."""

    def __init__(self, folder: Path) -> None:
        self.now, self.file = T, folder / "meter.csv"
        self.file.write_text("unix seconds,watts\n")
        append(self.file, (T - 2, 100.0), (T - 1, 100.0))

    def open(self) -> PowerSource:
        source = open_external(self.file, lambda: self.now)
        assert isinstance(source, PowerSource), source
        return source

    def read(self, source: PowerSource) -> float:
        (reading,) = source.read()
        assert (reading.name, reading.kind) == ("node", "node")
        return reading.energy_j


@pytest.fixture
def external(tmp_path: Path) -> Meter:
    return Meter(tmp_path)


def test_rows_count_when_they_have_come(external: Meter) -> None:
    source = external.open()
    assert external.read(source) == 0.0
    external.now = T + 3
    append(external.file, (T, 100.0), (T + 1, 200.0), end="")
    assert external.read(source) == 100.0, "the last line may go on"
    append(external.file, end="\n")
    assert external.read(source) == 150.0
    source.close()


def test_a_file_that_is_truncated_is_read_from_its_beginning(external: Meter) -> None:
    append(external.file, (T, 100.0), end="")
    source = external.open()
    external.file.write_text("")
    append(external.file, (T, 100.0))
    assert external.read(source) == 100.0
    source.close()


def test_a_file_that_is_rotated_loses_no_row(external: Meter) -> None:
    source = external.open()
    append(external.file, (T, 100.0))
    external.file.rename(external.file.with_suffix(".1"))
    assert external.read(source) == 100.0, "there is no new file yet"
    append(external.file.with_suffix(".1"), (T + 1, 100.0))
    append(external.file, (T + 2, 100.0))
    external.now = T + 2
    assert external.read(source) == 200.0
    source.close()


def test_a_meter_that_stops_is_lost_and_found_when_it_writes_again(external: Meter) -> None:
    source = external.open()
    external.now = T + GAP_S
    with pytest.raises(PowerError, match="last row is 31 s old"):
        source.read()
    assert source.reopen is not None
    absent = source.reopen()
    assert isinstance(absent, Absent) and "does the meter write" in absent.reason
    append(external.file, (external.now, 100.0))
    assert isinstance(source.reopen(), PowerSource)


def test_what_cannot_be_a_meter_is_named(tmp_path: Path) -> None:
    for name, reason in [("none", "No such file"), ("empty", "holds no line"), ("pipe", "no regular file")]:
        file = tmp_path / name
        if name == "empty":
            file.touch()
        if name == "pipe":
            os.mkfifo(file)
        absent = open_external(file)
        assert isinstance(absent, Absent) and reason in absent.reason and str(file) in absent.reason


def test_of_a_long_file_only_the_end_is_read(external: Meter) -> None:
    append(external.file, *((T - 1 - i / 10_000, 5.0) for i in range(20_000, 0, -1)))
    append(external.file, (T - 0.5, 100.0))
    source = external.open()
    append(external.file, (T, 100.0))
    assert external.read(source) == 50.0
    source.close()


def test_each_node_has_its_file() -> None:
    assert locate("/m/{node}-{host}.csv", "n7") == Path(f"/m/n7-{socket.gethostname()}.csv")


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=20),
    st.integers(0, 2 * 10**9),
)
def test_parts_and_rest_sum_to_the_total_and_no_rest_is_negative(
    intervals: list[tuple[int, int]], last: int
) -> None:
    rest, now, added = ResidualPower(T), T, 0
    for parts, whole in intervals:
        now += 1.0
        ticks, covered_s = rest.subtract(now, parts, from_ticks(whole))
        assert ticks >= 0 and covered_s is None
        added += parts + ticks
    owed = added - sum(whole for _, whole in intervals)
    assert owed >= 0
    ticks, _ = rest.subtract(now + 1.0, 0, from_ticks(last + owed))
    assert added + ticks == sum(whole for _, whole in intervals) + last + owed, "what was owed is made good"


@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.integers(0, 50)), min_size=1, max_size=20), st.floats(-3.0, 8.0))
def test_late_rows_are_compared_with_the_parts_of_their_own_time(
    steps: list[tuple[float, int]], lag_s: float
) -> None:
    """A node of constant 100 W, of which the parts draw less: 50 W over all, each sample another amount."""
    rest, now, last = ResidualPower(T), T, MeterRow(T - 10.0, 100.0)
    total = parts_total = 0
    for step_s, watts in steps:
        now += step_s
        row = MeterRow(now - lag_s, 100.0)
        known = [Trapezoid(last.t, row.t, 100.0, 100.0)] if row.t > last.t else []
        last = row if known else last
        parts = to_ticks(watts * step_s)
        parts_total += parts
        ticks, _ = rest.subtract(now, parts, known)
        total += ticks
    end = max(now, last.t)
    total += rest.subtract(now, 0, [Trapezoid(last.t, end, 100.0, 100.0)] if end > last.t else [])[0]
    assert from_ticks(total + parts_total) == pytest.approx(100.0 * (end - T), abs=1e-4)


def steady(name: str, kind: Kind, used_j: list[float]) -> PowerSource:
    """A counter whose next readings are given."""
    return PowerSource(name, kind, "measured", lambda: [Reading(name, kind, used_j.pop(0))])


def test_the_parts_of_a_sample_sum_to_the_whole_node() -> None:
    cpu, node = [0.0, 0.0, 30.0, 90.0, 30.0], [0.0, 0.0, 80.0, 80.0, 80.0]
    meter = PowerMeter("n0", [steady("rapl", "cpu", cpu), steady("acpi", "node", node)], energy=UNMEASURED)
    meter.start()
    samples = [meter.sample()[0] for _ in range(3)]
    rests = [[part["energy_j"] for part in sample["parts"] if part["kind"] == "node"] for sample in samples]
    assert rests == [[50.0], [0.0], [40.0]], "10 J that were missing once are taken from the next rest"
    assert sum(sample["energy_j"] for sample in samples) == 240.0
    assert all(sum(part["energy_j"] for part in sample["parts"]) == sample["energy_j"] for sample in samples)


def test_a_run_with_an_external_meter(tmp_path: Path) -> None:
    now = [T]
    append(tmp_path / "local.csv", (T - 1, 200.0), (T, 200.0))
    energy = Energy(meter=str(tmp_path / "{node}.csv"), idle_w={"node": 120.0})
    meter = PowerMeter("local", clock=lambda: now[0], energy=energy, now=lambda: now[0])
    assert "external meter" in meter.source and "estimate" not in meter.source
    meter.start()
    now[0] = T + 1
    assert meter.sample() == [], "rows do not cover it yet"
    append(tmp_path / "local.csv", (T + 2, 200.0))
    (power,) = meter.sample()
    assert (power["until"], power["interval_s"]) == (T + 1, 1.0)
    (node,) = [part for part in power["parts"] if part["kind"] == "node"]
    assert set(node) == {"name", "kind", "device", "energy_j", "origin", "idle_j"}
    assert node["energy_j"] == pytest.approx(200.0), "of what was before the start nothing"
    assert node["idle_j"] == pytest.approx(120.0), "of the time of the rows"
    meter.close()


def test_a_meter_that_begins_after_the_run_is_used_from_then_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    energy = Energy(meter=str(tmp_path / "late.csv"), measure_idle_s=0)
    meter = PowerMeter("n0", energy=energy, clock=lambda: now[0])
    assert "external meter is not used yet" in caplog.text
    meter.start()
    before = meter.source
    append(tmp_path / "late.csv", (time.time(), 50.0))
    meter.sample()[0]
    assert meter.source == before
    now[0] = 11.0
    meter.sample()[0]
    assert "external meter" in meter.source and "estimate" not in meter.source
    meter.close()


class MeteredNode:
    """A node of constant 100 W, sampled each second, whose meter writes a row every so often until it ends.

    Time is virtual: it goes on by 100 ms whenever it is read. Rows are written 50 ms after their time.
    """

    def __init__(self, folder: Path, every_s: float, until_s: float = math.inf) -> None:
        self.now, self._every_s, self._until, self._file = T, every_s, T + until_s, folder / "meter.csv"
        self._next = T - 0.4
        append(self._file, (T - 0.4 - every_s, 100.0))
        self._write()
        self.events: list[dict[str, Any]] = []
        energy = Energy(meter=str(self._file), measure_idle_s=0)
        self.meter = PowerMeter("n0", energy=energy, clock=lambda: self.now, now=self._advance)

    def _advance(self) -> float:
        self.now += 0.1
        self._write()
        return self.now

    def _write(self) -> None:
        while self._next <= min(self.now - 0.05, self._until):
            append(self._file, (self._next, 100.0))
            self._next += self._every_s

    def _log(self, sampled: list[dict[str, Any]]) -> None:
        self.events += [{"type": "power", "t": self.now, **power} for power in sampled]

    def run(self, seconds: float) -> Ledger:
        self.meter.start()
        begun = self.now
        while self.now < begun + seconds:
            due = self.now + 1.0
            while self.now < due:
                self._advance()
            self._log(self.meter.sample())
        self.seconds = self.now - begun
        self._log(self.meter.finish())
        self.meter.close()
        return ledger([{"type": "run_started", "t": begun}, *self.events])


@pytest.mark.parametrize("every_s", [0.5, 1.03, 5.0])
def test_all_energy_is_in_the_interval_in_which_it_was_used(tmp_path: Path, every_s: float) -> None:
    node = MeteredNode(tmp_path, every_s)
    book = node.run(14.0)
    (used,), (power,) = book.nodes, book.power.values()
    assert used.energy_j == pytest.approx(100.0 * node.seconds, rel=0.03), "to the end of the run"
    assert used.peak_watts == pytest.approx(100.0, rel=1e-3)
    assert [each.watts for each in power] == pytest.approx([100.0] * len(power), rel=1e-3)
    assert used.unread_s == 0.0


def test_of_the_time_after_its_last_row_nothing_is_known(tmp_path: Path) -> None:
    node = MeteredNode(tmp_path, 1.0, until_s=4.0)
    (used,) = node.run(24.0).nodes
    assert used.mean_watts == pytest.approx(100.0, rel=1e-3)
    assert used.energy_j is not None and 200.0 < used.energy_j <= 400.0
    assert used.unread_s + used.energy_j / 100.0 == pytest.approx(node.seconds, abs=0.5)
    assert node.events[-1]["energy_j"] is None and node.events[-1]["reason"]


def test_a_meter_that_never_writes_again_measures_nothing(tmp_path: Path) -> None:
    node = MeteredNode(tmp_path, 1.0, until_s=-0.4)
    (used,) = node.run(8.0).nodes
    assert (used.energy_j, used.origin) == (None, "unavailable")
    assert used.unread_s == pytest.approx(node.seconds, abs=0.5)


def test_when_it_is_lost_the_other_sources_take_over_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = MeteredNode(tmp_path, 1.0, until_s=4.0)
    (used,) = node.run(40.0).nodes
    (lost,) = [n for n, event in enumerate(node.events) if event["energy_j"] is None]
    after = node.events[lost + 1 :]
    assert after and all("external meter" not in event["source"] for event in after)
    assert GAP_S - 1.0 < used.unread_s < GAP_S + 2.0
    assert caplog.text.count("no reading of the external meter") == 1 and "its last row is" in caplog.text


trapezoids = st.lists(
    st.tuples(st.floats(0.1, 9.0), st.sampled_from([0.0, 0.0, 0.0, 2.0]), st.floats(0.0, 3.0)), max_size=8
)


@given(trapezoids, st.lists(st.floats(0.1, 4.0), min_size=1, max_size=20))
def test_stretches_are_the_slices_and_each_is_covered_whole_or_not_at_all(
    rows: list[tuple[float, float, float]], lengths: list[float]
) -> None:
    """Rows of 100 W that come late, with gaps; parts of 1 J a second."""
    held, now, end, pending = PendingInterval(T), T, T, list[tuple[float, Trapezoid]]()
    for length_s, gap_s, late_s in rows:
        start, end = end + gap_s, end + gap_s + length_s
        arrives = max([end + late_s, *(each for each, _ in pending[-1:])])
        pending.append((arrives, Trapezoid(start, end, 100.0, 100.0)))
    taken, ticks, until = [], 0, T
    for length_s in lengths:
        now += length_s
        ticks += to_ticks(length_s)
        held.add(now, length_s, 1.0, [{"name": "cpu", "energy_j": from_ticks(to_ticks(length_s))}])
        held.add_rows([each for arrives, each in pending if arrives <= now])
        pending = [each for each in pending if each[0] > now]
        while (stretch := held.decide()) is not None:
            taken.append(stretch)
    while (stretch := held.decide(is_last=True)) is not None:
        taken.append(stretch)
    for stretch in taken:
        seconds = stretch.end - until
        assert seconds > 0 and sum(each.seconds for each in stretch.slices) == pytest.approx(seconds, abs=1e-5)
        if stretch.energy_j is not None:
            assert stretch.energy_j == pytest.approx(100.0 * seconds, abs=1e-3)
        until = stretch.end
    assert until == now
    assert ticks == sum(to_ticks(p["energy_j"]) for each in taken for one in each.slices for p in one.parts)


def test_a_file_that_is_ahead_of_the_clock_is_said_to_be(tmp_path: Path) -> None:
    append(tmp_path / "meter.csv", (time.time() + 5000.0, 100.0))
    absent = open_external(tmp_path / "meter.csv")
    assert isinstance(absent, Absent) and "s ahead of this host's clock" in absent.reason
