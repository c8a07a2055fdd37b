"""Ray's dashboard on a Ray of our own, and the metrics that a run reports through Ray."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from free_ports import find_free_ports
from leftovers import wait_until
from prometheus_client.parser import text_string_to_metric_families as parse_metrics
from started_cluster import make_cluster

from ensemble.cli.parser import main
from ensemble.executors.metrics import MetricSample
from ensemble.executors.ray.metrics import MOST_STREAMS, RayMetrics, find_dashboards
from ensemble.reporting.metrics import DASHBOARD
from ensemble.reporting.metrics import families as f
from ensemble.reporting.metrics.projection import FEW
from ensemble.store import RunDir, RunStatus

ROOT = Path(__file__).parents[3]
SPEC = """
from execute_members import an_ensemble
def spec(go="go"):
    faults = {"fault": "wait", "after": 4, "marker": go, "burn_s": 0.05}
    return an_ensemble([faults | {"lr": lr} for lr in (0.1, 0.2)], name="watched", retries=0)
"""


def fetch(url: str, token: str | None = None) -> tuple[int, str]:
    """Status and body."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def scrape(directory: Path) -> dict[str, list[tuple[dict[str, str], float]]]:
    """What Ray's nodes export: by name, the labels and value of each series."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for group in json.loads((directory / "prom_metrics_service_discovery.json").read_text()):
        for target in group["targets"]:
            for family in parse_metrics(fetch(f"http://{target}/metrics")[1]):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


DRIVER = """
import sys
from pathlib import Path
from execute_members import an_ensemble
import ensemble
run_dir, go, epochs = sys.argv[1:]
fault = {"fault": "wait", "after": 3, "marker": go, "burn_s": 0.05}
if epochs == "2":
    ensemble.submit(an_ensemble([{"lr": 0.1} | fault], name="outlived", epochs=2), run_dir, executor="ray").wait()
else:
    Path(go).unlink()
    ensemble.resume(run_dir, epochs=int(epochs)).wait()
