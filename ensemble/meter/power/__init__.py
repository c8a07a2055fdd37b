"""Energy of a node: RAPL for processors, NVML for GPUs, an estimate where nothing measures the processors."""

from ensemble.meter.power.common import Absent, PowerError, PowerSource, Reading
from ensemble.meter.power.estimate import watts_per_core
from ensemble.meter.power.meter import PowerMeter, open_power_sources
from ensemble.meter.power.nvml import Gpu, list_gpus, open_nvml, share_by_slices
from ensemble.meter.power.rapl import open_rapl
from ensemble.meter.power.reports import PowerReports

__all__ = [
    "Absent",
    "Gpu",
    "PowerError",
    "PowerMeter",
    "PowerReports",
    "PowerSource",
    "Reading",
    "list_gpus",
    "open_nvml",
    "open_power_sources",
    "open_rapl",
    "share_by_slices",
    "watts_per_core",
]
