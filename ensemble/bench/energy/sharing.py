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

import io
import statistics
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from ensemble.bench.charts import Panel, bar_panel
from ensemble.bench.pipelines import study as pipelines_study
from ensemble.bench.pipelines.config import EMULATED, MODEL
from ensemble.bench.pipelines.figures import load_warnings
from ensemble.bench.pipelines.study import PipelineRow, format_count
from ensemble.bench.results import Outcome, Report, Rows, Spread, median_row, name_ends, series_of, tabulate
from ensemble.meter.origin import ORIGINS
from ensemble.spec import SpecError

SHARED, OWN = "node", "independent"
_PHOTO_PX = (375, 500)
_QUALITY = 95
# Name -> field of a row.
_RATIOS = {"wall": "wall_s", "cpu": "cpu_s", "prep_cpu": "prep_cpu_s", "watts": "watts", "energy": "energy_j"}
_TITLES = ("seconds", "CPU-seconds", "CPU-seconds preparing", "watts", "joules")


@dataclass(frozen=True, kw_only=True)
class PeerComparison:
    """A shared pipeline beside own pipelines.

    Attributes:
        shared, own: the medians of each side.
        ratios: of each repeat shared / own, the median and both ends: seconds ("wall"), CPU-seconds ("cpu", and of
            preparation "prep_cpu"), mean power ("watts") and joules ("energy"), both None unless measured.
        energy_origin: of both sides' energy; the weaker of two.
    """

    shared: PipelineRow
    own: PipelineRow
    ratios: dict[str, Spread | None]
    energy_origin: str


def study(
    data: str,
    *,
    members: int = 4,
    cores: int | None = None,
    step_ms: float = 100.0,
    steps: Sequence[str] = (MODEL, EMULATED),
    samples: int = 1000,
    repeats: int = 3,
    report: Report = lambda _: None,
    **more: Any,
) -> list[PeerComparison]:
    """Run both sides with each step, `repeats` times in turn.

    Args:
        data, cores, step_ms, samples: of `pipelines.config.Config`, the samples of both sides alike.
        members: that train at once.
        steps: "model", a step of a small net, and "emulated", a wait that uses no CPU, as a GPU is to the CPU.
        more: of `pipelines.study.study`, such as `size`; it also says what is raised.

    Raises:
        SpecError: the runs are too short.
    """
    more |= {"members": [members], "samples": samples, "samples_alone": samples}
    more |= {"step_ms": [step_ms], "cores": [cores]}
    runs: dict[str, list[tuple[PipelineRow, PipelineRow]]] = {step: [] for step in steps}
    for repeat in range(1, repeats + 1):

        def report_run(line: str, of: str = f"{repeat}/{repeats}") -> None:
            report(f"sharing, {line.replace('1/1', of, 1)}")

        design = (SHARED, OWN) if repeat % 2 else (OWN, SHARED)
        for step, pairs in runs.items():
            found = pipelines_study.study(data, design=design, step=[step], repeats=1, report=report_run, **more)
            at = {row.design: row for row in found}
            pairs.append((at[SHARED], at[OWN]))
    return [compare(pairs) for pairs in runs.values()]


def compare(pairs: Sequence[tuple[PipelineRow, PipelineRow]]) -> PeerComparison:
    """The ratios of one configuration, from its (shared, own) runs of each repeat.

    Raises:
        SpecError: a run was over before its first batch was noticed.
    """
    if not all(row.prep_cpu_s for pair in pairs for row in pair):
        raise SpecError("the runs are too short to be measured: say a larger number of --samples")
    origins = {row.energy_origin for pair in pairs for row in pair}
    ratios: dict[str, Spread | None] = {}
    for name, field in _RATIOS.items():
        ratios[name] = None
        if field.endswith("_s") or origins == {"measured"}:
            # Of all but power, which is a mean: for the same samples, of which the clock misses the first ones.
            work = [1.0 if name == "watts" else own.samples / shared.samples for shared, own in pairs]
            found = [
                getattr(a, field) / getattr(b, field) * more for (a, b), more in zip(pairs, work, strict=True)
            ]
            ratios[name] = Spread(statistics.median(found), min(found), max(found))
    shared, own = (median_row(side) for side in zip(*pairs, strict=True))
    weakest = max(origins, key=[str(origin) for origin in ORIGINS].index)
    return PeerComparison(shared=shared, own=own, ratios=ratios, energy_origin=weakest)


