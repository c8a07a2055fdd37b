"""What is known of each member beyond its row: where its time went, how it was packed, what it cost.

These are further columns of the table of members; what is not known of any member has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ensemble.reporting import text
from ensemble.reporting.ranking import add_up
from ensemble.reporting.run_projection import NOTHING, RunProjection
from ensemble.reporting.sections import Cell, plain_cell
from ensemble.reporting.sections.cost import describe_methods

if TYPE_CHECKING:
    from ensemble.events import Profiled
    from ensemble.meter.ledger_rows import LedgerRow
    from ensemble.store import MemberState

TIME = (
    "Where its time went: all epochs added up, as its first worker saw them, without evaluation. Shared batches "
    "come from the stream; own ones were prepared by the member itself."
)
PACKING = "How it was packed: what was measured of it alone, and what it was given."
COST = (
    "What it cost. Full adds the member's share of common work: of preparing and feeding by the samples that it "
    "consumed, of all else by the time for which its ranks held places. Mean watts are over the time in which it "
    "held a place."
)


def list_details(run: RunProjection) -> tuple[list[dict[str, str]], dict[str, list[Any]]]:
    """The columns, each with `id`, `title`, `about` and `kind` ("text" or ""), and the cells of each member."""
    profiles = {member: profile for profile in run.state.profiles.values() for member in profile.members}
    used: dict[str | None, list[LedgerRow]] = {}
    for row in run.ledger.rows:
        used.setdefault(row.member, []).append(row)
    origins = {total.origin for view in (run.own, run.full) for total in view.values()} - {"unavailable"}
    one_origin = f" All joules and watts are {next(iter(origins))}." if len(origins) == 1 else ""
    groups: tuple[tuple[str, str, Callable[[MemberState], dict[str, Cell]]], ...] = (
        ("exchange", TIME, measure_time),
        *(
            [("packing", PACKING, lambda member: measure_packing(member, profiles.get(member.id)))]
            if profiles
            else []
        ),
        (
            "cost_of_members",
            COST + one_origin,
            lambda member: measure_cost(run, member.id, used.get(member.id, []), is_mixed=len(origins) > 1),
        ),
    )
    columns, cells = list[dict[str, str]](), {name: list[Any]() for name in run.state.members}
    for group, about, measure in groups:
        rows = {name: measure(member) for name, member in run.state.members.items()}
        for title in next(iter(rows.values()), {}):
            shown = [plain_cell(row[title]) for row in rows.values()]
            if all(cell in (None, 0, "") for cell in shown):
                continue
            kind = "text" if any(isinstance(cell, str) for cell in shown) else ""
            columns.append({"id": f"{group} {title}", "title": title, "about": about, "kind": kind})
            for own, cell in zip(cells.values(), shown, strict=True):
                own.append(cell)
    return columns, cells


def measure_time(member: MemberState) -> dict[str, Cell]:
    """Shares of the seconds of a member's epochs without evaluation, and how it exchanged gradients.

    What was sent is in bytes, to the other workers, by each worker on the average, by the formulas of
    `ensemble.comm.communicator.count_sent_bytes`.
    """
    own, train_s, sent = member.identity, add_up(member, "train_s"), add_up(member, "sent_bytes")
    sync_s, waited_s = add_up(member, "sync_s"), add_up(member, "waited_s")
    scales = (epoch.loss_scale for epoch in reversed(member.history) if epoch.loss_scale)

    def name_of(option: str) -> str | None:
        return None if own.get(option) is None else str(own[option]["name"])

    def share(seconds: float) -> Cell:
        return (f"{seconds / train_s:.1%}", seconds / train_s) if train_s > 0 and seconds else None

    return {
        "precision": own.get("precision", "fp32"),
        "optimizer": name_of("optimizer"),
        "schedule": name_of("schedule"),
        "accumulate": own.get("accumulate") if own.get("accumulate", 1) > 1 else None,
        "compression": name_of("compression"),
        "communicator": name_of("communicator"),
        "computing": share(train_s - sync_s - waited_s),
        "synchronizing": share(sync_s),
        "waiting for data": share(waited_s),
        "waited, s": waited_s or None,
        "shared batches": add_up(member, "shared_batches"),
        "own batches": add_up(member, "private_batches"),
        "sent by a worker": (text.memory(sent), sent) if sent else None,
        "loss scale": next(scales, None),
        "skipped steps": add_up(member, "skipped_steps"),
        "planned": None if member.plan is None else describe_plan(member.plan),
    }


def describe_plan(plan: Mapping[str, Any]) -> str:
    """The chosen exchange and the measured link (`ensemble.comm.exchange_plan.ExchangePlan`) as text."""
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
        total = sum(count for _, count in codecs)
        used = (f"{'fp32' if name == 'none' else name} for {count} of {total} buckets" for name, count in codecs)
        parts.append(f"link {text.memory(rates['bytes_per_s'])}/s: {', '.join(used)}")
    return ", ".join(parts)


def measure_packing(member: MemberState, profile: Profiled | None) -> dict[str, Cell]:
    """What was measured of a member alone, by its number of workers, and what it was given."""
    workers = int(member.identity.get("workers", 1))

    def measured(name: str, scale: float = 1.0) -> float | None:
        value = (getattr(profile, name, None) or {}).get(workers)
        return None if value is None else float(value) * scale

    return {
        "a step alone, ms": measured("step_s", 1e3),
        "samples/s alone": measured("samples_per_s"),
        "cores alone": measured("cpus"),
        "cores given": None if profile is None else member.identity.get("cpus_per_worker"),
    }


def measure_cost(run: RunProjection, member: str, rows: list[LedgerRow], *, is_mixed: bool) -> dict[str, Cell]:
    """What a member used, in both views.

    Args:
        rows: of the ledger, those of the member.
        is_mixed: whether figures of the run have several origins: then each member's are named.
    """
    own, full = run.own.get(member, NOTHING), run.full.get(member, NOTHING)
    origins = list(dict.fromkeys((own.origin, full.origin)))
    return {
        "full J": full.energy_j,
        "full CPU-s": round(full.cpu_s, 1) or None,
        "idle J": own.idle_j,
        "mean W": own.mean_w,
        "GPU-s": None if own.gpu_s is None else round(own.gpu_s, 1),
        "split by": describe_methods(rows),
        "J is": ", full ".join(origins) if is_mixed else None,
    }
