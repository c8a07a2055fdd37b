"""The combinations of the compression study's training steps; pure.

Packed values have no sum, so a ring takes plain fp32 and PowerSGD's factors only (gloo would sum fp16 in fp16),
and so does a sum in two levels. A packed exchange is an all-to-all and an all-gather of stripes, over gloo or MPI.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.compression.measure import PLAIN, Schemes
from ensemble.bench.net_shapes import parameter_shapes
from pipelines.environment.machine_limits import fits_in_memory

MEASURED, PREDICTED = "measured", "predicted"
# Packed exchanges over MPI.
_FEW = ("fp16", "qsgd4", "onebit+ef", "powersgd+ef")
_RANK_BYTES = 250 * 2**20  # of a process with torch
#: A predicted step that takes longer here is not measured.
MOST_STEP_S = 5.0


class Primitive(NamedTuple):
    """What sums gradients: a backend of `run_ranks`; plain values and PowerSGD's factors; packed values."""

    backend: str
    sums: bool
    packs: bool


PRIMITIVES = {
    "ring": Primitive("gloo", sums=True, packs=False),
    "gloo": Primitive("gloo", sums=False, packs=True),
    "mpi": Primitive("horovod-mpi", sums=True, packs=True),
    "hierarchical": Primitive("hierarchical", sums=True, packs=False),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination.

    Attributes:
        net, device: of `net_shapes.NETS`, on an accelerator of `published` (or `published.CORE`), emulated.
        step_s: of a step without an exchange.
        batch: samples of a worker.
        workers: ranks.  hosts: on which they are, equally many on each.  rate: of the hosts' links.
        primitive: of `PRIMITIVES`.  scheme: what gradients travel as.
    """

    net: str
    device: str
    step_s: float
    batch: int
    workers: int
    hosts: int
    rate: str
    primitive: str
    scheme: str


@dataclass(frozen=True, kw_only=True)
class StepRow(Cell):
    """One combination's step.

    Attributes:
        origin: "measured" (with an emulated accelerator), or "predicted".
        step_ms: a step, the median of the slowest rank; low_ms, high_ms: its quartiles, None of a predicted one.
        samples_per_s: of all workers.
        sent_mb: 10^6 bytes a rank sends in a step, by the communicator's count.
        messages: of a step.
    """

    origin: str
    step_ms: float
    low_ms: float | None
    high_ms: float | None
    samples_per_s: float
    sent_mb: float
    messages: int

    @property
    def cell(self) -> Cell:
        """The combination alone."""
        return Cell(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Cell)})


def list_cells(
    steps: Iterable[dict[str, Any]],
    workers: Iterable[int],
    rates: Iterable[str],
    primitives: Iterable[str],
    schemes: Schemes,
    per_host: int = 1,
) -> list[Cell]:
    """All combinations that have a meaning; `steps`: see `steps.list_steps`; `per_host`: workers of a host."""
    cells = []
    for step, count, rate, primitive in itertools.product(steps, workers, rates, primitives):
        same = {**step, "workers": count, "hosts": count // per_host, "rate": rate, "primitive": primitive}
        made = PRIMITIVES[primitive]
        for scheme, given in schemes.items():
            takes = made.sums if given["name"] in (PLAIN, "powersgd") else made.packs
            if takes and (primitive != "mpi" or scheme in (PLAIN, *_FEW)):
                cells.append(Cell(**same, scheme=scheme))
    return cells


def make_row(
    cell: Cell, origin: str, step_s: float, sent: float, messages: int, ends_s: tuple[float, float] | None = None
) -> StepRow:
    """The row of a cell, of the seconds of its step, and of its bytes and messages; `ends_s`: both quartiles."""
    low_ms, high_ms = (1e3 * end for end in ends_s) if ends_s is not None else (None, None)
    return StepRow(
        **vars(cell),
        origin=origin,
        step_ms=1e3 * step_s,
        low_ms=low_ms,
        high_ms=high_ms,
        samples_per_s=cell.batch * cell.workers / step_s,
        sent_mb=sent / 1e6,
        messages=messages,
    )


def fastest_of(rows: Sequence[StepRow], schemes: Sequence[str] | None = None) -> StepRow | None:
    """The row with the shortest step, of these schemes or of all; None where there is none."""
    able = [row for row in rows if schemes is None or row.scheme in schemes]
    return min(able, key=lambda row: row.step_ms, default=None)


def choose_checks(predicted: Mapping[Cell, float], one_in: int) -> tuple[list[Cell], str]:
    """One in so many predicted cells, 0 for none, drawn with a fixed seed from those that can be measured here.

    Args:
        predicted: seconds of a step where all hosts share this machine's cores.

    Returns:
        the cells, and how many cannot be measured here, and why, for people.
    """
    large = [cell for cell in predicted if not fits_in_memory(memory_bytes(cell))]
    slow = [cell for cell, step_s in predicted.items() if step_s > MOST_STEP_S and cell not in large]
    able = [cell for cell in predicted if cell not in large and cell not in slow]
    drawn = random.Random(0).sample(able, len(able) // one_in) if one_in else []
    said = f"of {len(predicted)} predicted steps {len(large)} cannot be measured here for want of memory, and "
    said += (
        f"{len(slow)} because all hosts share this machine's cores: a step would take more than {MOST_STEP_S:g} s"
    )
    return [cell for cell in able if cell in drawn], said


def memory_bytes(cell: Cell) -> int:
    """Of all ranks of a cell, roughly: buckets, residuals, and a packed largest tensor at both ends."""
    values = sum(math.prod(shape) for shape in parameter_shapes(cell.net))
    copies = 1 if cell.scheme == PLAIN else 2.5 if cell.scheme.endswith("+ef") else 2
    return int((4 * values * copies + _RANK_BYTES) * cell.workers)
