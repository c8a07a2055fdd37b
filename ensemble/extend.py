"""What an extension builds on, in one place: base classes, and the tables to which its entry points add names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipelines.providers import find_attribute, import_object

if TYPE_CHECKING:
    from ensemble.combine.calibrators import Calibrator as Calibrator
    from ensemble.comm.codecs.common import Codec as Codec
    from ensemble.meter.power.common import Absent as Absent
    from ensemble.meter.power.common import PowerError as PowerError
    from ensemble.meter.power.common import PowerSource as PowerSource
    from ensemble.meter.power.common import Reading as Reading
    from ensemble.reporting.loggers.base import Logger as Logger
    from ensemble.reporting.loggers.points import DeclaredMember as DeclaredMember
    from ensemble.reporting.loggers.points import EpochEnded as EpochEnded
    from ensemble.reporting.loggers.points import WentBack as WentBack
    from ensemble.spec.callbacks import MemberCallback as MemberCallback
    from pipelines.providers import Providers
    from pipelines.sources import Source as Source

_HOME_OF = {
    "Absent": "ensemble.meter.power.common",
    "Calibrator": "ensemble.combine.calibrators",
    "Codec": "ensemble.comm.codecs.common",
    "DeclaredMember": "ensemble.reporting.loggers.points",
    "EpochEnded": "ensemble.reporting.loggers.points",
    "Logger": "ensemble.reporting.loggers.base",
    "MemberCallback": "ensemble.spec.callbacks",
    "PowerError": "ensemble.meter.power.common",
    "PowerSource": "ensemble.meter.power.common",
    "Reading": "ensemble.meter.power.common",
    "Source": "pipelines.sources",
    "WentBack": "ensemble.reporting.loggers.points",
}
#: Where each kind of provider has its table.
TABLES = {
    "sources": "pipelines.sources:SOURCES",
    "stages": "pipelines.stages:STAGES",
    "executors": "ensemble.executors:EXECUTORS",
    "commands": "ensemble.cli.parser:COMMANDS",
    "calibrators": "ensemble.spec.fields:CALIBRATORS",
    "codecs": "ensemble.spec.options:CODECS",
    "communicators": "ensemble.spec.options:BACKENDS",
    "power_sources": "ensemble.meter.power:POWER_SOURCES",
    "samplers": "ensemble.spec.search:SAMPLER_TYPES",
    "pruners": "ensemble.spec.search:PRUNER_TYPES",
    "loggers": "ensemble.spec.loggers:LOGGERS",
}

__all__ = ["TABLES", "list_tables", *_HOME_OF]


def list_tables() -> list[Providers]:
    """All tables of providers, in the order of `TABLES`."""
    return [import_object(place) for place in TABLES.values()]


def __getattr__(name: str) -> Any:
    return find_attribute(__name__, _HOME_OF, name)
