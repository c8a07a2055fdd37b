"""A run beside an external meter of the whole node: its account is what that meter saw."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import execute_members
import pytest

import ensemble
from ensemble.meter.ledger import ledger
from ensemble.spec import Energy
from ensemble.store import read_events

WATTS = 400.0


class Meter:
    """Writes a row of constant power ten times a second until it is left."""

    def __init__(self, file: Path) -> None:
        self.file, self._stop = file, threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        while not self._stop.is_set():
            with open(self.file, "a") as file:
                file.write(f"{time.time()},{WATTS}\n")
            self._stop.wait(0.1)

    def __enter__(self) -> Meter:
        self._thread.start()
        while not self.file.exists() or not self.file.read_text().endswith("\n"):
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.mark.parametrize("executor", ["inline", "local"])
def test_the_account_of_a_run_is_what_its_meter_saw(tmp_path: Path, executor: str) -> None:
    energy = Energy(meter=str(tmp_path / "{node}.csv"), idle_w={"node": 150.0})
    declared = execute_members.an_ensemble(energy=energy)
    with Meter(tmp_path / f"{executor}.csv"):
        ensemble.submit(declared, tmp_path / "run", executor).wait()
    events = read_events(tmp_path / "run" / "events.jsonl")
    (node,) = [event for event in events if event["type"] == "node"]
    assert "external meter" in node["power"]["source"] and node["power"]["origin"] == "measured"
    assert node["power"]["idle"]["origin"] == "given"
    total = ledger(events)
    (used,) = total.nodes
    assert used.origin == "measured" and used.energy_j is not None
    assert used.energy_j == pytest.approx(WATTS * used.metered_s, rel=0.15, abs=0.2 * WATTS), "but for late rows"
    assert {kind for row in total.rows for kind in row.parts} == {"node"}, "nothing is estimated beside it"
    assert sum(row.energy_j or 0.0 for row in total.rows) == used.energy_j
