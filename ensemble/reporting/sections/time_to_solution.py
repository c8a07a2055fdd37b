"""How long many models took together, in the figures of MLPerf HPC's weak-scaling part ("train many models").

An *instance* is one model, from the start of its first attempt to the end of its last. TTTa, the time to train
all, goes from the first start to the last stop; the score is models per minute of it; TTTa over the median
instance says how much longer all of them took than one: 1 is the best there is when all run at once (the machines
of record have 1.02 to 1.66). Source: Farrell et al., "MLPerf HPC: A Holistic Benchmark Suite for Scientific
Machine Learning on HPC Systems", 2021.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble.reporting import text
from ensemble.reporting.sections import Line

if TYPE_CHECKING:
    from ensemble.meter import Ledger
    from ensemble.store import MemberState, RunState


@dataclass(frozen=True)
class TimeToSolution:
    """What `time_to_solution` finds.

    Attributes:
        models: that finished, or were pruned.
        ttta_s: from the first start to the last stop.
        median_s: of their instances.
        held: share of the cores or GPUs, whichever members were packed by, that they held meanwhile; None where it
            is not known what the nodes have.
    """

    models: int
    ttta_s: float
    median_s: float
    held: float | None = None

    @property
    def per_minute(self) -> float:
        """Models per minute."""
        return 60 * self.models / self.ttta_s

    @property
    def over_median(self) -> float:
        """TTTa over the median instance."""
        return self.ttta_s / self.median_s


def measure_instances(
    instances: Iterable[tuple[float, float]], held: float | None = None
) -> TimeToSolution | None:
    """The figures of (start, stop) pairs in seconds; None where there is none that took any time."""
    known: Sequence[tuple[float, float]] = [(start, stop) for start, stop in instances if stop > start]
    if not known:
        return None
    whole = max(stop for _, stop in known) - min(start for start, _ in known)
    return TimeToSolution(len(known), whole, statistics.median(stop - start for start, stop in known), held)


def measure_time_to_solution(state: RunState) -> TimeToSolution | None:
    """The figures of a run that was not interrupted; None while no model is done, or after a resume."""
    done = [member for member in state.members.values() if member.state in ("finished", "pruned") and member.spans]
    if state.starts > 1:  # hours may lie between
        return None
    return measure_instances((find_instance(one) for one in done), _share_held(state))


def find_instance(member: MemberState, now: float | None = None) -> tuple[float, float]:
    """Start and stop, in Unix seconds, of a member that was placed.

    Args:
        now: what counts as the stop of one that has none yet.
    """
    last = member.spans[-1]
    return member.spans[0].placed, last.ended or now or last.placed


def _share_held(state: RunState) -> float | None:
    """Share of what the nodes have that members held, from the first start to the last stop."""
    spans = [(member, span) for member in state.members.values() for span in member.spans if span.ended]
    on_gpus = any(device is not None for _, span in spans for device in span.devices)
    offered = sum(
        len(node.info.gpus) if on_gpus else node.info.cpus
        for node in state.nodes.values()
        if node.info is not None
    )
    if not spans or not offered:
        return None
    asked = "gpus_per_worker" if on_gpus else "cpus_per_worker"
    taken = sum(
        (span.ended - span.placed) * len(span.devices) * member.identity.get(asked, 1.0)
        for member, span in spans
        if span.ended is not None
    )
    whole = max(span.ended for _, span in spans if span.ended) - min(span.placed for _, span in spans)
    return float(min(1.0, taken / (whole * offered))) if whole > 0 else None


def summarize(state: RunState, ledger: Ledger | None = None) -> list[Line]:
    """Returns the figures in a line; nothing while no model is done, or after a resume."""
    found = measure_time_to_solution(state)
    if found is None:
        return []
    line = f"{text.count(found.models, 'model')} in {text.duration(found.ttta_s)}, {found.per_minute:.1f} a minute"
    if found.models > 1:
        line += f"; the median one took {text.duration(found.median_s)}"
    if found.held is not None:
        line += f"; {100 * found.held:.0f}% of the cores, or GPUs, were reserved meanwhile"
    return [("models", line)]
