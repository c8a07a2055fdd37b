"""One shared pipeline against a pipeline for each member, at equal work: CPU time, energy and mean power.

After Pittman et al., "Exploring Flexible Communications for Streamlining DNN Ensemble Training Pipelines" (SC18):
members that shared one pipeline used 2 to 11 times less CPU time, and their nodes 5 to 16 % less mean power.

**Equal work**: every member of both sides takes the same samples in the same order, so the sides differ by who
prepares them alone. The runs are those of `ensemble.bench.pipelines`; each repeat runs both sides one after the
other, the next repeat in the opposite order, and a ratio is of two runs of one repeat.

Mean power is energy over time, so it says nothing new where energy is estimated from CPU time. Such a figure is
shown with its origin, and no ratio is made of it.
"""

from __future__ import annotations

import dataclasses
import io
import statistics
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ensemble.bench.charts import Panel, Series, bar_panel
from ensemble.bench.energy.parts import PartOutcome
from ensemble.bench.pipelines import study as pipelines_study
from ensemble.bench.pipelines.config import EMULATED, MODEL, Config
from ensemble.bench.pipelines.rows import Row, format_count, load_warnings
from ensemble.bench.results import Report, Rows, Spread, flatten, median_row, tabulate
from ensemble.meter import PowerMeter
from ensemble.meter.origin import ORIGINS
from ensemble.spec import Energy, SpecError

SHARED, OWN = "node", "independent"
_PHOTO_PX = (375, 500)
_QUALITY = 95
_SIDES = {SHARED: "shared", OWN: "own"}
_RATIOS = {
    "seconds": "wall",
    "CPU-seconds": "cpu",
    "CPU-seconds preparing": "prep_cpu",
    "watts": "watts",
    "joules": "energy",
}
_LOOKS = {SHARED: ("#2f7bc4", "one shared pipeline"), OWN: ("#d97a2b", "a pipeline each")}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A shared pipeline's figures over those of own pipelines: of each repeat's ratio the median and both ends.

    Attributes:
        step, step_ms, members, cores, runs: as in `ensemble.bench.pipelines.rows.Row`; runs of each side.
        wall, cpu, prep_cpu: ratios of seconds, CPU-seconds, and CPU-seconds of preparation.
        watts, energy: ratios of mean power and of energy; None unless both were measured.
        energy_origin: of both sides' energy; the weaker of two.
    """

    step: str
    step_ms: float
    members: int
    cores: int
    runs: int
    wall: Spread
    cpu: Spread
    prep_cpu: Spread
    watts: Spread | None
    energy: Spread | None
    energy_origin: str


@dataclass(frozen=True)
class Result:
    """Both sides' medians for each step, and their ratios."""

    rows: list[Row]
    comparisons: list[Comparison]


def study(
    data: str,
    *,
    members: int = 4,
    cores: int | None = None,
    step_ms: float = 100.0,
    steps: Sequence[str] = (MODEL, EMULATED),
    samples: int = 1000,
    size: int = 224,
    batch_size: int = 32,
    repeats: int = 3,
    open_meter: Callable[[], PowerMeter] = lambda: PowerMeter("local", energy=Energy(measure_idle_s=0)),
    report: Report = lambda _: None,
) -> Result:
    """Run both sides with each step, `repeats` times in turn.

    Args:
        data: a tar archive of JPEG photographs.
        members: that train at once.
        cores: pin all processes to that many cores; None leaves them alone.
        step_ms: the emulated accelerator's milliseconds for a batch.
        steps: "model", a step of a small net, and "emulated", a wait that uses no CPU, as a GPU is to the CPU.
        samples: that each member consumes at least, after its first batch; whole epochs of the archive.
        open_meter: returns the meter of the machine's energy in one run; it must not measure idle power, because
            the run has begun when it starts.

    Raises:
        SpecError: this process may not use so many cores, or the runs are too short.
        PipelineError: the archive is missing or cannot be read.
    """
    runs: dict[str, list[tuple[Row, Row]]] = {step: [] for step in steps}
    for repeat in range(1, repeats + 1):

        def report_run(line: str, of: str = f"{repeat}/{repeats}") -> None:
            report(f"sharing, {line.replace('1/1', of, 1)}")

        for step in steps:
            designs = (SHARED, OWN) if repeat % 2 else (OWN, SHARED)
            found = pipelines_study.study(
                data,
                [members],
                designs=designs,
                batch_size=batch_size,
                samples=samples,
                samples_alone=samples,
                size=size,
                step=step,
                step_ms=(step_ms,),
                cores=(cores,),
                repeats=1,
                open_meter=open_meter,
                report=report_run,
            )
            at = {row.design: row for row in found}
            runs[step].append((at[SHARED], at[OWN]))
    rows = [median_row(side) for pairs in runs.values() for side in zip(*pairs, strict=True)]
    return Result(rows, [compare(pairs) for pairs in runs.values()])


