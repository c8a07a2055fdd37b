"""`ensemble bench pipelines` on a few generated photographs: its rows, its designs, and that nothing is left."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import simplejpeg

from ensemble.bench.charts import write
from ensemble.bench.launch import hosts
from ensemble.bench.pipelines.config import DATALOADER, DESIGNS
from ensemble.bench.pipelines.figures import TITLE, notes, panels
from ensemble.bench.pipelines.processes import is_preparation_worker, process_tree
from ensemble.bench.pipelines.rows import Row, findings
from ensemble.bench.pipelines.study import study
from ensemble.bench.results import median_row
from ensemble.cli.parser import main
from pipelines import PipelineError

ROOT = Path(__file__).parents[2]
COLUMNS = ["design", "members", "prep_workers", "cores", "nodes", "batch_size", "step_ms", "samples", "wall_s"]
COLUMNS += [
    "samples_per_s",
    "cpu_s",
    "prep_cpu_s",
    "energy_j",
    "energy_origin",
    "step",
    "runs",
    "memory_mb",
    "others_cpu_s",
]
ACROSS = ["link", "mtu", "wire_mb", "sent_mb", "bound_mb", "chosen"]
PHOTOS, BATCH = 40, 8
SLOW = pytest.mark.slow
SMALL: dict[str, Any] = {"batch_size": BATCH, "samples": 2 * PHOTOS - BATCH, "size": 64, "repeats": 1}


def write_photos(path: Path, corrupt: int | None = None) -> Path:
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as archive:
        for number in range(PHOTOS):
            pixels = rng.integers(0, 256, (24, 32, 3)).repeat(10, 0).repeat(10, 1).astype(np.uint8)
            jpeg = simplejpeg.encode_jpeg(pixels)[: 50 if number == corrupt else None]
            member = tarfile.TarInfo(f"{number:03d}.jpeg")
            member.size = len(jpeg)
            archive.addfile(member, io.BytesIO(jpeg))
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_photos(tmp_path_factory.mktemp("photos") / "photos.tar"))


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no socket directory: the feeders' go to this test's own temporary directory, of a short name."""
    own = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(own))
    before = set(psutil.Process().children(recursive=True))
    yield
    until = time.monotonic() + 10  # workers of a feeder in a reader end on their own when it has
    while any(own.iterdir()) or _marked(str(own)):
        assert time.monotonic() < until, (list(own.iterdir()), _marked(str(own)))
        time.sleep(0.05)
    own.rmdir()
    assert set(psutil.Process().children(recursive=True)) <= before


