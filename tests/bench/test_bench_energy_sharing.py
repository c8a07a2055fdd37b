"""The study of shared and own pipelines at equal work, on tiny photographs and on a synthetic energy counter."""

from __future__ import annotations

import dataclasses
import tarfile
import time
from pathlib import Path
from typing import Any

import plain_rows
import pytest
import simplejpeg

from ensemble.bench.energy.sharing import (
    PeerComparison,
    compare,
    findings,
    json_rows,
    panels,
    study,
    tables,
    write_photographs,
)
from ensemble.bench.pipelines.study import PipelineRow
from ensemble.meter import PowerMeter
from ensemble.meter.power import PowerSource, open_rapl
from ensemble.spec import Energy, SpecError

PHOTOS, BATCH, WATTS = 24, 8, 50.0
SAMPLES = 10 * PHOTOS - BATCH  # several times what a ring holds, which may be prepared before the clock starts
SMALL: dict[str, Any] = {"batch_size": BATCH, "samples": SAMPLES, "size": 64, "members": 3}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("photos") / "photos.tar"
    write_photographs(path, PHOTOS)
    return str(path)


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    """The zone of one processor."""
    package = tmp_path / "intel-rapl:0"
    package.mkdir()
    for name, text in (("name", "package-0"), ("max_energy_range_uj", "262143328850"), ("energy_uj", "0")):
        (package / name).write_text(f"{text}\n")
    return tmp_path


def open_constant_meter(root: Path, counted_j: list[float]) -> PowerMeter:
    """A meter of a processor whose counter grows by `WATTS` joules a second; keeps what it showed."""
    rapl = open_rapl(root)
    assert isinstance(rapl, PowerSource)

    def read() -> Any:
        counted_j.append(time.monotonic() * WATTS)
        (root / "intel-rapl:0" / "energy_uj").write_text(f"{int(counted_j[-1] * 1e6)}\n")
        return rapl.read()

    return PowerMeter("local", [dataclasses.replace(rapl, read=read)], energy=Energy(idle_w={"cpu": WATTS / 2}))


def find_ends(found: PeerComparison, name: str) -> tuple[float, float, float]:
    """The median, the least and the most of a ratio."""
    ratio = found.ratios[name]
    assert ratio is not None
    return ratio.ends


def make_row(**fields: Any) -> PipelineRow:
    plain: dict[str, Any] = {"design": "node", "members": 4, "samples": 100, "wall_s": 2.0, "prep_cpu_s": 0.5}
    return plain_rows.make_row(PipelineRow, **plain | {"energy_j": 100.0, "energy_origin": "measured"} | fields)


def test_generated_photographs_are_distinct_jpegs_of_a_photographs_size(photos: str) -> None:
    with tarfile.open(photos) as archive:
        contents = [archive.extractfile(entry).read() for entry in archive]  # type: ignore[union-attr]
    assert len(set(contents)) == PHOTOS
    assert {simplejpeg.decode_jpeg(each).shape for each in contents} == {(375, 500, 3)}


@pytest.mark.slow
def test_both_sides_take_the_same_samples_in_turn_and_sharing_prepares_once(photos: str) -> None:
    lines: list[str] = []
    result = study(photos, **SMALL, steps=["emulated"], step_ms=30.0, repeats=2, report=lines.append)
    (found,) = result
    rows = (found.shared, found.own)
    assert [row.design for row in rows] == ["node", "independent"]
    assert {(row.members, row.runs) for row in rows} == {(3, 2)}
    assert all(0 <= row.samples - 3 * SAMPLES <= 2 * BATCH for row in rows), "all after the first batch of one"
    assert find_ends(found, "prep_cpu")[0] < 0.75, "one that prepares for three members, against three"
    assert [line.split(",")[1].strip() for line in lines] == [
        "1/2 node",
        "1/2 independent",
        "2/2 independent",
        "2/2 node",
    ]
    (_, sides), (_, ratios) = tables(result)
    assert len(sides) == 2 and len(ratios) == 5 and len(json_rows(result)) == 3
    assert panels(result)[0].series[0].ys == [found.shared.cpu_s]


