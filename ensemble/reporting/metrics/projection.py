"""Computes the metrics of a run from its state and what it has used: pure functions.

Counters never fall. CPU time is summed up as it is reported. Energy of an interval is shared out anew when another
process reports its part of it, so that of a run in progress only what is settled counts
(`ensemble.meter.LedgerView.settled`); once the run has ended all of it does, and equals `ledger.json`.

A member has series of its own from its first place until `KEPT_S` after its end, by the clock of the log, which is
long enough for its last interval to be settled and for the final values to be scraped. Of too many, those that
train come first, then those that have just ended, then those that wait for another place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ensemble.events import NOT_COMBINED, FeederLost
from ensemble.executors.metrics import MetricSample
from ensemble.meter import LedgerView
from ensemble.meter.origin import Origin, from_ticks, weakest
from ensemble.meter.usage_records import Owner
from ensemble.meter.usage_sums import CPU, Sums, list_energies
from ensemble.reporting import text
from ensemble.reporting.metrics import families as f
from ensemble.reporting.model_figures import describe_figure, read_task
from ensemble.reporting.ranking import finite_or_none, metric
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections.nodes import list_nodes
from ensemble.reporting.time_left import fraction_done
from ensemble.store.member import ENDED

if TYPE_CHECKING:
    from ensemble.store import MemberState, RunState

KEPT_S = 300.0
MOST_MEMBERS = 1000
MOST_LETTERS = 200  # of a label's value


@dataclass(slots=True)
class Used:
    """CPU time and energy in ticks; the origins of the energy's parts, none where no energy is known."""

    cpu: int = 0
    energy: int = 0
    origins: set[Origin] = field(default_factory=set)


def project(
    run: str, state: RunState, view: LedgerView, most_members: int = MOST_MEMBERS
) -> Iterator[MetricSample]:
    """Yields the samples of a run.

    Args:
        run: value of the label `run`, which no other run has.
        view: of the same events as the state.
        most_members: how many members may have series of their own.
    """
    members, left_out = select_members(state, most_members)
    used = _sum_up(view.settled)
    yield from project_run(run, state, view, used)
    yield MetricSample(f.LEFT_OUT, (run,), left_out)
    yield from _project_members(run, state, view, members, used)
    cohorts = {member.cohort for member in members}
    yield from project_streams(run, state, view, cohorts)


#: Families for collectors to which each series is dear: of the run, its nodes and its streams.
FEW = frozenset(
    (f.RUN_MEMBERS, f.RUN_PROGRESS, f.RUN_BEST, f.RUN_RATE, f.RUN_MODELS, f.RUN_CPU, f.RUN_ENERGY, f.RUN_PREPARED)
) | frozenset(
    (
        *(f.RUN_CONSUMED, f.RUN_REUSE, f.STREAM_PREPARED, f.STREAM_CONSUMED, f.STREAM_SKIPPED, f.STREAM_REUSE),
        *(f.RUN_UPDATED, f.RUN_FAILED, f.RUN_FAILURES_IN_ROW, f.RUN_LOST_FEEDERS),
        *(f.NODE_EXCLUDED, f.NODE_QUARANTINED, f.NODE_FREE, f.NODE_CLOCK),
    )
)


def project_few(run: str, state: RunState, view: LedgerView) -> Iterator[MetricSample]:
    """Yields the samples of the families in `FEW`, none of which is about a member; see `project`."""
    samples = (*project_run(run, state, view, _sum_up(view.settled)), *project_streams(run, state, view))
    return (sample for sample in samples if sample.family in FEW)


def select_members(state: RunState, most: int) -> tuple[list[MemberState], int]:
    """The members that have series of their own, in their order, and how many more should have."""
    now = state.updated or 0.0
    ranks = {"running": 0, "placed": 0}
    found = [
        (1 if member.state in ENDED else ranks.get(member.state, 2), member)
        for member in state.members.values()
        if member.attempts and (member.state not in ENDED or now - _find_end(member) <= KEPT_S)
    ]
    chosen = sorted(found, key=lambda each: (each[0], each[1].number))[:most]
    return sorted((member for _, member in chosen), key=lambda member: member.number), len(found) - len(chosen)


def _find_end(member: MemberState) -> float:
    """When the member's last attempt ended, in Unix seconds."""
    last = member.spans[-1] if member.spans else None
    return -math.inf if last is None else last.ended or last.placed


# -- the run ------------------------------------------------------------------------------------------------------


