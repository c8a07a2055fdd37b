"""What nodes and streams did over the time of the run: the document `history`, figures for the views of each.

What the log has anyway is drawn: CPU time and GPU activity of the `power` events (one a second of each node),
levels of queues of the `feeder` events. What members used is in their curves, by epoch. Series are thinned as they
grow.
The figures have the form of `plots`, and the `view` that shows them; an axis may have `zero`: it begins there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble.events import Feeder, Power
from ensemble.reporting import text
from ensemble.reporting.dashboard.plots import Document
from ensemble.reporting.dashboard.power_series import GAP_S, Point, thin

if TYPE_CHECKING:
    from ensemble.events import Event
    from ensemble.meter.usage_records import PowerInterval
    from ensemble.store.state import RunState

#: What a series is of: the figure, the place, and what of it.
Key = tuple[str, str, str]

MOST = 400  # points of a series in the document; up to twice as many are kept
MOST_SERIES = 16  # in a figure, those that use most
MOST_KEPT = 64  # series of a figure, the first that are heard of
FEEDER_GAP_S = 120.0
NO_POWER = "There is no power reading: no node has a source that could be read, or none has reported yet."
#: Of each level of a stream: what the figure is called, how to read it.
_LEVELS = {
    "ring": ("Ring over time", "How full the ring of prepared samples was: empty where preparing limits."),
    "waiting": ("Waiting over time", "Share of the time in which some member waited for samples."),
    "workers": ("Workers over time", "Share of the preparing workers that had work."),
    "link": ("Links over time", "Share of the transfers between nodes that may be under way."),
}
_UNITS = ((10_800.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))


class History:
    """The series of a run, from its events."""

    def __init__(self) -> None:
        self._series: dict[Key, list[Point]] = {}
        self._feeders: dict[tuple[str, int], Feeder] = {}

    def apply(self, state: RunState, event: Event, interval: PowerInterval | None) -> None:
        """Adds what an event tells.

        Args:
            interval: of a `power` event: its time and parts, as the parser knows them.
        """
        if isinstance(event, Power) and interval is not None and interval.end > interval.start:
            self._add_use(state, event, interval)
        elif isinstance(event, Feeder):
            self._add_levels(event)

    def _add_use(self, state: RunState, event: Power, interval: PowerInterval) -> None:
        node = state.nodes.get(event.node)
        info = node.info if node is not None else None
        length = event.interval_s or interval.end - interval.start
        if event.busy_s is not None and info is not None and info.cpus:
            self._add(
                ("cpu", event.node, ""), interval.start, interval.end, min(1.0, event.busy_s / length / info.cpus)
            )
        for part in event.parts or ():
            if part.kind == "gpu" and part.activity is not None:
                ids = list(info.gpu_ids) if info is not None else []
                name = f"GPU {ids.index(part.device)}" if part.device in ids else str(part.device)
                key = ("gpu", event.node, name)
                use = min(1.0, sum(seconds for *_, seconds in part.activity) / length)
                self._add(key, interval.start, interval.end, use)

    def _add_levels(self, event: Feeder) -> None:
        """Levels are means since a feeder began: those of the time between two reports follow from both."""
        key = (event.node, event.cohort)
        before, self._feeders[key] = self._feeders.get(key), event
        if before is None or before.pid != event.pid or event.recorded_s is None or before.recorded_s is None:
            return
        if (span_s := event.recorded_s - before.recorded_s) <= 0:
            return
        for name, mean in event.fullness.items():
            if name not in _LEVELS:
                continue
            since = before.fullness.get(name, 0.0) * before.recorded_s
            level = min(1.0, max(0.0, (mean * event.recorded_s - since) / span_s))
            self._add((name, event.node, f"group {event.cohort}"), before.t, event.t, level)

    def _add(self, key: Key, begin: float, end: float, value: float) -> None:
        if key not in self._series and sum(known[0] == key[0] for known in self._series) >= MOST_KEPT:
            return
        points = self._series.setdefault(key, [])
        points.append((round(begin, 3), round(end, 3), round(value, 4), None))
        if len(points) > 2 * MOST:
            self._series[key] = thin(points, MOST, GAP_S if key[0] in ("cpu", "gpu") else FEEDER_GAP_S)

    def find(self, figure: str) -> dict[str, list[Point]]:
        """Returns the series of a figure by what they are of; of many those that are highest in the mean."""
        found = {
            ", ".join(filter(None, key[1:])): points for key, points in self._series.items() if key[0] == figure
        }
        mean = {name: sum(point[2] for point in points) / len(points) for name, points in found.items()}
        kept = sorted(found, key=lambda name: -mean[name])[:MOST_SERIES]
        return {name: points for name, points in found.items() if name in kept}


def describe_history(state: RunState, history: History, power: Sequence[Mapping[str, Any]]) -> Document:
    """Returns the document: `plots`, of the form of `plots`, each with the `view`, or the views, that show it.

    Args:
        power: of each node, as `PowerSeries.describe` has it.
    """
    begin = state.started or 0.0
    end = max([state.updated or begin, begin + 1e-3])
    scale, unit = time_unit(end - begin)
    x = {"title": f"{unit} since the start", "range": None, "kind": "linear", "zero": True}
    plots = [_plot_power(power, begin, scale, unit)]
    for figure, view, title, reading in (
        ("cpu", "placement", "CPU use over time", "Share of each node's cores at work, of all processes."),
        (
            "gpu",
            "placement",
            "GPU use over time",
            "Share of the time in which the run's processes kept a GPU busy.",
        ),
        *((name, "pipeline", *words) for name, words in _LEVELS.items()),
    ):
        gap = GAP_S if view == "placement" else FEEDER_GAP_S
        series = [
            _line(name, name, points, 2, begin, scale, unit, gap, _percent)
            for name, points in history.find(figure).items()
        ]
        if series:
            y = {"title": "", "range": [0.0, 1.0], "kind": "linear"}
            plots.append(
                {"view": view, "id": figure, "title": title, "reading": reading, "x": x, "y": y, "series": series}
            )
    return {"plots": [{**plot, "x": x} for plot in plots]}


def time_unit(span_s: float) -> tuple[float, str]:
    """Returns the unit for an axis of so many seconds: its size in seconds, its name."""
    return next((size, word) for least, size, word in _UNITS if span_s >= least)


def _plot_power(nodes: Sequence[Mapping[str, Any]], begin: float, scale: float, unit: str) -> Document:
    measured = [node for node in nodes if node["points"]]
    known = sorted(measured, key=lambda node: -node["points"][-1][2])[:MOST_SERIES]
    known = [node for node in measured if node in known]
    origins = " + ".join(sorted({str(node["origin"]) for node in known}))
    series, has_idle, said = list[Document](), False, list[str]()
    for node in known:
        name, origin = text.visible(str(node["node"])), node["origin"]
        sources = ", ".join(text.visible(str(each)) for each in node.get("sources") or ())
        line = _line(str(node["node"]), "", node["points"], 2, begin, scale, unit, GAP_S, text.watts)
        label = f"{name}, {origin}" + (f" ({sources})" if sources else "")
        series.append(line | {"label": label, "dash": [6, 4] if origin == "estimated" else None})
        said.append(f"{name}: {text.watts(node['points'][-1][2])} {origin}")
        if any(point[3] for point in node["points"]):
            has_idle = True
            idle = _line(str(node["node"]), "idle", node["points"], 3, begin, scale, unit, GAP_S, text.watts)
            series.append(idle | {"label": f"{name}, idle", "dash": [2, 3]})
    return {
        "view": ["cost", "placement"],
        "id": "power",
        "title": "Power over time",
        "reading": f"Of whole nodes, {origins}."
        + (f" The {len(known)} of {len(measured)} that draw most." if len(measured) > len(known) else "")
        + (f" Dashed: estimated. {text.ESTIMATED}" if "estimated" in origins else "")
        + (" Dotted: what a node would have drawn while nothing ran." if has_idle else ""),
        "absent": None if known else NO_POWER,
        "said": "; ".join(said),
        "y": {"title": f"watts ({origins})", "range": None, "kind": "linear", "zero": True},
        "series": series,
    }


def _line(
    of: str,
    name: str,
    points: Sequence[Point],
    column: int,
    begin: float,
    scale: float,
    unit: str,
    gap: float,
    write: Any,
) -> Document:
    found = list[list[Any]]()
    for t, value in _corners(thin(points, MOST, gap), column, gap):
        x = round((t - begin) / scale, 5)
        what = f"{text.visible(name or of)}\n{text.number(x)} {unit}: "
        found.append([x, value] if value is None else [x, value, {"text": what + write(value)}])
    return {
        "of": of,
        "name": None,
        "label": text.visible(name or of),
        "shape": None,
        "line": True,
        "points": found,
    }


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _corners(points: Sequence[Point], column: int, gap: float) -> Iterator[tuple[float, float | None]]:
    """Both ends of each interval; None between stretches in which nobody measured."""
    last: float | None = None
    for point in points:
        value = point[column]
        if value is None:
            continue
        if last is not None and point[0] - last > gap:
            yield last, None
            last = None
        yield (point[0] if last is None else last), value
        yield point[1], value
        last = point[1]
