"""Reads CPU energy from RAPL through Linux's powercap files (Documentation/power/powercap/powercap.rst).

The energy of the processors is that of the zones ``package-N``, that of memory the sum of the ``dram`` zones.
Left out are ``intel-rapl-mmio`` where it shows a package a second time, and ``psys``, of which the firmware
decides what it covers. Counters wrap after some 20 minutes at 200 W; since CVE-2020-8694 only root may read
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from ensemble.meter.power.common import Absent, Kind, PowerError, PowerSource, Reading
from ensemble.meter.power.sysfs import Counter, read_int, read_text

ROOT = Path("/sys/class/powercap")
_CONTROL_TYPES = ("intel-rapl", "intel-rapl-mmio")  # the second shows zones of the first once more


def open_rapl(
    root: Path | None = None, expected: Collection[str] = (), clock: Callable[[], float] = time.monotonic
) -> PowerSource | Absent:
    """The RAPL zones below `root`, all or none: a part of them would understate the node.

    Args:
        root: folder of the powercap zones; None: `ROOT`.
        expected: names of zones without which nothing is opened: those that were there before one was lost.
        clock: seconds; see `Counter`.
    """
    root = root or ROOT
    try:
        zones = _find_zones(root, clock)
    except PowerError as error:
        return Absent("rapl", str(error))
    if not any(zone.kind == "cpu" for zone in zones):
        return Absent(
            "rapl",
            f"no package zone in {root}/intel-rapl:* (a virtual machine, another kind of processor, "
            "or the kernel module intel_rapl_msr is not loaded)",
        )
    names = [zone.name for zone in zones]
    missing = sorted(set(expected) - set(names))
    if missing:
        return Absent("rapl", f"zones have disappeared: {', '.join(missing)}")
    return PowerSource(
        "rapl",
        "cpu",
        "measured",
        lambda: [Reading(zone.name, zone.kind, zone.advance()) for zone in zones],
        reopen=lambda: open_rapl(root, names, clock),
    )


def _find_zones(root: Path, clock: Callable[[], float]) -> list[Counter]:
    for control_type in _CONTROL_TYPES:
        zones = _find_zones_of(root, control_type, clock)
        if any(zone.kind == "cpu" for zone in zones):
            return zones
    return []


def _find_zones_of(root: Path, control_type: str, clock: Callable[[], float]) -> list[Counter]:
    # sysfs shows a sub-zone twice: beside its parent (as a link) and inside it.
    patterns = (f"{control_type}:*/{control_type}:*", f"{control_type}:*")
    folders = {path.name: path for pattern in patterns for path in root.glob(pattern)}
    zones = []
    for folder_name, folder in sorted(folders.items()):
        name = read_text(folder / "name") if (folder / "name").exists() else ""
        if name.startswith("package"):
            zones.append(_open_zone(name, "cpu", folder, clock))
        elif name == "dram":
            parent = folders.get(folder_name.rpartition(":")[0])
            owner = read_text(parent / "name") if parent is not None else folder_name
            zones.append(_open_zone(f"{owner}/dram", "dram", folder, clock))
    return zones


def _open_zone(name: str, kind: Kind, folder: Path, clock: Callable[[], float]) -> Counter:
    try:
        range_uj = read_int(folder / "max_energy_range_uj") or None
    except PowerError:
        range_uj = None  # only a wrap needs it, and says so then
    return Counter(name, kind, folder / "energy_uj", range_uj, read_int(folder / "energy_uj"), clock)
