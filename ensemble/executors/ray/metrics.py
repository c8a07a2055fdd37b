"""Reports a run's metrics to Ray (`ray.util.metrics`), which exports them with its own, as `ray_` and their names.

Ray exports them at the metrics port of the node on which the run is driven. All are given to Ray as gauges: those
end two of Ray's export intervals after they were last set (20 s by default), so that none outlives its run, and
totals go on where a resumed run had left them. A counter of Ray would stay for as long as the node lives, and what
a resume reports would be added to it. Only what needs few series is reported: figures of the run, by role and by
node, and of at most `MOST_STREAMS` streams; none of members.

A Ray whose dashboard is on has a folder from which a Grafana provisions its dashboards; ours joins Ray's there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemble.executors.metrics import Family, MetricSample

MOST_STREAMS = 64
DASHBOARD, _OF_RAY = "ensemble_grafana_dashboard.json", "default_grafana_dashboard.json"
_COHORT = "cohort"


class RayMetrics:
    """The metrics of one run, of a process that is connected to Ray.

    Args:
        folder: from which a Grafana provisions dashboards, made by Ray soon after its start; None: there is none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.dashboard: str | None = None
        self._folder = folder
        self._metrics: dict[str, Any] = {}
        self._streams: set[tuple[str, ...]] = set()

    def report(self, samples: Iterable[MetricSample]) -> None:
        """Give Ray the present values."""
        self._provision()
        for family, labels, value in self.select(samples):
            metric = self._metrics.get(family.name)
            if metric is None:
                metric = self._metrics[family.name] = _make_metric(family)
            metric.set(value, labels)

    def select(self, samples: Iterable[MetricSample]) -> Iterator[tuple[Family, dict[str, str], float]]:
        """Yields what Ray is to be given, with the labels by their names."""
        for family, labels, value in samples:
            named = dict(zip(family.labels, labels, strict=True))
            if family.kind != "info" and self._has_room(named):
                yield family, named, value

    def _provision(self) -> None:
        """Put the dashboard beside Ray's, once those are there: before, Ray may empty the folder."""
        if self.dashboard is not None and self._folder is not None and (self._folder / _OF_RAY).exists():
            (self._folder / DASHBOARD).write_text(self.dashboard, encoding="utf-8")
            self._folder = None

    def _has_room(self, labels: dict[str, str]) -> bool:
        """Whether these labels are of no stream, or of one of the first streams."""
        if _COHORT not in labels:
            return True
        stream = tuple(labels.values())
        if len(self._streams) < MOST_STREAMS:
            self._streams.add(stream)
        return stream in self._streams


def find_dashboards(session: Path) -> Path:
    """The folder in which Ray puts its dashboards for Grafana.

    Args:
        session: Ray's directory of its session.
    """
    named = os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
    root = Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT") or session / "metrics")
    return Path(named) if named else root / "grafana" / "dashboards"


def _make_metric(family: Family) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(family.name, family.help, family.labels)
