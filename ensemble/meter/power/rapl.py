"""Reads CPU energy from RAPL through Linux's powercap files.

RAPL (Running Average Power Limit) is the energy counter of Intel and AMD processors. Linux shows it as a tree
of **zones**: ``package-N`` is a whole socket; below it lie ``core`` and ``uncore``, which the package includes,
and ``dram``, which it does not; ``psys``, on some laptops, is the whole platform and includes everything. So the
energy of a node is that of its packages plus that of its dram zones.

A zone's ``energy_uj`` counts microjoules up to ``max_energy_range_uj`` and starts over: some 20 minutes at 200 W.
It must be read more often than that, for two wraps between readings look like one. Since CVE-2020-8694 (2020)
the file is readable by root only.

Source: Documentation/power/powercap/powercap.rst of the Linux kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ensemble.meter.power.common import Absent, Kind, PowerError, PowerSource, Reading

ROOT = Path("/sys/class/powercap")


@dataclass
class Zone:
    """One counter: its file, where it wraps (None: not known), and its last value in microjoules."""

    name: str
    kind: Kind
    file: Path
    range_uj: int | None
    last_uj: int

    def advance(self) -> float:
        """Joules since the last call."""
        now_uj = _read_int(self.file)
        used_uj = now_uj - self.last_uj
        self.last_uj = now_uj
        if used_uj < 0:
            if self.range_uj is None:
                raise PowerError(f"{self.file} went back and its max_energy_range_uj is not known")
            used_uj += self.range_uj
        return used_uj / 1e6


def open_rapl(root: Path = ROOT) -> PowerSource | Absent:
    """The RAPL zones below `root`, all or none: a part of them would understate the node."""
    try:
        zones = _find_zones(root)
    except PowerError as error:
        return Absent("rapl", str(error))
    if not any(zone.kind == "cpu" for zone in zones):
        return Absent(
            "rapl",
            f"no package zone in {root}/intel-rapl:* (a virtual machine, another kind of processor, "
            "or the kernel module intel_rapl_msr is not loaded)",
        )
    return PowerSource(
        "rapl", "cpu", "measured", lambda: [Reading(each.name, each.kind, each.advance()) for each in zones]
    )


def _find_zones(root: Path) -> list[Zone]:
    # sysfs shows a sub-zone twice: beside its parent (as a link) and inside it.
    folders = {
        path.name: path for pattern in ("intel-rapl:*/intel-rapl:*", "intel-rapl:*") for path in root.glob(pattern)
    }
    zones = []
    for folder_name, folder in sorted(folders.items()):
        name = _read_text(folder / "name") if (folder / "name").exists() else ""
        if name.startswith("package"):
            zones.append(_open_zone(name, "cpu", folder))
        elif name == "dram":
            parent = folders.get(folder_name.rpartition(":")[0])
            owner = _read_text(parent / "name") if parent is not None else folder_name
            zones.append(_open_zone(f"{owner}/dram", "dram", folder))
    return zones


def _open_zone(name: str, kind: Kind, folder: Path) -> Zone:
    try:
        range_uj = _read_int(folder / "max_energy_range_uj") or None
    except PowerError:
        range_uj = None  # only a wrap needs it, and says so then
    return Zone(name, kind, folder / "energy_uj", range_uj, _read_int(folder / "energy_uj"))


def _read_text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except PermissionError:
        raise PowerError(
            f"{file} is readable by root only: run as root, or `sudo chmod a+r {file.parent.parent}/*/energy_uj`"
        ) from None
    except OSError as error:
        raise PowerError(f"{file} cannot be read: {error.strerror or error}") from None


def _read_int(file: Path) -> int:
    text = _read_text(file)
    try:
        return int(text)
    except ValueError:
        raise PowerError(f"{file} holds {text[:40]!r}, which is no number") from None
