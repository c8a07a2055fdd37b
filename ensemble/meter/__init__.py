"""What a run uses: CPU time, power, and the ledger that attributes both to members and roles."""

from ensemble.meter.cpu import CpuClock, count_whole_process, cpu_seconds, make_usage, read_clocks, read_start
from ensemble.meter.ledger import Ledger
from ensemble.meter.ledger_view import LedgerView, ledger
from ensemble.meter.memory import PeakMemory, peak_memory_gb, release_memory, reset_peak_memory
from ensemble.meter.power import PowerMeter
from ensemble.meter.ray_processes import RaySampler

__all__ = [
    "CpuClock",
    "Ledger",
    "LedgerView",
    "PeakMemory",
    "PowerMeter",
    "RaySampler",
    "count_whole_process",
    "cpu_seconds",
    "ledger",
    "make_usage",
    "peak_memory_gb",
    "read_clocks",
    "read_start",
    "release_memory",
    "reset_peak_memory",
]
