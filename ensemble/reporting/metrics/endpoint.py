"""Serves the metrics of runs at `/metrics` of an aiohttp application, which says who may read them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from ensemble.reporting.metrics.collector import ListRuns, RunCollector
from ensemble.reporting.metrics.projection import MOST_MEMBERS


class Exposition:
    """Renders the metrics of runs in the format that a scraper asks for; any thread may call it.

    Args:
        list_runs, most_members, clock: see `RunCollector`.
    """

    def __init__(
        self,
        list_runs: ListRuns,
        most_members: int = MOST_MEMBERS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RunCollector(list_runs, most_members, clock))
        self._lock = threading.Lock()

    def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the body and the content type for an `Accept` header: OpenMetrics where that is accepted."""
        encode, content_type = choose_encoder(accept)
        with self._lock:
            return encode(self._registry), content_type


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
