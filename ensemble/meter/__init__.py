"""What a run uses: CPU time, power, and the ledger that attributes both to members and roles."""

from ensemble.meter.cpu import DriverClock, count_whole_process, cpu_seconds, read_clocks
from ensemble.meter.ledger import Ledger, ledger
from ensemble.meter.memory import PeakMemory, peak_memory_gb, release_memory, reset_peak_memory
from ensemble.meter.power import PowerMeter
from ensemble.meter.ray_processes import RaySampler

__all__ = [
    "DriverClock",
    "Ledger",
    "PeakMemory",
    "PowerMeter",
    "RaySampler",
    "count_whole_process",
    "cpu_seconds",
    "ledger",
    "peak_memory_gb",
    "read_clocks",
    "release_memory",
    "reset_peak_memory",
]
