"""`python -m benchmarks sc18` on a few photographs: designs, the model of power, and that nothing is left."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.leftovers import wait_until
from kit.plain_rows import make_row

from benchmarks.__main__ import main
from benchmarks.launch import hosts
from benchmarks.sc18.config import ALONE, BARE, DATALOADER, INDEPENDENT, NODE, Config, write_photographs
from benchmarks.sc18.expected import claim_power, claims, findings, pairs
from benchmarks.sc18.power import compare_power, node_watts
from benchmarks.sc18.processes import process_tree
from benchmarks.sc18.study import PipelineRow, study
from pipelines import PipelineError

PHOTOS, BATCH = 40, 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("photos") / "photos.tar"
    write_photographs(path, PHOTOS)
    taken = {"samples": 2 * PHOTOS - BATCH, "samples_alone": PHOTOS - BATCH}
    return Config(data=str(path), batch_size=BATCH, size=64, **taken)


@pytest.fixture
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files, sockets and processes are gone afterwards."""
    own = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))  # a short name, for sockets
    monkeypatch.setenv("TMPDIR", str(own))
    before = set(psutil.Process().children(recursive=True))
    yield
    # workers of a feeder in a reader end on their own when it has
    wait_until(lambda: all(path.name.startswith("torchinductor") for path in own.iterdir()), "an empty folder")
    shutil.rmtree(own)
    assert set(psutil.Process().children(recursive=True)) <= before


def test_an_emulated_step_takes_its_time_on_the_cores_that_are_asked_for(base: Config) -> None:
    before = os.sched_getaffinity(0)
    (row,) = study(dataclasses.replace(base, cores=1), [BARE], [1], [30.0], 1)
    assert (row.cores, row.step_ms, row.runs) == (1, 30.0, 1) and os.sched_getaffinity(0) == before
    assert row.wall_s > 0.9 * (2 * PHOTOS // BATCH - 1) * 0.030
    assert row.cpu_s < row.wall_s, "it waits"


@pytest.mark.more
@pytest.mark.usefixtures("nothing_is_left")
def test_every_design_runs_and_sharing_saves_the_preparation(base: Config) -> None:
    designs = [BARE, NODE, INDEPENDENT, DATALOADER]
    rows = study(base, designs, [6], [0.0], 1)
    at = {row.design: row for row in rows}
    assert list(at) == designs
    for row in rows:
        taken = PHOTOS - BATCH if row.design in ALONE else 2 * PHOTOS - BATCH
        assert row.members == 6 and 0 <= row.samples - 6 * taken <= 5 * BATCH, "all after the first batch of one"
        assert row.samples_per_s == pytest.approx(row.samples / row.wall_s)
        assert 0 < row.prep_cpu_s <= row.cpu_s and row.first_ms > 0 and row.memory_mb > 0
    each = {design: row.prep_cpu_s / row.samples for design, row in at.items()}
    assert each[NODE] < min(each[INDEPENDENT], each[DATALOADER]) / 2
    assert each[NODE] < 2 * each[BARE]
    assert [(row.design, other.design) for row, other in pairs(rows)] == [(NODE, INDEPENDENT), (NODE, DATALOADER)]
    assert len(list(findings(rows))) == 2 and len(claims(rows)) == 2


@pytest.mark.more
def test_the_command_runs_lists_in_every_combination(
    base: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.json"
    small = f"--samples {PHOTOS} --repeats 1 --cores 1 --members 1,2 --step-ms 0,5 --designs".split()
    assert main(["sc18", "--data", base.data, "--json", str(kept), *small, "bare ring"]) == 0
    rows = [row for row in json.loads(kept.read_text()) if row["part"] == "design"]
    assert [(row["step_ms"], row["members"]) for row in rows] == [(0.0, 1), (0.0, 2), (5.0, 1), (5.0, 2)]
    assert all(row["cpu_s"] < 1.2 * row["wall_s"] for row in rows)
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0].split()[:2] == ["design", "members"]
    assert shown.err.count("samples/s") >= 4, "a line for each run"


@pytest.mark.slow
@pytest.mark.skipif((reason := hosts.unavailable()) is not None, reason=str(reason))
def test_nodes_on_hosts_share_one_stream(base: Config) -> None:
    on_hosts = dataclasses.replace(base, nodes=2, link="1gbit")
    alone, shared = study(on_hosts, [NODE, "all"], [2], [0.0], 1)
    assert (alone.nodes, alone.link) == (2, "1gbit")
    assert shared.prep_cpu_s / shared.samples < 0.75 * alone.prep_cpu_s / alone.samples
    assert not [name for name in hosts.namespaces() if name.startswith(f"bench-{os.getpid()}-")]


@pytest.mark.slow
def test_where_hosts_cannot_be_had_nodes_are_groups_of_processes(
    base: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "unavailable", lambda: "no hosts here")
    said: list[str] = []
    on_hosts = dataclasses.replace(base, nodes=3, link="1gbit")
    (row,) = study(on_hosts, ["multi"], [2], [0.0], 1, said.append)
    assert said[0] == "no hosts here; the 3 nodes are groups of processes on this machine's loopback"
    assert (row.nodes, row.link) == (2, "loopback")


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    "design",
    [
        pytest.param(design, marks=pytest.mark.more if design == NODE else pytest.mark.slow)
        for design in (BARE, NODE, INDEPENDENT, DATALOADER)
    ],
)
def test_an_unreadable_photograph_ends_the_study_with_its_reason(
    design: str, base: Config, tmp_path: Path
) -> None:
    archive = Path(shutil.copy(base.data, tmp_path / "corrupt.tar"))
    with tarfile.open(archive) as whole, archive.open("r+b") as file:
        entry = whole.getmembers()[17]
        file.seek(entry.offset_data)
        file.write(bytes(entry.size))
    with pytest.raises(PipelineError, match=f"design {design}, .*JPEG"):
        study(dataclasses.replace(base, data=str(archive)), [design], [2], [0.0], 1)