def _marked(directory: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == directory:
                found.append(process)
        except psutil.Error:
            continue
    return found


def bench(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ensemble.cli", "bench", "pipelines", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_every_design_runs_and_sharing_saves_the_preparation(photos: str) -> None:
    rows = study(photos, [4], **SMALL)
    at = {row.design: row for row in rows}
    assert list(at) == list(DESIGNS)
    for row in rows:
        assert row.members == 4 and row.samples == row.members * (2 * PHOTOS - BATCH)
        assert row.samples_per_s == pytest.approx(row.samples / row.wall_s)
        assert 0 < row.prep_cpu_s <= row.cpu_s
        assert (row.energy_j is None) == (row.energy_origin == "unavailable")
    assert at["node"].prep_cpu_s < at["independent"].prep_cpu_s / 2
    assert at["node"].prep_cpu_s < 2 * at["bare ring"].prep_cpu_s


def test_the_command_writes_rows_and_a_plot_that_opens_offline(photos: str, tmp_path: Path) -> None:
    from plotly.offline import get_plotlyjs

    small = ("--batch-size", BATCH, "--samples", PHOTOS - BATCH, "--size", 64, "--repeats", 2, "--members", "1,2")
    files = ("--json", tmp_path / "rows.json", "--plot", tmp_path / "plot.html")
    one_core = ("--cores", 1, "--step-ms", 5, "--designs", "bare ring")
    done = bench("--data", photos, *small, *files, *one_core, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [list(row) for row in rows] == [[*COLUMNS, *ACROSS, "idle_j"]] * 2
    assert [(row["design"], row["members"]) for row in rows] == [("bare ring", 1), ("bare ring", 2)]
    assert all(row["cpu_s"] < 1.2 * row["wall_s"] for row in rows)
    assert {(row["cores"], row["nodes"], row["prep_workers"], row["step_ms"]) for row in rows} == {(1, 1, 1, 5.0)}
    assert done.stdout.splitlines()[0].split() == COLUMNS
    assert done.stderr.count("samples/s") == 4  # a line for each run
    whole = (tmp_path / "plot.html").read_text()
    assert get_plotlyjs() in whole
    page = whole.replace(get_plotlyjs(), "")
    assert "Plotly.newPlot" in page and "bare ring (the limit)" in page
    assert "http" not in page


def test_lists_are_run_in_every_combination_and_who_is_alone_takes_fewer_samples(photos: str) -> None:
    lists: dict[str, Any] = {"prep_workers": [1, 2], "step_ms": [0.0, 2.0], "cores": [1], "designs": ["bare ring"]}
    rows = study(photos, [1], **SMALL, **lists)
    combined = [(row.prep_workers, row.step_ms) for row in rows]
    assert combined == list(itertools.product([1, 2], [0.0, 2.0]))
    assert all((row.cores, row.step, row.runs) == (1, "emulated", 1) for row in rows)
    shared, alone = study(photos, [1], **SMALL, samples_alone=PHOTOS - BATCH, designs=["bare ring", DATALOADER])
    assert (shared.samples, alone.samples) == (2 * PHOTOS - BATCH, PHOTOS - BATCH)


def test_a_dataloader_each_prepares_as_much_as_a_pipeline_each(photos: str) -> None:
    rows = study(photos, [2], **SMALL, designs=["node", DATALOADER])
    shared, alone = rows
    assert alone.samples == shared.samples and alone.prep_cpu_s > 1.2 * shared.prep_cpu_s
    assert any("samples/s of dataloader" in line for line in findings(rows))


@pytest.mark.parametrize(
    "design", ["node", *(pytest.param(each, marks=SLOW) for each in ("bare ring", DATALOADER))]
)
def test_a_real_step_is_computed_measured_and_called_real(design: str, photos: str) -> None:
    (row,) = study(photos, [1], **SMALL, designs=[design], step="model")
    assert row.step in ("model on cpu", "model on cuda") and row.step_ms > 0
    if row.step == "model on cpu":
        steps = 2 * PHOTOS // BATCH
        assert row.cpu_s - row.prep_cpu_s > 0.3 * steps * row.step_ms / 1000 - 0.05


def test_memory_counts_a_shared_page_once(photos: str) -> None:
    one, many = study(photos, [1, 4], **SMALL, designs=["bare ring"])
    assert one.memory_mb is not None and many.memory_mb is not None
    assert one.memory_mb < many.memory_mb < 2 * one.memory_mb


@pytest.mark.slow
@pytest.mark.skipif((reason := hosts.unavailable()) is not None, reason=str(reason))
def test_hosts_share_one_stream_and_send_each_sample_to_all_but_one(photos: str) -> None:
    own = f"bench-{os.getpid()}-"
    alone, shared = study(photos, [2], **SMALL, designs=["node", "all"], nodes=2, links=["1gbit"])
    assert (alone.nodes, alone.link, alone.mtu, alone.chosen) == (2, "1gbit", 1500, None)
    assert alone.wire_mb == 0.0, "nodes that prepare everything themselves send nothing"
    assert shared.chosen == "all 2" and shared.bound_mb == 2 * PHOTOS * 3 * 64 * 64 / 1e6
    assert shared.wire_mb is not None and shared.sent_mb is not None
    assert shared.bound_mb <= shared.sent_mb < 1.05 * shared.bound_mb
    assert shared.sent_mb < shared.wire_mb
    assert not [name for name in hosts.namespaces() if name.startswith(own)]


def test_where_hosts_cannot_be_had_nodes_are_groups_of_processes(
    photos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "unavailable", lambda: "no hosts here")
    said: list[str] = []
    (row,) = study(photos, [3], **SMALL, designs=["single"], nodes=2, links=["1gbit"], report=said.append)
    assert said[0] == "no hosts here; the 2 nodes are groups of processes on this machine's loopback"
    assert (row.nodes, row.link, row.wire_mb, row.chosen) == (2, "loopback", None, "single 1")


def test_an_emulated_step_takes_its_time_and_no_cpu(photos: str) -> None:
    options = {**SMALL, "designs": ["node"], "step_ms": [30.0]}
    (row,) = study(photos, [2], **options)
    steps = 2 * PHOTOS // BATCH
    assert row.wall_s > 0.9 * (steps - 1) * 0.030
    assert row.cpu_s < row.wall_s


def test_pinning_is_undone(photos: str) -> None:
    before = os.sched_getaffinity(0)
    (row,) = study(photos, [1], **SMALL, designs=["bare ring"], cores=[1])
    assert row.cores == 1 and os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    "design", [pytest.param(each, marks=() if each == "node" else SLOW) for each in (*DESIGNS, DATALOADER)]
)
def test_an_unreadable_photograph_ends_the_study_with_its_reason(design: str, tmp_path: Path) -> None:
    archive = write_photos(tmp_path / "corrupt.tar", corrupt=17)
    with pytest.raises(PipelineError, match=f"design {design}, .*JPEG"):
        study(str(archive), [2], **SMALL, designs=[design])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--data nowhere.tar", "nowhere.tar"),
        ("--data rows.txt", "rows.txt"),
        ("--data {photos} --members 0", "--members"),
        ("--data {photos} --members 1,x", "--members"),
        ("--data {photos} --designs nod", "did you mean 'node'"),
        ("--data {photos} --cores 4096", "4096"),
        ("--data {photos} --step-ms -1", "--step-ms"),
        ("--data {photos} --step-ms 5,x", "--step-ms"),
        ("--data {photos} --step model --step-ms 5", "--step-ms"),
        ("--data {photos} --link 1gbit", "--hosts"),
        ("--data {photos} --designs single", "--hosts"),
        ("--data {photos} --hosts 2 --link fast", "1gbit"),
        ("--data {photos} --hosts 4 --members 2", "at least that many members"),
        ("--data {photos} --repeats 0", "--repeats"),
        ("--data {photos} --plot no/such/folder/p.html", "--plot"),
        ("--members 1", "--data"),
    ],
)
def test_a_mistake_is_answered_with_one_line(
    arguments: str,
    says: str,
    photos: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "rows.txt").write_text("no archive")
    monkeypatch.chdir(tmp_path)
    try:
        status: object = main(["bench", "pipelines", *arguments.format(photos=photos).split()])
    except SystemExit as ended:
        status = ended.code
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    (line,) = shown.err.splitlines()
    assert says in line


