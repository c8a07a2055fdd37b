"""Energy of a node: RAPL for processors, NVML for GPUs, an estimate where nothing measures the processors."""

from ensemble.meter.power.common import Absent as Absent
from ensemble.meter.power.common import PowerError as PowerError
from ensemble.meter.power.common import PowerSource as PowerSource
from ensemble.meter.power.common import Reading as Reading
from ensemble.meter.power.estimate import watts_per_core as watts_per_core
from ensemble.meter.power.meter import POWER_SOURCES as POWER_SOURCES
from ensemble.meter.power.meter import PowerMeter as PowerMeter
from ensemble.meter.power.meter import open_power_sources as open_power_sources
from ensemble.meter.power.reports import PowerReports as PowerReports
