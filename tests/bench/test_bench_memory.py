"""`ensemble bench pipelines --memory`: real processes on both sides, and parts that sum to their total."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import simplejpeg

from ensemble.bench.pipelines.memory import DATALOADERS, MEMBERS, TOTAL, outcome, study_memory
from ensemble.cli.parser import main
from pipelines import PipelineError


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("photos") / "photos.tar"
    rng = np.random.default_rng(0)
    with tarfile.open(path, "w") as archive:
        for number in range(24):
            data = simplejpeg.encode_jpeg(rng.integers(0, 256, (60, 80, 3)).astype(np.uint8))
            member = tarfile.TarInfo(f"{number:03d}.jpeg")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.more
def test_both_sides_are_measured_by_part(photos: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    rows = study_memory(str(photos), members=2, loaders=1, size=48, batch_size=8, epochs=1, repeats=1)
    assert set(psutil.Process().children(recursive=True)) <= before, "no process is left"
    counts = {(row.side, row.part): row.processes for row in rows}
    assert counts == {
        (MEMBERS, "controller"): 1,
        (MEMBERS, "fork server"): 1,
        (MEMBERS, "feeder"): 1,
        (MEMBERS, "preparation worker"): 2,
        (MEMBERS, "member"): 2,
        (MEMBERS, TOTAL): 7,
        (DATALOADERS, "training process"): 1,
        (DATALOADERS, "DataLoader worker"): 2,
        (DATALOADERS, TOTAL): 3,
    }
    for row in rows:
        assert row.anonymous_mb + row.shared_mb + row.files_mb == pytest.approx(row.pss_mb, rel=0.01, abs=0.2)
        assert 0 < row.private_mb <= row.pss_mb
    for total in (row for row in rows if row.part == TOTAL):
        parts = [row.pss_mb for row in rows if row.side == total.side and row.part != TOTAL]
        assert sum(parts) == pytest.approx(total.pss_mb, rel=0.05)
        assert total.peak_mb is not None and total.peak_mb >= total.pss_mb * 0.99
    # A member takes little more than the memory of what all share.
    member = next(row for row in rows if row.part == "member")
    process = next(row for row in rows if row.part == "training process")
    assert member.private_mb / 2 < process.anonymous_mb / 2
    shown = outcome(rows)
    assert "2 members of one pipeline take" in shown.findings[0]
    assert [series.name for series in shown.panels[0].series] == [f"2 {MEMBERS}", f"1 {DATALOADERS}"]


def test_what_cannot_be_measured_is_said(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "pipelines", "--data", str(photos), "--memory", "--members", "4", "--plot", "-"]) == 2
    assert "leave out --members" in capsys.readouterr().err
    (tmp_path / "photos.tar").write_bytes(b"no archive")
    with pytest.raises(PipelineError, match=r"photos\.tar"):
        study_memory(str(tmp_path / "photos.tar"), repeats=1)
