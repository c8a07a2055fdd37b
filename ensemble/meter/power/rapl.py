"""Reads CPU energy from RAPL through Linux's powercap files.

RAPL (Running Average Power Limit) is the energy counter of Intel and AMD processors. Linux shows it as a tree of
**zones** named ``intel-rapl:N``, on AMD, too. ``package-N`` is a whole socket, ``package-N-die-M`` one die of it
where a socket has several. Below it lie ``core`` and ``uncore``, which the package includes, and ``dram``, which
it does not and AMD does not have. So the energy of a node's processors is that of its packages, and that of its
memory the sum of its dram zones.

Two kinds of zones are left out:

- ``intel-rapl-mmio:N`` shows a package a second time, through memory-mapped registers. Added to ``intel-rapl:N``
  it gives twice the power (as in issue 4 of powerstat, pull request 950 of CodeCarbon). It is read only where the
  first does not exist.
- ``psys`` is the whole platform by its name. What it covers is left to the board's firmware: on some machines it
  includes the display and the charger, on others no GPU that has a power plug of its own, on others it does not
  move (for which reason CodeCarbon went back to packages). It is no total of the node that a rest may be taken of.

A zone's ``energy_uj`` counts microjoules up to ``max_energy_range_uj`` and starts over: some 20 minutes at 200 W.
It must be read more often than that, for two wraps between readings look like one. A machine that wakes up or a
virtual one that moves to another host counts from zero: that is no wrap (`Counter.advance`), and the interval in
which it happened is not known. Since CVE-2020-8694 (2020)
the file is readable by root only. A zone disappears when its socket is taken offline.

Source: Documentation/power/powercap/powercap.rst of the Linux kernel.
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
    root: Path = ROOT, expected: Collection[str] = (), clock: Callable[[], float] = time.monotonic
) -> PowerSource | Absent:
    """The RAPL zones below `root`, all or none: a part of them would understate the node.

    Args:
        root: folder of the powercap zones.
        expected: names of zones without which nothing is opened: those that were there before one was lost.
        clock: seconds; see `Counter`.
    """
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
        return Absent("rapl", f"zones that were there are not there now: {', '.join(missing)}")
    return PowerSource(
        "rapl",
        "cpu",
        "measured",
        lambda: [Reading(each.name, each.kind, each.advance()) for each in zones],
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
