"""What a run uses: CPU time, power, and the ledger that attributes both to members and roles."""

from ensemble.meter.cpu import CpuClock, Sampler, cpu_seconds, tree_cpu_seconds
from ensemble.meter.daemons import RaySampler
from ensemble.meter.ledger import Ledger, ledger
from ensemble.meter.origin import ORIGINS, Origin
from ensemble.meter.power import PowerMeter, PowerSource, open_power_sources

__all__ = [
    "ORIGINS",
    "CpuClock",
    "Ledger",
    "Origin",
    "PowerMeter",
    "PowerSource",
    "RaySampler",
    "Sampler",
    "cpu_seconds",
    "ledger",
    "open_power_sources",
    "tree_cpu_seconds",
]
