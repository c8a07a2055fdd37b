"""A Prometheus on loopback, with its files in a temporary directory, for tests."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit.free_ports import find_free_ports
from kit.leftovers import wait_until

CONFIG = Path(__file__).parents[3] / "deploy" / "grafana" / "prometheus.yml"
ALERTS = CONFIG.with_name("alerts.yml")


Query = Callable[[str], list[tuple[dict[str, str], float]]]


def promtool(*arguments: str, given: str = "") -> str:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (package prometheus)")
    done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def started(directory: Path, target: str, token: str) -> Iterator[Query]:
    """Asks a Prometheus with the configuration of `deploy/`, which scrapes this address every second."""
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

    def query(expression: str) -> list[tuple[dict[str, str], float]]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=300) as answer:
            series = json.load(answer)["data"]["result"]
        return [(one["metric"], float(one["value"][1])) for one in series]

    def is_ready() -> bool:
        with contextlib.suppress(OSError):
            return bool(query("vector(1)"))
        return False

    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            wait_until(is_ready, "Prometheus does not start")
            yield query
        finally:
            process.terminate()
            process.wait(300.0)
