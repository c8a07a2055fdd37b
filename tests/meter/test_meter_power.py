"""Power sources on real files and processes: a tree of counters as powercap shows it, an NVML library in C."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from forked_programs import Programs

from ensemble.meter.power import POWER_SOURCES, Absent, PowerMeter, PowerSource, Reading, open_power_sources
from ensemble.meter.power.common import Kind, PowerError
from ensemble.meter.power.estimate import open_estimate, watts_per_core
from ensemble.meter.power.nvml import ImplausibleEnergy, count_energy
from ensemble.meter.power.rapl import open_rapl
from ensemble.spec import Energy, SpecError
from pipelines.providers import Provider

ROOT = Path(__file__).resolve().parents[2]
UNMEASURED = Energy(measure_idle_s=0)


def zone(folder: Path, name: str, energy_uj: int, range_uj: int = 1_000_000) -> Path:
    folder.mkdir(parents=True)
    (folder / "name").write_text(name + "\n")
    (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """A two-socket server: sub-zones lie inside their package and, as sysfs has it, beside it as links."""
    for socket in (0, 1):
        package = tmp_path / f"intel-rapl:{socket}"
        zone(package, f"package-{socket}", 100_000)
        zone(package / f"intel-rapl:{socket}:0", "core", 50_000)
        zone(package / f"intel-rapl:{socket}:1", "dram", 900_000)
        for sub in (0, 1):
            link = tmp_path / f"intel-rapl:{socket}:{sub}"
            link.symlink_to(package / link.name)
    zone(tmp_path / "intel-rapl:2", "psys", 7)
    zone(tmp_path / "intel-rapl-mmio:0", "package-0", 7)
    return tmp_path


def fail(error: Exception) -> NoReturn:
    raise error


def opened(root: Path) -> PowerSource:
    source = open_rapl(root)
    assert isinstance(source, PowerSource)
    return source


@contextmanager
def without_root() -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_packages_and_memory_are_counted_once_and_nothing_that_they_include(powercap: Path) -> None:
    rapl = opened(powercap)
    (powercap / "intel-rapl:0" / "energy_uj").write_text("350000\n")
    (powercap / "intel-rapl:0" / "intel-rapl:0:0" / "energy_uj").write_text("999999\n")
    (powercap / "intel-rapl:1" / "intel-rapl:1:1" / "energy_uj").write_text("950000\n")
    first = [("package-0", "cpu", 0.25), ("package-0/dram", "dram", 0.0)]
    second = [("package-1", "cpu", 0.0), ("package-1/dram", "dram", 0.05)]
    assert [(r.name, r.kind, r.energy_j) for r in rapl.read()] == [*first, *second]


def test_a_counter_that_wraps_loses_no_joule(powercap: Path) -> None:
    rapl = opened(powercap)
    file = powercap / "intel-rapl:0" / "energy_uj"
    total_j, counter_uj = 0.0, 100_000
    for _ in range(25):  # 7.5 J through a counter that starts over after every joule
        counter_uj = (counter_uj + 300_000) % 1_000_000
        file.write_text(f"{counter_uj}\n")
        total_j += rapl.read()[0].energy_j
    assert total_j == pytest.approx(7.5)
    (powercap / "intel-rapl:0" / "max_energy_range_uj").unlink()
    rapl = opened(powercap)
    file.write_text("5\n")
    with pytest.raises(PowerError, match="went back"):  # without a known range it is an error, not a guess
        rapl.read()


def test_a_counter_that_starts_anew_is_no_wrap(tmp_path: Path) -> None:
    file, now = zone(tmp_path / "intel-rapl:0", "package-0", 262_000_000_000, 262_143_328_850), [0.0]
    rapl = open_rapl(tmp_path, clock=lambda: now[0])
    assert isinstance(rapl, PowerSource)
    now[0] = 1.0
    file.write_text("156671150\n")
    assert rapl.read()[0].energy_j == pytest.approx(300.0), "a wrap at 300 W"
    now[0] = 2.0
    file.write_text("5000000\n")
    with pytest.raises(PowerError, match=r"restarted: .* 261992 J in 1.0 s"):
        rapl.read()
    now[0] = 3.0
    file.write_text("305000000\n")
    assert rapl.read()[0].energy_j == pytest.approx(300.0), "from there on it counts"
    now[0] = 803.0
    file.write_text("1000\n")
    assert rapl.read()[0].energy_j == pytest.approx(261838.3, abs=0.1), "it was not read for long: a wrap at 327 W"


def test_a_counter_for_root_only_is_said_with_the_remedy(powercap: Path) -> None:
    for folder in (powercap, *powercap.parents):
        if os.geteuid() == 0 and folder.stat().st_uid == 0 and "pytest" in str(folder):
            folder.chmod(0o755)
    (powercap / "intel-rapl:1" / "energy_uj").chmod(0o400 if os.geteuid() == 0 else 0)
    with without_root():
        absent = open_rapl(powercap)
    assert isinstance(absent, Absent)
    assert "readable by root only" in absent.reason and "intel-rapl:1/energy_uj" in absent.reason


def test_measured_beats_estimated_and_a_source_of_another_distribution_takes_the_place_of_ours(
    powercap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ensemble.meter.power.hwmon.ROOT", tmp_path / "bare")
    monkeypatch.setattr("ensemble.meter.power.rapl.ROOT", tmp_path / "bare")
    assert [s.origin for s in open_power_sources() if s.kind == "cpu"] == ["estimated"]
    monkeypatch.setattr("ensemble.meter.power.rapl.ROOT", powercap)
    (tmp_path / "wall_meter.py").write_text(
        "from ensemble.meter.power import PowerSource, Reading\n"
        "def open_wall():\n"
        "    return PowerSource('wall', 'node', 'measured', lambda: [Reading('node', 'node', 8.0)])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    wall = Provider("power_sources", "wall", "wall_meter:open_wall", "wall 1.0")
    monkeypatch.setattr(POWER_SOURCES, "_foreign", ({"wall": wall}, []))
    names = [source.name for source in open_power_sources() if source.kind != "gpu"]
    assert names == ["wall", "rapl"], "what measures the processors is a part of the whole node"
    meter = PowerMeter("n0", energy=UNMEASURED)
    meter.start()
    parts = {part["kind"]: part["energy_j"] for part in meter.sample()["parts"] if part["kind"] != "gpu"}
    assert sum(parts.values()) == 8.0 and parts["node"] > 0
    for opener in (lambda: None, lambda: fail(OSError("no such device"))):
        monkeypatch.setattr("wall_meter.open_wall", opener)
        caplog.clear()
        assert [s.name for s in open_power_sources() if s.kind != "gpu"] == ["rapl"]
        assert [record.getMessage().count("wall cannot be opened") for record in caplog.records].count(1) == 1


def steady(name: str, kind: Kind, used_j: list[float]) -> PowerSource:
    return PowerSource(name, kind, "measured", lambda: [Reading(name, kind, used_j.pop(0))])


def test_the_parts_of_a_sample_sum_to_the_whole_node() -> None:
    cpu, node = [0.0, 0.0, 30.0, 90.0, 30.0], [0.0, 0.0, 80.0, 80.0, 80.0]
    meter = PowerMeter("n0", [steady("rapl", "cpu", cpu), steady("acpi", "node", node)], energy=UNMEASURED)
    meter.start()
    samples = [meter.sample() for _ in range(3)]
    rests = [[part["energy_j"] for part in sample["parts"] if part["kind"] == "node"] for sample in samples]
    assert rests == [[50.0], [0.0], [40.0]], "10 J that were missing once are taken from the next rest"
    assert sum(sample["energy_j"] for sample in samples) == 240.0
    assert all(sum(part["energy_j"] for part in sample["parts"]) == sample["energy_j"] for sample in samples)


def test_a_sample_adds_up_and_says_where_it_comes_from(powercap: Path) -> None:
    now = [0.0]
    meter = PowerMeter("n0", [opened(powercap)], clock=lambda: now[0], energy=UNMEASURED)
    (powercap / "intel-rapl:0" / "energy_uj").write_text("300000\n")
    meter.start()  # what was used before is not the run's
    (powercap / "intel-rapl:0" / "energy_uj").write_text("700000\n")
    (powercap / "intel-rapl:1" / "intel-rapl:1:1" / "energy_uj").write_text("0\n")  # wrapped: 0.1 J
    now[0] = 2.0
    sample = meter.sample()
    assert (sample["node"], sample["source"], sample["origin"]) == ("n0", "rapl", "measured")
    assert sample["energy_j"] == pytest.approx(0.5, abs=1e-5)
    assert sample["watts"] == pytest.approx(0.25, abs=1e-5)
    assert sum(part["energy_j"] for part in sample["parts"]) == sample["energy_j"]
    assert json.loads(json.dumps(sample)) == sample
    meter.close()


@pytest.mark.parametrize("value", ["much", "-1", "0", "nan", ""])
def test_a_mistyped_constant_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ENSEMBLE_WATTS_PER_CORE", value)
    with pytest.raises(SpecError, match="ENSEMBLE_WATTS_PER_CORE must be a positive number"):
        watts_per_core()


def test_a_counter_that_says_what_cannot_be_is_not_charged_and_goes_on() -> None:
    now_s, total_mj = 0.0, 1000
    read = count_energy(lambda: total_mj, lambda: now_s)

    def after(seconds: float, joules: float) -> float:
        nonlocal now_s, total_mj
        now_s, total_mj = now_s + seconds, total_mj + round(1000 * joules)
        return read()

    assert after(1, 300) == 300.0
    with pytest.raises(ImplausibleEnergy, match="went back"):
        after(1, -900)
    assert after(1, 300) == 300.0
    with pytest.raises(ImplausibleEnergy, match=r"jumped by 1e\+07 J in 1.0 s"):
        after(1, 1e7)
    assert [after(1, 700), after(5, 0), after(4, 0)] == [700.0, 0.0, 0.0]
    for _ in range(2):
        with pytest.raises(ImplausibleEnergy, match="stands still"):
            after(1, 0)
    assert [after(1, 3000), after(1, 300)] == [3000.0, 300.0], "it had not been read"


READ_NVML = """
import json, time
from ensemble.executors.host import describe_host
from ensemble.meter.devices import list_gpus
from ensemble.meter.power.nvml import open_nvml
source, gpus, node = open_nvml(), list_gpus(), describe_host("here")
begin = time.monotonic()
while time.monotonic() - begin < 0.05: pass
readings = [[r.name, r.device, r.energy_j] for r in source.read()]
shares = node.as_event()["gpu_shares"]
print(json.dumps([[g[:3] for g in gpus], readings, [g.names for g in gpus], node.gpu_parents, shares]))
source.close()
"""


@pytest.fixture
def read_nvml(programs: Programs, tmp_path: Path) -> Callable[..., Any]:
    """GPUs, readings, all names of each GPU, of what GPU each is a part, and its share of that."""

    def read(gpus: str, visible: str = "", state: str = "") -> Any:
        (tmp_path / "state").write_text(state)
        found = json.loads(programs.run(READ_NVML, gpus, tmp_path / "state", CUDA_VISIBLE_DEVICES=visible))
        return [[tuple(row) for row in rows] for rows in found[:2]] + found[2:]

    return read


def test_gpus_are_read_by_their_counter_or_else_by_their_power_under_one_name(read_nvml: Any) -> None:
    gpus, (new, old), *_ = read_nvml("New GPU:16,Old GPU:32")
    assert gpus == [("GPU-0", "New GPU", 16.0), ("GPU-1", "Old GPU", 32.0)]
    assert new == ("gpu-0", "GPU-0", 0.25) and old[:2] == ("gpu-1", "GPU-1")
    assert 0.05 * 40 <= old[2] < 300 * 40  # 40 W over the time between
    for visible in ("1,0", "GPU-1,0"):
        reordered, readings, *_ = read_nvml("New GPU:16,Old GPU:32", visible)
        assert reordered == gpus[::-1] and readings[1] == ("gpu-1", "GPU-0", 0.25)


def test_instances_of_a_gpu_are_gpus_of_their_own_with_the_share_of_their_slices(read_nvml: Any) -> None:
    gpus, readings, *_ = read_nvml("A100:80:2,A100:80")
    assert gpus == [("MIG-0-0", "A100 MIG 1g", 40.0), ("MIG-0-1", "A100 MIG 1g", 40.0), ("GPU-1", "A100", 80.0)]
    assert [device for _, device, _ in readings] == ["GPU-0", "GPU-1"], "energy is counted for the whole GPU"
    for nodes, state, shares in (
        ("A100:80,A100:80:7", "", [1.0, *[1 / 7] * 7]),
        ("A100:80:2", "MIG-0-0 slices 4\nMIG-0-1 slices 2\n", [4 / 7, 2 / 7]),
        ("A30:24:2", "", [1 / 2, 1 / 2]),
        ("A100:80:2,A100:80", "MIG-0-1 slices 0\n", [0.5, 0.5, 1.0]),  # it has no attributes
    ):
        assert read_nvml(nodes, state=state)[4] == pytest.approx(shares)
    gpus, readings, names, parents, _ = read_nvml("A100:80,A100:80:2", "MIG-1-1,MIG-1-0,0")
    assert names == [["1", "GPU-1", "MIG-1-1"], ["1", "GPU-1", "MIG-1-0"], ["0", "GPU-0", "GPU-0"]]
    assert parents == ["GPU-1", "GPU-1", "GPU-0"]
    assert [name for name, *_ in gpus] == ["MIG-1-1", "MIG-1-0", "GPU-0"]
    assert [device for _, device, _ in readings] == ["GPU-1", "GPU-0"], "energy is counted once for both"


BAD_READINGS: list[tuple[Any, Any]] = [("node", math.nan), ("node", -1.0), ("node", "8 J"), ("board", 8.0)]
BAD_READS = [lambda: fail(OSError(5, "Input/output error")), lambda: None]
BAD_READS += [lambda bad=bad: [Reading("wall", *bad)] for bad in BAD_READINGS]


@pytest.mark.parametrize("read", BAD_READS)
def test_a_source_that_cannot_be_counted_is_lost_and_the_others_go_on(
    read: Callable[[], list[Reading]], caplog: pytest.LogCaptureFixture
) -> None:
    gpu = steady("gpu-0", "gpu", [0.0, 0.0, 5.0])
    closing = lambda: fail(RuntimeError("it is gone"))  # noqa: E731
    wall = PowerSource("wall", "node", "measured", read, closing, reopen=lambda: fail(OSError("not yet")))
    now = [0.0]
    meter = PowerMeter("n0", [wall, gpu], clock=lambda: now[0], energy=UNMEASURED)
    meter.start()
    now[0] = 60.0  # it is looked for again
    parts = {part["kind"]: part["energy_j"] for part in meter.sample()["parts"]}
    assert parts["gpu"] == 5.0 and set(parts) == {"gpu", "cpu"}, "the processors are estimated"
    assert [record.getMessage().count("wall is lost") for record in caplog.records].count(1) == 1
    meter.close()


def test_a_gpu_source_that_comes_back_leaves_the_estimate_of_the_processors() -> None:
    now, used_j = [0.0], [0.0, 0.0]
    gpu = replace(steady("gpu-0", "gpu", used_j), reopen=lambda: gpu)
    estimate = open_estimate()
    assert isinstance(estimate, PowerSource)
    meter = PowerMeter("n0", [estimate, gpu], clock=lambda: now[0], energy=UNMEASURED)
    meter.start()
    assert {part["kind"] for part in meter.sample()["parts"]} == {"cpu"}, "no reading is left: it is lost"
    used_j += [3.0, 3.0]
    now[0] = 11.0
    meter.sample()
    assert {part["kind"] for part in meter.sample()["parts"]} == {"cpu", "gpu"}


def test_a_part_that_two_sources_read_is_counted_once(powercap: Path) -> None:
    wall = [Reading("board-0", "gpu", 10.0, device="GPU-0"), Reading("board-1", "gpu", 4.0, device="GPU-1")]
    nvml = [Reading("gpu-0", "gpu", 10.5, device="GPU-0"), Reading("gpu-2", "gpu", 1.0, device="GPU-2")]
    memory = [Reading("slot-0", "dram", 2.0), Reading("slot-1", "dram", 3.0)]
    given: list[tuple[str, Kind, list[Reading]]] = [("wall", "gpu", wall), ("memory", "dram", memory)]
    sources = [
        PowerSource(name, kind, "measured", lambda readings=readings: readings)
        for name, kind, readings in [*given, ("nvml", "gpu", nvml)]
    ]
    meter = PowerMeter("n0", [*sources, opened(powercap)], energy=UNMEASURED)
    meter.start()
    parts = {part["name"]: part["energy_j"] for part in meter.sample()["parts"] if part["energy_j"]}
    assert parts == {"board-0": 10.0, "board-1": 4.0, "slot-0": 2.0, "slot-1": 3.0, "gpu-2": 1.0}
