"""Follows the event logs of runs, and serves their metrics at `/metrics` of an aiohttp application.

Each log is read once, then only what is new in it, when a scraper asks. A run has series while its log grows and
for `KEPT_S` after its last event, by the clock of the file system, so that its final values are scraped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ensemble.reporting.metrics.families import FAMILIES, MOST_MEMBERS, Family, MetricSample, clean, project
from ensemble.reporting.metrics.scrape import KEPT_S
from ensemble.store import RunDir, RunStatus, StoreError

#: The runs to show: the value of the label `run`, and the directory.
ListRuns = Callable[[], Mapping[str, Path]]


class Exposition(Collector):
    """Collects the metrics of runs, and renders them in the format that is asked for; any thread may call it.

    Args:
        list_runs: called at each scrape.
        most_members: how many members of all runs together may have series of their own.
        clock: Unix seconds, as the file system has them.
    """

    def __init__(
        self, list_runs: ListRuns, most_members: int = MOST_MEMBERS, clock: Callable[[], float] = time.time
    ) -> None:
        self._list_runs, self._most_members, self._clock = list_runs, most_members, clock
        self._statuses: dict[Path, RunStatus] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._lock = threading.Lock()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the body and the content type for an `Accept` header: OpenMetrics where that is accepted."""
        encode, content_type = choose_encoder(accept)
        with self._lock:
            return encode(self._registry), content_type

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
        members_left, runs = self._most_members, self._list_runs()
        self._statuses = {path: run_status for path, run_status in self._statuses.items() if path in runs.values()}
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
            samples = list(project(clean(name), status.state, status.used, members_left))
            members_left -= len(
                {sample.labels[1] for sample in samples if sample.family.labels[:2] == ("run", "member")}
            )
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


def add_metrics(app: web.Application, list_runs: ListRuns, folders: Iterable[str]) -> None:
    """Adds `metrics` to folders of an application.

    Args:
        list_runs: the runs to show, called at each scrape, in another thread than the application's.
        folders: their paths, with the slash.
    """
    exposition = Exposition(list_runs)

    async def answer(request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        body, content_type = await asyncio.to_thread(exposition.render, accept)
        return web.Response(body=body, headers={"Content-Type": content_type})

    for folder in folders:
        app.router.add_get(folder + "metrics", answer)
