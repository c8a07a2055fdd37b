"""The power sources of this machine, and how what they measure compares with the rules of MLPerf Power.

The rules are those of MLPerf Training (mlcommons/training_policies, power_measurement.adoc), with those that only
MLPerf Inference has (mlcommons/inference_policies, power_measurement.adoc), marked so. Of a rule that no look at
one machine before a run can decide, it is said that it cannot be checked, and what would decide it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ensemble.meter.power import Absent, PowerSource

Conformity = Literal["meets", "does not meet", "cannot be checked"]
EXTERNAL, ACPI, NVML, RAPL, AMD = "external meter", "power_meter", "nvml", "rapl", "amd_energy"
#: GPUs whose power sensor sees a quarter of the time (arXiv 2312.02741).
PARTLY_SEEN = ("A100", "H100")
_BATTERIES = Path("/sys/class/power_supply")
_UNSYNCHRONIZED = 5  # TIME_ERROR of adjtimex(2)


@dataclass(frozen=True)
class Source:
    """A power source: names of its parts, or why it is absent.

    Attributes:
        is_denied: whether only this user may not read it.
    """

    name: str
    parts: tuple[str, ...] = ()
    reason: str = ""
    is_denied: bool = False


@dataclass(frozen=True)
class Machine:
    """What the rules are compared with.

    Attributes:
        sources: all that were looked for.
        gpus: model of each GPU.
        clock_error_s: by how much the clock is wrong at most; infinite where nothing keeps it in step, None where
            that is not known.
        battery: name of a battery between the wall and the machine, if there is one.
        every_s: seconds between samples of a run.
        logged_every_s: seconds between samples in the log of a long run.
        meter: whether the file of an external meter was named.
    """

    sources: tuple[Source, ...]
    gpus: tuple[str, ...] = ()
    clock_error_s: float | None = None
    battery: str = ""
    every_s: float = 1.0
    logged_every_s: float = 30.0
    meter: bool = False

    def offers(self, name: str) -> bool:
        """Whether a source is there."""
        return any(source.name == name and source.parts for source in self.sources)


@dataclass(frozen=True)
class Finding:
    """One rule, whether this machine meets it, and why."""

    rule: str
    conformity: Conformity
    because: str


def compare(machine: Machine) -> list[Finding]:
    """Each rule with what this machine makes of it."""
    return [
        _compare_scope(machine),
        Finding(
            "all nodes of a run are measured",
            "cannot be checked",
            "this is one machine: run this on each node; the account of a run gives each node's sources",
        ),
        Finding(
            "interconnects are measured or estimated",
            "does not meet",
            "switches between nodes are in no account of a run; a run on one node needs none",
        ),
        Finding(
            "at least one sample a second, evenly",
            "does not meet",
            f"each sample is taken {machine.every_s:g} s after the one before, a little less often, and the log "
            f"of a long run keeps their sums over up to {machine.logged_every_s:g} s, in which all of it is",
        ),
        Finding(
            "the window is the run, at least 60 samples",
            "cannot be checked",
            "what a run does before the meter of a node starts (imports, the start of Ray, measuring idle power) "
            "and after its last sample (the report) has no joules; a run of less than 60 s is too short",
        ),
        _compare_accuracy(machine),
        *_compare_gpu_sensors(machine),
        Finding(
            "energy is the sum of power times time over all nodes",
            "meets",
            "counters of energy are subtracted, power is integrated by the trapezoid rule; nodes are summed",
        ),
        Finding(
            "every run that counts is measured, and scored as its time is (Olympic scoring)",
            "cannot be checked",
            "that is of several runs",
        ),
        _compare_permissions(machine),
        _compare_clock(machine),
        _compare_battery(machine),
        Finding(
            "Inference: the workflow of MLPerf Power with SPEC PTDaemon is used",
            "does not meet",
            "runs are measured by the sources above; PTDaemon is licensed to members of MLCommons",
        ),
    ]


def _compare_scope(machine: Machine) -> Finding:
    rule = "the whole node is measured, at its power supplies"
    if machine.offers(EXTERNAL):
        text = "an external meter is read; what is plugged into it is not known"
        return Finding(rule, "cannot be checked", text)
    unread = [source.reason for source in machine.sources if source.name == EXTERNAL and machine.meter]
    if machine.offers(ACPI):
        text = "ACPI's meter is read; whether it covers all power supplies depends on the board's firmware"
        text = "; ".join([text, *unread])
        return Finding(rule, "cannot be checked", text)
    seen = [part for source in machine.sources for part in source.parts]
    only = f"only {', '.join(seen)} are measured" if seen else "nothing is measured; processors are estimated"
    remedy = "; ".join(unread) or "a run reads the file of an external meter: Energy(meter=...)"
    return Finding(rule, "does not meet", f"{only}, without power supplies, fans and boards; {remedy}")


def _compare_accuracy(machine: Machine) -> Finding:
    rule = "within 5 % of a reference meter, idle and under two loads (5 x 1 minute each)"
    if not any(map(machine.offers, (EXTERNAL, ACPI, RAPL, AMD))):
        return Finding(rule, "does not meet", "the estimate of the processors may be off by a factor of two")
    return Finding(
        rule,
        "cannot be checked",
        "no meter of SPEC's list or revenue grade is known here; compare one with `ensemble report` of three runs",
    )


def _compare_gpu_sensors(machine: Machine) -> Iterator[Finding]:
    partly = [gpu for gpu in dict.fromkeys(machine.gpus) if any(name in gpu for name in PARTLY_SEEN)]
    rule = "beyond its rules: a GPU's figures stand for all of the time"
    if partly:
        text = f"the power sensor of {', '.join(partly)} sees 25 % of the time; only long windows average that"
        yield Finding(rule, "does not meet", f"{text} (arXiv 2312.02741)")
    elif machine.gpus:
        text = "how much of the time its sensor sees depends on the model: arXiv 2312.02741 has a table"
        yield Finding(rule, "cannot be checked", text)


def _compare_permissions(machine: Machine) -> Finding:
    rule = "beyond its rules: this user may read what measures"
    closed = [source.reason for source in machine.sources if source.is_denied]
    if closed:
        return Finding(rule, "does not meet", "; ".join(closed))
    return Finding(rule, "meets", "no source is closed to this user")


def _compare_clock(machine: Machine) -> Finding:
    rule = "Inference: the clocks of node and meter are in step (NTP)"
    if machine.clock_error_s is None:
        return Finding(rule, "cannot be checked", "the kernel does not report how exact its clock is (adjtimex)")
    if math.isinf(machine.clock_error_s):
        return Finding(rule, "does not meet", "no service synchronizes this clock (adjtimex: unsynchronized)")
    text = f"this clock is off by at most {machine.clock_error_s * 1e3:.3g} ms; the meter's is not known"
    return Finding(rule, "meets" if machine.clock_error_s < 1.0 else "does not meet", text)


def _compare_battery(machine: Machine) -> Finding:
    rule = "Inference: no battery between the wall and the node"
    if machine.battery:
        return Finding(rule, "does not meet", f"{machine.battery} is one")
    return Finding(rule, "meets", f"{_BATTERIES} shows none")


def look_at_sources(meter: Path | None = None) -> list[PowerSource | Absent]:
    """All sources that measure, opened, or why they are absent.

    Args:
        meter: the file of an external meter.
    """
    from ensemble.meter.power import open_nvml, open_rapl
    from ensemble.meter.power.external import open_external
    from ensemble.meter.power.hwmon import open_amd_energy, open_power_meter

    absent = Absent(EXTERNAL, "none is named here: --meter FILE; a run reads that of Energy(meter=...)")
    external = absent if meter is None else open_external(meter)
    return [open_rapl(), open_amd_energy(), open_power_meter(), external, open_nvml()]


def read_source(source: PowerSource | Absent) -> Source:
    """What a source says of itself; it is closed."""
    from ensemble.meter.power.common import PowerError

    if isinstance(source, Absent):
        return Source(source.name, reason=source.reason, is_denied=source.is_denied)
    try:
        return Source(source.name, tuple(reading.name for reading in source.read()))
    except PowerError as error:
        return Source(source.name, reason=str(error), is_denied=error.is_denied)
    finally:
        source.close()


def examine_power(meter: Path | None = None) -> list[Finding]:
    """This machine beside each rule.

    Args:
        meter: the file of an external meter.
    """
    from ensemble.executors.node_services import POWER_EVERY_S
    from ensemble.meter.cpu import MOST_S
    from ensemble.meter.power import list_gpus

    return compare(
        Machine(
            sources=tuple(read_source(source) for source in look_at_sources(meter)),
            gpus=tuple(gpu.model for gpu in list_gpus()),
            clock_error_s=read_clock_error(),
            battery=find_battery(_BATTERIES),
            every_s=POWER_EVERY_S,
            logged_every_s=MOST_S,
            meter=meter is not None,
        )
    )


def read_clock_error() -> float | None:
    """Seconds by which this clock is wrong at most (adjtimex(2)); see `Machine.clock_error_s`."""

    class Timex(ctypes.Structure):
        """The beginning of `struct timex`, with room for the rest; modes of 0 change nothing."""

        _fields_ = [
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror_us", ctypes.c_long),
            ("rest", ctypes.c_char * 512),
        ]

    timex = Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(timex))
    if state == _UNSYNCHRONIZED:
        return math.inf
    return None if state < 0 else timex.maxerror_us / 1e6


def find_battery(folder: Path) -> str:
    """The first battery that supplies the machine itself, not a device of it; empty if there is none."""
    for supply in sorted(folder.glob("*")):
        kind, scope = (_read(supply / name) for name in ("type", "scope"))
        if kind == "Battery" and scope != "Device":
            return supply.name
    return ""


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def list_lines(findings: Sequence[Finding], width: int | None) -> list[tuple[str, str]]:
    """The findings as a table, a row for each rule: lines with their styles."""
    from ensemble.reporting.tables import Column, lay_out

    styles: dict[Conformity, str] = {"meets": "green", "does not meet": "yellow", "cannot be checked": "cyan"}
    columns = [
        Column("MLPerf Power", [finding.rule for finding in findings], folds_to=20),
        Column("this machine", [finding.conformity for finding in findings]),
        Column("because", [finding.because for finding in findings], folds_to=30),
    ]
    return list(
        zip(lay_out(columns, width), ["dim", *(styles[each.conformity] for each in findings)], strict=True)
    )
