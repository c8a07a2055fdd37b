"""SC18's mean power, modelled: what the model gives for a run, and what is claimed of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_rows import make_row

from benchmarks.__main__ import main
from benchmarks.energy.sc18 import TITAN, PowerRow, claims, model_power
from ensemble.bench.energy.sharing import write_photographs
from ensemble.bench.pipelines.study import PipelineRow

SHARE = st.floats(0, 1)


def run(design: str, cpu_s: float, wall_s: float, step_ms: float = 100.0) -> PowerRow:
    """Four members on two cores that take 100 steps of 32 samples each."""
    fields: dict[str, Any] = {"design": design, "members": 4, "cores": 2, "batch_size": 32, "samples": 4 * 3200}
    return model_power(make_row(PipelineRow, **fields, cpu_s=cpu_s, wall_s=wall_s, step_ms=step_ms), TITAN)


def test_a_node_draws_what_was_published_at_rest_and_at_full_load() -> None:
    assert TITAN.watts(1.0, 1.0) == pytest.approx(8_209_000 / 18_688)
    assert TITAN.watts(0.0, 1.0) == pytest.approx(TITAN.watts(1.0, 1.0) - 115 + 6.4)


@given(SHARE, SHARE, SHARE)
def test_what_is_busier_draws_more(processor: float, accelerator: float, more: float) -> None:
    assert TITAN.watts(processor, accelerator) <= TITAN.watts(max(processor, more), accelerator) + 1e-9
    assert TITAN.watts(processor, accelerator) <= TITAN.watts(processor, max(accelerator, more)) + 1e-9


def test_equally_fast_sides_differ_by_the_processor_and_a_faster_side_draws_more_for_less_energy() -> None:
    shared, own = run("node", 4.0, 10.0), run("independent", 16.0, 10.0)
    assert (shared.processor_busy, own.processor_busy) == (0.2, 0.8)
    assert shared.accelerator_busy == own.accelerator_busy == 1.0
    quick, slow = run("node", 4.0, 2.0, step_ms=20.0), run("independent", 16.0, 8.0, step_ms=20.0)
    assert quick.modelled_w > slow.modelled_w and quick.modelled_j < slow.modelled_j
    claim, alone = claims([shared, own, quick, slow])
    assert claim.ratio is alone.ratio is None
    for one, less in ((claim, 1 - shared.modelled_w / own.modelled_w), (alone, 1 - shared.own_w / own.own_w)):
        assert one.measured.startswith(f"up to {100 * less:.3g} %") and one.measured.endswith("not measured")
    assert own.own_w - shared.own_w == pytest.approx((4.0 - 1.0) / 10 / 16 * (115 - 6.4)), "of a member's own work"
    assert claim.loses.startswith(f"{100 * (quick.modelled_w / slow.modelled_w - 1):.2g} % more")
    claim, _ = claims([quick, slow])
    assert claim.measured.startswith("nothing where both sides are equally fast")


@pytest.mark.more
def test_the_study_runs_both_sides_and_models_their_power(tmp_path: Path) -> None:
    write_photographs(tmp_path / "photos.tar", 40)
    rows = tmp_path / "rows.json"
    small = ["--members", "2", "--step-ms", "5", "--samples", "200", "--repeats", "1"]
    assert main(["sc18", "--data", str(tmp_path / "photos.tar"), *small, "--json", str(rows)]) == 0
    found = json.loads(rows.read_text())
    power = [row for row in found if row["part"] == "power"]
    assert [row["side"] for row in power] == ["one shared pipeline", "a pipeline each"]
    assert power[0]["cpu_s"] < power[1]["cpu_s"] and all(100 < row["modelled_w"] < 440 for row in power)
    assert found[0]["part"] == "claim" and "CPU time" in found[0]["claim"]
