"""What `spawn` takes is what `Feeder` takes."""

from __future__ import annotations

import threading
from types import MappingProxyType
from typing import Any, get_type_hints

import psutil
import pytest
from core_pipes import N, leaves_nothing, pipe  # noqa: F401

from pipelines import Feeder, attach, resident
from pipelines.feeder.process import FeederOptions, spawn


def test_the_options_of_a_process_are_the_feeders_with_their_types() -> None:
    own = get_type_hints(Feeder.__init__)
    others = ("pipeline", "listener", "forks", "return")  # the process's own: it feeds, and does nothing else
    assert get_type_hints(FeederOptions) == {name: own[name] for name in own if name not in others}


def test_an_option_that_a_feeder_does_not_have_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        spawn(pipe("plain"), worker=2)  # type: ignore[call-arg]


def begin_thread(sample: dict[str, Any]) -> dict[str, Any]:
    if not _thread:
        _thread.append(threading.Thread(target=threading.Event().wait, daemon=True))
        _thread[0].start()
    return sample


_thread: list[threading.Thread] = []


@pytest.mark.parametrize("is_threaded", [False, True])
def test_workers_are_forked_from_the_feeders_process_unless_a_stage_has_begun_a_thread_there(
    is_threaded: bool,
) -> None:
    pipeline = pipe("plain").map(begin_thread, id="thread") if is_threaded else pipe("plain")
    process = spawn(pipeline, block=8, workers=2)
    try:
        assert sum(len(batch["index"]) for batch in attach(process.address, pipeline, 8, 1)) == N
        workers = psutil.Process(process.pid).children()
        assert len(workers) == 2
        for worker in workers:
            assert ("pipelines.workers.worker_main" in worker.cmdline()) == is_threaded
    finally:
        process.stop()


def test_any_mapping_of_resident_sets_reaches_the_process() -> None:
    process = spawn(pipe("plain"), resident=MappingProxyType({"valid": pipe("still")}), block=8)
    try:
        batches = resident(process.address, "valid", pipe("still"))
        assert sum(len(batch["index"]) for batch in batches.loader(8)) == N
        assert len(list(attach(process.address, pipe("plain"), 8))) == -(-N // 8)
    finally:
        process.stop()