def test_medians_leave_out_what_was_not_had(tmp_path: Path) -> None:
    row = Row(
        design="node",
        members=4,
        prep_workers=1,
        cores=2,
        nodes=1,
        batch_size=8,
        step_ms=0.0,
        samples=100,
        wall_s=1.0,
        samples_per_s=100.0,
        cpu_s=1.0,
        prep_cpu_s=0.5,
        energy_j=None,
        energy_origin="unavailable",
    )
    other = dataclasses.replace(row, wall_s=3.0, cpu_s=2.0)
    middle = median_row([row, other, dataclasses.replace(other, cpu_s=4.0)])
    assert (middle.wall_s, middle.cpu_s, middle.energy_j, middle.members) == (3.0, 2.0, None, 4)
    write(TITLE, notes([middle]), panels([middle]), tmp_path / "plot.html")
    assert (tmp_path / "plot.html").stat().st_size > 1e6


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


def test_an_interrupted_study_ends_with_one_line(photos: str, tmp_path: Path) -> None:
    small = (
        "--members",
        2,
        "--designs",
        "node",
        "--step-ms",
        100,
        "--plot",
        "-",
        "--batch-size",
        BATCH,
        "--size",
        64,
    )
    command = [sys.executable, "-m", "ensemble.cli", "bench", "pipelines", "--data", photos, *map(str, small)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as study:
        until = time.monotonic() + 60
        while not _prepares(study.pid):
            assert time.monotonic() < until
            time.sleep(0.1)
        study.send_signal(signal.SIGTERM)
        _, said = study.communicate(timeout=60)
    assert (study.returncode, said.splitlines()) == (128 + signal.SIGTERM, ["ensemble: terminated"])


def _prepares(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(is_preparation_worker(each.pid) for each in psutil.Process(pid).children(recursive=True))
    return False
