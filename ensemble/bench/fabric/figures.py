"""The tables and the plot of the fabric study."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ensemble.bench import charts
from ensemble.bench.fabric.rows import CollectiveRow, FusionRow, Results, TrainingRow, findings
from ensemble.bench.launch.hosts import rate_bps
from ensemble.bench.results import Outcome, format_bytes, group_by, tabulate

_COLLECTIVE = "link backend collective size count type time_us algbw busbw wrong predicted_us"
_TRAINING = "link backend net parameters grad_mb ranks batch samples_per_s step_ms alone_ms exchange_ms efficiency"
_MEMBER = "link hosts backend net grad_mb ranks batch samples_per_s step_ms alone_ms efficiency"
_FUSION = "link backend threshold messages time_ms low_ms high_ms chosen"


def outcome(results: Results) -> Outcome:
    """What the study prints, writes and draws; the key `part` of a row determines its other keys."""
    fusion = tabulate(results.fusion, _FUSION)
    parts = zip(("collective", "training", "fusion", "member"), results, strict=True)
    return Outcome(
        tables=[
            ("collectives (algbw, busbw: GB/s)", tabulate(results.collectives, _COLLECTIVE)),
            ("training, data-parallel", tabulate(results.training, f"{_TRAINING} predicted")),
            (
                "fusion of a ResNet-50's 161 gradients",
                [{**row, "threshold": format_bytes(row["threshold"])} for row in fusion],
            ),
            ("a member on one host and on several", tabulate(results.members, _MEMBER)),
        ],
        rows=[{"part": part, **vars(row)} for part, rows in parts for row in rows],
        findings=list(findings(results)),
        title="Network fabrics",
        notes=("measured: lines with marks, quartiles as bars", "predicted: dashed"),
        panels=panels(results),
    )


def panels(results: Results) -> list[charts.Panel]:
    """The all-reduce of every backend over every link, the other collectives, training and fusion."""
    return [
        *_all_reduce(results.collectives),
        *_others(results.collectives),
        *_training(results.training),
        *_fusion(results.fusion),
    ]


def _all_reduce(rows: Sequence[CollectiveRow]) -> Iterator[charts.Panel]:
    colours = charts.colours([row.backend for row in rows])
    for link, chosen in group_by((r for r in rows if r.collective == "all_reduce"), lambda row: row.link).items():
        series = []
        for backend, own in group_by(chosen, lambda row: row.backend).items():
            xs, colour = [row.size for row in own], colours[backend]
            series.append(
                charts.Series(
                    name=backend,
                    xs=xs,
                    ys=[row.time_us / 1e3 for row in own],
                    low=[row.low_us / 1e3 for row in own],
                    high=[row.high_us / 1e3 for row in own],
                    colour=colour,
                )
            )
            series.append(
                charts.Series(
                    name=f"{backend}, predicted",
                    xs=xs,
                    ys=[row.predicted_us / 1e3 for row in own],
                    colour=colour,
                    dash=charts.PREDICTED,
                    points=False,
                )
            )
        yield _over_sizes("All-reduce, ms", link, series, chosen)


def _others(rows: Sequence[CollectiveRow]) -> Iterator[charts.Panel]:
    """The bus bandwidth of each collective over each link."""
    # After the backends' colours: all are in the same legend.
    colours = charts.colours([*(row.backend for row in rows), *(row.collective for row in rows)])
    for (link, backend), chosen in group_by(rows, lambda row: (row.link, row.backend)).items():
        by_collective = group_by(chosen, lambda row: row.collective)
        if len(by_collective) < 2:
            continue
        series = []
        for name, own in by_collective.items():
            xs, ys = [row.size for row in own], [row.busbw for row in own]
            series.append(charts.Series(name=name, xs=xs, ys=ys, colour=colours[name]))
        if (rate := chosen[0].rate) is not None:
            xs, ys = [row.size for row in own], [rate_bps(rate) / 8e9 for _ in own]
            series.append(
                charts.Series(
                    name="link's rate", xs=xs, ys=ys, colour=charts.NEUTRAL, dash=charts.PREDICTED, points=False
                )
            )
        yield _over_sizes("Bus bandwidth, GB/s", f"{backend}, {link}", series, chosen)


def _over_sizes(
    title: str, at: str, series: Sequence[charts.Series], rows: Sequence[CollectiveRow]
) -> charts.Panel:
    text = {row.size: format_bytes(row.size) for row in rows}
    return charts.Panel(title=title, at=at, series=series, x="message", x_scale="log", log_y=True, x_text=text)


def _training(rows: Sequence[TrainingRow]) -> Iterator[charts.Panel]:
    if not rows:
        return
    series, colours = [], charts.colours([row.net for row in rows])
    for net, own in group_by(rows, lambda row: row.net).items():
        links = [row.link for row in own]
        measured, predicted = [row.efficiency for row in own], [row.predicted for row in own]
        look: dict[str, Any] = {"xs": links, "colour": colours[net]}
        series.append(charts.Series(name=net, ys=measured, **look))
        series.append(charts.Series(name=f"{net}, predicted", ys=predicted, dash=charts.PREDICTED, **look))
    at = "samples/s against the same ranks without exchange"
    yield charts.bar_panel("Efficiency of data-parallel training", series, at=at)


def _fusion(rows: Sequence[FusionRow]) -> Iterator[charts.Panel]:
    for link, chosen in group_by(rows, lambda row: row.link).items():
        series = charts.Series(
            name="exchange",
            xs=[format_bytes(row.threshold) for row in chosen],
            ys=[row.time_ms for row in chosen],
            low=[row.low_ms for row in chosen],
            high=[row.high_ms for row in chosen],
        )
        marks = [charts.Mark(format_bytes(row.threshold), row.time_ms, "tuned") for row in chosen if row.chosen]
        yield charts.Panel(
            title="Fusion of a ResNet-50's 161 gradients, ms",
            at=link,
            series=[series],
            x="threshold",
            x_scale="category",
            marks=marks,
        )
