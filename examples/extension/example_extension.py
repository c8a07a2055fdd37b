"""An extension of ray-ensemble: a source, a logger and a power source by name, and a member callback."""

import os
import sqlite3
import time
from pathlib import Path

import torch

from ensemble import MemberCallback
from ensemble.extend import Absent, EpochEnded, Logger, PowerError, PowerSource, Reading, Source


class FixedWidth(Source):
    """Lines of numbers in columns of a fixed width."""

    kind = "fixed_width"

    def __init__(self, path, columns, width):
        self.path, self.columns, self.width = os.path.abspath(path), tuple(columns), width
        self.lines = Path(self.path).read_text(encoding="utf-8").splitlines()

    def __len__(self):
        return len(self.lines)

    def _read(self, index):
        starts = range(0, self.width * len(self.columns), self.width)
        cells = [float(self.lines[index][start : start + self.width]) for start in starts]
        return dict(zip(self.columns, cells, strict=True))

    def where(self, index):  # for error messages
        return f"{self.path}, line {index + 1}"

    def identity(self):  # equal only for sources with equal records
        return {
            "source": self._describe_class(),
            "columns": self.columns,
            "width": self.width,
            "lines": self.lines,
        }


def fixed_width(path, columns, width=8):
    """`sources.fixed_width("data.txt", columns=("x", "y"))`"""
    return FixedWidth(path, columns, width)


class SQLiteLogger(Logger):
    """Writes the metrics of all epochs into one table: `loggers=["sqlite"]`."""

    def open(self, state, ids):
        path = self.options.get("path") or self.run_dir.path / "metrics.sqlite"
        self.database = sqlite3.connect(path)
        table = "metrics (member TEXT, epoch INTEGER, name TEXT, value REAL, PRIMARY KEY (member, epoch, name))"
        self.database.execute(f"CREATE TABLE IF NOT EXISTS {table}")

    def write(self, points):
        for point in points:  # after a crash some come again: the primary key keeps one row of each
            if isinstance(point, EpochEnded):
                rows = [(point.member, point.epoch, name, value) for name, value in point.values.items()]
                self.database.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", rows)
        self.database.commit()
        return {}

    def end(self, end, state):
        return {}

    def close(self):
        self.database.close()


def open_battery():
    """The discharge of a laptop's battery, which feeds the whole node."""
    supplies = Path(os.environ.get("POWER_SUPPLIES", "/sys/class/power_supply"))
    file = next(supplies.glob("BAT*/power_now"), None)  # microwatts
    if file is None:
        return Absent("battery", f"no battery in {supplies}")
    last_s = time.monotonic()

    def read():
        nonlocal last_s
        try:
            watts = int(file.read_text()) / 1e6
        except (OSError, ValueError) as error:
            raise PowerError(f"{file}: {error}") from error
        now_s = time.monotonic()
        seconds, last_s = now_s - last_s, now_s
        return [Reading("battery", "node", watts * seconds)]

    return PowerSource("battery", "node", "measured", read)


class WeightLimit(MemberCallback):
    """Keeps each weight between -limit and limit: `callbacks=[WeightLimit(0.5)]`."""

    def __init__(self, limit):
        self.limit = limit  # a public attribute: part of the identity of the members

    def end_step(self, member, *, applied):
        with torch.no_grad():
            for weight in member.model.parameters():
                weight.clamp_(-self.limit, self.limit)
