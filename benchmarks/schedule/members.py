"""Draws members from a published table of unequal ones, and makes that table.

`members.csv` beside this file has one member a row: `samples_per_s`, its rate on one device; `serial`, the part of
its step that more workers do not shorten (Amdahl's law); `epochs`, after which it has converged. It was written by

    python -m benchmarks.schedule.members

with seed 2020: rates log-uniform from 20 to 180 samples/s, serial parts uniform from 0.02 to 0.10, epochs uniform
from 30 to 90, all independent. FLEET's own members (100 networks on SummitDev) are not public; these ranges are
chosen, not measured: a factor of nine between the fastest and the slowest, and of three between the first to
converge and the last. The scheduler knows only that each takes at most 90 epochs.
"""

from __future__ import annotations

import csv
import math
from importlib import resources
from pathlib import Path

import numpy as np

from benchmarks.schedule.simulate import Trainee
from ensemble.spec import Identity

SEED, ROWS = 2020, 500
RATES, SERIAL, EPOCHS = (20.0, 180.0), (0.02, 0.10), (30, 90)
SAMPLES = 30_000  # of an epoch
_CPUS, _MEMORY_GB = 0.01, 1.0  # of a member beside its device: they limit no node


def read_table() -> list[tuple[float, float, int]]:
    """The rows of members.csv: samples a second, serial part, epochs."""
    text = (resources.files(__package__) / "members.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return [(float(row["samples_per_s"]), float(row["serial"]), int(row["epochs"])) for row in rows]


def draw_members(seed: int, count: int, widest: int) -> list[Trainee]:
    """Members drawn from the table with replacement.

    Args:
        widest: the most workers of a member; rates are known up to it.
    """
    rows = read_table()
    chosen = np.random.default_rng(seed).integers(0, len(rows), count)
    widths = [1 << power for power in range(widest.bit_length())]
    return [_make_trainee(number, rows[row], widths) for number, row in enumerate(chosen)]


def _make_trainee(number: int, row: tuple[float, float, int], widths: list[int]) -> Trainee:
    samples_per_s, serial, epochs = row
    identity = Identity(
        member=f"member-{number}",
        number=number,
        params={},
        seed=number,
        workers=1,
        threads=1,
        precision="fp32",
        epochs=EPOCHS[1],
        batch_size=64,
        cpus_per_worker=_CPUS,
        gpus_per_worker=1.0,
        memory_gb=_MEMORY_GB,
        auto=["workers"],
    )
    by_width = {width: samples_per_s / (serial + (1 - serial) / width) for width in widths}
    return Trainee(identity=identity, samples_per_s=by_width, epochs=epochs)


def draw_table(seed: int = SEED, rows: int = ROWS) -> list[dict[str, str]]:
    """Draw the table again."""
    rng = np.random.default_rng(seed)
    rates = np.exp(rng.uniform(math.log(RATES[0]), math.log(RATES[1]), rows))
    serial, epochs = rng.uniform(SERIAL[0], SERIAL[1], rows), rng.integers(EPOCHS[0], EPOCHS[1] + 1, rows)
    return [
        {"samples_per_s": f"{rate:.2f}", "serial": f"{part:.4f}", "epochs": str(count)}
        for rate, part, count in zip(rates, serial, epochs, strict=True)
    ]


def main() -> None:
    """Write members.csv beside this file."""
    with open(Path(__file__).with_name("members.csv"), "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["samples_per_s", "serial", "epochs"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(draw_table())


if __name__ == "__main__":
    main()
