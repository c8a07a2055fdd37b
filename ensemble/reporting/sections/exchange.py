"""Where members' time went: computing, synchronizing, waiting for data; and in which precision they trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.ranking import add_up, rank_members
from ensemble.reporting.sections import Cell, Line, Table

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import MemberState, RunState


TITLE = "Where their time went"
TEXT = (
    "All epochs of a member added up, as its first worker saw them, without evaluation. Shared batches come from "
    "the stream, own ones the member has prepared for itself."
)


def tabulate(state: RunState, ledger: Ledger) -> list[Table]:
    """Returns a table with a row for each member; none while no epoch has ended."""
    if not any(member.history for member in state.members.values()):
        return []
    head, rows = list_columns(rank_members(state))

    def cell(name: str, value: str | float | None) -> Cell:
        if value is None or isinstance(value, str):
            return value
        if name in SHARES:
            return f"{value:.1%}", value
        return (text.memory(value), value) if name == SENT else value

    kinds = [(name, "text" if isinstance(value, str) else "") for name, value in zip(head, rows[0], strict=True)]
    shown = [[cell(*pair) for pair in zip(head, row, strict=True)] for row in rows]
    return [Table("exchange", TITLE, TEXT, kinds, shown, of_members=True)]


def summarize(state: RunState, ledger: Ledger) -> list[Line]:
    """Returns the share of time and the bytes that members of several workers spent on exchanging gradients."""
    known = [m for m in state.members.values() if m.identity.get("workers", 1) > 1 and add_up(m, "train_s") > 0]
    if not known:
        return []
    sync_s, train_s, sent = (sum(add_up(m, name) for m in known) for name in ("sync_s", "train_s", "sent_bytes"))
    line = (
        f"{text.count(len(known), 'member')} of several workers: {sync_s / train_s:.0%} of the time synchronizing"
    )
    return [("exchange", f"{line}, {text.memory(sent)} sent by each worker in all" if sent else line)]


def list_columns(members: Iterable[MemberState]) -> tuple[list[str], list[list[str | float | None]]]:
    """A head, and a row for each member: the columns that say something for at least one of them."""
    measured = [measure_member(member) for member in members]
    head = [name for name in measured[0] if any(each[name] not in (None, 0) for each in measured)]
    return head, [[each[name] for name in head] for each in measured]


SHARES = ("computing", "synchronizing", "waiting for data")
SENT = "sent by a worker"


def measure_member(member: MemberState) -> dict[str, str | float | None]:
    """Returns a member's row by column: its epochs added up, as its rank 0 saw them.

    Shares are of the seconds of its epochs without evaluation. What was sent is in bytes, to the other workers, by
    each worker on the average, by the formulas of `ensemble.comm.communicator.count_sent_bytes`.
    """
    own, train_s = member.identity, add_up(member, "train_s")
    sync_s, waited_s = add_up(member, "sync_s"), add_up(member, "waited_s")
    shares = (
        (1 - (sync_s + waited_s) / train_s, sync_s / train_s, waited_s / train_s) if train_s > 0 else [None] * 3
    )
    scales = (epoch.loss_scale for epoch in reversed(member.history) if epoch.loss_scale)

    def name_of(option: str) -> str | None:
        return None if own.get(option) is None else str(own[option]["name"])

    return {
        "member": member.id,
        "workers": own.get("workers", 1),
        "precision": own.get("precision", "fp32"),
        "optimizer": name_of("optimizer"),
        "schedule": name_of("schedule"),
        "accumulate": own.get("accumulate") if own.get("accumulate", 1) > 1 else None,
        "compression": name_of("compression"),
        "communicator": name_of("communicator"),
        **dict(zip(SHARES, shares, strict=True)),
        "waited, s": waited_s or None,
        "shared batches": add_up(member, "shared_batches"),
        "own batches": add_up(member, "private_batches"),
        SENT: add_up(member, "sent_bytes"),
        "loss scale": next(scales, None),
        "skipped steps": add_up(member, "skipped_steps"),
        "planned": None if member.plan is None else describe_plan(member.plan),
    }


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
        codecs = plan.get("auto") or []
        many = sum(count for _, count in codecs)
        used = (f"{'fp32' if name == 'none' else name} for {count} of {many} buckets" for name, count in codecs)
        parts.append(f"link {text.memory(rates['bytes_per_s'])}/s: {', '.join(used)}")
    return ", ".join(parts)
