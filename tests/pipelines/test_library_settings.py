"""Global settings of libraries: the same in every process that computes for a pipeline or a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import ImageFile

from pipelines import Pipeline, sources
from pipelines.environment.library_settings import apply_settings, find_settings, keep_settings
from pipelines.ipc import memory_pickle
from pipelines.ipc.child_processes import child_environment

torch = pytest.importorskip("torch")

#: A process that has imported neither torch nor Pillow loads a pipeline, and says what is set then.
LOADS = """
import json, sys
from pipelines.ipc import memory_pickle
before = [name for name in ("torch", "PIL") if name in sys.modules]
memory_pickle.load(int(sys.argv[1]))
from pipelines.environment.library_settings import find_settings
from PIL import ImageFile
import torch
print(json.dumps([before, find_settings(), str(torch.empty(0).dtype), ImageFile.LOAD_TRUNCATED_IMAGES]))
"""


@pytest.fixture
def settings() -> Iterator[None]:
    """What a spec may set when it is imported."""
    with keep_settings():
        ImageFile.LOAD_TRUNCATED_IMAGES = True
        torch.set_default_dtype(torch.float64)
        torch.backends.cuda.matmul.allow_tf32 = True
        yield


def make_pipeline() -> Pipeline:
    return Pipeline(sources.arrays(x=[1.0, 2.0])).map(abs, field="x")


def test_a_process_that_prepares_has_the_settings_of_the_one_that_declared(settings: None) -> None:
    payload = memory_pickle.dump(make_pipeline())
    try:
        command = [sys.executable, "-c", LOADS, str(payload)]
        said = subprocess.check_output(command, pass_fds=[payload], env=child_environment())
    finally:
        os.close(payload)
    found = find_settings()
    assert {"torch.set_default_dtype", "torch.backends.cuda.matmul.fp32_precision"} <= found.keys()
    assert json.loads(said) == [[], found, "torch.float64", True]


def test_a_setting_that_changes_samples_is_part_of_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprints() -> dict[str, Any]:
        return {name: digest for name, digest, _ in make_pipeline().describe_for_peers()["parts"]}

    usual = fingerprints()
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert fingerprints() == usual, "no sample depends on it"
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert {name for name, digest in fingerprints().items() if usual[name] != digest} == {"stage 0 abs('x')"}


def test_a_process_takes_on_the_settings_of_a_run_and_no_others(settings: None) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # torch says then that its two sets of names are mixed
    found = find_settings()
    with keep_settings():
        apply_settings({})
        assert find_settings() == {}
        apply_settings({"torch.set_default_dtype": "torch.bfloat16"})
        assert find_settings() == {"torch.set_default_dtype": "torch.bfloat16"}, (
            "what is not named has its default"
        )
        assert not ImageFile.LOAD_TRUNCATED_IMAGES
    assert find_settings() == found


def test_contexts_that_overlap_leave_the_settings_of_before_the_first() -> None:
    found, contexts = find_settings(), (keep_settings(), keep_settings())
    for context, dtype in zip(contexts, ("torch.bfloat16", "torch.float16"), strict=True):  # as two threads do
        context.__enter__()
        apply_settings({"torch.set_default_dtype": dtype})
    for context in contexts:
        context.__exit__(None, None, None)
    assert find_settings() == found
