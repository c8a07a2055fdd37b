"""What a run uses: CPU time, power, and the ledger that attributes both to members and roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import find_attribute

if TYPE_CHECKING:
    from ensemble.meter.cpu import CpuClock as CpuClock
    from ensemble.meter.cpu import count_whole_process as count_whole_process
    from ensemble.meter.cpu import cpu_seconds as cpu_seconds
    from ensemble.meter.cpu import make_usage as make_usage
    from ensemble.meter.cpu import read_clocks as read_clocks
    from ensemble.meter.cpu import read_start as read_start
    from ensemble.meter.ledger import Ledger as Ledger
    from ensemble.meter.ledger_view import LedgerView as LedgerView
    from ensemble.meter.memory import PeakMemory as PeakMemory
    from ensemble.meter.memory import peak_memory_gb as peak_memory_gb
    from ensemble.meter.memory import release_memory as release_memory
    from ensemble.meter.memory import reset_peak_memory as reset_peak_memory
    from ensemble.meter.memory import tree_memory_gb as tree_memory_gb
    from ensemble.meter.power import PowerMeter as PowerMeter

_HOMES = {
    "CpuClock": "ensemble.meter.cpu",
    "Ledger": "ensemble.meter.ledger",
    "LedgerView": "ensemble.meter.ledger_view",
    "PeakMemory": "ensemble.meter.memory",
    "PowerMeter": "ensemble.meter.power",
    "count_whole_process": "ensemble.meter.cpu",
    "cpu_seconds": "ensemble.meter.cpu",
    "make_usage": "ensemble.meter.cpu",
    "peak_memory_gb": "ensemble.meter.memory",
    "read_clocks": "ensemble.meter.cpu",
    "read_start": "ensemble.meter.cpu",
    "release_memory": "ensemble.meter.memory",
    "reset_peak_memory": "ensemble.meter.memory",
    "tree_memory_gb": "ensemble.meter.memory",
}


def __getattr__(name: str) -> Any:
    return find_attribute(__name__, _HOMES, name)
