"""The columns of members: head, format and meaning of each figure, for terminal, notebook and page alike.

A view chooses columns by name. The page is sent the declarations, and has the same formats (`static/format.js`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.ranking import add_up, differ_by_seed, metric
from ensemble.reporting.run_projection import NOTHING, RunProjection
from ensemble.reporting.tables import Column
from ensemble.reporting.time_left import member_epochs, member_left_s

if TYPE_CHECKING:
    from ensemble.store import MemberState

#: How a value is written; of none there is a dash.
FORMATS: Mapping[str, Callable[[Any], str]] = {
    "text": lambda value: text.ABSENT if value is None else str(value),
    "whole": lambda value: text.ABSENT if value is None else str(value),
    "number": text.number,
    "tenths": lambda value: text.number(None if value is None else round(value, 1)),
    "score": text.score,
    "share": lambda value: text.ABSENT if value is None else f"{100 * value:.0f} %",
    "clock": lambda value: text.ABSENT if value is None else text.clock(value),
}


@dataclass(frozen=True)
class MemberColumn:
    """A column of a table of members.

    Attributes:
        head: above it, with the unit; empty for that of the run's objective.
        format: in `FORMATS`.
        read: the value for a member of a run.
        about: what it is, in words.
        is_usual: whether it is there where no member has a value, too.
    """

    head: str
    format: str
    read: Callable[[RunProjection, MemberState], Any]
    about: str = ""
    is_usual: bool = True


def _own(name: str) -> Callable[[RunProjection, MemberState], Any]:
    return lambda run, member: getattr(run.own[member.id], name) if member.id in run.own else None


def _share_of_training(name: str) -> Callable[[RunProjection, MemberState], float | None]:
    def read(run: RunProjection, member: MemberState) -> float | None:
        whole = add_up(member, "train_s")
        return min(1.0, add_up(member, name) / whole) if whole else None

    return read


def _read_left(run: RunProjection, member: MemberState) -> float | None:
    return member_left_s(run.state, member) if run.state.ended is None and not run.is_lost else None


def _describe_lineage(run: RunProjection, member: MemberState) -> str | None:
    """What a member is a clone of, and after how many epochs of that one a warm clone starts."""
    lineage = member.identity.get("lineage")
    if not lineage:
        return None
    at = "" if lineage["epoch"] is None else f", {lineage['epoch']}"
    how = f" (goes on{at})" if lineage.get("whole") else f" (warm{at})" if lineage["warm"] else ""
    return f"{lineage['from']}{how}"


COLUMNS: Mapping[str, MemberColumn] = {
    "member": MemberColumn("member", "text", lambda run, m: m.id),
    "seed": MemberColumn("seed", "whole", lambda run, m: m.identity.get("seed")),
    "hyperparameters": MemberColumn("hyperparameters", "text", lambda run, m: text.hyperparameters(m.params)),
    "state": MemberColumn("state", "text", lambda run, m: text.attempted(run.member_word(m), m.attempts)),
    "epoch": MemberColumn("epoch", "whole", lambda run, m: f"{m.epoch}/{member_epochs(run.state, m)}"),
    "metric": MemberColumn("", "score", lambda run, m: m.latest_metrics.get(run.state.objective)),
    "rate": MemberColumn("samples/s", "number", lambda run, m: m.samples_per_s if m.state == "running" else None),
    "error": MemberColumn("", "text", lambda run, m: f"{m.reason}: {m.error}" if m.state == "failed" else ""),
    "place": MemberColumn("place", "text", lambda run, m: m.place, "Node and device"),
    "waited": MemberColumn(
        "waits", "share", _share_of_training("waited_s"),
        "Share of its time in training that it waited for samples"),
    "synced": MemberColumn(
        "syncs", "share", _share_of_training("sync_s"),
        "Share of its time in training that its workers spent in exchanging gradients"),
    "samples_per_s": MemberColumn(
        "samples/s", "number", lambda run, m: m.training_rate, "Samples trained on in a second, over all epochs"),
    "left_s": MemberColumn("left", "clock", _read_left, "Time left"),
    "attempts": MemberColumn("attempts", "number", lambda run, m: m.attempts, "How often it was started"),
    "workers": MemberColumn(
        "workers", "number", lambda run, m: m.identity.get("workers", 1), "Data-parallel workers"),
    "cohort": MemberColumn("group", "number", lambda run, m: m.cohort, "The members that share a stream"),
    "memory_gb": MemberColumn(
        "GiB", "number", lambda run, m: m.history[-1].memory_gb if m.history else None, "Memory"),
    "cpu_s": MemberColumn("CPU-s", "tenths", _own("cpu_s"), "CPU-seconds of its own processes"),
    "mean_w": MemberColumn("mean W", "number", _own("mean_w"), is_usual=False),
    "gpu_s": MemberColumn("GPU-s", "number", _own("gpu_s"), is_usual=False),
    "full_cpu_s": MemberColumn(
        "full CPU-s", "number", lambda run, m: run.full[m.id].cpu_s if m.id in run.full else None, is_usual=False),
    "lineage": MemberColumn("clone of", "text", _describe_lineage, is_usual=False),
    "node": MemberColumn("node", "text", lambda run, m: m.node or None),
}  # fmt: skip
#: Those of the table of members in the page that are no more than their values.
OF_PAGE = (
    "place", "waited", "synced", "samples_per_s", "left_s", "attempts", "workers", "cohort", "memory_gb", "cpu_s",
)  # fmt: skip


def declare_columns() -> list[dict[str, str]]:
    chosen = {name: COLUMNS[name] for name in OF_PAGE}
    return [
        {"id": name, "title": column.head, "about": column.about, "format": column.format}
        for name, column in chosen.items()
    ]


def list_columns(
    run: RunProjection, members: Sequence[MemberState], chosen: Mapping[str, int]
) -> Iterator[Column]:
    """The columns of a table of members for a terminal.

    Args:
        chosen: names of `COLUMNS`, "energy_j", "full_energy_j", or "metric NAME"; with which go first where there
            is no room, as `Column.spare` says.
    """
    for name, spare in chosen.items():
        if name.endswith("energy_j"):
            yield from _list_energies(run, members, name, spare)
        elif name.startswith("metric "):
            other = name.removeprefix("metric ")
            yield Column(other, [text.score(metric(member, other)) for member in members], True, spare=spare)
        elif name != "seed" or differ_by_seed(run.state.members.values()):
            column = COLUMNS[name]
            values = [column.read(run, member) for member in members]
            if column.is_usual or any(value is not None for value in values):
                head = run.state.objective if name == "metric" else column.head
                yield Column(head, list(map(FORMATS[column.format], values)), column.format != "text", spare=spare)


def _list_energies(run: RunProjection, members: Sequence[MemberState], name: str, spare: int) -> Iterator[Column]:
    """Members' joules: the head names the origin where all have the same, else each cell names its own."""
    direct, full = ([view.get(member.id, NOTHING) for member in members] for view in (run.own, run.full))
    head = text.joules_head(total.origin for total in (*direct, *full))
    shown = direct if name == "energy_j" else full
    if name == "energy_j" or any(total.energy_j is not None for total in full):
        origins = [f" {total.origin}" if head == "J" and total.energy_j is not None else "" for total in shown]
        cells = [text.number(total.energy_j) + origin for total, origin in zip(shown, origins, strict=True)]
        yield Column(head if name == "energy_j" else "full J", cells, True, spare=spare)
