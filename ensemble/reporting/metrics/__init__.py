"""The metrics of runs, for Prometheus: what there is, from what it is computed, and where it is served.

`families` names them all and reads each from what `scrape` knows of a run, `collector` follows the logs of runs
and serves a scrape, `grafana.json` is the dashboard that shows it. None asks a member anything: all of it
is derived from the event logs.
"""

from pathlib import Path

#: The dashboard for Grafana 10 and later (schema version 39). Its variable `datasource` is the Prometheus to ask;
#: `run` and `member` choose series.
DASHBOARD = Path(__file__).with_name("grafana.json")
