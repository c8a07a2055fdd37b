"""Reads energy and power from Linux's hwmon files: AMD's energy driver, and the power meter of ACPI.

Each ``hwmonN`` is one device, whose file ``name`` says which driver made it.

- ``amd_energy`` counts the microjoules of each core (``Ecore...``) and socket (``Esocket...``) in
  ``energyN_input``, with the label in ``energyN_label``. A socket includes its cores. The driver extends the 32
  bits of the processor to 64, so the counter does not wrap. It is an alternative to RAPL where the kernel's RAPL
  does not know the processor; both read the same registers, so they are never added.
- ``power_meter`` is the meter of the node's power supplies that ACPI 4.0 describes (10.4): the mean power of the
  whole node in microwatts over the meter's own averaging time, in ``power1_average``, or ``power1_input`` of some
  firmware. It is integrated by the trapezoid rule. A battery's (``power1_is_battery``) is none. Of several, nobody
  says whether they add up or contain each other: then none is used.

Source: Documentation/hwmon/acpi_power_meter.rst of the Linux kernel, and amd_energy.rst of its driver.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading
from ensemble.meter.power.nvml import integrate_power
from ensemble.meter.power.sysfs import Counter, read_int, read_text

ROOT = Path("/sys/class/hwmon")
POWER_METER = "power_meter"


def open_amd_energy(root: Path = ROOT, expected: Collection[str] = ()) -> PowerSource | Absent:
    """The sockets' counters below `root`, all or none.

    Args:
        root: folder of the hwmon devices.
        expected: names of sockets without which nothing is opened.
    """
    try:
        sockets = [socket for folder in _find_devices(root, "amd_energy") for socket in _find_sockets(folder)]
    except PowerError as error:
        return Absent("amd_energy", str(error))
    names = [socket.name for socket in sockets]
    if not names:
        return Absent("amd_energy", f"no socket of the driver amd_energy in {root}")
    missing = sorted(set(expected) - set(names))
    if missing:
        return Absent("amd_energy", f"sockets that were there are not there now: {', '.join(missing)}")
    return PowerSource(
        "amd_energy",
        "cpu",
        "measured",
        lambda: [Reading(each.name, "cpu", each.advance()) for each in sockets],
        reopen=lambda: open_amd_energy(root, names),
    )


def open_power_meter(root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> PowerSource | Absent:
    """The meter of the whole node that ACPI offers."""
    try:
        files = [file for folder in _find_devices(root, POWER_METER) for file in _find_power(folder)]
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


def _find_devices(root: Path, driver: str) -> list[Path]:
    devices = sorted(root.glob("hwmon*"))
    return [folder for folder in devices if (folder / "name").exists() and read_text(folder / "name") == driver]


def _find_sockets(folder: Path) -> list[Counter]:
    labels = {file: read_text(file) for file in folder.glob("energy*_label")}
    sockets = {label: file for file, label in labels.items() if re.fullmatch(r"Esocket\d+", label)}
    counters = []
    for label, file in sorted(sockets.items()):
        counter = file.with_name(file.name.replace("_label", "_input"))
        counters.append(Counter(label.replace("Esocket", "package-"), "cpu", counter, None, read_int(counter)))
    return counters


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
