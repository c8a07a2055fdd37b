"""One wake-up serves all readers of a ring: nobody sleeps through it, and nobody waits for one who was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from forked_children import pipeline
from wake_ups import SIZES, N, digest

from pipelines import Feeder, attach
from pipelines.ipc.child_processes import child_environment
from pipelines.loader import stream_client

LIMIT_S = 300.0
MORE, MANY = range(1, 6), range(100, 150)


@pytest.mark.parametrize(
    ("seed", "epochs"),
    [
        (0, 60),
        *(pytest.param(seed, 400, marks=pytest.mark.more) for seed in MORE),
        *(pytest.param(seed, 400, marks=pytest.mark.chaos) for seed in MANY),
    ],
)
def test_a_killed_reader_or_feeder_takes_no_wake_up_along(seed: int, epochs: int) -> None:
    script = str(Path(__file__).with_name("wake_ups.py"))
    command = [sys.executable, "-W", "ignore", script, str(seed), str(epochs)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=child_environment(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as storm:
        try:
            said, errors = storm.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # they have ended, as they should
                os.killpg(storm.pid, signal.SIGKILL)
    assert storm.returncode == 0, errors
    for size, spared in zip(SIZES, json.loads(said), strict=True):
        assert spared["digest"] == digest(pipeline("noise", N, 0.0).loader(size, range(epochs)))
        assert spared["stats"]["shared_batches"] > 0


def test_a_reader_that_others_wake_all_the_time_still_says_that_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch is ready after 600 samples of 3 ms; another one is woken for every few of them."""
    monkeypatch.setattr(stream_client, "_WAIT_S", 0.4)
    made, address, begun, waits = (
        pipeline("noise", 600, 0.003),
        tmp_path / "socket",
        threading.Event(),
        list[bool](),
    )

    def read_all() -> None:
        for _ in attach(address, made, 4, 1, name="other"):
            begun.set()

    with Feeder(made, capacity=800, block=4, address=address, expect=2):
        other = threading.Thread(target=read_all)
        other.start()
        late = attach(address, made, 600, 1, name="late", on_wait=lambda: waits.append(begun.is_set()))
        for _ in late:
            break
        other.join()
        late.close()
    assert sum(waits) >= 2
