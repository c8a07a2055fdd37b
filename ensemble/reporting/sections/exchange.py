"""Where members' time went: computing, synchronizing, waiting for data; and in which precision they trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.page import Cell, escape, table
from ensemble.reporting.ranking import rank_members
from ensemble.reporting.sections import Content, Line, ReportData

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import MemberState, RunState


def compose(data: ReportData) -> Content:
    """Returns a table with a row for each member; None while no epoch has ended."""
    if not any(member.history for member in data.state.members.values()):
        return None
    head, rows = tabulate([measure_member(member) for member in rank_members(data.state)])
    shares = {head.index(name) for name in ("computing", "synchronizing", "waiting for data") if name in head}
    sent = head.index("sent by a worker") if "sent by a worker" in head else None

    def cell(column: int, value: str | float | None) -> Cell:
        if value is None or isinstance(value, str):
            return Cell(escape(value or ""), value)
        shown = (
            f"{value:.1%}" if column in shares else text.memory(value) if column == sent else text.number(value)
        )
        return Cell(shown, value)

    texts = [isinstance(value, str) for value in rows[0]]
    kinds = [(name, "text" if is_text else "") for name, is_text in zip(head, texts, strict=True)]
    return table(kinds, [[cell(column, value) for column, value in enumerate(row)] for row in rows])


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns the share of time and the bytes that members of several workers spent on exchanging gradients."""
    known = [each for each in map(measure_member, state.members.values()) if each.workers > 1 and each.train_s > 0]
    if not known:
        return []
    share = sum(training.sync_s for training in known) / sum(training.train_s for training in known)
    sent = sum(training.sent_bytes for training in known)
    line = f"{text.count(len(known), 'member')} of several workers: {share:.0%} of the time synchronizing"
    return [("exchange", f"{line}, {text.memory(sent)} sent by each worker in all" if sent else line)]


@dataclass(frozen=True)
class MemberTime:
    """One member's epochs added up, as its rank 0 saw them.

    Attributes:
        member: its name.  workers: how many.  precision: its own.
        optimizer, schedule, compression, communicator: names; None where the declaration has none.
        accumulate: parts of a batch; None for one.
        planned: what was measured and chosen for its exchange, as text.
        train_s: seconds of its epochs without evaluation; of these
        sync_s: waiting for the other workers,  waited_s: waiting for data.
        sent_bytes: to the other workers, each worker on the average, by the formulas of
            `ensemble.comm.communicator.count_sent_bytes`.
        loss_scale: the last one; None without.  skipped_steps: those that an overflow skipped.
    """

    member: str
    workers: int
    precision: str
    optimizer: str | None
    schedule: str | None
    accumulate: int | None
    compression: str | None
    communicator: str | None
    planned: str | None
    train_s: float
    sync_s: float
    waited_s: float
    sent_bytes: float
    loss_scale: float | None
    skipped_steps: int

    def share(self, part: str) -> float | None:
        """The part of its time that it spent "computing", "synchronizing" or "waiting for data"."""
        if self.train_s <= 0:
            return None
        spent = {"synchronizing": self.sync_s, "waiting for data": self.waited_s}
        return spent[part] / self.train_s if part in spent else 1 - sum(spent.values()) / self.train_s


def measure_member(member: MemberState) -> MemberTime:
    """Returns the sums over all epochs of a member that are known."""
    own, epochs = member.identity, member.history

    def total(name: str) -> float:
        return sum(epoch.get(name) or 0 for epoch in epochs)

    return MemberTime(
        member=member.id,
        workers=own.get("workers", 1),
        precision=own.get("precision", "fp32"),
        optimizer=_name_of(own.get("optimizer")),
        schedule=_name_of(own.get("schedule")),
        accumulate=own.get("accumulate") if own.get("accumulate", 1) > 1 else None,
        compression=_name_of(own.get("compression")),
        communicator=_name_of(own.get("communicator")),
        planned=None if member.plan is None else describe_plan(member.plan),
        train_s=total("train_s"),
        sync_s=total("sync_s"),
        waited_s=total("waited_s"),
        sent_bytes=total("sent_bytes"),
        loss_scale=next((epoch["loss_scale"] for epoch in reversed(epochs) if epoch.get("loss_scale")), None),
        skipped_steps=int(total("skipped_steps")),
    )


def _name_of(chosen: Mapping[str, Any] | None) -> str | None:
    return None if chosen is None else str(chosen["name"])


def describe_plan(plan: Mapping[str, Any]) -> str:
    """Returns the chosen exchange and the measured link (`ensemble.comm.autotune.plan.ExchangePlan`) as text."""
    tuned, rates = plan["tuned"], plan["rates"]
    parts = []
    if tuned["groups"]:
        sizes = sorted({len(group) for group in tuned["groups"]})
        parts.append(f"groups of {' and '.join(map(str, sizes))}")
    before = ""
    if len(tuned["ways"]) == 1:
        parts.append(tuned["ways"][0][1])
    for up_to, way in tuned["ways"] if len(tuned["ways"]) > 1 else ():
        last = up_to == tuned["ways"][-1][0]
        parts.append(f"{way} {f'above {before}' if last and before else f'up to {text.memory(up_to)}'}")
        before = text.memory(up_to)
    parts.append(f"buckets of {text.memory(tuned['bucket_bytes'])}")
    if rates is not None:
        parts.append(f"link {text.memory(rates['bytes_per_s'])}/s: {_describe_codecs(plan.get('auto') or [])}")
    return ", ".join(parts)


def _describe_codecs(taken: Sequence[Sequence[Any]]) -> str:
    """Returns the codecs of the buckets, such as "qsgd4 for 3 of 4 buckets, fp32 for 1"."""
    many = sum(count for _, count in taken)
    return ", ".join(
        f"{'fp32' if name == 'none' else name} for {count} of {many} buckets" for name, count in taken
    )


def tabulate(trainings: Sequence[MemberTime]) -> tuple[list[str], list[list[str | float | None]]]:
    """A head, and a row for each member: the columns that say something for at least one of them.

    Shares are of the time in training, "sent" is in bytes.
    """
    columns = [(name, [_cell(name, training) for training in trainings]) for name in _COLUMNS]
    shown = [(name, cells) for name, cells in columns if any(cell not in (None, 0.0) for cell in cells)]
    return [name for name, _ in shown], [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]


_COLUMNS = (
    "member",
    "workers",
    "precision",
    "optimizer",
    "schedule",
    "accumulate",
    "compression",
    "communicator",
    "computing",
    "synchronizing",
    "waiting for data",
    "sent by a worker",
    "loss scale",
    "skipped steps",
    "planned",
)


def _cell(column: str, training: MemberTime) -> str | float | None:
    if column in ("computing", "synchronizing", "waiting for data"):
        return training.share(column)
    given = {"sent by a worker": training.sent_bytes, "loss scale": training.loss_scale}
    if column in given:
        return given[column]
    found: str | float | None = getattr(training, column.replace(" ", "_"))
    return found
