"""The metrics of runs, for Prometheus: what there is, from what it is computed, and where it is served.

`families` names them all, `projection` computes them from a run's state and account, `collector` follows the logs
of runs and serves a scrape, `grafana.json` is the dashboard that shows it. None asks a member anything: all of it
is derived from the event logs.
"""

from pathlib import Path

#: The dashboard for Grafana 10 and later (schema version 39). Its variable `datasource` is the Prometheus to ask;
#: `run` and `member` choose series. What a run on Ray reports through Ray has `ray_` before its name.
DASHBOARD = Path(__file__).with_name("grafana.json")
