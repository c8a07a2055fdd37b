"""Makes the Grafana dashboard of runs, from the families that there are: `deploy/grafana/ensemble.json`.

    python -m ensemble.reporting.metrics.grafana > deploy/grafana/ensemble.json

A panel is a dictionary as Grafana 10 and later read it from a file (schema version 39). The variable `datasource`
is the Prometheus to ask; `run` and `member` choose series. Panels of runs and members read what the live page
serves; those of a cluster read what a run on Ray reports through Ray (`ray_` before the name), and Ray's own
metrics.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ensemble.executors.metrics import Family
from ensemble.reporting.metrics import families as f

Json = dict[str, Any]

UID, TITLE = "ray-ensemble", "ray-ensemble"
#: What Ray puts before the names of all metrics that it exports.
RAY_PREFIX = "ray_"
#: Of Ray's own, beside our joules: the power of each GPU, by NVML.
RAY_GPU_POWER = "ray_node_gpu_power_milliwatts"
WIDTH, HEIGHT = 12, 8
_OF_RUN = 'run=~"$run"'
_OF_MEMBER = f'{_OF_RUN}, member=~"$member"'


@dataclass(frozen=True)
class Query:
    """A PromQL expression and how its series are named."""

    expression: str
    legend: str


def select(family: Family, matchers: str, prefix: str = "") -> str:
    """Returns the selector of a family's series: `name{matchers}`."""
    return f"{prefix}{family.name}{{{matchers}}}"


def rate(family: Family, matchers: str, prefix: str = "") -> str:
    """Returns how fast a counter grows, per second."""
    return f"rate({select(family, matchers, prefix)}[$__rate_interval])"


