"""What a run uses: CPU time, power, and the ledger that attributes both to members and roles."""

from ensemble.meter.cpu import CpuClock, Sampler, clocks, cpu_seconds, tree_cpu_seconds
from ensemble.meter.driver import DriverClock, count_whole_process
from ensemble.meter.ledger import Ledger, ledger
from ensemble.meter.memory import PeakMemory, peak_memory_gb, release_memory, reset_peak_memory
from ensemble.meter.origin import ORIGINS, Origin
from ensemble.meter.power import PowerMeter, PowerSource, open_power_sources
from ensemble.meter.ray_processes import RaySampler

__all__ = [
    "ORIGINS",
    "CpuClock",
    "DriverClock",
    "Ledger",
    "Origin",
    "PeakMemory",
    "PowerMeter",
    "PowerSource",
    "RaySampler",
    "Sampler",
    "clocks",
    "count_whole_process",
    "cpu_seconds",
    "reset_peak_memory",
    "release_memory",
    "ledger",
    "open_power_sources",
    "peak_memory_gb",
    "tree_cpu_seconds",
]
