"""The metrics of a run: each family with its type, its labels, what it is, and the series that it has.

A *family* has one name and one set of labels; each combination of values of the labels is a *series*. Names follow
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ensemble.events import NOT_COMBINED, FeederLost
from ensemble.meter import LedgerView
from ensemble.meter.origin import from_ticks, weakest
from ensemble.reporting import text
from ensemble.reporting.metrics.scrape import Scrape
from ensemble.reporting.model_figures import describe_figure, read_task
from ensemble.reporting.ranking import finite_or_none, metric
from ensemble.reporting.time_left import fraction_done
from ensemble.store import RunState

MOST_MEMBERS = 1000
MOST_LETTERS = 200  # of a label's value
STATES = ("waiting", "placed", "running", "paused", "stopped", "finished", "pruned", "failed", "cancelled")

#: Values of the labels but `run`, and behind them the series' value.
Series = Iterable[tuple[Any, ...]]


@dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
        name: as Prometheus stores it, with `_total` or `_info`.
        labels: the names of its labels, in order; `run` is the first one.
        help: what it is, a sentence.
        read: its series.
    """

    name: str
    kind: Literal["counter", "gauge", "info"]
    labels: tuple[str, ...]
    help: str
    read: Callable[[Scrape], Series] = field(compare=False)

    @property
    def stem(self) -> str:
        """The name without the ending that its kind brings."""
        return self.name.removesuffix({"counter": "_total", "info": "_info", "gauge": ""}[self.kind])

    @property
    def unit(self) -> str:
        """Its base unit, as OpenMetrics has it; empty where it counts things."""
        last = self.stem.rpartition("_")[2]
        return last if last in ("seconds", "joules", "watts", "ratio", "bytes") and self.kind != "info" else ""


class MetricSample(NamedTuple):
    """The value of one series; the labels are in the order of the family's."""

    family: Family
    labels: tuple[str, ...]
    value: float


def project(
    run: str, state: RunState, view: LedgerView, most_members: int = MOST_MEMBERS
) -> Iterator[MetricSample]:
    """Yields the samples of a run; those whose value is None are left out.

    Args:
        run: value of the label `run`, which no other run has.
    """
    scrape = Scrape(state, view, most_members)
    for family in FAMILIES:
        for *labels, value in family.read(scrape):
            if value is not None:
                yield MetricSample(family, (run, *map(clean, labels)), value)


@functools.lru_cache(maxsize=4096)
def clean(value: str) -> str:
    """A label's value that any reader of the format takes: without control characters, in UTF-8, not too long."""
    shown = text.visible(value).encode("utf-8", "backslashreplace").decode().replace("\n", " ")
    return shown if len(shown) <= MOST_LETTERS else shown[: MOST_LETTERS - 1] + "…"


# -- series that take more than an expression ---------------------------------------------------------------------


def _read_info(of: Scrape) -> Series:
    state = of.state
    yield state.name, state.run_id, state.executor, state.mode, state.objective or "", state.direction or "", 1


def _count_members(of: Scrape) -> Series:
    counts = of.run.counts + Counter({"waiting": of.run.counts["measuring"]})
    return [(name, counts[name]) for name in STATES]


def _read_combined(of: Scrape) -> Series:
    combined, ranking = of.state.combined or NOT_COMBINED, (of.state.objective, of.state.direction)
    for model, metrics in (combined.metrics or {}).items():
        for name, value in (metrics or {}).items():
            better = describe_figure(name, read_task(combined), ranking).better or ""
            yield name, model, str(combined.split or ""), better, finite_or_none(value)


def _read_bounds(of: Scrape) -> Series:
    for model, intervals in ((of.state.combined or NOT_COMBINED).intervals or {}).items():
        for name, ends in (intervals or {}).items():
            for end, value in zip(("low", "high"), ends or (), strict=False):
                yield name, model, end, float(value)


def _read_cpu(of: Scrape) -> Series:
    new_of_ray = of.view.count_open_ray_cpu() if of.is_open else 0
    for role, use in of.roles.items():
        if use.cpu:
            yield role, from_ticks(use.cpu - (new_of_ray if role == "ray" else 0))


def _count_failed(of: Scrape) -> Series:
    failed: Counter[str] = Counter()
    for node in of.state.nodes.values():
        failed.update(node.failures)
    return failed.items()


def _read_member_energy(of: Scrape) -> Series:
    for member in of.members:
        use = of.used_by(member)
        if use.origins:
            yield member.id, weakest(use.origins), from_ticks(use.energy)
        elif member.id in of.power:  # a counter begins at 0, from where a rate is known
            yield member.id, of.power[member.id][1], 0.0


