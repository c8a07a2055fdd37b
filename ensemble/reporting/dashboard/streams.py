"""The shared streams: what each feeder does, how fast, and what holds it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ensemble.events import Feeder, FeederLost, RunStarted, SharingEnded
from ensemble.reporting import text
from ensemble.reporting.sections.feeders import bottlenecks
from ensemble.reporting.sections.notices import describe_end_of_sharing, describe_lost_feeder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ensemble.events import Event
    from ensemble.store.state import RunState

COUNTS = ("prepared", "consumed")
SUMS = (*COUNTS, "skipped", "restarts", "sent_bytes")
FIELDS = ("workers", "capacity", "ring_bytes", "members", "detached", "cache")
ADDED_UP = (*SUMS, "workers", "members", "detached", "prepared_per_s", "consumed_per_s")
LEVELS = ("workers", "ring", "link", "waiting")
LEAST_S = 0.5  # between two reports of which there is a rate: they may be logged together
MOST_SHOWN = 6  # groups drawn in full, unless more than that are active


class StreamRates:
    """Samples a second of each (node, cohort), between reports of its feeder that are `LEAST_S` apart; and what
    all its feeders in turn have counted: each counts from zero.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Feeder] = {}
        self._rated: dict[tuple[str, int], Feeder] = {}  # from which on the next rate is
        self.rates: dict[tuple[str, int], dict[str, float]] = {}
        self.totals: dict[tuple[str, int], dict[str, int]] = {}

    def apply(self, event: Event) -> None:
        """Reads the counts of a `feeder` event."""
        if isinstance(event, RunStarted):
            self._last.clear()
            self._rated.clear()
            self.rates.clear()
        if not isinstance(event, Feeder):
            return
        key = (event.node, event.cohort)
        before, self._last[key] = self._last.get(key), event
        if before is not None and (before.pid != event.pid or event.prepared < before.prepared):
            before = None  # of another process
        total = self.totals.setdefault(key, dict.fromkeys(SUMS, 0))
        for name in SUMS:
            total[name] += (getattr(event, name) or 0) - (getattr(before, name, 0) or 0)
        if before is None:
            self._rated[key] = event
        if (seconds := event.t - self._rated[key].t) < LEAST_S:
            return
        before, self._rated[key] = self._rated[key], event
        grown = {name: getattr(event, name) - getattr(before, name) for name in COUNTS}
        if min(grown.values()) >= 0:
            self.rates[key] = {name: round(many / seconds, 2) for name, many in grown.items()}


def describe_streams(state: RunState, rates: StreamRates) -> list[dict[str, Any]]:
    """Returns each group of streams, with a row for each node that has a feeder, or had one."""
    limits = bottlenecks(state)
    found = []
    for key in sorted({*state.feeders, *(key for key in state.unshared if key[0] is not None)}, key=str):
        node, cohort = key
        event, gone = state.feeders.get(key), state.unshared.get(key)  # type: ignore[arg-type]
        group = (event and event.group) or {}
        rate = {} if gone or state.ended else rates.rates.get(key, {})  # type: ignore[arg-type]
        found.append(
            {
                "node": node,
                "cohort": cohort,
                **{name: getattr(event, name, None) for name in FIELDS},
                **(rates.totals.get(key) or dict.fromkeys(SUMS)),  # type: ignore[arg-type]
                **{f"{name}_per_s": rate.get(name) for name in COUNTS},
                "levels": event.fullness if event is not None else {},
                "design": group.get("design"),
                "nodes": list(group.get("nodes") or ()),
                **dict(zip(("slow", "limit"), limits.get(cohort, (None, None)), strict=True)),  # type: ignore[arg-type]
                "lost": gone and _describe_loss(gone),
            }
        )
    return group_streams(found)


def group_streams(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the streams of each cohort as one, the rows of nodes as its `streams`: counts and rates are summed,
    levels averaged. `is_shown`: it is one of those that are drawn, which are the active ones and the newest.
    """
    groups: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["cohort"], []).append(row)
    merged = [_merge(groups[cohort]) for cohort in sorted(groups, key=_age)]
    active = [group for group in merged if group["prepared_per_s"] is not None or group["lost"]]
    newest = [group for group in reversed(merged) if group not in active]
    for group in (active + newest)[: max(MOST_SHOWN, len(active))]:
        group["is_shown"] = True
    return merged


def _age(cohort: int | None) -> int:
    return -1 if cohort is None else cohort


def _merge(streams: list[dict[str, Any]]) -> dict[str, Any]:
    first = streams[0]

    def known(name: str, of: Iterable[Mapping[str, Any]] = streams) -> list[Any]:
        return [each[name] for each in of if each.get(name) is not None]

    levels = {name: known(name, known("levels")) for name in LEVELS}
    return {
        **{name: first[name] for name in ("cohort", "capacity", "ring_bytes", "design")},
        **{name: sum(known(name)) if known(name) else None for name in ADDED_UP},
        "levels": {name: sum(values) / len(values) for name, values in levels.items() if values},
        "nodes": list(dict.fromkeys(node for each in streams for node in (each["node"], *each["nodes"]))),
        "slow": next(iter(known("slow")), None),
        "limit": next(iter(known("limit")), None),
        "lost": known("lost"),
        "cache": "; ".join(map(_describe_cache, known("cache"))),
        "is_shown": False,
        "streams": streams,
    }


def _describe_cache(cache: Mapping[str, Any]) -> str:
    used, limit, expected = (cache.get(name) or 0 for name in ("bytes", "limit", "expected_bytes"))
    room = f"{text.memory(used)} of {text.memory(limit)}"
    room += f", all need {text.memory(expected)}" if expected > limit else ""
    return f"{text.number(cache.get('samples'))} kept ({room}), {text.number(cache.get('hits'))} read again"


def _describe_loss(event: FeederLost | SharingEnded) -> str:
    return describe_end_of_sharing(event) if isinstance(event, SharingEnded) else describe_lost_feeder(event)
