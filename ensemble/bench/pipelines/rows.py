"""The rows of the pipelines study, one for each configuration, and the findings from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ensemble.bench.pipelines.config import ALONE, DATALOADER, EMULATED, LOADER
from ensemble.bench.results import Rows, tabulate

# Columns that every table has, also where no row has a value.
_ALWAYS = ("energy_j", "memory_mb")
# Cores that other processes may use without a warning.
_QUIET = 0.1


@dataclass(frozen=True, kw_only=True)
class PipelineRow:
    """One configuration's medians over its runs.

    Attributes:
        design, members, prep_workers, cores, nodes, batch_size: what was run; members on all nodes together,
            preparation workers of each node or independent member, cores of all processes together.
        step_ms: milliseconds of a member's step: given where it is emulated, measured of a model.
        samples: that all members consumed while the clock ran.
        first_ms: from the start of a member's reader to its first batch, the median of all members.
        wall_s, cpu_s, prep_cpu_s: seconds; CPU-seconds of all processes, and of those that prepare samples.
        energy_j: of the whole machine in that time, joules.  energy_origin: measured, estimated or unavailable.
        step: what `step_ms` is: "emulated", or "model on cpu" or "model on cuda".
        runs: of which the figures are medians.
        memory_mb: proportional set size of all processes when the last batch is there, 10^6 bytes.
        others_cpu_s: CPU-seconds of the machine's other processes meanwhile, which lower samples/s; `energy_j`
            contains them.
        link: the rate of the hosts' links; "loopback" where nodes are not hosts of their own; None on one node.
        mtu: bytes of an Ethernet frame's payload on the hosts' links.
        wire_mb: bytes that left the hosts' interfaces in the whole run, with headers and acknowledgements, 10^6.
        sent_mb: of these the samples that feeders sent each other, 10^6 bytes.
        bound_mb: the least that must be sent: every sample's bytes to all nodes but one, 10^6 bytes.
        chosen: the design across nodes in the end, with its preparing nodes, as in "multi 4".
        idle_j: of `energy_j`, what the parts of the machine of which it is known would have used without work.
    """

    design: str
    members: int
    prep_workers: int
    cores: int
    nodes: int
    batch_size: int
    step_ms: float
    samples: int
    wall_s: float
    samples_per_s: float
    cpu_s: float
    prep_cpu_s: float
    energy_j: float | None
    energy_origin: str
    step: str = EMULATED
    runs: int = 1
    memory_mb: float | None = None
    others_cpu_s: float = 0.0
    link: str | None = None
    mtu: int | None = None
    wire_mb: float | None = None
    sent_mb: float | None = None
    bound_mb: float | None = None
    chosen: str | None = None
    idle_j: float | None = None
    first_ms: float = 0.0

    @property
    def watts(self) -> float | None:
        """The machine's mean power, in watts; its origin is `energy_origin`."""
        return None if self.energy_j is None else self.energy_j / self.wall_s


def format_count(number: int, thing: str) -> str:
    """Such as "1 core", "2 cores"."""
    return f"{number} {thing}{'s' * (number != 1)}"


def describe(row: PipelineRow) -> str:
    """The configuration in one line."""
    parts = [f"{row.design}, {format_count(row.members, 'member')}, {format_count(row.cores, 'core')}"]
    parts += [format_count(row.prep_workers, "preparation worker")]
    parts += [f"{row.nodes} nodes, link {row.link or 'unlimited'}"] if row.nodes > 1 else []
    return ", ".join([*parts, f"step {row.step_ms:.3g} ms {row.step}"])


def table(rows: Sequence[PipelineRow]) -> Rows:
    """The table that is printed, without the columns that have no value in any row."""
    names = [field.name for field in dataclasses.fields(PipelineRow)]
    shown = [n for n in names if n in _ALWAYS or any(getattr(row, n) is not None for row in rows)]
    return tabulate(rows, " ".join(shown))


def findings(rows: Sequence[PipelineRow]) -> Iterator[str]:
    """Each row against those that it is to be compared with, a line each, and warnings about load and energy."""
    for row, other in pairs(rows):
        yield (
            f"{describe(row)}: {row.samples_per_s / other.samples_per_s:.3g} x the samples/s of {other.design}, "
            f"1/{cpu_per_1000(other) / cpu_per_1000(row):.3g} of the CPU-seconds per sample"
        )
    yield from load_warnings(rows)
    if any(row.energy_origin == "estimated" for row in rows):
        yield "energy is estimated from the machine's CPU time: it repeats CPU-seconds, and no saving was measured"


def load_warnings(rows: Sequence[PipelineRow]) -> Iterator[str]:
    """A warning where other processes kept cores of the machine busy."""
    busiest = max(rows, key=lambda row: row.others_cpu_s / row.wall_s)
    if busiest.others_cpu_s > _QUIET * busiest.wall_s:
        yield (
            f"other processes used up to {busiest.others_cpu_s / busiest.wall_s:.2g} cores meanwhile: speed and "
            "energy are not those of a quiet machine; CPU-seconds are of this study's processes alone"
        )


def pairs(rows: Sequence[PipelineRow]) -> Iterator[tuple[PipelineRow, PipelineRow]]:
    """Rows that ran alike: of one pipeline a node with each without sharing, of loaders with DataLoaders."""

    def configuration(row: PipelineRow) -> tuple[object, ...]:
        emulated_ms = row.step_ms if row.step == EMULATED else None
        return row.members, row.prep_workers, row.cores, row.nodes, row.batch_size, row.step, emulated_ms, row.link

    compared = {"node": ALONE, LOADER: (DATALOADER,)}
    for row in rows:
        for other in rows:
            if other.design in compared.get(row.design, ()) and configuration(row) == configuration(other):
                yield row, other


def cpu_per_1000(row: PipelineRow) -> float:
    """CPU-seconds of all processes per 1,000 samples that members consumed."""
    return row.cpu_s / row.samples * 1000
