"""The plot of the pipelines study shows what was varied, and never an estimate as a measurement."""

from __future__ import annotations

from typing import Any

from plain_rows import make_row

from ensemble.bench.charts import figure
from ensemble.bench.pipelines.figures import findings, make_outcome, notes, pairs, panels
from ensemble.bench.pipelines.study import PipelineRow
from ensemble.bench.results import median_row


def row(design: str = "node", members: int = 4, **more: Any) -> PipelineRow:
    """Sharing is as many times faster and cheaper as there are members."""
    gain = members if design == "node" else 1
    usual: dict[str, Any] = {"design": design, "members": members, "samples": 1000, "step_ms": 0.0}
    usual |= {"batch_size": 32, "samples_per_s": 700.0 * gain, "cpu_s": 2.0 / gain, "memory_mb": 100.0}
    usual |= {"energy_j": 10.0 / gain, "energy_origin": "estimated"}
    return make_row(PipelineRow, **usual | more)


BOTH = ("node", "independent")


def test_panels_are_over_what_was_varied_at_one_value_of_the_rest() -> None:
    rows = [row(d, m, step_ms=s) for d in BOTH for m in (1, 16) for s in (5.0, 10.0)]
    drawn = panels(rows)
    assert {panel.x for panel in drawn} == {"members", "step, ms"}
    for panel in drawn:
        expected, at = ([1, 16], "5 ms emulated step") if panel.x == "members" else ([5.0, 10.0], "16 members")
        assert panel.at == at and all(series.xs == expected for series in panel.series)


def test_only_runs_that_differ_in_sharing_alone_are_compared() -> None:
    shared = row("node", 16, cores=1)
    others = [row("independent", 16, cores=2), row("independent", 4), row("bare ring", 16)]
    alone = row("dataloader", 16)
    assert list(pairs([shared, *others, alone])) == [(shared, alone)]
    measured = [row("node", 16, step="model on cpu", step_ms=9.1), row("independent", 16, step="model on cpu")]
    assert list(pairs(measured)) == [tuple(measured)], "a model's step takes what it takes"


def test_where_nothing_was_varied_there_are_bars_of_each_design() -> None:
    drawn = panels([row("bare ring"), row("node")])
    assert all(panel.bars and len(panel.series) == 2 for panel in drawn)
    assert {trace.type for trace in figure("Sharing", [], drawn).data} == {"bar"}


def test_links_show_what_was_on_the_wire_against_the_least() -> None:
    more = {"nodes": 4, "wire_mb": 315.0, "bound_mb": 300.0}
    drawn = panels([row("node", link=link, **more) for link in ("100mbit", "1gbit")])
    (panel,) = (p for p in drawn if p.title.startswith("Bytes"))
    assert [(series.xs, series.ys) for series in panel.series] == [(["100mbit", "1gbit"], [1.05, 1.05])]


def test_an_estimate_is_called_one_and_what_was_not_had_is_left_out() -> None:
    rows = [row(d) for d in BOTH]
    assert "Energy, J per 1,000 consumed samples (estimated)" in [panel.title for panel in panels(rows)]
    assert "energy is estimated from CPU time: no saving was measured" in notes(rows)
    assert [line for line in findings(rows) if "no saving was measured" in line]
    without = [row(d, energy_j=None, energy_origin="unavailable", memory_mb=None) for d in BOTH]
    assert len(panels(without)) == 2
    assert not [line for line in findings(without) if "energy" in line]


def test_a_machine_that_was_busy_with_other_work_is_said_to_have_been() -> None:
    assert not [line for line in findings([row()]) if "other processes" in line]
    (said,) = (line for line in findings([row(), row(others_cpu_s=1.5)]) if "other processes" in line)
    assert "up to 1.5 cores" in said


def test_the_table_has_no_column_that_says_nothing_but_the_usual_ones() -> None:
    ((_, (shown,)),) = make_outcome([row(energy_j=None)]).tables
    assert "energy_j" in shown and "link" not in shown and "wire_mb" not in shown
    ((_, both),) = make_outcome([row(), row(link="1gbit")]).tables
    assert "link" in both[0]


def test_medians_leave_out_what_was_not_had() -> None:
    rows = [row(wall_s=wall_s, energy_j=None) for wall_s in (1.0, 3.0, 4.0)]
    middle = median_row(rows)
    assert (middle.wall_s, middle.energy_j, middle.members) == (3.0, None, 4)