def project_run(
    run: str, state: RunState, view: LedgerView, used: Mapping[tuple[str, str], Used]
) -> Iterator[MetricSample]:
    """Yields the samples of the run as a whole and of its nodes.

    Args:
        used: what is settled, by role and by member.
    """
    facts = (state.name, state.run_id, state.executor, state.mode, state.objective or "", state.direction or "")
    yield MetricSample(f.RUN_INFO, tuple(map(clean, (run, *facts))), 1)
    known = RunProjection(state)
    states = known.counts + Counter({"waiting": known.counts["measuring"]})
    for name in ("waiting", "placed", "running", "paused", "stopped", "finished", "pruned", "failed", "cancelled"):
        yield MetricSample(f.RUN_MEMBERS, (run, name), states[name])
    if state.members or state.declared:
        yield MetricSample(f.RUN_PROGRESS, (run,), known.done)
    if (value := known.best_value) is not None:
        yield MetricSample(f.RUN_BEST, (run, clean(state.objective)), value)
    yield from _project_combined(run, state)
    yield MetricSample(f.RUN_RATE, (run,), known.samples_per_s)
    if known.pace is not None:
        yield MetricSample(f.RUN_MODELS, (run,), known.pace.per_minute)
    if state.updated is not None:
        yield MetricSample(f.RUN_UPDATED, (run,), state.updated)
    yield from _project_failures(run, state)
    yield from _project_roles(run, state, view, used)
    samples = view.parser.samples
    prepared, consumed = samples.prepared + samples.private, samples.consumed + samples.private
    yield MetricSample(f.RUN_PREPARED, (run,), prepared)
    yield MetricSample(f.RUN_CONSUMED, (run,), consumed)
    if prepared:
        yield MetricSample(f.RUN_REUSE, (run,), consumed / prepared)
    for name, node in view.parser.nodes.items() if state.ended is None else ():
        if node.power and (watts := node.power[-1].watts) is not None:
            yield MetricSample(f.NODE_POWER, (run, clean(name), node.power[-1].origin), watts)


def _project_failures(run: str, state: RunState) -> Iterator[MetricSample]:
    """Yields what has failed, and, while the run goes on, how its nodes are."""
    failed: Counter[str] = Counter()
    for node in state.nodes.values():
        failed.update(node.failures)
    for reason, many in failed.items():
        yield MetricSample(f.RUN_FAILED, (run, clean(reason)), many)
    yield MetricSample(f.RUN_FAILURES_IN_ROW, (run,), state.failures_in_row)
    if state.ended is not None:
        return
    lost = sum(isinstance(event, FeederLost) for event in state.unshared.values())
    yield MetricSample(f.RUN_LOST_FEEDERS, (run,), lost)
    for row in list_nodes(state):
        which = (run, clean(row["node"]))
        for reason in state.nodes[row["node"]].excluded:
            yield MetricSample(f.NODE_EXCLUDED, (*which, reason), 1)
        yield MetricSample(f.NODE_QUARANTINED, which, len(row["quarantined"]))
        for place, free_gb in row["free_gb"].items():
            yield MetricSample(f.NODE_FREE, (*which, clean(place)), free_gb * 2**30)
        if (clock_s := row["clock_s"]) is not None:
            certain_s = max(0.0, abs(clock_s) - (row["clock_error_s"] or 0.0))
            yield MetricSample(f.NODE_CLOCK, which, math.copysign(certain_s, clock_s))


def _project_combined(run: str, state: RunState) -> Iterator[MetricSample]:
    """Yields the samples of the combined model, once there is one."""
    combined = state.combined or NOT_COMBINED
    task, split = read_task(combined), str(combined.split or "")
    for of, metrics in (combined.metrics or {}).items():
        for name, value in (metrics or {}).items():
            if (known := finite_or_none(value)) is not None:
                better = describe_figure(name, task, (state.objective, state.direction)).better or ""
                yield MetricSample(f.RUN_COMBINED, (run, clean(name), of, split, better), known)
    for of, intervals in (combined.intervals or {}).items():
        for name, ends in (intervals or {}).items():
            for end, value in zip(("low", "high"), ends or (), strict=False):
                yield MetricSample(f.RUN_COMBINED_BOUND, (run, clean(name), of, end), float(value))
    for part, value in (combined.uncertainty or {}).items():
        if (known := finite_or_none(value)) is not None:
            yield MetricSample(f.RUN_UNCERTAINTY, (run, clean(part)), known)


def _project_roles(
    run: str, state: RunState, view: LedgerView, used: Mapping[tuple[str, str], Used]
) -> Iterator[MetricSample]:
    new_of_ray = 0 if state.ended is not None else view.count_open_ray_cpu()
    for (what, role), use in used.items():
        if what != "role":
            continue
        if use.cpu:
            ticks = use.cpu - (new_of_ray if role == "ray" else 0)
            yield MetricSample(f.RUN_CPU, (run, clean(role)), from_ticks(ticks))
        if use.origins:
            yield MetricSample(f.RUN_ENERGY, (run, clean(role), weakest(use.origins)), from_ticks(use.energy))


