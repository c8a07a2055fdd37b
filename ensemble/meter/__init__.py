"""What a run uses: CPU time, power, and the ledger that attributes both to members and roles."""

from ensemble.meter.cpu import CpuClock, Sampler, clocks, cpu_seconds, tree_cpu_seconds
from ensemble.meter.driver import DriverClock, count_whole_process
from ensemble.meter.ledger import Ledger, ledger
from ensemble.meter.memory import OwnPeak, forget_peak, give_back, own_peak_gb
from ensemble.meter.origin import ORIGINS, Origin
from ensemble.meter.power import PowerMeter, PowerSource, open_power_sources
from ensemble.meter.ray_processes import RaySampler

__all__ = [
    "ORIGINS",
    "CpuClock",
    "DriverClock",
    "Ledger",
    "Origin",
    "OwnPeak",
    "PowerMeter",
    "PowerSource",
    "RaySampler",
    "Sampler",
    "clocks",
    "count_whole_process",
    "cpu_seconds",
    "forget_peak",
    "give_back",
    "ledger",
    "open_power_sources",
    "own_peak_gb",
    "tree_cpu_seconds",
]
