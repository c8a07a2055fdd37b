"""The dashboard that is shipped asks for series that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from local_prometheus import ALERTS

from ensemble.reporting.metrics import DASHBOARD
from ensemble.reporting.metrics.families import FAMILIES

LABELS = {family.name: set(family.labels) for family in FAMILIES}
LABELS |= {f"ray_{name}": labels for name, labels in LABELS.items()}
LABELS["ray_node_gpu_power_milliwatts"] = {"instance", "GpuIndex"}  # of those that it has
PANELS = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def targets(panel: dict[str, Any]) -> list[tuple[str, str]]:
    return [(target["expr"], target["legendFormat"]) for target in panel["targets"]]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_metric_and_label_of_a_panel_exists(panel: dict[str, Any]) -> None:
    for expression, legend in targets(panel):
        names = re.findall(r"\b(?:ray_|ensemble_)\w+", expression)
        assert len(names) == 1 and names[0] in LABELS, expression
        known = LABELS[names[0]]
        matched = set(re.findall(r'(\w+)=~?"', expression))
        grouped = re.findall(r"by \(([^)]*)\)", expression)
        left = known if not grouped else set(re.split(r",\s*", grouped[0]))
        assert matched <= known and left <= known, expression
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= left, (expression, legend)
        rates = re.findall(r"rate\((\w+)", expression)
        assert all(name.endswith("_total") for name in rates), "only counters have a rate"


def test_promql_has_no_fault(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool (package prometheus)")
    expressions = [expression for panel in PANELS for expression, _ in targets(panel)]
    replaced = [each.replace("$__rate_interval", "1m").replace("$run", ".*") for each in expressions]
    rules = [{"record": f"rule{number}", "expr": expression} for number, expression in enumerate(replaced)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    command = ["promtool", "check", "rules", str(tmp_path / "rules.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and f"{len(rules)} rules found" in done.stdout, done.stderr + done.stdout


def test_every_family_with_figures_is_shown() -> None:
    shown = " ".join(expression for panel in PANELS for expression, _ in targets(panel))
    plain = {"ensemble_stream_workers"}  # for a number
    plain |= set(re.findall(r"ensemble_\w+", ALERTS.read_text())) | {"ensemble_run_failed_attempts_total"}
    left = {
        family.name
        for family in FAMILIES
        if family.name not in shown and family.kind != "info" and family.name not in plain
    }
    assert left == {"ensemble_run_samples_prepared_total", "ensemble_run_samples_consumed_total"}, "reuse has them"
