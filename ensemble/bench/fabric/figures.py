"""What the fabric study draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ensemble.bench import charts
from ensemble.bench.fabric.rows import CollectiveRow, Found, FusionRow, human
from ensemble.bench.launch.hosts import rate_bps
from ensemble.reporting.theme import NEUTRAL


def panels(found: Found) -> list[charts.Panel]:
    """The all-reduce of every backend over every link, the other collectives, training and fusion."""
    return [
        *_all_reduce(found.collectives),
        *_others(found.collectives),
        *_training(found),
        *_fusion(found.fusion),
    ]


def _all_reduce(rows: Sequence[CollectiveRow]) -> Iterator[charts.Panel]:
    colours = charts.colours([row.backend for row in rows])
    for link in dict.fromkeys(row.link for row in rows):
        here = [row for row in rows if row.link == link and row.collective == "all_reduce"]
        series = []
        for backend in dict.fromkeys(row.backend for row in here):
            mine = [row for row in here if row.backend == backend]
            xs, colour = [row.size for row in mine], colours[backend]
            series.append(
                charts.Series(
                    name=backend,
                    xs=xs,
                    ys=[row.time_us / 1e3 for row in mine],
                    low=[row.low_us / 1e3 for row in mine],
                    high=[row.high_us / 1e3 for row in mine],
                    colour=colour,
                )
            )
            series.append(
                charts.Series(
                    name=f"{backend}, predicted",
                    xs=xs,
                    ys=[row.predicted_us / 1e3 for row in mine],
                    colour=colour,
                    dash=charts.PREDICTED,
                    points=False,
                )
            )
        if series:
            yield _over_sizes("All-reduce, ms", link, series, here)


def _others(rows: Sequence[CollectiveRow]) -> Iterator[charts.Panel]:
    """The bus bandwidth of each collective over each link."""
    # After those of the backends: they are in the same legend.
    colours = charts.colours([*(row.backend for row in rows), *(row.collective for row in rows)])
    for link, backend in dict.fromkeys((row.link, row.backend) for row in rows):
        here = [row for row in rows if (row.link, row.backend) == (link, backend)]
        names = list(dict.fromkeys(row.collective for row in here))
        if len(names) < 2:
            continue
        series = []
        for name in names:
            mine = [row for row in here if row.collective == name]
            xs, ys = [row.size for row in mine], [row.busbw for row in mine]
            series.append(charts.Series(name=name, xs=xs, ys=ys, colour=colours[name]))
        if (rate := here[0].rate) is not None:
            xs, ys = [row.size for row in mine], [rate_bps(rate) / 8e9 for _ in mine]
            series.append(
                charts.Series(
                    name="link's rate", xs=xs, ys=ys, colour=NEUTRAL, dash=charts.PREDICTED, points=False
                )
            )
        yield _over_sizes("Bus bandwidth, GB/s", f"{backend}, {link}", series, here)


def _over_sizes(
    title: str, at: str, series: Sequence[charts.Series], rows: Sequence[CollectiveRow]
) -> charts.Panel:
    text = {row.size: human(row.size) for row in rows}
    return charts.Panel(title=title, at=at, series=series, x="message", x_scale="log", log_y=True, x_text=text)


def _training(found: Found) -> Iterator[charts.Panel]:
    rows = found.training
    if not rows:
        return
    series, colours = [], charts.colours([row.net for row in rows])
    for net in dict.fromkeys(row.net for row in rows):
        mine = [row for row in rows if row.net == net]
        links = [row.link for row in mine]
        measured, predicted = [row.efficiency for row in mine], [row.predicted for row in mine]
        look: dict[str, Any] = {"xs": links, "colour": colours[net]}
        series.append(charts.Series(name=net, ys=measured, **look))
        series.append(charts.Series(name=f"{net}, predicted", ys=predicted, dash=charts.PREDICTED, **look))
    yield charts.Panel(
        title="Efficiency of data-parallel training",
        at="samples/s against the same ranks without exchange",
        series=series,
        bars=True,
        x_scale="category",
    )


def _fusion(rows: Sequence[FusionRow]) -> Iterator[charts.Panel]:
    for link in dict.fromkeys(row.link for row in rows):
        here = [row for row in rows if row.link == link]
        series = charts.Series(
            name="exchange",
            xs=[human(row.threshold) for row in here],
            ys=[row.time_ms for row in here],
            low=[row.low_ms for row in here],
            high=[row.high_ms for row in here],
        )
        marks = [charts.Mark(human(row.threshold), row.time_ms, "tuned") for row in here if row.chosen]
        yield charts.Panel(
            title="Fusion of a ResNet-50's 161 gradients, ms",
            at=link,
            series=[series],
            x="threshold",
            x_scale="category",
            marks=marks,
        )


def draw(found: Found, path: Path) -> None:
    """Write the plot."""
    said = ["measured: lines with marks, quartiles as bars", "predicted: dashed"]
    charts.write(charts.figure("Network fabrics", said, panels(found)), path)
