"""What `spawn` takes is what `Feeder` takes."""

from __future__ import annotations

from types import MappingProxyType
from typing import get_type_hints

import pytest
from core_pipes import N, leaves_nothing, pipe  # noqa: F401

from pipelines import Feeder, attach, resident
from pipelines.feeder.process import FeederOptions, spawn


def test_the_options_of_a_process_are_the_feeders_with_their_types() -> None:
    own = get_type_hints(Feeder.__init__)
    others = ("pipeline", "listener", "return")  # the process gets its listener from its parent
    assert get_type_hints(FeederOptions) == {name: own[name] for name in own if name not in others}


def test_an_option_that_a_feeder_does_not_have_is_refused_before_anything_starts() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'worker'"):
        spawn(pipe("plain"), worker=2)  # type: ignore[call-arg]


def test_any_mapping_of_resident_sets_reaches_the_process() -> None:
    process = spawn(pipe("plain"), resident=MappingProxyType({"valid": pipe("still")}), block=8)
    try:
        batches = resident(process.address, "valid", pipe("still"))
        assert sum(len(batch["index"]) for batch in batches.loader(8)) == N
        assert len(list(attach(process.address, pipe("plain"), 8))) == -(-N // 8)
    finally:
        process.stop()