def outcome(data: str | None, **options: Any) -> Outcome:
    """Run the study on an archive of photographs, or on generated ones; see `study`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        photographs = f"photographs of {Path(data).name}" if data else ""
        if data is None:
            data = str(Path(folder) / "photographs.tar")
            photographs = write_photographs(Path(data))
        found = study(data, **options)
    note = f"sharing: {photographs}"
    return Outcome(
        tables=tables(found),
        rows=json_rows(found),
        findings=[*findings(found), note],
        notes=[note],
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
            top = int(rng.integers(picture.shape[0] - height, endpoint=True))
            left = int(rng.integers(picture.shape[1] - width, endpoint=True))
            part = picture[top : top + height, left : left + width][:, :: 1 if number % 4 < 2 else -1]
            content = simplejpeg.encode_jpeg(np.ascontiguousarray(part), quality=_QUALITY)
            entry = tarfile.TarInfo(f"{number:04d}.jpeg")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"{count} parts of scikit-learn's two photographs, {width} x {height} px"


# --- tables and findings ---------------------------------------------------------------------------------------


def _sides(found: Sequence[PeerComparison]) -> list[PipelineRow]:
    return [row for each in found for row in (each.shared, each.own)]


def tables(found: Sequence[PeerComparison]) -> list[tuple[str, Rows]]:
    """Both sides, and their ratios, a column for each step: none is wider than a terminal."""
    rows = _sides(found)
    sides = [
        {"step": row.step, "side": "shared" if row.design == SHARED else "own", **figures}
        for row, figures in zip(rows, tabulate(rows, "runs wall_s cpu_s prep_cpu_s watts energy_j"), strict=True)
    ]
    ratios: Rows = [
        {"shared / own": title, **{each.shared.step: str(each.ratios[name] or "-") for each in found}}
        for name, title in zip(_RATIOS, _TITLES, strict=True)
    ]
    first, origins = rows[0], dict.fromkeys(each.energy_origin for each in found)
    work = f"{format_count(first.members, 'member')}, {first.samples // first.members:,} samples each"
    return [
        (f"One shared pipeline, and own ones: {work}; energy {' and '.join(origins)}", sides),
        ("Shared / own: medians of the repeats (least to most)", ratios),
    ]


def json_rows(found: Sequence[PeerComparison]) -> Rows:
    """All rows, for a file."""
    rows: Rows = [{"of": row.design, **vars(row), "watts": row.watts} for row in _sides(found)]
    for each in found:
        about = {name: getattr(each.shared, name) for name in ("step", "members", "runs")}
        about |= {"of": "shared / own", "energy_origin": each.energy_origin}
        for name, ratio in each.ratios.items():
            about |= name_ends(name, ratio)
        rows.append(about)
    return [{"part": "sharing", **row} for row in rows]


def findings(found: Sequence[PeerComparison]) -> Iterator[str]:
    """What follows for CPU time and for power, a line each, and what does not."""
    for each in found:
        row, cpu = each.shared, each.ratios["cpu"]
        assert cpu is not None
        step, less = f"{row.step_ms:.3g} ms {row.step}", Spread(1 / cpu.median, 1 / cpu.high, 1 / cpu.low)
        yield (
            f"sharing, {format_count(row.members, 'member')} on {format_count(row.cores, 'core')}, step {step}: "
            f"{less} times less CPU time for the same samples, in {each.ratios['wall']} times the time"
        )
        if each.energy_origin == "measured":
            ratios = f"{each.ratios['watts']} times the mean watts and {each.ratios['energy']} times the joules"
            yield f"sharing, step {step}: {ratios}, measured"
    origins = {each.energy_origin for each in found}
    if "estimated" in origins:
        yield (
            "sharing: watts and joules are estimated from CPU time, so nothing follows about watts; SC18's 5 to "
            "16 % less mean power can only be seen on a node whose power is measured"
        )
    if "unavailable" in origins:
        yield "sharing: this machine reports no energy: nothing follows about watts"
    yield from (f"sharing: {line}" for line in load_warnings(_sides(found)))


def panels(found: Sequence[PeerComparison]) -> list[Panel]:
    """Bars of CPU-seconds, and of mean watts where they were measured."""
    shown = {"cpu_s": "CPU-seconds for equal work"}
    if all(each.energy_origin == "measured" for each in found):
        shown["watts"] = "mean watts for equal work, measured"
    rows, sides = _sides(found), {SHARED: "one shared pipeline", OWN: "a pipeline each"}
    colours = {sides[SHARED]: "#2f7bc4", sides[OWN]: "#d97a2b"}
    return [
        bar_panel(f"Sharing: {title}", series_of(rows, "step", name, lambda row: sides[row.design], colours))
        for name, title in shown.items()
    ]
