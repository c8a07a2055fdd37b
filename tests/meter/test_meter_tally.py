"""What a killed process had not reported: kept in its tally, read by the next start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from event_dicts import ledger, typed

from ensemble.meter import CpuClock, make_usage
from ensemble.meter.origin import to_ticks
from ensemble.meter.tally import Tally, list_unreported, read_tallies, remove
from ensemble.meter.usage_parser import UsageParser

CHILD = """
import sys, time
from pathlib import Path
from ensemble.meter import CpuClock
from ensemble.meter.tally import Tally
clock = CpuClock(whole=True)
tally = Tally(Path(sys.argv[1]), lambda: clock.list_usage("n"))
clock.switch("orchestrate")
while time.process_time() < 1.0:
    pass
print("used", flush=True)
time.sleep(600)
"""


def test_what_a_process_used_outlives_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "usage")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"used\n"
        while sum(event["cpu_s"] for event in read_tallies(tmp_path / "usage")[0]) < 1.0:
            time.sleep(0.05)
        child.kill()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == -signal.SIGKILL
    events, files = read_tallies(tmp_path / "usage")
    assert 1.0 <= sum(event["cpu_s"] for event in events) <= used.ru_utime + used.ru_stime
    remove(files)
    assert not (tmp_path / "usage").exists()


def test_a_tally_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    clock = CpuClock()
    tally = Tally(tmp_path / "usage", lambda: clock.list_usage("n"))
    while not read_tallies(tmp_path / "usage")[1]:
        time.sleep(0.05)
    tally.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_reported_in_another_role_after_a_tally_was_written_is_counted_once() -> None:
    clock = CpuClock()
    clock.switch("train")
    clock.member = "member-0"
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    left = [event | {"until": 12.0} for event in clock.list_usage("n")]
    clock.move("prepare", 0.15)
    roles = ("startup", "train", "prepare")
    log = [clock.report("n", role, "member-0", 0) | {"t": 13.0} for role in roles]  # then a kill
    used_s, reader = sum(event["cpu_s"] for event in log), UsageParser()
    for event in log:
        reader.apply(typed(event))
    assert list_unreported(left, reader.last_usage) == []
    (train,) = (event for event in left if event["role"] == "train")
    later = [train | {"cpu_s": used_s + 1.0}]  # one that was written later has the rest, and what came since
    for event in list_unreported([*left, *later], reader.last_usage):
        reader.apply(typed(event | {"t": 14.0}))
    counted = sum(use.span.ticks for use in reader.node("n").cpu)
    startup = to_ticks(log[0]["cpu_s"])
    assert counted == pytest.approx(to_ticks(used_s + 1.0) + startup, abs=9)
    driver = make_usage("n", "orchestrate", train["pid"], 3.0, began=train["began"])
    assert list_unreported([driver], reader.last_usage) == [driver], "nothing moves to and from it"


def test_what_a_kill_or_a_power_failure_left_of_tallies_is_left_out_and_removed(tmp_path: Path) -> None:
    folder, used = tmp_path / "usage", CpuClock().list_usage("n")
    folder.mkdir()
    (folder / "h-1-a.json").write_text(json.dumps(used))
    (folder / "h-1-b.new").write_text("[")
    flipped = [
        json.dumps(used).replace(name, name[::-1]).encode() for name in ("began", "node", "pid", "role", "cpu_s")
    ]
    other = json.dumps([{**each, "cpu_s": "much"} for each in used]).encode()
    parts = (b"null", b"{}", b"[null]", b'[{"type":"epoch"}]', b"\0" * 90, b"\xff", b"", other, *flipped)
    for number, damaged in enumerate(parts):
        (folder / f"h-2-{number}.json").write_bytes(damaged)
    events, files = read_tallies(folder)
    assert events == json.loads(json.dumps(used)) and events
    remove(files)
    assert not folder.exists()


def test_what_a_tally_has_more_than_the_log_is_counted_and_nothing_twice() -> None:
    reported = make_usage("n", "train", 7, 4.0, "member-0", 0, began=70)
    left = [reported | {"cpu_s": 5.0, "until": 12.0}, make_usage("n", "feed", 8, 2.0, began=80) | {"until": 12.0}]
    begins = {"type": "run_started", "name": "again", "epochs": 1}
    log = [begins | {"t": 0.0}, reported | {"t": 10.0}]
    log += [*(event | {"t": 99.0} for event in left), begins | {"t": 99.0}]
    log += [event | {"t": 99.5} for event in left]  # its removal failed
    assert ledger(log).cpu_by_role() == {"train": 5.0, "feed": 2.0}
    part = {"kind": "cpu", "energy_j": 10.0, "origin": "measured"}
    power = {"type": "power", "node": "n", "t": 12.0, "interval_s": 2.0, "watts": 5.0, "origin": "measured"}
    power |= {"energy_j": 10.0, "parts": [part], "source": "rapl"}
    rows = {row.role: row.energy_j for row in ledger([*log[:2], power, *log[2:]]).rows if row.energy_j}
    assert sum(rows.values()) == pytest.approx(10.0) and rows["train"] > 0, "it is of the time before the kill"
