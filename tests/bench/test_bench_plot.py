"""The plot of the pipelines study shows what was varied, and never an estimate as a measurement."""

from __future__ import annotations

from typing import Any

from plain_rows import make_row

from ensemble.bench.charts import figure
from ensemble.bench.pipelines.expected import claims, pairs
from ensemble.bench.pipelines.figures import findings, make_outcome, notes, panels
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
    (*_, (_, (shown,))) = make_outcome([row(energy_j=None)]).tables
    assert "energy_j" in shown and "link" not in shown and "wire_mb" not in shown
    (*_, (_, both)) = make_outcome([row(), row(link="1gbit")]).tables
    assert "link" in both[0]


def test_medians_leave_out_what_was_not_had() -> None:
    rows = [row(wall_s=wall_s, energy_j=None) for wall_s in (1.0, 3.0, 4.0)]
    middle = median_row(rows)
    assert (middle.wall_s, middle.energy_j, middle.members) == (3.0, None, 4)


def test_a_claim_stands_beside_what_was_measured_and_says_where_sharing_loses() -> None:
    rows = [
        row(d, m, samples_per_s=s)
        for m, s in ((2, 650.0), (16, 9000.0))
        for d, s in (("node", s), (BOTH[1], 700.0))
    ]
    cpu, speed = claims(rows)
    assert (cpu.published, cpu.spread, cpu.ratio) == ("2 to 11 times", "2 to 16 times", 16 / 11) and not cpu.loses
    assert speed.ratio == 9000 / 7000 and "0.93 times: node, 2 members" in speed.loses
    assert not claims([row("node")]), "nothing to compare with"


def test_less_power_is_claimed_only_where_it_was_measured() -> None:
    less, metered = {"node": 90.0, "independent": 100.0}, {"energy_origin": "measured", "samples_per_s": 700.0}
    (*_, claim) = claims([row(d, energy_j=less[d], **metered) for d in BOTH])
    assert claim.measured == "up to 10 % where both sides are equally fast, measured, step emulated by a wait"
    (*_, faster) = claims([row(d, energy_j=100 / less[d], energy_origin="measured") for d in BOTH])
    assert faster.ratio is None and faster.loses.startswith("11 % more, with ")
    assert not [c for c in claims([row(d) for d in BOTH]) if "power" in c.claim]


def test_the_fastest_design_across_nodes_is_counted() -> None:
    speeds = {
        ("single", 1): 1.0,
        ("multi", 1): 3.0,
        ("all", 1): 2.0,
        ("single", 2): 1.0,
        ("multi", 2): 2.0,
        ("all", 2): 4.0,
    }
    rows = [row(d, prep_workers=n, nodes=5, samples_per_s=s, preparers=None) for (d, n), s in speeds.items()]
    (claim,) = claims(rows)
    assert claim.measured == "the fastest of three in 1 of 2 configurations" and claim.loses.startswith("to multi")


def test_queues_are_drawn_over_the_run_and_their_limit_is_said() -> None:
    course = ((0.5, 0.1), (1.5, 0.2))
    levels: dict[str, Any] = {"member_waiting": 0.9, "queue_full": 0.0, "limit": "preparation"}
    rows = [row(d, m, **levels, queue_course=course) for d in BOTH for m in (1, 16)]
    (panel,) = (p for p in panels(rows) if p.title == "How full the queues are")
    assert [(series.xs, series.ys) for series in panel.series] == [((0.5, 1.5), (0.1, 0.2))] * 2
    (said, _) = (line for line in findings(rows) if "limits" in line)
    waits = "some member waits 90 to 90 % of the time, queues are full 0 to 0 %"
    assert said == f"node: preparation limits in 2 cases: {waits}"
