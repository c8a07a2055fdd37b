"""A Prometheus on loopback, with its files in a temporary directory, for tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.free_ports import find_free_ports
from kit.leftovers import wait_until

CONFIG = Path(__file__).parents[3] / "deploy" / "grafana" / "prometheus.yml"
ALERTS = CONFIG.with_name("alerts.yml")
PATIENCE_S = 300.0


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        series = self._get("query", query=expression)["result"]
        return [(each["metric"], float(each["value"][1])) for each in series]

    def describe_targets(self) -> list[dict[str, Any]]:
        targets: list[dict[str, Any]] = self._get("targets")["activeTargets"]
        return targets

    def is_ready(self) -> bool:
        try:
            return bool(self._get("query", query="1"))
        except OSError:
            return False

    def _get(self, what: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=300) as answer:
            return json.load(answer)["data"]


@contextmanager
def started(directory: Path, target: str, token: str) -> Iterator[Prometheus]:
    """A Prometheus with the configuration of `deploy/`, which scrapes this address every second."""
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus")
    text = CONFIG.read_text()
    for before, after in (("127.0.0.1:8270", target), ("scrape_interval: 10s", "scrape_interval: 1s")):
        assert text.count(before) == 1
        text = text.replace(before, after)
    (directory / "prometheus.yml").write_text(text)
    (directory / "alerts.yml").write_text(ALERTS.read_text())
    (directory / "token").touch(0o600)
    (directory / "token").write_text(token + "\n")
    (port,) = find_free_ports(1)
    command = ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            wait_until(prometheus.is_ready, "Prometheus does not start")
            yield prometheus
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
