"""The metrics of runs, for Prometheus: what there is, from what it is computed, and where it is served.

`families` names them all, `projection` computes them from a run's state and account, `collector` follows the logs
of runs and renders a scrape, `endpoint` serves it, `grafana` makes the dashboard that shows it. None asks a member
anything: all of it is derived from the event logs.
"""