def test_the_processes_of_a_run_are_found_with_all_their_descendants() -> None:
    command = "sleep 60 & sh -c 'sleep 60 & echo started; wait' & wait"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = process_tree(process.pid)
        assert len(found) == 4 and found[0] == process.pid
        assert set(found[1:]) == {each.pid for each in psutil.Process(process.pid).children(recursive=True)}
        for pid in found:
            os.kill(pid, signal.SIGKILL)


SHARE = st.floats(0, 1)


def run(design: str, cpu_s: float, wall_s: float, step_ms: float = 100.0) -> PipelineRow:
    """Four members on two cores that take 100 steps of 32 samples each."""
    fields: dict[str, Any] = {"design": design, "members": 4, "cores": 2, "batch_size": 32, "samples": 4 * 3200}
    times = {"cpu_s": cpu_s, "wall_s": wall_s, "samples_per_s": 4 * 3200 / wall_s, "step_ms": step_ms}
    return make_row(PipelineRow, **fields, **times)


def test_a_node_draws_what_was_published_at_rest_and_at_full_load() -> None:
    assert node_watts(1.0, 1.0) == pytest.approx(8_209_000 / 18_688)
    assert node_watts(0.0, 1.0) == pytest.approx(node_watts(1.0, 1.0) - 115 + 6.4)


@given(SHARE, SHARE, SHARE)
def test_what_is_busier_draws_more(processor: float, accelerator: float, more: float) -> None:
    assert node_watts(processor, accelerator) <= node_watts(max(processor, more), accelerator) + 1e-9
    assert node_watts(processor, accelerator) <= node_watts(processor, max(accelerator, more)) + 1e-9


def test_equally_fast_sides_differ_by_the_processor_and_a_faster_side_draws_more_for_less_energy() -> None:
    alike = compare_power(run(NODE, 4.0, 10.0), run(INDEPENDENT, 16.0, 10.0))
    assert alike.own_w - alike.shared_w == pytest.approx((0.8 - 0.2) * (115 - 6.4)) and alike.faster == 1
    quick = compare_power(run(NODE, 4.0, 2.0, 20.0), run(INDEPENDENT, 16.0, 8.0, 20.0))
    assert quick.shared_w > quick.own_w and quick.energy < 1 and quick.faster == 4
    (claim,) = claim_power([alike, quick])
    assert claim.ratio is None and claim.measured.startswith(f"up to {alike.less_percent:.3g} %")
    assert claim.loses.startswith(f"{-quick.less_percent:.2g} % more")
    (claim,) = claim_power([quick])
    assert claim.measured.startswith("nothing where both sides are equally fast")
    assert list(claim_power([])) == []


@pytest.mark.more
def test_the_command_models_the_power_of_both_sides(base: Config, tmp_path: Path) -> None:
    kept = tmp_path / "rows.json"
    small = "--members 2 --step-ms 5 --samples 200 --repeats 1 --designs node,independent"
    assert main(["sc18", "--data", base.data, *small.split(), "--json", str(kept)]) == 0
    found = json.loads(kept.read_text())
    (power,) = (row for row in found if row["part"] == "power")
    assert all(100 < power[side] < 440 for side in ("shared_w", "own_w"))
    shared, own = (row for row in found if row["part"] == "design")
    assert shared["cpu_s"] / shared["samples"] < own["cpu_s"] / own["samples"]
    assert found[0]["part"] == "claim" and "CPU time" in found[0]["claim"]