@pytest.mark.more
def test_a_counter_of_energy_gives_measured_mean_watts_and_their_ratio(photos: str, powercap: Path) -> None:
    options: dict[str, Any] = {**SMALL, "members": 2, "steps": ["emulated"], "step_ms": 30.0, "repeats": 1}
    counted: list[list[float]] = []

    def open_meter() -> PowerMeter:
        counted.append([])
        return open_constant_meter(powercap, counted[-1])

    result = study(photos, **options, open_meter=open_meter)
    (found,) = result
    for row, (*_, began_j, ended_j) in zip((found.shared, found.own), counted, strict=True):
        assert row.energy_origin == "measured"
        assert row.energy_j == pytest.approx(ended_j - began_j, abs=1e-3)
        assert row.watts == pytest.approx(row.energy_j / row.wall_s)
        assert row.idle_j is not None and 0 < row.idle_j < row.energy_j
    assert found.shared.watts is not None and found.own.watts is not None
    assert find_ends(found, "watts")[0] == pytest.approx(found.shared.watts / found.own.watts)
    (title, _), (_, ratios) = tables(result)
    assert "energy measured" in title
    assert {row["shared / own"] for row in ratios if row["emulated"] == "-"} == set()
    lines = "\n".join(findings(result))
    assert "times the mean watts" in lines and "measured" in lines and "nothing follows" not in lines
    assert len(panels(result)) == 2


@pytest.mark.parametrize(
    ("origins", "weakest"),
    [
        (("estimated", "estimated"), "estimated"),
        (("measured", "estimated"), "estimated"),
        (("unavailable", "measured"), "unavailable"),
    ],
)
def test_nothing_follows_about_watts_that_were_not_measured(origins: tuple[str, str], weakest: str) -> None:
    joules = [None if origin == "unavailable" else 100.0 for origin in origins]
    sides = [make_row(energy_origin=origin, energy_j=j) for origin, j in zip(origins, joules, strict=True)]
    shared, own = sides[0], dataclasses.replace(sides[1], design="independent", cpu_s=4.0)
    found = compare([(shared, own)])
    assert (found.ratios["watts"], found.ratios["energy"], found.energy_origin) == (None, None, weakest)
    lines = "\n".join(findings([found]))
    assert "nothing follows about watts" in lines and "times the mean watts" not in lines
    assert "4.00 (4.00 to 4.00) times less CPU time" in lines
    assert len(panels([found])) == 1


def test_the_tables_fit_a_terminal_of_80_columns() -> None:
    from ensemble.cli.console import format_rows

    many = {"wall_s": 12345.6, "cpu_s": 12345.6, "prep_cpu_s": 12345.6, "energy_j": 123456.7}
    shared = [make_row(step=step, **many) for step in ("model on cuda", "emulated")]
    own = [dataclasses.replace(row, design="independent") for row in shared]
    for title, rows in tables([compare([pair]) for pair in zip(shared, own, strict=True)]):
        assert len(title) <= 80
        assert max(map(len, format_rows(rows).splitlines())) <= 80


def test_a_run_that_is_too_short_is_no_measurement() -> None:
    with pytest.raises(SpecError, match="--samples"):
        compare([(make_row(prep_cpu_s=0.0), make_row(design="independent"))])


def test_ratios_are_of_runs_of_one_repeat() -> None:
    shared = [make_row(cpu_s=cpu_s, energy_j=energy_j) for cpu_s, energy_j in ((1.0, 50.0), (2.0, 100.0))]
    own = [make_row(design="independent", cpu_s=cpu_s, wall_s=4.0, energy_j=400.0) for cpu_s in (2.0, 8.0)]
    found = compare(list(zip(shared, own, strict=True)))
    assert find_ends(found, "cpu") == find_ends(found, "watts") == (0.375, 0.25, 0.5)
    assert find_ends(found, "wall") == (0.5, 0.5, 0.5)
    assert find_ends(found, "energy") == (0.1875, 0.125, 0.25)
