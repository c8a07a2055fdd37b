"""What the fabric study shows: its tables, its findings and its plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ensemble.bench import charts
from ensemble.bench.charts import Panel, Series, series_of
from ensemble.bench.fabric.rows import CollectiveRow, FusionRow, TrainingRow
from ensemble.bench.launch.hosts import rate_bps
from ensemble.bench.results import Outcome, Spread, format_bytes, group_by, tabulate

_COLLECTIVE = "link backend collective size count type time_us algbw busbw wrong predicted_us"
_TRAINING = "link backend net parameters grad_mb ranks batch samples_per_s step_ms alone_ms exchange_ms efficiency"
_FUSION = "link backend threshold messages time_ms low_ms high_ms chosen"


@dataclass(frozen=True, kw_only=True)
class FabricResults:
    """All rows of a study."""

    collectives: Sequence[CollectiveRow] = ()
    training: Sequence[TrainingRow] = ()
    fusion: Sequence[FusionRow] = ()


def outcome(results: FabricResults) -> Outcome:
    """What the study prints, writes and draws; the key `part` of a row determines its other keys."""
    fusion = [{**row, "threshold": format_bytes(row["threshold"])} for row in tabulate(results.fusion, _FUSION)]
    parts = {"collective": results.collectives, "training": results.training, "fusion": results.fusion}
    return Outcome(
        tables=[
            ("collectives (algbw, busbw: GB/s)", tabulate(results.collectives, _COLLECTIVE)),
            ("training, data-parallel", tabulate(results.training, f"{_TRAINING} predicted")),
            ("fusion of a ResNet-50's 161 gradients", fusion),
        ],
        rows=[{"part": part, **vars(row)} for part, rows in parts.items() for row in rows],
        findings=list(findings(results)),
        title="Network fabrics",
        notes=("measured: lines with marks, quartiles as bars", "predicted: dashed"),
        panels=panels(results),
    )


# --- findings ------------------------------------------------------------------------------------------------


def findings(results: FabricResults) -> Iterator[str]:
    """Conclusions, one line each."""
    for row in (row for row in results.collectives if row.wrong):
        what = f"{row.collective} {format_bytes(row.size)}, {row.backend}, {row.link}"
        yield f"WRONG: {row.wrong} elements of {what}"
    reduced = [row for row in results.collectives if row.collective == "all_reduce"]
    for link, rows in group_by(reduced, lambda row: row.link).items():
        yield from _compare_backends(link, rows)
    for (net, backend), trained in group_by(results.training, lambda row: (row.net, row.backend)).items():
        home = next((row for row in trained if row.hosts == 1), None)
        each = [f"{row.efficiency:.0%} (predicted {row.predicted:.0%}) on {row.link}" for row in trained]
        line = f"{net} net, {trained[0].parameters:,} parameters, {backend}: efficiency {', '.join(each)}"
        away = [f"{row.step_ms / home.step_ms:.2f} x on {row.link}" for row in trained if home and row.hosts > 1]
        yield line + (f"; its step takes {', '.join(away)} of its time on one host" if away else "")
    for link, fused in group_by(results.fusion, lambda row: row.link).items():
        best, first, last = min(fused, key=lambda row: row.time_ms), fused[0], fused[-1]
        line = f"fusion, {link}: best {best.time_ms:.0f} ms at {format_bytes(best.threshold)}; "
        line += f"{first.time_ms:.0f} ms at {format_bytes(first.threshold)}, {last.time_ms:.0f} at the largest"
        for tuned in (each for each in fused if each.chosen):
            line += (
                f"; tuned {format_bytes(tuned.threshold)}, {tuned.time_ms / best.time_ms - 1:.0%} above the best"
            )
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


def panels(results: FabricResults) -> list[Panel]:
    """The all-reduce of every backend over every link, the other collectives, training and fusion."""
    return [
        *_draw_all_reduce(results.collectives),
        *_draw_collectives(results.collectives),
        *_draw_training(results.training),
        *_draw_fusion(results.fusion),
    ]


def _draw_all_reduce(rows: Sequence[CollectiveRow]) -> Iterator[Panel]:
    for link, own in group_by((r for r in rows if r.collective == "all_reduce"), lambda r: r.link).items():
        colours = charts.colours([row.backend for row in rows])
        time_ms = series_of(own, "size", _time_ms, "backend", colours)
        colours |= {f"{name}, predicted": colour for name, colour in colours.items()}
        predicted = series_of(
            own,
            "size",
            lambda row: row.predicted_us / 1e3,
            lambda row: f"{row.backend}, predicted",
            colours,
            dash=charts.PREDICTED,
            points=False,
        )
        yield _over_sizes("All-reduce, ms", link, [*time_ms, *predicted], own)


def _time_ms(row: CollectiveRow) -> Spread:
    return Spread(row.time_us / 1e3, row.low_us / 1e3, row.high_us / 1e3)


def _draw_collectives(rows: Sequence[CollectiveRow]) -> Iterator[Panel]:
    """The bus bandwidth of each collective over each link."""
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
    if not rows:
        return

    def name(row: TrainingRow) -> str:
        return f"{row.net}, {row.backend}"

    colours = charts.colours([name(row) for row in rows])
    series = series_of(rows, "link", "efficiency", name, colours)
    colours = {f"{each}, predicted": colour for each, colour in colours.items()}
    predicted = series_of(
        rows, "link", "predicted", lambda row: f"{name(row)}, predicted", colours, dash=charts.PREDICTED
    )
    at = "samples/s against the same ranks without exchange"
    yield charts.bar_panel("Efficiency of data-parallel training", [*series, *predicted], at=at)


def _draw_fusion(rows: Sequence[FusionRow]) -> Iterator[Panel]:
    for link, chosen in group_by(rows, lambda row: row.link).items():
        yield Panel(
            title="Fusion of a ResNet-50's 161 gradients, ms",
            at=link,
            series=series_of(
                chosen,
                lambda row: format_bytes(row.threshold),
                lambda row: Spread(row.time_ms, row.low_ms, row.high_ms),
                lambda _: "exchange",
            ),
            x="threshold",
            x_scale="category",
            marks=[charts.Mark(format_bytes(r.threshold), r.time_ms, "tuned") for r in chosen if r.chosen],
        )