def check(data: str | None, members: int, cores: int | None) -> None:
    """Find mistakes before anything is measured.

    Args:
        data, members, cores: as of `study`; None for generated photographs.

    Raises:
        SpecError, PipelineError: as `study`.
    """
    pipelines_study.check_options((SHARED, OWN), [members], [cores], 1, [None])
    if data is not None:
        config = Config(
            design=SHARED,
            members=members,
            prep_workers=1,
            cores=cores,
            batch_size=1,
            samples=1,
            step=MODEL,
            step_ms=0.0,
            data=data,
            size=224,
        )
        _ = config.pipeline().fields  # prepares the first photograph


def compare(pairs: Sequence[tuple[Row, Row]]) -> Comparison:
    """The ratios of one configuration, from its (shared, own) runs of each repeat.

    Raises:
        SpecError: a run was over before its first batch was noticed.
    """
    if not all(row.prep_cpu_s for pair in pairs for row in pair):
        raise SpecError("the runs are too short to be measured: say a larger number of --samples")
    origins = {row.energy_origin for pair in pairs for row in pair}
    is_measured = origins == {"measured"}

    def ratio(value: Callable[[Row], float]) -> Spread:
        found = [value(shared) / value(own) for shared, own in pairs]
        return Spread(statistics.median(found), min(found), max(found))

    first = pairs[0][0]
    return Comparison(
        step=first.step,
        step_ms=statistics.median(row.step_ms for pair in pairs for row in pair),
        members=first.members,
        cores=first.cores,
        runs=len(pairs),
        wall=ratio(lambda row: row.wall_s),
        cpu=ratio(lambda row: row.cpu_s),
        prep_cpu=ratio(lambda row: row.prep_cpu_s),
        watts=ratio(lambda row: row.watts or 0.0) if is_measured else None,
        energy=ratio(lambda row: row.energy_j or 0.0) if is_measured else None,
        energy_origin=max(origins, key=[str(origin) for origin in ORIGINS].index),
    )


