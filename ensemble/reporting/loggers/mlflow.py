"""Writes a run of MLflow for the run, and one nested in it for each member.

A metric of an epoch has the epoch's number as its step: of an epoch that is trained again MLflow shows the later
value. Runs are found again by their tags at each start: one that was made just before this process was killed is
used.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ensemble.reporting.loggers.base import Logger, LostRecordsError, as_text, importing
from ensemble.reporting.loggers.points import DeclaredMember, EpochEnded, Point, RunEnd
from ensemble.store import RunState
from ensemble.store.files import make_directory
from ensemble.store.member import ENDED

LONGEST_NAME = 240  # of 250, with a digest
RUN = ""  # stands for the parent run
RUN_TAG, MEMBER_TAG, STATE_TAG = "ensemble.run_id", "ensemble.member", "ensemble.state"
PARENT_TAG = "mlflow.parentRunId"  # by which MLflow nests runs
MOST_METRICS, MOST_PARAMS, LONGEST_VALUE = 800, 100, 6000  # of a request, which has 1,000 items at most

#: What MLflow calls a member's state.
STATUS = {"finished": "FINISHED", "pruned": "FINISHED", "failed": "FAILED"}
STOPPED = "KILLED"

#: MLflow's settings, where the user has none: no telemetry, and a server that is gone is given up soon.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}
NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


class MLflowLogger(Logger):
    """Writes by MLflow's client; no run is active in the process."""

    def open(self, state: RunState, ids: dict[str, Any]) -> None:
        """Find or make the experiment and the run."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        os.environ.update(NO_TELEMETRY)
        with importing():
            from mlflow import entities
            from mlflow.tracking import MlflowClient

        self._entities, self._run_id = entities, state.run_id
        folder, uri = self.run_dir.path / "mlflow", self.options.get("uri")
        if uri is None:
            make_directory(folder)
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{folder / 'mlflow.db'}")
        self._experiment = self._find_experiment(
            self.options.get("experiment") or state.name, None if uri else (folder / "artifacts").as_uri()
        )
        self._runs = self._find_runs()
        gone = ids.get("runs", {}).keys() - self._runs.keys()
        if gone:
            raise LostRecordsError(f"{len(gone)} of the runs that were made are gone")
        ended = {member.id for member in state.members.values() if member.state in ENDED}
        for key in self._runs.keys() - ended:
            self._client.update_run(self._runs[key], status="RUNNING")
        if RUN in self._runs:
            return
        options = {
            name: getattr(state.header, name) for name in ("executor", "mode", "objective", "direction", "epochs")
        }
        self._make_run(RUN, state.name, state.started or 0.0, {"ensemble.run_dir": str(self.run_dir.path)})
        self._log(RUN, params=options)

    def write(self, points: Sequence[Point]) -> dict[str, Any]:
        """Write hyperparameters, and the metrics of each member together."""
        params: dict[str, dict[str, Any]] = {}
        metrics: dict[str, list[Any]] = {}
        for point in points:
            if isinstance(point, DeclaredMember):
                if self._declare(point):
                    metrics[point.member] = []
                params[point.member] = point.options | point.params
            elif isinstance(point, EpochEnded):
                made = metrics.setdefault(point.member, [])
                made += self._make_metrics(point.values, point.t, point.epoch)
        for member, member_metrics in metrics.items():
            self._log(member, member_metrics, params.get(member))
        return {"runs": self._runs}

    def end(self, end: RunEnd, state: RunState) -> dict[str, Any]:
        """Write how each member stands and what it has used, and end its run; then those of the whole run."""
        for member, member_end in end.members.items():
            tags = {
                STATE_TAG: member_end.state,
                "ensemble.attempts": member_end.attempts,
                "ensemble.energy_origin": member_end.origin,
            }
            tags |= {"ensemble.error": member_end.error} if member_end.error else {}
            self._log(member, self._make_metrics(member_end.values, end.t, member_end.epochs), tags=tags)
            status = STATUS.get(member_end.state, STOPPED)
            self._client.set_terminated(self._runs[member], status, _milliseconds(member_end.t))
        word = "finished" if end.finished else "stopped"
        tags = {STATE_TAG: word, "ensemble.energy_origin": end.origin}
        self._log(RUN, self._make_metrics(end.values, end.t, 0), tags=tags)
        status = "FINISHED" if end.finished else STOPPED
        self._client.set_terminated(self._runs[RUN], status, _milliseconds(end.t))
        return {"runs": self._runs}

    def _declare(self, point: DeclaredMember) -> bool:
        """Make the run of a member, without its parameters; one with other parameters is replaced.

        Returns:
            Whether a run was made; else the one that is there is kept.
        """
        member, params = point.member, point.options | point.params
        if member in self._runs:
            logged = self._client.get_run(self._runs[member]).data.params
            if any(logged.get(_clean(name), _shorten(value)) != _shorten(value) for name, value in params.items()):
                self._client.delete_run(self._runs.pop(member))  # a parameter cannot be changed
        if member in self._runs:
            return False
        tags = {MEMBER_TAG: member, PARENT_TAG: self._runs[RUN], STATE_TAG: "running"}
        self._make_run(member, member, point.t, tags)
        return True

    def _make_run(self, key: str, name: str, t: float, tags: Mapping[str, str]) -> None:
        made = self._client.create_run(
            self._experiment, _milliseconds(t), {RUN_TAG: self._run_id, **tags}, run_name=name
        )
        self._runs[key] = made.info.run_id

    def _log(
        self,
        key: str,
        metrics: Sequence[Any] = (),
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        entities = self._entities
        logged_params = [entities.Param(_clean(name), _shorten(value)) for name, value in (params or {}).items()]
        tagged = [entities.RunTag(name, _shorten(value)) for name, value in (tags or {}).items()]
        parts = itertools.zip_longest(_cut(metrics, MOST_METRICS), _cut(logged_params, MOST_PARAMS), fillvalue=())
        for some_metrics, some_params in list(parts) or [((), ())]:
            self._client.log_batch(self._runs[key], some_metrics, some_params, tagged)
            tagged = []  # with the first part

    def _make_metrics(self, values: Mapping[str, float], t: float, step: int) -> list[Any]:
        metric = self._entities.Metric
        return [metric(_clean(name), value, _milliseconds(t), step) for name, value in values.items()]

    def _find_experiment(self, name: str, artifacts: str | None) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _find_runs(self) -> dict[str, str]:
        """Runs that an earlier process has made for this run, by member."""
        runs, token = dict[str, str](), None
        while True:
            page = self._client.search_runs(
                [self._experiment], f"tags.`{RUN_TAG}` = '{self._run_id}'", page_token=token
            )
            runs |= {run.data.tags.get(MEMBER_TAG, RUN): run.info.run_id for run in page}
            token = page.token
            if not token:
                return runs


def _milliseconds(t: float) -> int:
    return round(t * 1000)


def _clean(name: str) -> str:
    """The name as MLflow takes it; one that it does not take ends with a digest, which tells it from others."""
    taken = re.sub(r"[^\w.\- /:]", "_", name)
    taken = "/".join(part for part in taken.split("/") if part.strip("."))[:LONGEST_NAME]
    return taken if taken == name else f"{taken or '_'}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _shorten(value: Any) -> str:
    return as_text(value)[:LONGEST_VALUE]


def _cut(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[first : first + most] for first in range(0, len(items), most))
