"""Sources of Linux's files, on trees as machines show them, and whose CPU time can be seen in containers."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest

from ensemble.meter.power import Absent, PowerMeter, PowerSource, open_power_sources
from ensemble.meter.power.busy_time import BusyTime, find_busy_time
from ensemble.meter.power.common import PowerError
from ensemble.meter.power.estimate import open_estimate
from ensemble.meter.power.hwmon import open_power_meter
from ensemble.meter.power.rapl import open_rapl
from ensemble.spec import Energy

UNMEASURED = Energy(measure_idle_s=0)


def write(folder: Path, **files: str | int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    return folder


def zone(root: Path, path: str, name: str, energy_uj: int = 0) -> Path:
    """A powercap zone; a sub-zone also as the link beside its parent that sysfs has."""
    folder = write(root / path, name=name, energy_uj=energy_uj, max_energy_range_uj=1_000_000)
    if "/" in path:
        (root / folder.name).symlink_to(folder)
    return folder / "energy_uj"


def names(source: PowerSource | Absent) -> list[tuple[str, str]]:
    assert isinstance(source, PowerSource), source
    return [(reading.name, reading.kind) for reading in source.read()]


FIRST, SECOND = "intel-rapl:0", "intel-rapl:1"
DRAM = {f"{SECOND}/intel-rapl:1:0": "dram"}
MMIO = {"intel-rapl-mmio:0": "package-0", "intel-rapl-mmio:0/intel-rapl-mmio:0:0": "dram"}
LAYOUTS: dict[str, tuple[dict[str, str], set[str]]] = {
    "AMD's packages have cores below, and no memory": (
        {FIRST: "package-0", SECOND: "package-1", f"{FIRST}/intel-rapl:0:0": "core"},
        {"package-0", "package-1"},
    ),
    "each die of a socket counts": (
        {FIRST: "package-0-die-0", SECOND: "package-0-die-1"} | DRAM,
        {"package-0-die-0", "package-0-die-1", "package-0-die-1/dram"},
    ),
    "zones are named as the kernel names them, not by their number": (
        {FIRST: "package-1", SECOND: "package-0"} | DRAM,
        {"package-1", "package-0", "package-0/dram"},
    ),
    "the second view is read where there is no first": (MMIO, {"package-0", "package-0/dram"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zones_are_found_however_the_kernel_lays_them_out(layout: str, tmp_path: Path) -> None:
    zones, expected = LAYOUTS[layout]
    for path, name in zones.items():
        zone(tmp_path, path, name)
    found = names(open_rapl(tmp_path))
    assert sorted(found) == sorted((name, "dram" if "/" in name else "cpu") for name in expected)
    zone(tmp_path / "platform", "intel-rapl:0", "psys")
    assert isinstance(open_rapl(tmp_path / "platform"), Absent), "no measure of the processors"


def test_a_socket_that_goes_offline_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0")
    second = zone(tmp_path, "intel-rapl:1", "package-1")
    rapl = open_rapl(tmp_path)
    assert isinstance(rapl, PowerSource)
    now = [0.0]
    meter = PowerMeter("n0", [rapl], clock=lambda: now[0], energy=UNMEASURED)
    meter.start()
    shutil.rmtree(second.parent)
    lost = meter.sample()
    assert (lost["energy_j"], lost["watts"], lost["origin"]) == (None, None, "unavailable")
    for now[0] in (1.0, 2.0, 12.0):  # the other socket alone would understate the node
        guessed = meter.sample()
        assert guessed["origin"] == "estimated" and guessed["source"].startswith("estimate")
        assert guessed["parts"][0]["idle_j"] == 0.0
    described = meter.describe()
    assert (described["source"], described["origin"]) == (guessed["source"], "estimated")
    assert [record.getMessage().count("rapl is lost") for record in caplog.records] == [1]
    zone(tmp_path, "intel-rapl:1", "package-1", 100_000)
    now[0] = 13.0
    assert meter.sample()["origin"] == "estimated", "it is looked for every ten seconds"
    now[0] = 23.0
    assert meter.sample()["origin"] == "estimated", "the interval that ends there still is"
    second.write_text("350000\n")
    now[0] = 24.0
    back = meter.sample()
    assert (back["source"], back["origin"]) == ("rapl", "measured")
    assert back["energy_j"] == pytest.approx(0.25, abs=1e-5) and len(caplog.records) == 2


@pytest.mark.parametrize("file", ["power1_average", "power1_input"])
def test_the_power_meter_of_acpi_is_integrated_until_it_stops_to_measure(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "hwmon1", name="power_meter", **{file: 200_000_000})
    now = [0.0]
    source = open_power_meter(tmp_path, lambda: now[0])
    assert isinstance(source, PowerSource)
    write(tmp_path / "hwmon1", **{file: 300_000_000})
    now[0] = 2.0
    (reading,) = source.read()
    assert (reading.name, reading.kind, reading.energy_j) == ("node", "node", 500.0)
    monkeypatch.setattr("ensemble.meter.power.rapl.ROOT", tmp_path / "none")
    monkeypatch.setattr("ensemble.meter.power.hwmon.ROOT", tmp_path)
    names = [source.name for source in open_power_sources() if source.kind != "gpu"]
    assert names == ["power_meter"], "where a whole node is measured none is estimated"
    write(tmp_path / "hwmon1", **{file: 0})
    with pytest.raises(PowerError, match="no running node draws"):
        source.read()
    assert isinstance(open_power_meter(tmp_path), Absent)


def test_batteries_are_no_meters_of_the_node_and_of_several_meters_none_is_used(tmp_path: Path) -> None:
    write(tmp_path / "hwmon1", name="power_meter", power1_average=9, power1_is_battery=1)
    assert "no power meter" in getattr(open_power_meter(tmp_path), "reason", "")
    write(tmp_path / "hwmon2", name="power_meter", power1_average=200_000_000)
    assert isinstance(open_power_meter(tmp_path), PowerSource)
    write(tmp_path / "hwmon3", name="power_meter", power1_average=100_000_000)
    assert "several power meters" in getattr(open_power_meter(tmp_path), "reason", "")


STAT = "cpu  1000 200 300 9000 50 10 20 7 100 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
ZEROS = "cpu  0 0 0 0 0 0 0 0 0 0\n"
LXCFS = "85 72 0:60 /proc/stat /proc/stat rw,nosuid - fuse.lxcfs lxcfs rw,user_id=0\n"
OTHER = "86 72 0:61 /proc/meminfo /proc/meminfo rw - fuse.lxcfs lxcfs rw\n"


def procfs(root: Path, stat: str, mounts: str = "") -> Path:
    write(root / "proc" / "self", mountinfo=mounts)
    write(root / "proc", stat=stat)
    return root / "proc"


def found(proc: Path, cgroup: Path) -> tuple[str, str, float]:
    busy = find_busy_time(proc, cgroup)
    assert isinstance(busy, BusyTime), busy
    return busy.scope, busy.file.name, busy.read()


@pytest.mark.parametrize(
    ("file", "text", "busy_s"),
    [
        ("cpu.stat", "user_usec 4000000\nusage_usec 5000000\nsystem_usec 1", 5.0),
        ("cpuacct/cpuacct.usage", "7000000000", 7.0),
        ("cpu,cpuacct/cpuacct.usage", "8000000000", 8.0),
    ],
)
@pytest.mark.parametrize(("stat", "mounts"), [(STAT, LXCFS), (ZEROS, "")])
def test_where_the_host_is_hidden_the_containers_group_is_counted(
    tmp_path: Path, file: str, text: str, busy_s: float, stat: str, mounts: str
) -> None:
    counter = tmp_path / "cgroup" / file
    write(counter.parent, **{counter.name: text})
    proc = procfs(tmp_path, stat, mounts)
    assert found(proc, tmp_path / "cgroup") == ("container", counter.name, busy_s)


def test_the_host_is_seen_from_most_containers_and_where_nothing_is_there_is_no_estimate(tmp_path: Path) -> None:
    write(tmp_path / "cgroup", **{"cpu.stat": "usage_usec 5000000"})
    scope, file, busy_s = found(procfs(tmp_path, STAT, OTHER), tmp_path / "cgroup")
    assert (scope, file) == ("host", "stat")
    assert busy_s == pytest.approx(15.30)  # neither idle, nor waiting, stolen, or a guest's time twice
    zone(tmp_path / "rapl", "intel-rapl:0", "package-0")
    rapl, busy = open_rapl(tmp_path / "rapl"), find_busy_time(procfs(tmp_path, STAT, LXCFS), tmp_path / "cgroup")
    assert isinstance(rapl, PowerSource)
    meter = PowerMeter("n0", [rapl], energy=UNMEASURED, busy=busy)
    meter.start()
    assert meter.sample()["busy_s"] is None, "a container's, beside a measure of the host"
    assert found(procfs(tmp_path, STAT, LXCFS), tmp_path / "none")[:2] == ("container", "stat")
    unknown = find_busy_time(procfs(tmp_path, ZEROS), tmp_path / "none")
    assert isinstance(unknown, Absent)
    estimate = open_estimate(unknown)
    assert isinstance(estimate, Absent) and "does not report its CPU time" in estimate.reason


def test_an_estimate_of_a_container_is_of_its_cpu_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENSEMBLE_WATTS_PER_CORE", "4")
    write(tmp_path / "cgroup", **{"cpu.stat": "usage_usec 5000000"})
    busy = find_busy_time(procfs(tmp_path, ZEROS), tmp_path / "cgroup")
    estimate = open_estimate(busy, itertools.count(step=10.0).__next__)
    assert isinstance(estimate, PowerSource) and "of this container" in estimate.name
    meter = PowerMeter("n0", [estimate], energy=UNMEASURED, busy=busy)
    meter.start()
    write(tmp_path / "cgroup", **{"cpu.stat": "usage_usec 7000000"})
    sample = meter.sample()
    assert (sample["busy_s"], sample["energy_j"]) == (2.0, 8.0)


def test_cpu_time_that_is_reported_late_makes_no_power_that_cannot_be(tmp_path: Path) -> None:
    clock, cores, watts = [100.0], os.cpu_count() or 1, 5.0
    write(tmp_path / "cgroup", **{"cpu.stat": "usage_usec 0"})
    busy = find_busy_time(procfs(tmp_path, ZEROS), tmp_path / "cgroup")
    estimate = open_estimate(busy, lambda: clock[0])
    assert isinstance(estimate, PowerSource)
    write(tmp_path / "cgroup", **{"cpu.stat": f"usage_usec {int(3e6 * cores)}"})  # of three seconds, all at once
    energies = []
    for seconds in (0.01, 1.0, 1.0, 1.0, 1.0):
        clock[0] += seconds
        (reading,) = estimate.read()
        energies.append(reading.energy_j)
        assert reading.energy_j <= cores * seconds * watts * (1 + 1e-9)
    assert sum(energies) == pytest.approx(3.0 * cores * watts) and energies[-1] == 0.0
