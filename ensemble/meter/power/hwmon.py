"""Reads the power of the whole node from the power meter of ACPI (4.0, 10.4), by Linux's hwmon files.

It is integrated by the trapezoid rule. Batteries are none; of several meters none is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading, integrate_power
from ensemble.meter.power.sysfs import read_int, read_text

ROOT = Path("/sys/class/hwmon")
POWER_METER = "power_meter"


def open_power_meter(
    root: Path | None = None, clock: Callable[[], float] = time.monotonic
) -> PowerSource | Absent:
    """The meter of the whole node that ACPI offers."""
    root = root or ROOT
    try:
        folders = [folder for folder in sorted(root.glob("hwmon*")) if _is_power_meter(folder)]
        files = [file for folder in folders for file in _find_power(folder)]
        if len(files) != 1:
            reason = "no power meter of ACPI" if not files else "several power meters, which may overlap,"
            return Absent(POWER_METER, f"{reason} in {root}")
        read_joules = integrate_power(_open_milliwatts(files[0]), clock)
    except PowerError as error:
        return Absent(POWER_METER, str(error))
    return PowerSource(
        POWER_METER,
        "node",
        "measured",
        lambda: [Reading("node", "node", read_joules())],
        reopen=lambda: open_power_meter(root, clock),
    )


def _is_power_meter(folder: Path) -> bool:
    return (folder / "name").exists() and read_text(folder / "name") == POWER_METER


def _find_power(folder: Path) -> list[Path]:
    """The file with the power of a device; none of a battery."""
    battery = folder / "power1_is_battery"
    if battery.exists() and read_int(battery):
        return []
    return [file for name in ("power1_average", "power1_input") if (file := folder / name).exists()][:1]


def _open_milliwatts(file: Path) -> Callable[[], int]:
    def read() -> int:
        microwatts = read_int(file)
        if microwatts <= 0:
            raise PowerError(f"{file} holds {microwatts} microwatts, which no running node draws")
        return microwatts // 1000

    return read
