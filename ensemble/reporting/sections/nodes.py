"""Nodes: what each has, what the run holds of it, who is there, what failed there, and why it is left out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import NodeChanged, NodeHealth
from ensemble.reporting import text
from ensemble.reporting.sections import Cell, Table
from ensemble.reporting.tables import Column

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import NodeState, RunState

#: Why a node is left out, the gravest first.
EXCLUSIONS = ("lost", "unusable", "draining", "resting")


def list_nodes(state: RunState) -> list[dict[str, Any]]:
    """Returns a row for each node that a run has had, in the order in which they joined.

    Returns:
        - `node`, `host`, and `state`: one of `EXCLUSIONS`; "in use", "idle"; "given back"; "ended" after the run.
        - `since`, `until` (Unix seconds), `reason`: of the exclusion; None where there is none, or not known.
        - `has_cpus`, `has_memory_gb`, `has_gpus`: of the node; `cpus`, `memory_gb`, `gpus` (their ids): what the
          run holds, or held last; `no_gpus`: why that is less than its GPUs.
        - `quarantined`: `gpu`, `since`, `reason` of each GPU that has broken.
        - `members`: those that are there; `attempts` that were placed there, over all starts; `failures` of
          these by cause.
        - `free_gb`: GiB by place; `seen`: when these were logged last, which they are when one is a fifth off.
        - `watts`: its power in the last interval.
    """
    here: dict[str, list[str]] = {}
    for member in state.members.values():
        if member.state in ("placed", "running"):
            for name in dict.fromkeys(member.nodes or ([member.node] if member.node else [])):
                here.setdefault(name, []).append(member.id)
    return [_describe(state, node, here.get(node.name, [])) for node in state.nodes.values()]


def _describe(state: RunState, node: NodeState, members: Sequence[str]) -> dict[str, Any]:
    info, health = node.info or NodeChanged(node=node.name), node.health or NodeHealth(node=node.name)
    kind = next((kind for kind in EXCLUSIONS if kind in node.excluded), None)
    why = node.excluded[kind] if kind is not None else None
    held = "in use" if members else "idle" if node.is_held else "given back"
    return {
        "node": node.name,
        "host": info.host,
        "state": kind or ("ended" if state.ended is not None else held),
        "since": why and why.since,
        "until": why and why.until,
        "reason": (why and why.detail) or None,
        "has_cpus": health.cpus,
        "has_memory_gb": health.memory_gb,
        "has_gpus": health.gpus if node.health is not None else None,
        "cpus": info.cpus if node.info is not None else None,
        "memory_gb": info.memory_gb,
        "gpus": [str(gpu) for gpu in info.gpu_ids],
        "no_gpus": info.no_gpus or None,
        "quarantined": [
            {"gpu": gpu_event.gpu, "since": gpu_event.t, "reason": gpu_event.detail}
            for gpu_event in state.quarantined.values()
            if gpu_event.node == node.name
        ],
        "members": list(members),
        "attempts": node.attempts,
        "failures": dict(node.failures),
        "free_gb": dict(health.free_gb),
        "seen": health.t or None,
        "watts": None if state.ended is not None else node.watts,
    }


def list_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Returns the rows as the columns of a table for a terminal; where it is narrow some are left out."""
    places = list(dict.fromkeys(place for row in rows for place in row["free_gb"]))
    columns = [
        Column("node", [row["node"] for row in rows]),
        Column("state", [row["state"] for row in rows]),
        Column("cores", [_of(row["cpus"], row["has_cpus"]) for row in rows], True),
        Column("GiB", [_of(row["memory_gb"], row["has_memory_gb"]) for row in rows], True, spare=1),
        Column("members", [text.names(row["members"]) or text.ABSENT for row in rows], folds_to=12),
        Column("attempts", [str(row["attempts"]) for row in rows], True, spare=2),
        Column("failed", [_describe_failures(row["failures"]) for row in rows]),
    ]
    if any(row["gpus"] or row["has_gpus"] for row in rows):
        columns.insert(4, Column("GPUs", [_of(len(row["gpus"]), row["has_gpus"]) for row in rows], True))
    free = ([_describe_free(row["free_gb"].get(place)) for row in rows] for place in places)
    return columns + [
        Column(f"free {place}", cells, True, spare=4 + at)
        for at, (place, cells) in enumerate(zip(places, free, strict=True))
    ]


def list_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = []
    for row in rows:
        if row["since"] is not None:
            until = "" if row["until"] is None else f", until {_moment(row['until'])}"
            notes.append(
                f"{row['node']}: {row['state']} since {_moment(row['since'])}{until}"
                + (f": {row['reason']}" if row["reason"] else "")
            )
        notes += [
            f"{row['node']}: GPU {gpu['gpu']} quarantined since {_moment(gpu['since'])}: {gpu['reason']}"
            for gpu in row["quarantined"]
        ]
        notes += [f"{row['node']}: {row['no_gpus']}"] if row["no_gpus"] else []
    return notes


def tabulate(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table with a row for each node; none where the only one there is has no trouble."""
    rows = list_nodes(state)
    notes = list_notes(rows)
    if len(rows) < 2 and not notes and not any(row["failures"] for row in rows):
        return []
    columns = list_columns(rows)
    head = [(column.head, "" if column.is_number else "text") for column in columns]
    cells: list[list[Cell]] = [list(line) for line in zip(*(column.cells for column in columns), strict=True)]
    about = "What the run holds of what each node has, and what has failed there."
    return [Table("nodes", "Nodes", about + (f" {'; '.join(notes)}." if notes else ""), head, cells)]


def _describe_failures(failures: Mapping[str, int]) -> str:
    most = sorted(failures.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{many} {cause}" for cause, many in most) or "0"


def _describe_free(free_gb: float | None) -> str:
    return text.ABSENT if free_gb is None else text.memory(free_gb * 2**30)


def _of(held: float | None, has: float | None) -> str:
    if held is None:
        return text.ABSENT
    return text.number(held) if has is None or has == held else f"{text.number(held)} of {text.number(has)}"


def _moment(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