def outcome(
    data: str | None,
    *,
    members: int,
    cores: int | None,
    steps: Sequence[str],
    step_ms: float,
    samples: int,
    repeats: int,
    report: Report,
) -> PartOutcome:
    """Run the study on an archive of photographs, or on generated ones; see `study`.

    Raises:
        SpecError, PipelineError: see `study`.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        photographs = "photographs of " + Path(data).name if data else ""
        if data is None:
            data = str(Path(folder) / "photographs.tar")
            photographs = write_photographs(Path(data))
            report(f"sharing: no --data: {photographs}")
        found = study(
            data,
            members=members,
            cores=cores,
            steps=steps,
            step_ms=step_ms,
            samples=samples,
            repeats=repeats,
            report=report,
        )
    return PartOutcome(
        tables=tables(found),
        rows=json_rows(found),
        findings=[*findings(found), f"sharing: {photographs}"],
        notes=[f"sharing: {photographs}"],
        panels=panels(found),
    )


# --- photographs -----------------------------------------------------------------------------------------------


def write_photographs(path: Path, count: int = 250) -> str:
    """Write a tar archive of JPEGs: parts of the two photographs in scikit-learn, half of them mirrored.

    Returns:
        What they are, in a few words.
    """
    import numpy as np
    import simplejpeg

    folder = files("sklearn.datasets.images")
    whole = [simplejpeg.decode_jpeg((folder / name).read_bytes()) for name in ("china.jpg", "flower.jpg")]
    rng, (height, width) = np.random.default_rng(0), _PHOTO_PX
    with tarfile.open(path, "w") as archive:
        for number in range(count):
            picture = whole[number % len(whole)]
            top, left = (
                int(rng.integers(0, free + 1)) for free in (picture.shape[0] - height, picture.shape[1] - width)
            )
            part = picture[top : top + height, left : left + width][:, :: 1 if number % 4 < 2 else -1]
            content = simplejpeg.encode_jpeg(np.ascontiguousarray(part), quality=_QUALITY)
            entry = tarfile.TarInfo(f"{number:04d}.jpeg")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"{count} parts of scikit-learn's two photographs, {width} x {height} px"


# --- tables and findings ---------------------------------------------------------------------------------------


def tables(result: Result) -> list[tuple[str, Rows]]:
    """Both sides, and their ratios, a column for each step: none is wider than a terminal."""
    columns = "wall_s cpu_s prep_cpu_s watts energy_j"
    sides = [
        {"step": row.step, "side": _SIDES[row.design], "runs": row.runs, **figures}
        for row, figures in zip(result.rows, tabulate(result.rows, columns), strict=True)
    ]
    ratios: Rows = [
        {"shared / own": name, **{each.step: _format_ratio(getattr(each, key)) for each in result.comparisons}}
        for name, key in _RATIOS.items()
    ]
    first, origins = result.rows[0], dict.fromkeys(each.energy_origin for each in result.comparisons)
    work = f"{format_count(first.members, 'member')}, {first.samples // first.members:,} samples each"
    return [
        (f"One shared pipeline, and own ones: {work}; energy {' and '.join(origins)}", sides),
        ("Shared / own: medians of the repeats (least to most)", ratios),
    ]


def _format_ratio(ratio: Spread | None) -> str:
    return "-" if ratio is None else str(ratio)


def json_rows(result: Result) -> Rows:
    """All rows, for a file."""
    sides = [{"of": row.design, **dataclasses.asdict(row), "watts": row.watts} for row in result.rows]
    return sides + [{"of": "shared / own", **flatten(each, "watts", "energy")} for each in result.comparisons]


def findings(result: Result) -> Iterator[str]:
    """What follows for CPU time and for power, a line each, and what does not."""
    for each in result.comparisons:
        step = f"{each.step_ms:.3g} ms {each.step}"
        less = Spread(1 / each.cpu.median, 1 / each.cpu.high, 1 / each.cpu.low)
        yield (
            f"sharing, {format_count(each.members, 'member')} on {format_count(each.cores, 'core')}, step {step}: "
            f"{less} times less CPU time for the same samples, in {each.wall} times the time"
        )
        if each.watts is not None and each.energy is not None:
            ratios = f"{each.watts} times the mean watts and {each.energy} times the joules"
            yield f"sharing, step {step}: {ratios}, measured"
    origins = {each.energy_origin for each in result.comparisons}
    if "estimated" in origins:
        yield (
            "sharing: watts and joules are estimated from CPU time, so nothing follows about watts; SC18's 5 to "
            "16 % less mean power can only be seen on a node whose power is measured"
        )
    if "unavailable" in origins:
        yield "sharing: this machine reports no energy: nothing follows about watts"
    yield from (f"sharing: {line}" for line in load_warnings(result.rows))


def panels(result: Result) -> list[Panel]:
    """Bars of CPU-seconds, and of mean watts where they were measured."""
    found = [bar_panel("Sharing: CPU-seconds for equal work", _bars(result, lambda row: row.cpu_s))]
    if all(each.watts is not None for each in result.comparisons):
        found.append(
            bar_panel("Sharing: mean watts for equal work, measured", _bars(result, lambda row: row.watts))
        )
    return found


def _bars(result: Result, value: Callable[[Row], float | None]) -> list[Series]:
    bars = []
    for design, (colour, name) in _LOOKS.items():
        rows = [row for row in result.rows if row.design == design]
        bars.append(
            Series(name=name, xs=[row.step for row in rows], ys=[value(row) for row in rows], colour=colour)
        )
    return bars
