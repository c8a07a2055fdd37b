"""`ensemble bench pipelines --single`: a loader with workers of its own against torch's DataLoader.

One process reads batches and waits after each as long as a training step would take. Both sides decode the same
JPEG files with the same functions, with equally many workers; every run is a new process
(`ensemble.bench.pipelines.single_process`), and the sides take turns, so that what else the machine does meets
both.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble.bench.results import Report, Rows, median_row
from ensemble.spec import SpecError
from pipelines.child_processes import child_environment

PIPELINE, DATALOADER = "pipeline", "dataloader"
PHOTOS, CIFAR = "photos", "cifar"
_BATCH_SIZES = {PHOTOS: 32, CIFAR: 128}
_SAMPLES_PER_WORKER = {PHOTOS: 1000, CIFAR: 20_000}


@dataclass(frozen=True, kw_only=True)
class Config:
    """One run.

    Attributes:
        design: "pipeline" or "dataloader".
        data: "photos", a tar archive of JPEG photographs cropped to 224 px, or "cifar", a Parquet file with the
            columns image and label, 32 px.
        path: of the file.
        workers: worker processes; 0 prepares in the reading process.
        step_ms: how long the reader waits after each batch.
        batch_size, samples: of a batch, and of the timed part at least.
    """

    design: str
    data: str
    path: str
    workers: int
    step_ms: float
    batch_size: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """Medians of the runs of one configuration, of both sides; each ratio is that of the medians.

    Attributes:
        data, workers, step_ms, batch_size: see `Config`.
        samples_per_s, dataloader_samples_per_s: after the first five batches.
        speed: their ratio; above 1 the loader is faster.
        first_ms, dataloader_first_ms: from before the loader is made to its first batch, milliseconds.
        cpu_s_per_1000, dataloader_cpu_s_per_1000: CPU-seconds of the process and its workers per 1,000 samples.
        memory_mb, dataloader_memory_mb: proportional set size of the process and its workers, 10^6 bytes.
        runs: of each side.
    """

    data: str
    workers: int
    step_ms: float
    batch_size: int
    samples_per_s: float
    dataloader_samples_per_s: float
    speed: float
    first_ms: float
    dataloader_first_ms: float
    cpu_s_per_1000: float
    dataloader_cpu_s_per_1000: float
    memory_mb: float
    dataloader_memory_mb: float
    runs: int = 1


@dataclass(frozen=True, kw_only=True)
class _Run:
    samples_per_s: float
    first_ms: float
    cpu_s_per_1000: float
    memory_mb: float
    runs: int = 1


def study(
    path: str,
    *,
    workers: Sequence[int] = (1, 2, 4),
    step_ms: Sequence[float] = (0.0, 60.0),
    batch_size: int | None = None,
    samples: int | None = None,
    repeats: int = 5,
    report: Report = lambda _: None,
) -> list[Row]:
    """Run both sides in every combination, `repeats` times in turn; returns the medians.

    Args:
        path: a tar archive of JPEG photographs, or a Parquet file with the columns image and label.
        workers: worker processes of each side.
        step_ms: how long the reader waits after each batch.
        batch_size: by default 32 photographs, 128 images of a Parquet file.
        samples: of each timed part at least; by default as many for each worker as take a few seconds.

    Raises:
        SpecError: the file is neither, or a run has failed.
    """
    kind = {".tar": PHOTOS, ".parquet": CIFAR}.get(Path(path).suffix)
    if kind is None:
        raise SpecError(f"--single reads a .tar archive of photographs or a .parquet file, got {path!r}")
    rows = []
    for count, wait_ms in itertools.product(workers, step_ms):
        batch = batch_size or _BATCH_SIZES[kind]
        configs = [
            Config(
                design=design,
                data=kind,
                path=path,
                workers=count,
                step_ms=wait_ms,
                batch_size=batch,
                samples=samples or _SAMPLES_PER_WORKER[kind] * max(1, count),
            )
            for design in (PIPELINE, DATALOADER)
        ]
        runs: dict[str, list[_Run]] = {config.design: [] for config in configs}
        for repeat in range(repeats):
            for config in configs if repeat % 2 == 0 else reversed(configs):
                runs[config.design].append(run := _run_once(config))
                report(
                    f"{repeat + 1}/{repeats} {config.design}, {kind}, {count} workers, step {wait_ms:g} ms: "
                    f"{run.samples_per_s:,.0f} samples/s, first batch {run.first_ms:,.0f} ms, "
                    f"{run.cpu_s_per_1000:.3g} CPU-s per 1,000, {run.memory_mb:,.0f} MB"
                )
        ours, theirs = (median_row(runs[design]) for design in (PIPELINE, DATALOADER))
        rows.append(_compare(configs[0], ours, theirs))
    return rows


def _compare(config: Config, ours: _Run, theirs: _Run) -> Row:
    return Row(
        data=config.data,
        workers=config.workers,
        step_ms=config.step_ms,
        batch_size=config.batch_size,
        samples_per_s=ours.samples_per_s,
        dataloader_samples_per_s=theirs.samples_per_s,
        speed=ours.samples_per_s / theirs.samples_per_s,
        first_ms=ours.first_ms,
        dataloader_first_ms=theirs.first_ms,
        cpu_s_per_1000=ours.cpu_s_per_1000,
        dataloader_cpu_s_per_1000=theirs.cpu_s_per_1000,
        memory_mb=ours.memory_mb,
        dataloader_memory_mb=theirs.memory_mb,
        runs=ours.runs,
    )


def _run_once(config: Config) -> _Run:
    command = [sys.executable, "-P", "-m", "ensemble.bench.pipelines.single_process"]
    done = subprocess.run(
        [*command, json.dumps(dataclasses.asdict(config))],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise SpecError(f"a run of {config.design} with {config.workers} workers has failed: {last}")
    return _Run(**json.loads(done.stdout.splitlines()[-1]))


def table(rows: Sequence[Row]) -> Rows:
    """The table that is printed: one row for each configuration, our figure / the DataLoader's."""
    return [
        {
            "data": row.data,
            "workers": row.workers,
            "step, ms": row.step_ms,
            "samples/s": f"{row.samples_per_s:,.0f} / {row.dataloader_samples_per_s:,.0f}",
            "speed": row.speed,
            "first batch, ms": f"{row.first_ms:,.0f} / {row.dataloader_first_ms:,.0f}",
            "CPU-s per 1,000": f"{row.cpu_s_per_1000:.3g} / {row.dataloader_cpu_s_per_1000:.3g}",
            "memory, MB": f"{row.memory_mb:,.0f} / {row.dataloader_memory_mb:,.0f}",
        }
        for row in rows
    ]


def findings(rows: Sequence[Row]) -> Iterator[str]:
    """What holds for all rows, a line each."""
    least, most = (bound(rows, key=lambda row: row.speed) for bound in (min, max))
    yield (
        f"{least.speed:.3g} to {most.speed:.3g} x the samples/s of a DataLoader; the least with {least.workers} "
        f"workers and a step of {least.step_ms:g} ms"
    )
    slowest = max(rows, key=lambda row: row.first_ms / row.dataloader_first_ms)
    yield (
        f"the first batch takes {slowest.first_ms / slowest.dataloader_first_ms:.3g} x as long at most, memory is "
        f"{max(row.memory_mb - row.dataloader_memory_mb for row in rows):,.0f} MB more at most"
    )
