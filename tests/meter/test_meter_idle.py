"""Idle power: given, or measured before a run starts while the node is at rest; never guessed from a busy node."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_programs import Programs

from ensemble.meter.origin import round_to_tick
from ensemble.meter.power import PowerMeter, PowerSource, Reading
from ensemble.meter.power.estimate import open_estimate
from ensemble.meter.power.idle import NO_SOURCE, Idle, Window, judge, spread_given
from ensemble.spec import Energy


def part(name: str, kind: str, energy_j: float = 0.0, origin: str = "measured") -> dict[str, Any]:
    return {"name": name, "kind": kind, "energy_j": energy_j, "origin": origin}


PACKAGES = [part("package-0", "cpu", 120.0), part("package-1", "cpu", 80.0)]
GPUS = [part("gpu-0", "gpu", 140.0)]


def steady(name: str, kind: Any, watts: float, clock: Callable[[], float] = time.monotonic) -> PowerSource:
    last = clock()

    def read() -> list[Reading]:
        nonlocal last
        last, since = clock(), last
        return [Reading(name, kind, watts * (last - since))]

    return PowerSource(name, kind, "measured", read)


def spin() -> None:
    while True:
        sum(range(10_000))


CPU_IDLE = {"package-0": 60.0, "package-1": 40.0}


@pytest.mark.parametrize(
    ("parts", "cores", "gpus", "idle", "reason"),
    [
        (PACKAGES + GPUS, 0.01, 0.0, {**CPU_IDLE, "gpu-0": 70.0}, ""),
        (PACKAGES + GPUS, 0.30, 0.0, {"gpu-0": 70.0}, "cores were busy for 30%"),
        ([*PACKAGES, *GPUS, part("node", "node", 300.0)], 0.01, 0.5, CPU_IDLE, "kernels ran on a GPU for 50%"),
        (PACKAGES, 0.2, 0.0, {}, "busy for 20%"),
        (PACKAGES, None, 0.0, {}, "cannot be seen"),
        (PACKAGES + GPUS, 0.2, None, {}, "does not report"),
    ],
)
def test_each_part_that_is_at_rest_shows_its_idle_power(
    parts: Any, cores: float | None, gpus: float | None, idle: dict[str, float], reason: str
) -> None:
    judged = judge(Window(2.0, parts, cores, gpus))
    assert (judged.origin, judged.watts) == ("measured" if idle else "unavailable", idle)
    assert reason in judged.reason and (idle or judged.compute_share(PACKAGES[0], 1.0) is None)


def test_given_watts_are_of_all_packages_together_and_of_each_gpu_and_no_more_than_was_used() -> None:
    parts = [*PACKAGES, part("package-0/dram", "dram"), *GPUS, part("gpu-1", "gpu")]
    given = spread_given({"cpu": 90.0, "gpu": 60.0, "node": 100.0}, parts)
    assert given == {"package-0": 45.0, "package-1": 45.0, "gpu-0": 60.0, "gpu-1": 60.0, "node": 100.0}
    idle = Idle("given", {"package-0": 1 / 3})
    assert idle.compute_share(part("package-0", "cpu", 0.25), 1.0) == 0.25
    assert idle.compute_share(part("package-0", "cpu", 10.0), 1.0) == round_to_tick(1 / 3)
    assert idle.compute_share(part("package-1", "cpu", 10.0), 1.0) is None


def test_an_estimate_has_no_idle_part_whatever_was_given_and_is_not_waited_for() -> None:
    estimate = part("cpu", "cpu", 5.0, "estimated")
    idle = Idle("given", spread_given({"cpu": 90.0}, [estimate]))
    assert idle.watts == {"cpu": 0.0} and idle.compute_share(estimate, 1.0) == 0.0
    found, before = [], time.monotonic()
    for energy in (Energy(idle_w={"cpu": 90.0}), Energy(measure_idle_s=600.0)):
        source = open_estimate()
        assert isinstance(source, PowerSource)
        meter = PowerMeter("n0", [source], energy=energy)
        meter.start()
        found.append(meter.describe()["idle"])
    assert time.monotonic() - before < 300.0
    assert found[0]["origin"] == "unavailable" and "names no part that is measured" in found[0]["reason"]
    assert found[1] == {"origin": "unavailable", "watts": {"cpu": 0.0}, "reason": NO_SOURCE}


def test_given_idle_power_is_not_waited_for() -> None:
    now = [0.0]
    source = steady("p", "cpu", 50.0, lambda: now[0])
    energy = Energy(idle_w={"cpu": 30.0}, measure_idle_s=600.0)
    meter, before = PowerMeter("n0", [source], lambda: now[0], energy), time.monotonic()
    meter.start()
    assert time.monotonic() - before < 300.0
    assert meter.describe()["idle"] == {"origin": "given", "watts": {"p": 30.0}, "reason": ""}
    now[0] = 2.0
    sample = meter.sample()
    (used,) = sample["parts"]
    assert (used["energy_j"], used["idle_j"]) == (100.0, 60.0) and json.loads(json.dumps(sample)) == sample


def test_a_gpu_is_measured_before_the_first_interval_begins() -> None:
    meter = PowerMeter("n0", [steady("gpu-0", "gpu", 70.0)], energy=Energy(measure_idle_s=2.0))
    meter.start()
    idle = meter.describe()["idle"]
    assert idle["origin"] == "measured" and idle["watts"]["gpu-0"] == pytest.approx(70.0, rel=0.1)
    sample = meter.sample()
    assert sample["energy_j"] < 70.0  # what the measuring took, 140 J, is not the run's
    assert 0 < sample["parts"][0]["idle_j"] <= sample["energy_j"]


def test_a_busy_node_is_said_to_be_busy() -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=spin, daemon=True) for _ in range(os.cpu_count() or 1)]
    for worker in workers:
        worker.start()
    try:
        meter = PowerMeter("n0", [steady("package-0", "cpu", 50.0)], energy=Energy(measure_idle_s=0.3))
        meter.start()
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
    idle = meter.describe()["idle"]
    assert (idle["origin"], idle["watts"]) == ("unavailable", {}) and "cores were busy" in idle["reason"]
    assert [each["idle_j"] for each in meter.sample()["parts"]] == [None]


READ_IDLE = """
import json, time
from ensemble.meter.power import PowerMeter
from ensemble.meter.power.nvml import open_nvml
from ensemble.spec import Energy
meter, before = PowerMeter("n0", [open_nvml()], energy=Energy(measure_idle_s=2.0)), time.monotonic()
meter.start()
print(json.dumps([time.monotonic() - before, meter.describe()["idle"]]))
"""


@pytest.mark.parametrize(
    ("state", "watts", "reason", "least_s"),
    [
        ("GPU-0 load 0\nGPU-1 load 2\nGPU-1 power 70000\n", {"gpu-0": 40.0, "gpu-1": 70.0}, "", 2.0),
        ("GPU-0 load 0\nGPU-1 load 60\n", {}, "kernels ran on a GPU for 60% of the time", 2.0),
        ("", {}, "does not report whether kernels run", 0.0),
    ],
)
def test_the_idle_power_of_gpus_is_read_from_the_driver(
    programs: Programs, tmp_path: Path, state: str, watts: dict[str, float], reason: str, least_s: float
) -> None:
    file = tmp_path / "state"
    file.write_text(state)
    took_s, idle = json.loads(programs.run(READ_IDLE, "Old A:16,Old B:16", file, CUDA_VISIBLE_DEVICES=""))
    assert idle["watts"] == pytest.approx(watts, rel=0.1)
    assert idle["origin"] == ("measured" if watts else "unavailable") and reason in idle["reason"]
    assert took_s >= least_s
