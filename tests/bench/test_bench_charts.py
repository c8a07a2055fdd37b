"""Charts of studies: what was predicted is dashed, intervals and crossovers are drawn where they are."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ensemble.bench.charts import PREDICTED, Mark, Panel, Series, bar_panel, colours, figure, write

SIZES = [1024, 4096, 16384]


def panel(**more: object) -> Panel:
    series = [
        Series(name="gloo", xs=SIZES, ys=[1.0, 2.0, 4.0], low=[0.9, 1.8, 3.5], high=[1.2, 2.1, 4.8]),
        Series(name="predicted", xs=SIZES, ys=[1.0, None, 4.1], dash=PREDICTED, points=False),
    ]
    return Panel(title="Time", series=series, x="size", y="ms", **more)  # type: ignore[arg-type]


def test_lines_have_intervals_and_what_was_predicted_is_dashed() -> None:
    gloo, predicted = figure("Links", ["two hosts"], [panel()]).data
    assert gloo.error_y.array == pytest.approx((0.2, 0.1, 0.8))
    assert gloo.error_y.arrayminus == pytest.approx((0.1, 0.2, 0.5))
    assert (gloo.line.dash, predicted.line.dash, predicted.mode) == ("solid", "dash", "lines")


def test_a_mark_is_where_it_belongs_on_a_logarithmic_axis() -> None:
    marked = panel(x_scale="log", log_y=True, marks=[Mark(4096, 2.0, "here they cross")])
    drawn = figure("Links", [], [marked])
    (mark,) = (note for note in drawn.layout.annotations if note.text == "here they cross")
    assert (mark.x, mark.y) == pytest.approx((math.log10(4096), math.log10(2.0)))
    low, high = drawn.layout.yaxis.range
    assert low < math.log10(0.9) and math.log10(4.8) < high, "intervals are in the picture"


def test_a_name_has_one_colour_and_one_entry_in_the_legend_in_all_panels() -> None:
    drawn = figure("Links", [], [panel(), panel()])
    assert [trace.showlegend for trace in drawn.data] == [True, True, False, False]
    assert drawn.data[0].line.color == drawn.data[2].line.color != drawn.data[1].line.color
    assert len(set(colours([f"series {i}" for i in range(9)]).values())) == 9


def test_values_of_the_x_axis_may_be_said_in_words() -> None:
    drawn = figure("Links", [], [panel(x_scale="log", x_text={1024: "1 KiB", 16384: "16 KiB"})])
    assert drawn.layout.xaxis.ticktext == ("1 KiB", "", "16 KiB")


def test_bars_stand_beside_each_other_with_their_values(tmp_path: Path) -> None:
    bars = [Series(name=name, xs=["1gbit", "10gbit"], ys=[0.5, 1234.0]) for name in ("convolutions", "linear")]
    panels = [bar_panel("Efficiency", bars)]
    drawn = figure("Links", [], panels)
    assert [trace.type for trace in drawn.data] == ["bar", "bar"] and drawn.data[0].text == ("0.5", "1,234")
    write("Links", [], panels, tmp_path / "page.html")
    assert "Plotly.newPlot" in (tmp_path / "page.html").read_text()
