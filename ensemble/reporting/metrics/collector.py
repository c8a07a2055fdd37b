"""Follows the event logs of runs, and collects their metrics for a scrape.

Each log is read once, then only what is new in it, when a scraper asks. A run has series while its log grows and
for `KEPT_S` after its last event, by the clock of the file system, so that its final values are scraped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ensemble.executors.metrics import Family, MetricSample
from ensemble.reporting.metrics.families import FAMILIES
from ensemble.reporting.metrics.projection import KEPT_S, MOST_MEMBERS, clean, project
from ensemble.store import RunDir, RunStatus, StoreError

#: The runs to show: the value of the label `run`, and the directory.
ListRuns = Callable[[], Mapping[str, Path]]


class RunCollector(Collector):
    """Collects the metrics of runs; for a `CollectorRegistry` of prometheus_client.

    Args:
        list_runs: called at each scrape.
        most_members: how many members of all runs together may have series of their own.
        clock: Unix seconds, as the file system has them.
    """

    def __init__(
        self,
        list_runs: ListRuns,
        most_members: int = MOST_MEMBERS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._list_runs, self._most_members, self._clock = list_runs, most_members, clock
        self._statuses: dict[Path, RunStatus] = {}

    def describe(self) -> Iterable[Metric]:
        """The families, without samples: the registry asks for them instead of reading all logs."""
        return [_make_metric(family) for family in FAMILIES]

    def collect(self) -> Iterator[Metric]:
        """The families that have samples, with their samples."""
        metrics = {family: _make_metric(family) for family in FAMILIES}
        for sample in self._project_runs():
            labels = dict(zip(sample.family.labels, sample.labels, strict=True))
            metrics[sample.family].add_sample(sample.family.name, labels, sample.value)
        return (metric for metric in metrics.values() if metric.samples)

    def _project_runs(self) -> Iterator[MetricSample]:
        left, runs = self._most_members, self._list_runs()
        self._statuses = {path: known for path, known in self._statuses.items() if path in runs.values()}
        for name, path in runs.items():
            if self._clock() - _find_last_event(path) > KEPT_S:
                self._statuses.pop(path, None)
                continue
            try:
                if path not in self._statuses:
                    self._statuses[path] = RunStatus.load(RunDir(path))
                status = self._statuses[path]
                status.update()
            except StoreError:  # it was removed just now, or is unreadable, which the page of the run says
                continue
            samples = list(project(clean(name), status.state, status.used, left))
            left -= len({sample.labels[1] for sample in samples if sample.family.labels[:2] == ("run", "member")})
            yield from samples


def _find_last_event(path: Path) -> float:
    """When the log of a run was last written, in Unix seconds; minus infinity where there is none."""
    try:
        return RunDir(path).events.stat().st_mtime
    except OSError:
        return float("-inf")


def _make_metric(family: Family) -> Metric:
    if family.kind == "info":
        return InfoMetricFamily(family.stem, family.help)
    if family.kind == "counter":
        return CounterMetricFamily(family.stem, family.help, unit=family.unit)
    return GaugeMetricFamily(family.stem, family.help, unit=family.unit)