def _sum_up(sums: Sums) -> dict[tuple[str, str], Used]:
    """What was used over all nodes, by ("role", name) and ("member", name)."""
    found: dict[tuple[str, str], Used] = {}
    for (owner, _), use in sums.uses.items():
        for key in _list_keys(owner):
            total = found.get(key)
            if total is None:
                total = found[key] = Used()
            total.cpu += use.get(CPU, (0, ""))[0]
            for *_, ticks, origin in list_energies(use):
                total.energy += ticks
                total.origins.add(origin)
    return found


def _list_keys(owner: Owner) -> tuple[tuple[str, str], ...]:
    role = ("role", owner.role)
    return (role,) if owner.member is None else (role, ("member", owner.member))


# -- members and streams ------------------------------------------------------------------------------------------


def _project_members(
    run: str,
    state: RunState,
    view: LedgerView,
    members: list[MemberState],
    used: Mapping[tuple[str, str], Used],
) -> Iterator[MetricSample]:
    objective, nothing = clean(state.objective or ""), Used()
    power = _measure_power(view, members) if state.ended is None else {}
    for member in members:
        who = (run, clean(member.id))
        cohort = "" if member.cohort is None else str(member.cohort)
        yield MetricSample(f.MEMBER_INFO, (*who, member.state, clean(member.place), cohort), 1)
        yield MetricSample(f.MEMBER_PROGRESS, who, fraction_done(state, member))
        yield MetricSample(f.MEMBER_EPOCHS, who, member.epoch)
        if (value := metric(member, state.objective)) is not None:
            yield MetricSample(f.MEMBER_OBJECTIVE, (*who, objective), value)
        if member.state == "running" and member.samples_per_s is not None:
            yield MetricSample(f.MEMBER_RATE, who, member.samples_per_s)
        yield MetricSample(f.MEMBER_WAITED, who, from_ticks(view.parser.waited.get(member.id, 0)))
        use = used.get(("member", member.id), nothing)
        yield MetricSample(f.MEMBER_CPU, who, from_ticks(use.cpu))
        if use.origins:
            yield MetricSample(f.MEMBER_ENERGY, (*who, weakest(use.origins)), from_ticks(use.energy))
        elif member.id in power:  # a counter begins at 0, from where a rate is known
            yield MetricSample(f.MEMBER_ENERGY, (*who, power[member.id][1]), 0.0)
        if member.id in power:
            watts, origin = power[member.id]
            yield MetricSample(f.MEMBER_POWER, (*who, origin), watts)


def _measure_power(view: LedgerView, members: list[MemberState]) -> dict[str, tuple[float, Origin]]:
    """The mean power of each member that holds a place, in the intervals that are still open, and its origin."""
    recent = _sum_up(view.sum_open())
    spans = {
        name: (node.power[0].start, node.power[-1].end) for name, node in view.parser.nodes.items() if node.power
    }
    found = {}
    for member in members:
        use, window = recent.get(("member", member.id)), spans.get(member.node or "")
        if use is None or not use.origins or window is None or member.state not in ("placed", "running"):
            continue
        held_s = sum(
            max(0.0, min(span.ended or math.inf, window[1]) - max(span.placed, window[0])) for span in member.spans
        )
        if held_s > 0:
            found[member.id] = (from_ticks(use.energy) / held_s, weakest(use.origins))
    return found


def project_streams(
    run: str, state: RunState, view: LedgerView, cohorts: set[int | None] | None = None
) -> Iterator[MetricSample]:
    """Yields the samples of streams: of these cohorts, or of all."""
    for (node, cohort), (prepared, consumed, skipped) in view.parser.samples.by_stream.items():
        if cohorts is not None and cohort not in cohorts:
            continue
        which = (run, clean(node), str(cohort))
        yield MetricSample(f.STREAM_PREPARED, which, prepared)
        yield MetricSample(f.STREAM_CONSUMED, which, consumed)
        yield MetricSample(f.STREAM_SKIPPED, which, skipped)
        if prepared:
            yield MetricSample(f.STREAM_REUSE, which, consumed / prepared)
        last = state.feeders.get((node, cohort))
        if state.ended is None and last is not None:
            yield MetricSample(f.STREAM_WORKERS, which, last.workers or 0)
            for queue, level in last.fullness.items():
                if level is not None:
                    yield MetricSample(f.STREAM_LEVEL, (*which, clean(queue)), level)


def clean(value: str) -> str:
    """A label's value that any reader of the format takes: without control characters, in UTF-8, not too long."""
    shown = text.visible(value).encode("utf-8", "backslashreplace").decode().replace("\n", " ")
    return shown if len(shown) <= MOST_LETTERS else shown[: MOST_LETTERS - 1] + "…"
