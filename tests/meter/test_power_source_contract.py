"""What every power source promises, on a machine that it can read; a source is a row of `SOURCES`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.property_examples import examples

from ensemble.meter.power import Absent, PowerSource
from ensemble.meter.power.busy_time import find_busy_time
from ensemble.meter.power.common import Kind, PowerError
from ensemble.meter.power.estimate import open_estimate, watts_per_core
from ensemble.meter.power.hwmon import open_power_meter
from ensemble.meter.power.rapl import open_rapl


@dataclass
class Machine:
    """Files that a source reads, and a clock: `draw` lets some seconds pass with so many watts."""

    root: Path
    now: float = 1000.0
    used_j: float = 0.0
    files: dict[str, Path] = field(default_factory=dict)

    def write(self, name: str, text: Any) -> None:
        self.files[name] = self.root / name
        self.files[name].parent.mkdir(parents=True, exist_ok=True)
        self.files[name].write_text(f"{text}\n")

    def lose(self) -> None:
        for file in self.files.values():
            file.unlink(missing_ok=True)


RANGE_UJ = 262_143_328_850  # of a server's counter, which wraps


def set_rapl(machine: Machine, watts: float) -> None:
    for number, share in enumerate((0.75, 0.25)):
        folder = f"intel-rapl:{number}"
        machine.write(f"{folder}/name", f"package-{number}")
        machine.write(f"{folder}/max_energy_range_uj", RANGE_UJ)
        machine.write(f"{folder}/energy_uj", (RANGE_UJ - 10**9 + round(machine.used_j * share * 1e6)) % RANGE_UJ)


def set_power_meter(machine: Machine, watts: float) -> None:
    machine.write("hwmon0/name", "power_meter")
    machine.write("hwmon0/power1_average", round(watts * 1e6))


def set_busy_time(machine: Machine, watts: float) -> None:
    machine.write("proc/self/mountinfo", "")
    machine.write("proc/stat", "cpu  0 0 0 0 0 0 0 0 0 0")
    machine.write("cpu.stat", f"usage_usec {round(machine.used_j / watts_per_core() * 1e6)}")


def open_busy_time(machine: Machine) -> PowerSource | Absent:
    return open_estimate(find_busy_time(machine.root / "proc", machine.root), lambda: machine.now)


@dataclass(frozen=True)
class Source:
    """How a source is opened on a machine, and how its files follow what is drawn."""

    set_files: Callable[[Machine, float], None]
    open: Callable[[Machine], PowerSource | Absent]
    watts: tuple[float, float]  # between which a node draws; of the estimate, what its cores can be
    relative_error: float


SOURCES = {
    "rapl": Source(set_rapl, lambda m: open_rapl(m.root, (), lambda: m.now), (1.0, 900.0), 1e-4),
    # It knows the power at the readings only: constant between them, here.
    "power_meter": Source(set_power_meter, lambda m: open_power_meter(m.root, lambda: m.now), (1.0, 900.0), 1e-2),
    "estimate": Source(set_busy_time, open_busy_time, (0.0, 5.0), 1e-4),
}
every = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


def start(source: Source, root: Path, watts: float) -> tuple[Machine, PowerSource]:
    machine = Machine(root)
    source.set_files(machine, watts)
    opened = source.open(machine)
    assert isinstance(opened, PowerSource), opened
    return machine, opened


def draw(source: Source, machine: Machine, seconds: float, watts: float) -> None:
    machine.now += seconds
    machine.used_j += seconds * watts
    source.set_files(machine, watts)


@every
@given(data=st.data())
@examples(10)
def test_readings_add_up_to_what_was_drawn(
    source: Source, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    low, high = source.watts
    watts = data.draw(st.floats(low, high))
    machine, opened = start(source, tmp_path_factory.mktemp("machine"), watts)
    counted: list[float] = []
    for seconds in data.draw(st.lists(st.floats(0.5, 100.0), min_size=1, max_size=5)):
        draw(source, machine, seconds, watts)
        readings = opened.read()
        assert len({reading.name for reading in readings}) == len(readings) > 0
        assert all(0 <= reading.energy_j < math.inf and reading.kind in get_args(Kind) for reading in readings)
        assert {reading.device for reading in readings} == {None}, "no GPU has it"
        counted.append(sum(reading.energy_j for reading in readings))
        assert sum(reading.energy_j for reading in opened.read()) == pytest.approx(0, abs=1e-6), "once only"
    assert sum(counted) == pytest.approx(machine.used_j, rel=source.relative_error, abs=1e-4)
    opened.close()


@every
def test_what_is_not_there_is_absent_for_a_reason_in_one_line(source: Source, tmp_path: Path) -> None:
    opened = source.open(Machine(tmp_path))
    assert isinstance(opened, Absent) and opened.name and opened.reason and "\n" not in opened.reason


@every
def test_one_that_is_lost_says_so_and_counts_from_its_return(source: Source, tmp_path: Path) -> None:
    watts = source.watts[1] / 2
    machine, opened = start(source, tmp_path, watts)
    draw(source, machine, 10.0, watts)
    opened.read()
    machine.lose()
    with pytest.raises(PowerError) as lost:
        opened.read()
    assert "\n" not in str(lost.value)
    if opened.reopen is None:
        return
    assert isinstance(opened.reopen(), Absent)
    draw(source, machine, 50.0, watts)  # of this nothing is known: it was away
    again = opened.reopen()
    assert isinstance(again, PowerSource) and (again.name, again.kind) == (opened.name, opened.kind)
    draw(source, machine, 10.0, watts)
    assert sum(reading.energy_j for reading in again.read()) == pytest.approx(10.0 * watts, rel=1e-2)


def test_all_sources_of_files_are_rows() -> None:
    from ensemble.meter.power.meter import POWER_SOURCES

    ours = {provider.name for provider in POWER_SOURCES.list_providers() if not provider.distribution}
    assert ours == {*SOURCES, "nvml"} - {"estimate"}, "nvml: on its stand-in, in test_meter_power.py"
