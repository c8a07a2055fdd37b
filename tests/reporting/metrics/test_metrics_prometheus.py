"""Debian's Prometheus scrapes a run in progress, and says of a member's joules what its ledger says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "dashboard"))
sys.path.insert(0, str(Path(__file__).parents[2] / "executors"))

from dashboard_process import serve
from execute_members import an_ensemble
from local_prometheus import CONFIG, Prometheus, started, wait_until

import ensemble
from ensemble.reporting.metrics.families import FAMILIES

TOKEN = "0123456789abcdef0123456789abcdef"


def find_one(prometheus: Prometheus, expression: str) -> float:
    """The value of an expression that has one series."""
    [(_, value)] = prometheus.query(expression)
    return value


def test_a_query_for_a_members_joules_is_answered_with_those_of_the_ledger(tmp_path: Path) -> None:
    run_dir, files, token = tmp_path / "digits", tmp_path / "prometheus", tmp_path / "token"
    files.mkdir()
    go = tmp_path / "go"
    members = [{"fault": "wait", "after": 4, "marker": str(go), "burn_s": 0.01, "lr": lr} for lr in (0.1, 0.2)]
    run_dir.mkdir()
    token.touch(0o600)
    token.write_text(TOKEN)
    with (
        serve(tmp_path, "--metrics-token-file", str(token), log_in=False) as server,
        started(files, server.host, TOKEN) as prometheus,
    ):
        run = ensemble.submit(an_ensemble(members, epochs=3), run_dir, executor="local")
        training = 'ensemble_run_members{run="digits", state="running"} == 2'
        wait_until(lambda: prometheus.query(training), "it was not seen in progress")
        [target] = prometheus.describe_targets()
        assert (target["health"], target["lastError"]) == ("up", "")
        go.touch()
        run.wait()
        ended = 'ensemble_run_members{run="digits", state="finished"} == 2'
        wait_until(lambda: prometheus.query(ended), "its end was not seen")
        ledger = json.loads((run_dir / "ledger.json").read_text())
        assert [row["member"] for row in ledger["members"]] == ["member-0", "member-1"]
        for row in ledger["members"]:
            of = f'{{run="digits", member="{row["member"]}"}}'
            assert row["energy_j"] > 0
            energy = f"ensemble_member_energy_joules_total{of}"
            # Its end was seen before its last figures, if a scrape fell between the two.
            wait_until(lambda query=f"{energy} == {row['energy_j']!r}": prometheus.query(query), f"not {row}")
            [(labels, _)] = prometheus.query(energy)
            assert labels["origin"] == row["origin"]
            assert find_one(prometheus, f"ensemble_member_cpu_seconds_total{of}") == row["cpu_s"]
            assert find_one(prometheus, f"ensemble_member_progress_ratio{of}") == 1.0
        for role in ledger["roles"]:
            query = f'ensemble_run_energy_joules_total{{role="{role["role"]}"}}'
            assert [value for _, value in prometheus.query(query)] == [role["energy_j"]]
        total = find_one(prometheus, "sum(ensemble_run_energy_joules_total)")
        assert total == pytest.approx(ledger["total"]["energy_j"], rel=1e-12)
        counters = [family.name for family in FAMILIES if family.kind == "counter"]
        fallen = [name for name in counters if prometheus.query(f"resets({name}[1h]) > 0")]
        assert fallen == []


def test_the_configuration_has_no_fault() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (package prometheus)")
    command = ["promtool", "check", "config", "--syntax-only", str(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    text = CONFIG.read_text()
    assert "--web.listen-address=127.0.0.1:9090" in text and "credentials_file: token" in text
