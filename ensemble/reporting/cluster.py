"""Tables of a whole cluster: the runs that share it, and its nodes; see `ensemble.executors.ray.cluster_view`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.sections import Cell, Table
from ensemble.reporting.tables import Column, lay_out

if TYPE_CHECKING:
    from ensemble.store import RunDir

FRESH_S = 30.0  # for which what a run has said of the others is shown
_NAMES = {"gpus": ("GPU", "GPUs"), "cpus": ("core", "cores"), "memory_gb": ("GiB", "GiB")}


def list_run_columns(runs: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns of the table of runs, those of the highest priority first (`sort_runs`)."""
    known = [each if "held" in each else None for each in runs]
    return [
        Column("run", [each.get("name") or each.get("run_id") or "?" for each in runs]),
        Column("user", [each.get("user") or "?" for each in runs]),
        Column("priority", [str(each["priority"]) if each else text.ABSENT for each in known], True),
        Column("weight", [text.number(each["weight"]) if each else text.ABSENT for each in known], True, spare=3),
        Column("members", [_count_members(each) if each else text.ABSENT for each in known], spare=2),
        Column("holds", [describe_amount(each["held"]) if each else text.ABSENT for each in known], folds_to=12),
        Column("waits for", [_describe_wait(each) for each in runs], folds_to=16),
        Column("limits", [describe_amount(each["limits"]) if each else text.ABSENT for each in known], spare=4),
        Column("since", [_describe_age(each) if each else text.ABSENT for each in known], True, spare=5),
        Column("driver", [f"{each.get('host', '?')}:{each.get('pid', '?')}" for each in runs], spare=6),
    ]


def list_node_columns(nodes: Sequence[Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns of the table of nodes, with a cell that says who holds what."""
    names = {each["id"]: each["name"] for each in runs if "id" in each}
    holders = [
        "; ".join(
            [
                *(f"{names.get(run, run)}: {describe_amount(part)}" for run, part in node["runs"].items()),
                *([f"others: {describe_amount(node['foreign'])}"] if any(node["foreign"].values()) else []),
            ]
        )
        for node in nodes
    ]
    return [
        Column("node", [node["node"] for node in nodes]),
        Column("has", [describe_amount(node["total"]) for node in nodes], folds_to=12),
        Column("free", [describe_amount(node["free"]) for node in nodes], folds_to=12),
        Column("held by", [each or text.ABSENT for each in holders], folds_to=20),
        Column("address", [node["address"] for node in nodes], spare=1),
    ]


def sort_runs(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs in the order in which the table has them: by priority, then as they began; unknown ones last."""
    return sorted(runs, key=lambda each: ("held" not in each, -each.get("priority", 0), each.get("started", 0.0)))


def list_lines(view: Mapping[str, Any], width: int | None) -> list[tuple[str, str]]:
    """Returns the two tables with their heads as lines for a terminal, each with its style.

    Args:
        view: as `ClusterReader.read` returns it.
    """
    runs, nodes = sort_runs(view["runs"]), view["nodes"]
    users = len({each["user"] for each in runs if each.get("user")})
    much = f"{text.count(len(runs), 'run')} of {text.count(users, 'user')}" if runs else "no run"
    clock = time.strftime("%H:%M:%S", time.localtime(view["t"]))
    lines = [
        (f"Ray at {view['address']} · {much} on {text.count(len(nodes), 'node')} · {clock}", "bold"),
        ("", ""),
    ]
    if runs:
        rows = lay_out(list_run_columns(runs), width)
        lines += [(rows[0], "dim"), *((row, "") for row in rows[1:]), ("", "")]
    rows = lay_out(list_node_columns(nodes, runs), width)
    return [*lines, (rows[0], "dim"), *((row, "") for row in rows[1:])]


def describe_amount(amount: Mapping[str, float]) -> str:
    """`2 GPUs, 8 cores, 16 GiB`: what there is of each; a dash where there is nothing."""
    shown = {key: amount[key] for key in _NAMES if amount.get(key)}
    parts = [f"{text.number(value)} {_NAMES[key][value != 1]}" for key, value in shown.items()]
    return ", ".join(parts) or text.ABSENT


def _count_members(run: Mapping[str, Any]) -> str:
    return f"{run['running']} running" + (f", {run['waiting']} waiting" if run["waiting"] else "")


def _describe_wait(run: Mapping[str, Any]) -> str:
    """What a run waits for, and what it gives back, or why nothing is known of it."""
    if "held" not in run:
        return f"another version of ray-ensemble (its row has version {run['version']})"
    return "; ".join(_list_waits(run)) or text.ABSENT


def _list_waits(run: Mapping[str, Any]) -> Iterator[str]:
    for want in run["wants"]:
        parts = " + ".join(describe_amount(part) for part in want["parts"])
        yield (f"{want['count']} × " if want["count"] > 1 else "") + parts
    if run["wants"]:
        yield f"for {text.duration(run['waited_s'])}"
    if run["giving_back"]:
        yield f"gives back {run['giving_back']}"


def _describe_age(run: Mapping[str, Any]) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(run["started"]))


def tabulate_others(run_dir: RunDir, now: float) -> Table | None:
    """Returns the table of the other runs of a run's cluster; None where there are none, or nothing new is known.

    Args:
        now: Unix seconds.
    """
    try:
        said = json.loads(run_dir.cluster.read_bytes())
        if now - said["t"] > FRESH_S:
            return None
        columns = list_run_columns(sort_runs(said["runs"]))
    except (OSError, ValueError, LookupError, TypeError):  # none, or of another version
        return None
    head = [(column.head, "" if column.is_number else "text") for column in columns]
    cells: list[list[Cell]] = [list(line) for line in zip(*(column.cells for column in columns), strict=True)]
    return Table("cluster", "Other runs of this cluster", "What `ensemble top` shows of all.", head, cells)
