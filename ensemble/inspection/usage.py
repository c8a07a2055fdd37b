"""`sum_usage`: what the runs in a folder have used, summed by user, month or run.

Accounts are kept in whole ticks of 2**-20 s or J, of which floating-point numbers hold sums exactly: groups add up
to the whole.
"""

from __future__ import annotations

import math
import os
import pwd
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ensemble.meter.impact import J_PER_KWH, Impact
from ensemble.meter.ledger_rows import Total
from ensemble.meter.origin import weakest
from ensemble.reporting.dashboard.runs import find_runs, is_run
from ensemble.reporting.run_projection import RunProjection
from ensemble.reporting.sections.cost import run_impact
from ensemble.reporting.status import describe_lost_controller
from ensemble.spec import SpecError
from ensemble.spec.frames import Rows
from ensemble.store import RunDir, RunStatus, StoreError

NONE = "(none)"
#: The fields of a row after those that it is grouped by.
FIGURES = (
    "runs", "in_progress", "cpu_s", "gpu_s", "energy_j", "energy_kwh", "energy_origin", "without_energy",
    "emissions_g", "without_emissions", "price", "currency", "without_price",
)  # fmt: skip


def sum_usage(folder: str | os.PathLike[str] = "runs", by: str | Sequence[str] = "user") -> Rows:
    """What the runs in a folder have used, a row for each group, the one with the most CPU time first.

    A run belongs to the user who owns its log, and to the month (UTC) in which it was started, with all that it
    used.

    Args:
        folder: up to two levels below it runs are found, except in directories that this user may not enter; or a
            run directory.
        by: "user", "month" or "run", or several of them. Prices in different currencies are different groups, too.

    Returns:
        Rows of the fields of `by` and: `runs`, those of them `in_progress`; `cpu_s`, `gpu_s` (seconds in which
        GPUs were kept busy; None where none is known); `energy_j`, `energy_kwh` and `energy_origin`, the weakest
        of their origins; `emissions_g` (gCO2e), `price` and `currency`, by each run's `Energy`, PUE included;
        `without_energy`, `without_emissions`, `without_price`: runs of which that is not known and whose part is
        missing from the sum.

    Raises:
        StoreError: there is no such folder, or a run in it cannot be read.
        SpecError: `by` names something else.
    """
    path, names = Path(folder).expanduser(), (by,) if isinstance(by, str) else tuple(by)
    if not names or not set(names) <= set(_GROUPS):
        raise SpecError(f"runs are summed by {', '.join(_GROUPS)}, got {', '.join(map(repr, names)) or 'nothing'}")
    if not path.is_dir():
        raise StoreError(f"there is no folder {path}: give the one that holds the run directories")
    sums: dict[tuple[str, ...], _Sum] = {}
    for run_dir in map(RunDir, [path] if is_run(path) else find_runs(path.absolute())):
        if not run_dir.events.exists():
            continue  # it has not begun
        status = RunStatus.load(run_dir)
        run = RunProjection.from_status(status, describe_lost_controller(run_dir, status.state))
        impact = run_impact(run.state, run.ledger)
        key = (*(_GROUPS[name](run_dir, run) for name in names), impact.price.unit)
        sums.setdefault(key, _Sum()).add(run, impact)
    rows = [dict(zip(names, key, strict=False)) | total.as_row(key[-1]) for key, total in sums.items()]
    return Rows(sorted(rows, key=lambda row: (-row["cpu_s"], *map(str, row.values()))))


def _find_user(run_dir: RunDir, run: RunProjection) -> str:
    uid = run_dir.events.stat().st_uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _find_month(run_dir: RunDir, run: RunProjection) -> str:
    began = run.state.started
    return NONE if began is None else time.strftime("%Y-%m", time.gmtime(began))


_GROUPS: Mapping[str, Callable[[RunDir, RunProjection], str]] = {
    "user": _find_user,
    "month": _find_month,
    "run": lambda run_dir, run: str(run_dir.path),
}


@dataclass
class _Sum:
    """What several runs have used."""

    used: list[Total] = field(default_factory=list)
    impacts: list[Impact] = field(default_factory=list)
    in_progress: int = 0

    def add(self, run: RunProjection, impact: Impact) -> None:
        """Adds a run."""
        self.used.append(run.used)
        self.impacts.append(impact)
        self.in_progress += run.is_driven

    def as_row(self, currency: str) -> dict[str, object]:
        """Returns `FIGURES` by their names."""
        energy = [one for one in self.used if one.energy_j is not None]
        energy_j, without_energy = _add(one.energy_j for one in self.used)
        emissions_g, without_emissions = _add(one.emissions.total for one in self.impacts)
        price, without_price = _add(one.price.total for one in self.impacts)
        values = (
            len(self.used), self.in_progress, _add(one.cpu_s for one in self.used)[0],
            _add(one.gpu_s for one in self.used)[0],
            energy_j, None if energy_j is None else energy_j / J_PER_KWH,
            weakest(one.origin for one in energy), without_energy, emissions_g, without_emissions, price,
            currency or None, without_price,
        )  # fmt: skip
        return dict(zip(FIGURES, values, strict=True))


def _add(values: Iterable[float | None]) -> tuple[float | None, int]:
    """The sum of what is known, None where nothing is; and how many are not."""
    values = list(values)
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) if numbers else None, len(values) - len(numbers)