def make_panel(
    title: str, queries: list[Query], unit: str, text: str = "", kind: str = "timeseries", low: int | None = 0
) -> Json:
    """Returns a panel without its place.

    Args:
        unit: as Grafana names it, such as `watt`, `joule`, `percentunit`.
        text: what to know of the figures.
        kind: of the panel.
        low: the lowest value that is drawn; None: that of the figures.
    """
    source = {"type": "prometheus", "uid": "${datasource}"}
    panel: Json = {
        "title": title,
        "description": text,
        "type": kind,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit, **({} if low is None else {"min": low})}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": source,
                "expr": each.expression,
                "legendFormat": each.legend,
            }
            for at, each in enumerate(queries)
        ],
    }
    if kind == "timeseries":
        panel["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return panel


def make_run_panels() -> list[Json]:
    """Returns the panels of runs as a whole."""
    energy = select(f.RUN_ENERGY, _OF_RUN)
    return [
        make_panel(
            "Members by state",
            [Query(f"sum by (run, state) ({select(f.RUN_MEMBERS, _OF_RUN)}) > 0", "{{run}} {{state}}")],
            "short",
        ),
        make_panel("Progress", [Query(select(f.RUN_PROGRESS, _OF_RUN), "{{run}}")], "percentunit"),
        make_panel("Best objective", [Query(select(f.RUN_BEST, _OF_RUN), "{{run}} {{metric}}")], "short"),
        make_panel("Samples per second", [Query(select(f.RUN_RATE, _OF_RUN), "{{run}}")], "short"),
        make_panel(
            "Energy by role",
            [Query(f"sum by (run, role, origin) ({energy})", "{{run}} {{role}} ({{origin}})")],
            "joule",
            "The roles idle and other are what the nodes used besides the run.",
        ),
        make_panel(
            "Power by role",
            [Query(f"sum by (run, role) ({rate(f.RUN_ENERGY, _OF_RUN)})", "{{run}} {{role}}")],
            "watt",
            "About a minute late: what was used until then may still be corrected.",
        ),
        make_panel(
            "Cores in use by role",
            [Query(f"sum by (run, role) ({rate(f.RUN_CPU, _OF_RUN)})", "{{run}} {{role}}")],
            "short",
        ),
        make_panel(
            "Power of nodes",
            [Query(select(f.NODE_POWER, _OF_RUN), "{{node}} ({{origin}})")],
            "watt",
            "Of whole nodes, other programs included.",
        ),
        make_panel(
            "Figures of the combined model",
            [
                Query(select(f.RUN_COMBINED, _OF_RUN), "{{run}} {{figure}} of {{of}} ({{better}} is better)"),
                Query(select(f.RUN_COMBINED_BOUND, _OF_RUN), "{{run}} {{figure}} of {{of}}, {{end}}"),
            ],
            "short",
            "Of the combined model, its best member and the mean of its members, on one split; with the ends of "
            "95 % intervals.",
            low=None,
        ),
        make_panel(
            "Uncertainty of the combined model",
            [Query(select(f.RUN_UNCERTAINTY, _OF_RUN), "{{run}} {{part}}")],
            "short",
            "Mean over the samples of the split; of classes in nats.",
        ),
        make_panel("Models per minute", [Query(select(f.RUN_MODELS, _OF_RUN), "{{run}}")], "short"),
        make_panel(
            "Members without series",
            [Query(select(f.LEFT_OUT, _OF_RUN), "{{run}}")],
            "short",
            "Of very many members, those that train and those that have just ended have series of their own.",
            "stat",
        ),
    ]


def make_stream_panels() -> list[Json]:
    """Returns the panels of the shared pipeline."""
    name = "{{run}} {{node}} stream group {{cohort}}"
    samples = [
        Query(rate(f.STREAM_PREPARED, _OF_RUN), f"{name} prepared"),
        Query(rate(f.STREAM_CONSUMED, _OF_RUN), f"{name} consumed"),
    ]
    reuse = [Query(select(f.STREAM_REUSE, _OF_RUN), name), Query(select(f.RUN_REUSE, _OF_RUN), "{{run}}")]
    return [
        make_panel("Samples prepared and consumed per second", samples, "short"),
        make_panel("Uses of each prepared sample", reuse, "short"),
        make_panel(
            "Queue levels", [Query(select(f.STREAM_LEVEL, _OF_RUN), f"{name} {{{{queue}}}}")], "percentunit"
        ),
        make_panel("Samples left out", [Query(select(f.STREAM_SKIPPED, _OF_RUN), name)], "short"),
    ]


def make_member_panels() -> list[Json]:
    """Returns the panels of members."""
    name = "{{run}} {{member}}"
    energy = Query(select(f.MEMBER_ENERGY, _OF_MEMBER), f"{name} ({{{{origin}}}})")
    return [
        make_panel(
            "Objective", [Query(select(f.MEMBER_OBJECTIVE, _OF_MEMBER), f"{name} {{{{metric}}}}")], "short"
        ),
        make_panel("Progress of members", [Query(select(f.MEMBER_PROGRESS, _OF_MEMBER), name)], "percentunit"),
        make_panel("Samples per second of members", [Query(select(f.MEMBER_RATE, _OF_MEMBER), name)], "short"),
        make_panel(
            "Share of time waiting for data", [Query(rate(f.MEMBER_WAITED, _OF_MEMBER), name)], "percentunit"
        ),
        make_panel("Energy of members", [energy], "joule"),
        make_panel(
            "Power of members",
            [Query(select(f.MEMBER_POWER, _OF_MEMBER), f"{name} ({{{{origin}}}})")],
            "watt",
            "Mean of about the last minute; provisional.",
        ),
        make_panel("Cores in use by members", [Query(rate(f.MEMBER_CPU, _OF_MEMBER), name)], "short"),
        make_panel("Epochs of members", [Query(select(f.MEMBER_EPOCHS, _OF_MEMBER), name)], "short"),
    ]


def make_ray_panels() -> list[Json]:
    """Returns the panels of a Ray cluster: what runs report through Ray, beside what Ray measures itself."""
    ours = rate(f.RUN_ENERGY, _OF_RUN, RAY_PREFIX)
    power = [
        Query(f"sum by (run, role) ({ours})", "{{run}} {{role}}, by the ledger"),
        Query(f"sum by (instance, GpuIndex) ({RAY_GPU_POWER}) / 1000", "{{instance}} GPU {{GpuIndex}}, by Ray"),
    ]
    energy = select(f.RUN_ENERGY, _OF_RUN, RAY_PREFIX)
    members = select(f.RUN_MEMBERS, _OF_RUN, RAY_PREFIX)
    return [
        make_panel(
            "Power by role beside the GPUs' power by Ray",
            power,
            "watt",
            "The ledger has processors, memory and the rest of the node besides GPUs, and is about a minute late; "
            "Ray has whole GPUs, whoever uses them.",
        ),
        make_panel("Energy by role, through Ray", [Query(energy, "{{run}} {{role}} ({{origin}})")], "joule"),
        make_panel("Members by state, through Ray", [Query(f"{members} > 0", "{{run}} {{state}}")], "short"),
        make_panel(
            "Samples prepared per second, through Ray",
            [Query(rate(f.STREAM_PREPARED, _OF_RUN, RAY_PREFIX), "{{run}} {{node}} stream group {{cohort}}")],
            "short",
        ),
    ]


def make_row(title: str, y: int) -> Json:
    """Returns the heading of the panels below it."""
    return {"type": "row", "title": title, "collapsed": False, "panels": [], **_place(0, y, 2 * WIDTH, 1)}


def _place(x: int, y: int, width: int, height: int) -> Json:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _make_variable(name: str, query: str) -> Json:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def make_dashboard() -> Json:
    """Returns the dashboard."""
    groups = {
        "Runs": make_run_panels(),
        "Shared pipeline": make_stream_panels(),
        "Members": make_member_panels(),
        "On a Ray cluster": make_ray_panels(),
    }
    panels: list[Json] = []
    y = 0
    for title, group in groups.items():
        panels.append(make_row(title, y))
        panels += [
            each | _place(at % 2 * WIDTH, y + 1 + at // 2 * HEIGHT, WIDTH, HEIGHT) for at, each in enumerate(group)
        ]
        y += 1 + (len(group) + 1) // 2 * HEIGHT
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    runs = f'label_values({{__name__=~"(ray_)?{f.RUN_MEMBERS.name}"}}, run)'
    members = f"label_values({select(f.MEMBER_INFO, _OF_RUN)}, member)"
    return {
        "uid": UID,
        "title": TITLE,
        "tags": ["ray-ensemble"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source, _make_variable("run", runs), _make_variable("member", members)]},
        "panels": [each | {"id": number} for number, each in enumerate(panels, start=1)],
    }


def format_dashboard() -> str:
    """Returns the dashboard as the text of its file."""
    return json.dumps(make_dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    print(format_dashboard(), end="")