print("ended", flush=True)
sys.stdin.read()
"""


@pytest.mark.more
@pytest.mark.ray
def test_the_series_of_a_run_go_when_it_has_ended_though_its_cluster_and_program_go_on(tmp_path: Path) -> None:
    with make_cluster(RAY_metrics_report_interval_ms="1000") as cluster:
        (port,) = find_free_ports(1)
        cluster.start(metrics_export_port=port)

        def list_series() -> dict[str, float]:
            """Our series, by name and labels."""
            families = parse_metrics(fetch(f"http://127.0.0.1:{port}/metrics")[1])
            samples = (each for family in families for each in family.samples if "ray_ensemble" in each.name)
            return {f"{each.name} {each.labels.get('role', '')}": each.value for each in samples}

        def drive(epochs: int) -> float:
            """The most CPU-seconds of training that were exported."""
            go = tmp_path / "go"
            command = [sys.executable, "-c", DRIVER, str(tmp_path / "run"), str(go), str(epochs)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            program = subprocess.Popen(command, env=cluster.environment, text=True, **pipes)  # type: ignore[call-overload]
            try:
                key = "ray_ensemble_run_cpu_seconds_total train"
                wait_until(lambda: program.poll() is not None or key in list_series(), "nothing is exported")
                while key not in (seen := list_series()):  # between two exports
                    assert program.poll() is None
                go.touch()
                assert program.stdout.readline() == "ended\n"
                wait_until(lambda: not list_series(), "they outlive the run")
                assert program.poll() is None, "its program is still there, and so is the cluster"
                assert cluster.find("raylet/raylet")
                return seen[key]
            finally:
                program.stdin.close()
                program.wait()

        drive(2)
        used = RunStatus.load(RunDir(tmp_path / "run")).used.read()
        spent_s = used.by_role()["train"].cpu_s
        exported_s = drive(4)
        used = RunStatus.load(RunDir(tmp_path / "run")).used.read()
        assert spent_s <= exported_s <= used.by_role()["train"].cpu_s, "a resume goes on where it was"


@pytest.mark.slow
@pytest.mark.ray
def test_a_watched_run_shows_rays_dashboard_and_reports_through_ray(tmp_path: Path) -> None:
    spec, go, log = tmp_path / "spec.py", tmp_path / "go", tmp_path / "stderr"
    spec.write_text(SPEC)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "executors")])
    environment["RAY_metrics_report_interval_ms"] = "500"
    command = [sys.executable, "-m", "ensemble.cli", "run", str(spec), "--set", f"go={go}", "--ray-dashboard"]
    with open(log, "w") as stderr:
        process = subprocess.Popen(
            [*command, "--run-dir", str(tmp_path / "watched")], env=environment, stdout=stderr, stderr=stderr
        )
    try:
        pattern = r"Ray's dashboard: (http://127\.0\.0\.1:\d+) \(it asks for the token in (\S+)\)"
        wait_until(lambda: process.poll() is not None or re.search(pattern, log.read_text()), "it says nothing")
        said = re.search(pattern, log.read_text())
        assert said is not None, log.read_text()
        url, token_file = said[1], Path(said[2])
        assert (token_file.stat().st_mode & 0o777, token_file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        token = token_file.read_text().strip()

        assert fetch(f"{url}/nodes?view=summary")[0] == 401
        assert fetch(f"{url}/nodes?view=summary", "another")[0] == 403
        assert fetch(f"{url}/nodes?view=summary", token)[0] == 200
        assert "<html" in fetch(url)[1], "a browser is asked for the token"

        directory = token_file.parent / "r"
        training = {"run": "watched", "state": "running"}

        def is_training() -> bool:
            series = scrape(directory).get("ray_ensemble_run_members", [])
            return any(training.items() <= labels.items() and value == 2.0 for labels, value in series)

        wait_until(is_training, "Ray does not export that two members train")
        series = scrape(directory)
        names = {"ray_" + family.name for family in FEW}
        assert {name for name in series if "ensemble" in name} <= names
        assert not any("member" in labels for name in names for labels, _ in series.get(name, []))
        assert any(value > 0 for _, value in series["ray_ensemble_run_cpu_seconds_total"])

        actors = json.loads(fetch(f"{url}/logical/actors", token)[1])["data"]["actors"].values()
        assert any(re.match(r"watched/[^/]+/agent-", actor["name"]) for actor in actors)
        made = find_dashboards(directory / "session_latest") / "ensemble_grafana_dashboard.json"
        wait_until(made.exists, "the dashboard for Grafana is not beside Ray's")
        assert made.read_text() == DASHBOARD.read_text()
        go.touch()
        assert process.wait() == 0, log.read_text()
        assert not token_file.parent.exists()
    finally:
        process.terminate()
        process.wait()


def test_the_dashboard_needs_the_executor_that_starts_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ENSEMBLE_RAY_DASHBOARD", raising=False)
    run = ["demo", "--executor", "local", "--ray-dashboard", "--run-dir", str(tmp_path / "run")]
    assert main(run) == 2
    assert "'local' starts no Ray" in capsys.readouterr().err
    assert "ENSEMBLE_RAY_DASHBOARD" not in os.environ


def test_rays_figure_beside_ours_has_its_name_and_labels() -> None:
    import ray

    source = Path(ray.__file__).parent / "dashboard" / "modules" / "reporter" / "reporter_agent.py"
    text = source.read_text()
    assert '"node_gpu_power_milliwatts": Gauge(' in text
    assert '"GpuIndex"' in text


# -- what Ray is given ------------------------------------------------------------------------------------------


def test_only_the_first_streams_are_reported() -> None:
    metrics = RayMetrics()
    streams = [
        MetricSample(f.STREAM_REUSE, ("a", "node", str(cohort)), 2.0) for cohort in range(MOST_STREAMS + 10)
    ]
    for _ in range(2):
        found = [labels["cohort"] for _, labels, _ in metrics.select(streams)]
        assert found == list(map(str, range(MOST_STREAMS)))


def test_the_dashboard_waits_until_ray_has_made_its_own(tmp_path: Path) -> None:
    metrics = RayMetrics(tmp_path)
    metrics.dashboard = "{}"
    metrics.report([])
    assert not list(tmp_path.iterdir())
    (tmp_path / "default_grafana_dashboard.json").touch()
    metrics.report([])
    assert (tmp_path / "ensemble_grafana_dashboard.json").read_text() == "{}"


def test_rays_folder_of_dashboards_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", "RAY_METRICS_OUTPUT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    assert find_dashboards(tmp_path) == tmp_path / "metrics" / "grafana" / "dashboards"
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", "/root-of-metrics")
    assert find_dashboards(tmp_path) == Path("/root-of-metrics/grafana/dashboards")
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", "/dashboards")
    assert find_dashboards(tmp_path) == Path("/dashboards")
