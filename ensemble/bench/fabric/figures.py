"""What the fabric study shows: its tables, its findings and its plot."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ensemble.bench import charts
from ensemble.bench.charts import Panel, Series
from ensemble.bench.fabric.expected import training_claims
from ensemble.bench.fabric.rows import CollectiveRow, FusionRow, TrainingRow
from ensemble.bench.launch.hosts import rate_bps
from ensemble.bench.results import Outcome, Spread, format_bytes, group_by, outcome_of, series_of, show_claims

_COLLECTIVE = "link backend collective size count type time_us algbw busbw wrong predicted_us"
_TRAINING = "link backend net compute grad_mb ranks samples_per_s alone_ms packed_ms link_ms processor_ms step_ms"
_TRAINING += " predicted_ms error efficiency predicted free_processor"
_ERROR = 0.10  # of a predicted step, from which on it is named
_FUSION = "link backend threshold_text messages time_ms low_ms high_ms chosen"


def make_outcome(
    collectives: Sequence[CollectiveRow],
    training: Sequence[TrainingRow],
    fusion: Sequence[FusionRow],
    lost: Mapping[str, int],
) -> Outcome:
    """What the study prints, writes and draws; the key `part` of a row determines its other keys.

    Args:
        lost: frames that a relay has lost, by the link's name.
    """
    losses = [f"{link}: the relay that delays frames has lost {count}" for link, count in lost.items()]
    whole = (
        show_claims(list(training_claims(training)))
        + outcome_of(
            collectives,
            "collectives (algbw, busbw: GB/s)",
            _COLLECTIVE,
            part="collective",
            findings=judge_collectives(collectives),
            panels=[*_draw_all_reduce(collectives), *_draw_collectives(collectives)],
        )
        + outcome_of(
            training,
            "training, data-parallel",
            _TRAINING,
            part="training",
            findings=judge_training(training),
            panels=_draw_training(training),
        )
        + outcome_of(
            fusion,
            "fusion of a ResNet-50's 161 gradients",
            _FUSION,
            headings={"threshold_text": "threshold"},
            part="fusion",
            findings=judge_fusion(fusion),
            panels=_draw_fusion(fusion),
        )
    )
    notes = ("measured: lines with marks, quartiles as bars", "predicted: dashed")
    return dataclasses.replace(whole, title="Network fabrics", notes=notes, findings=[*losses, *whole.findings])


# --- findings ------------------------------------------------------------------------------------------------


def judge_collectives(rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """What is wrong, and every backend's all-reduce beside gloo's."""
    for row in (row for row in rows if row.wrong):
        what = f"{row.collective} {format_bytes(row.size)}, {row.backend}, {row.link}"
        yield f"WRONG: {row.wrong} elements of {what}"
    reduced = [row for row in rows if row.collective == "all_reduce"]
    for link, own in group_by(reduced, lambda row: row.link).items():
        yield from _compare_backends(link, own)


def judge_training(rows: Sequence[TrainingRow]) -> Iterator[str]:
    """The efficiency of each net over each link."""
    for (net, backend), trained in group_by(rows, lambda row: (row.net, row.backend)).items():
        each = [f"{row.efficiency:.0%} (predicted {row.predicted:.0%}) on {row.link}" for row in trained]
        yield f"{net} net, {trained[0].parameters:,} parameters, {backend}: efficiency {', '.join(each)}"
    if rows:
        off = [row for row in rows if abs(row.error) > _ERROR]
        yield f"{len(rows) - len(off)} of {len(rows)} steps are predicted within {_ERROR:.0%}"
        for row in off:
            parts = {"link": row.link_ms, "processor": row.processor_ms, "computing": row.packed_ms}
            most = max(parts, key=lambda name: parts[name])
            line = f"predicted {row.error:+.0%}: {row.net} net, {row.link}, {row.backend}; "
            yield line + f"the largest part is {most}, {parts[most]:.0f} of {row.step_ms:.0f} ms measured"


def judge_fusion(rows: Sequence[FusionRow]) -> Iterator[str]:
    """The best threshold over each link, and how good the tuned one is."""
    for link, fused in group_by(rows, lambda row: row.link).items():
        best, first, last = min(fused, key=lambda row: row.time_ms), fused[0], fused[-1]
        line = f"fusion, {link}: best {best.time_ms:.0f} ms at {best.threshold_text}; "
        line += f"{first.time_ms:.0f} ms at {first.threshold_text}, {last.time_ms:.0f} at the largest"
        for tuned in (each for each in fused if each.chosen):
            above = tuned.time_ms / best.time_ms - 1
            line += f"; tuned {tuned.threshold_text}, {above:.0%} above the best"
        yield line


def _compare_backends(link: str, rows: Sequence[CollectiveRow]) -> Iterator[str]:
    """Every backend's all-reduce against gloo's, and the hybrid against the better of its two ways."""
    by_backend = group_by(rows, lambda row: row.backend)
    us = {backend: {row.size: row.time_us for row in own} for backend, own in by_backend.items()}
    plain, hierarchical = us.get("gloo", {}), us.get("hierarchical", {})
    for backend, own in us.items():
        times = [f"{plain[size] / own[size]:.2f} x at {format_bytes(size)}" for size in own if size in plain]
        if backend != "gloo" and times:
            yield f"all_reduce by {backend} against gloo's, {link}: {', '.join(times)}"
    over = {
        size: time_us / min(plain[size], hierarchical[size])
        for size, time_us in us.get("hybrid", {}).items()
        if size in plain and size in hierarchical
    }
    if over:
        worst = max(over, key=lambda size: over[size])
        yield f"hybrid, {link}: at most {over[worst]:.2f} x the better of the two, at {format_bytes(worst)}"


# --- the plot ------------------------------------------------------------------------------------------------


def _draw_beside_predicted(
    rows: Sequence[Any], x: str, y: Any, predicted: Any, name: Any, names: Sequence[str], **more: Any
) -> list[Series]:
    """What was measured, and dashed what was predicted, in the colours of all `names`."""
    colours = charts.colours(names)
    measured = series_of(rows, x, y, name, colours)
    colours = {f"{each}, predicted": colour for each, colour in colours.items()}
    dashed = {"dash": charts.PREDICTED, **more}
    return measured + series_of(rows, x, predicted, lambda row: f"{name(row)}, predicted", colours, **dashed)


def _draw_all_reduce(rows: Sequence[CollectiveRow]) -> Iterator[Panel]:
    for link, own in group_by((r for r in rows if r.collective == "all_reduce"), lambda r: r.link).items():
        series = _draw_beside_predicted(
            own,
            "size",
            lambda row: Spread(row.time_us / 1e3, row.low_us / 1e3, row.high_us / 1e3),
            lambda row: row.predicted_us / 1e3,
            lambda row: row.backend,
            [row.backend for row in rows],
            points=False,
        )
        yield _over_sizes("All-reduce, ms", link, series, own)


def _draw_collectives(rows: Sequence[CollectiveRow]) -> Iterator[Panel]:
    # After the backends' colours: all are in the same legend.
    colours = charts.colours([*(row.backend for row in rows), *(row.collective for row in rows)])
    for (link, backend), own in group_by(rows, lambda row: (row.link, row.backend)).items():
        series = series_of(own, "size", "busbw", "collective", colours)
        if len(series) < 2:
            continue
        if (rate := own[0].rate) is not None:
            ends = sorted({row.size for row in own})
            limit: dict[str, Any] = {"colour": charts.NEUTRAL, "dash": charts.PREDICTED, "points": False}
            series.append(Series(name="link's rate", xs=ends, ys=[rate_bps(rate) / 8e9] * len(ends), **limit))
        yield _over_sizes("Bus bandwidth, GB/s", f"{backend}, {link}", series, own)


def _over_sizes(title: str, at: str, series: Sequence[Series], rows: Sequence[CollectiveRow]) -> Panel:
    text = {row.size: format_bytes(row.size) for row in rows}
    return Panel(title=title, at=at, series=series, x="message", x_scale="log", log_y=True, x_text=text)


def _draw_training(rows: Sequence[TrainingRow]) -> Iterator[Panel]:
    def name(row: TrainingRow) -> str:
        return f"{row.net}, {row.backend}"

    if rows:
        names = [name(row) for row in rows]
        series = _draw_beside_predicted(rows, "link", "efficiency", "predicted", name, names)
        at = "samples/s against the same ranks without exchange"
        yield charts.bar_panel("Efficiency of data-parallel training", series, at=at)


def _draw_fusion(rows: Sequence[FusionRow]) -> Iterator[Panel]:
    for link, chosen in group_by(rows, lambda row: row.link).items():
        yield Panel(
            title="Fusion of a ResNet-50's 161 gradients, ms",
            at=link,
            series=series_of(
                chosen,
                "threshold_text",
                lambda row: Spread(row.time_ms, row.low_ms, row.high_ms),
                lambda _: "exchange",
            ),
            x="threshold",
            x_scale="category",
            marks=[charts.Mark(r.threshold_text, r.time_ms, "tuned") for r in chosen if r.chosen],
        )