def _read_node_power(of: Scrape) -> Series:
    for name, node in of.view.parser.nodes.items() if of.is_open else ():
        if node.power:
            yield name, node.power[-1].origin, node.power[-1].watts


def _read_levels(of: Scrape) -> Series:
    return ((*which, queue, level) for *which, last in of.feeders for queue, level in last.fullness.items())


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


_ORIGIN = "The label origin says how the figure was obtained: measured, attributed or estimated."
_LATE = "What a run in progress has used in about the last minute is not in it yet, as it may still be corrected."
_RUN, _MEMBER, _STREAM, _NODE = ("run",), ("run", "member"), ("run", "node", "cohort"), ("run", "node")

FAMILIES = (
    Family("ensemble_run_info", "info", (*_RUN, "name", "run_id", "executor", "mode", "objective", "direction"),
        "A run: the name of its ensemble, its id, its executor, whether it is a list or a search, its objective.",
        _read_info),
    Family("ensemble_run_members", "gauge", (*_RUN, "state"), "Members by state.", _count_members),
    Family("ensemble_run_progress_ratio", "gauge", _RUN, "Epochs trained over all epochs to train.",
        lambda of: [(of.run.done if of.state.members or of.state.declared else None,)]),
    Family("ensemble_run_best_objective", "gauge", (*_RUN, "metric"),
        "The objective of the best member so far, on the validation split; its name is the label metric.",
        lambda of: [(of.state.objective or "", of.run.best_value)]),
    Family("ensemble_run_combined_figure", "gauge", (*_RUN, "figure", "of", "split", "better"),
        "A figure of the combined model, of its best member and of the mean of its members (label of), on the "
        "split that the label names; better says in which direction the figure is better.",
        _read_combined),
    Family("ensemble_run_combined_figure_bound", "gauge", (*_RUN, "figure", "of", "end"),
        "The ends (label end: low, high) of the 95 % interval of a figure of ensemble, best, or their difference.",
        _read_bounds),
    Family("ensemble_run_uncertainty", "gauge", (*_RUN, "part"),
        "Mean uncertainty of the combined model's predictions by part: total, aleatoric, epistemic, disagreement.",
        lambda of: [
            (part, finite_or_none(value))
            for part, value in ((of.state.combined or NOT_COMBINED).uncertainty or {}).items()
        ]),
    Family("ensemble_run_samples_per_second", "gauge", _RUN,
        "Samples that all members in training train on per second.",
        lambda of: [(of.run.samples_per_s,)]),
    Family("ensemble_run_updated_timestamp_seconds", "gauge", _RUN,
        "Time of the last event of the run, in Unix seconds.",
        lambda of: [(of.state.updated,)]),
    Family("ensemble_run_cpu_seconds_total", "counter", (*_RUN, "role"),
        "CPU time of the run's processes, by role. Those of Ray count from a minute after they were first seen.",
        _read_cpu),
    Family("ensemble_run_energy_joules_total", "counter", (*_RUN, "role", "origin"),
        f"Energy of the run's nodes by role; roles idle and other are not the run's own use. {_LATE} {_ORIGIN}",
        lambda of: [
            (role, weakest(use.origins), from_ticks(use.energy)) for role, use in of.roles.items() if use.origins
        ]),
    Family("ensemble_run_samples_prepared_total", "counter", _RUN, "Samples prepared, by feeders and by members.",
        lambda of: [of.samples[:1]]),
    Family("ensemble_run_samples_consumed_total", "counter", _RUN, "Samples that reached a member.",
        lambda of: [of.samples[1:]]),
    Family("ensemble_run_reuse_ratio", "gauge", _RUN,
        "How often a prepared sample was used: consumed over prepared.",
        lambda of: [(_share(of.samples[1], of.samples[0]),)]),
    Family("ensemble_run_failed_attempts_total", "counter", (*_RUN, "reason"),
        "Attempts of members that have failed, by cause, tried again or not.",
        _count_failed),
    Family("ensemble_run_failures_in_row", "gauge", _RUN,
        "Attempts that have failed since a member of the run last ended an epoch.",
        lambda of: [(of.state.failures_in_row,)]),
    Family("ensemble_run_streams_without_feeder", "gauge", _RUN,
        "Streams whose feeder has ended and has no successor yet: their members prepare for themselves.",
        lambda of: [(sum(isinstance(event, FeederLost) for event in of.state.unshared.values()),)] * of.is_open),
    Family("ensemble_members_left_out", "gauge", _RUN,
        "Members of the run that should have series of their own, and have none because there are too many.",
        lambda of: [(of.left_out,)]),
    Family("ensemble_member_info", "info", (*_MEMBER, "state", "node", "cohort"),
        "A member: its state, node and stream group (label cohort).",
        lambda of: [
            (member.id, member.state, member.place, "" if member.cohort is None else str(member.cohort), 1)
            for member in of.members
        ]),
    Family("ensemble_member_progress_ratio", "gauge", _MEMBER, "How much of its training a member has done.",
        lambda of: [(member.id, fraction_done(of.state, member)) for member in of.members]),
    Family("ensemble_member_epochs", "gauge", _MEMBER, "Epochs that a member has finished.",
        lambda of: [(member.id, member.epoch) for member in of.members]),
    Family("ensemble_member_objective", "gauge", (*_MEMBER, "metric"),
        "The objective after the last epoch, on the validation split; its name is the label metric.",
        lambda of: [
            (member.id, of.state.objective or "", metric(member, of.state.objective)) for member in of.members
        ]),
    Family("ensemble_member_samples_per_second", "gauge", _MEMBER, "Samples per second that a member trains on.",
        lambda of: [(member.id, member.samples_per_s) for member in of.members if member.state == "running"]),
    Family("ensemble_member_data_wait_seconds_total", "counter", _MEMBER,
        "Seconds that a member has waited for data, in epochs that have ended.",
        lambda of: [(member.id, from_ticks(of.view.parser.waited.get(member.id, 0))) for member in of.members]),
    Family("ensemble_member_cpu_seconds_total", "counter", _MEMBER,
        "CPU time of a member's own processes, start-up included.",
        lambda of: [(member.id, from_ticks(of.used_by(member).cpu)) for member in of.members]),
    Family("ensemble_member_energy_joules_total", "counter", (*_MEMBER, "origin"),
        f"Energy of a member without its part of what serves several members. {_LATE} {_ORIGIN}",
        _read_member_energy),
    Family("ensemble_member_power_watts", "gauge", (*_MEMBER, "origin"),
        f"Mean power of a member in about the last minute in which it held a place; provisional. {_ORIGIN}",
        lambda of: [(member, origin, watts) for member, (watts, origin) in of.power.items()]),
    Family("ensemble_stream_samples_prepared_total", "counter", _STREAM,
        "Samples that feeders have prepared for a stream.",
        lambda of: [(*which, prepared) for which, (prepared, _, _) in of.streams.items()]),
    Family("ensemble_stream_samples_consumed_total", "counter", _STREAM,
        "Samples of a stream that reached a member.",
        lambda of: [(*which, consumed) for which, (_, consumed, _) in of.streams.items()]),
    Family("ensemble_stream_samples_skipped_total", "counter", _STREAM,
        "Samples that could not be prepared and were left out, as on_error=skip asks for.",
        lambda of: [(*which, skipped) for which, (_, _, skipped) in of.streams.items()]),
    Family("ensemble_stream_reuse_ratio", "gauge", _STREAM, "How often a prepared sample of a stream was used.",
        lambda of: [
            (*which, _share(consumed, prepared)) for which, (prepared, consumed, _) in of.streams.items()
        ]),
    Family("ensemble_stream_workers", "gauge", _STREAM, "Preparation workers of a stream's feeder.",
        lambda of: [(*which, last.workers or 0) for *which, last in of.feeders]),
    Family("ensemble_stream_queue_level_ratio", "gauge", (*_STREAM, "queue"),
        "How full a part of a stream's pipeline is, 0 to 1: the ring, its workers, the members that wait.",
        _read_levels),
    Family("ensemble_node_power_watts", "gauge", (*_NODE, "origin"),
        f"Power of a whole node in its last interval, other programs included. {_ORIGIN}",
        _read_node_power),
    Family("ensemble_node_excluded", "gauge", (*_NODE, "reason"),
        "1: nothing is placed on a node now; the reason is lost, unusable, draining or resting.",
        lambda of: [
            (row["node"], reason, 1) for row in of.nodes for reason in of.state.nodes[row["node"]].excluded
        ]),
    Family("ensemble_node_quarantined_gpus", "gauge", _NODE, "GPUs of a node that the run uses no more.",
        lambda of: [(row["node"], len(row["quarantined"])) for row in of.nodes]),
    Family("ensemble_node_free_bytes", "gauge", (*_NODE, "place"),
        "Free space of a node by place (run directory, /tmp, /dev/shm), as last logged: again when a fifth off.",
        lambda of: [
            (row["node"], place, free * 2**30) for row in of.nodes for place, free in row["free_gb"].items()
        ]),
)  # fmt: skip
