"""Reads a whole Ray cluster as it is now: its nodes, the runs that share it, and what each holds and waits for.

Nothing is created there: the runs are read from the actor that they share (`ensemble.executors.ray.registry`),
and from Ray what nodes have and what is free. What is neither free nor a run's is *foreign*: of other jobs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ensemble.executors.ray import _compat, registry
from ensemble.executors.ray.session import RayConnection
from ensemble.schedule.fairness import NOTHING, Amount, sum_amounts
from ensemble.spec import SpecError


class ClusterReader:
    """A connection to a cluster.

    Args:
        address: of the cluster; None: RAY_ADDRESS.

    Raises:
        SpecError: there is no connection, or no address.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS")
        if not self.address:
            raise SpecError("no cluster is named: give --address HOST:PORT, or set RAY_ADDRESS")
        if self.address.startswith("ray://"):
            raise SpecError(
                f"{self.address} is Ray's server for clients: give HOST:PORT of its control store (usually 6379), "
                "on a machine of the cluster"
            )
        os.environ["RAY_ADDRESS"] = self.address
        self._session = RayConnection()

    def read(self) -> dict[str, Any]:
        """Returns the cluster as it is now; see `compose`.

        Raises:
            SpecError: it does not answer.
        """
        import ray

        try:
            records = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            free, rows = _compat.list_free_resources(), registry.read_rows()
        except ray.exceptions.RayError as error:
            raise SpecError(f"the cluster at {self.address} does not answer: {error}") from None
        return {"t": time.time(), "address": self.address, **compose(records, free, rows)}

    def close(self) -> None:
        """Disconnect."""
        self._session.close()


def describe_row(row: registry.RunRow) -> dict[str, Any]:
    """A run's row as JSON; `held` is summed over nodes, `wants` are gangs with their counts."""
    claim = row.claim
    return {
        "version": row.version,
        "id": claim.run,
        "run_id": row.run_id,
        "name": row.name,
        "user": row.user,
        "host": row.host,
        "pid": row.pid,
        "directory": row.directory,
        "started": row.started,
        "priority": claim.priority,
        "weight": claim.weight,
        "limits": dict(claim.limits),
        "running": row.running,
        "waiting": row.waiting,
        "held": sum_amounts(claim.sum_held().values())._asdict(),
        "wants": [{"parts": [part._asdict() for part in each.parts], "count": each.count} for each in claim.wants],
        "waited_s": claim.waited_s,
        "giving_back": row.giving_back,
        "age_s": row.age_s,
    }


def compose(
    records: Sequence[Mapping[str, Any]],
    free: Mapping[str, Mapping[str, float]],
    rows: Sequence[tuple[float, bytes]],
) -> dict[str, Any]:
    """Puts together what Ray and the runs say; pure.

    Args:
        records: Ray's record of each living node.
        free: what is free of each, by Ray's id.
        rows: of the runs, each with its age in seconds.

    Returns:
        - `runs`: `describe_row` of each; of one of another version its `version`, `age_s`, and what else can be
          read of `run_id`, `name`, `user`, `host`, `pid`, `directory`.
        - `nodes`: `node`, `address`, `id`, `total`, `free`, `foreign` (`gpus`, `cpus`, `memory_gb`), and `runs`:
          the same by the `id` of each. What runs of another version hold counts as foreign.
    """
    others = {row: _describe_other_version(age_s, row) for age_s, row in rows}
    known = {
        row.claim.run: row for row in registry.decode_rows([each for each in rows if others[each[1]] is None])
    }
    runs = [*map(describe_row, known.values()), *(each for each in others.values() if each is not None)]
    nodes = []
    for record in sorted(records, key=lambda each: (str(each["NodeManagerHostname"]), str(each["NodeID"]))):
        ray_id = str(record["NodeID"])
        held = {run: row.claim.sum_held() for run, row in known.items()}
        here = {run: parts[ray_id] for run, parts in held.items() if ray_id in parts}
        total, left = _as_amount(record["Resources"]), _as_amount(free.get(ray_id, {}))
        foreign = total.minus(left).minus(sum_amounts(here.values()))
        nodes.append(
            {
                "node": record["NodeManagerHostname"],
                "address": record["NodeManagerAddress"],
                "id": ray_id,
                "total": total._asdict(),
                "free": left._asdict(),
                "foreign": Amount(*(round(max(0.0, each), 6) for each in foreign))._asdict(),
                "runs": {run: amount._asdict() for run, amount in here.items() if amount != NOTHING},
            }
        )
    return {"runs": runs, "nodes": nodes}


def _describe_other_version(age_s: float, row: bytes) -> dict[str, Any] | None:
    """What can be read of a row that this version does not know; None of one that it knows."""
    try:
        said = msgspec.json.decode(row)
    except msgspec.DecodeError:
        said = {}
    said = said if isinstance(said, dict) else {}
    if said.get("version", 0) == registry.VERSION:
        return None
    texts = ("run_id", "name", "user", "host", "directory")
    found = {name: said[name] for name in texts if isinstance(said.get(name), str)}
    return {"version": said.get("version", 0), "age_s": age_s, **found, "pid": said.get("pid")}


def _as_amount(resources: Mapping[str, float]) -> Amount:
    gpus, cpus = resources.get("GPU", 0.0), resources.get("CPU", 0.0)
    return Amount(gpus, cpus, round(resources.get("memory", 0.0) / 2**30, 3))
