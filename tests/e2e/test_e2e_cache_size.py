"""`cache_size=`: members learn from the images that are kept, the same ones wherever they are prepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finished_runs import finished_hashes, of_kind
from test_e2e_augmentation import EPOCHS, SAMPLES, declared, trained

import ensemble
from ensemble.store import StoreError


@pytest.mark.more
def test_a_run_that_is_resumed_ends_as_members_alone_do_and_refuses_another_size(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"cache": "disk", "cache_dir": str(tmp_path / "cache"), "cache_size": 16}
    alone = trained(tmp_path / "alone", declared(**kept, epochs=EPOCHS + 1), "inline")
    assert alone != trained(tmp_path / "whole", declared(epochs=EPOCHS + 1), "inline")
    run_dir = tmp_path / "run"
    trained(run_dir, declared(**kept, cache_format="raw"))
    first = of_kind(run_dir, "feeder")[-1]["cache"]
    assert first["samples"] == SAMPLES and first["hits"] == (EPOCHS - 1) * SAMPLES
    ensemble.resume(run_dir, "local", epochs=EPOCHS + 1).wait()
    assert finished_hashes(run_dir) == alone
    again = of_kind(run_dir, "feeder")[-1]["cache"]
    assert again["samples"] == SAMPLES == again["hits"], "of the first run"
    with pytest.raises(StoreError, match=r"data|fingerprint"):
        ensemble.submit(declared(**{**kept, "cache_size": 17}, epochs=EPOCHS + 1), run_dir, executor="local")


@pytest.mark.more  # of a pipeline alone: tests/pipelines/test_cache_sizes.py
def test_a_dry_run_says_what_a_cache_needs(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"cache": "disk", "cache_dir": str(tmp_path / "cache"), "cache_size": 16}
    small = ensemble.dry_run(declared(**kept), tmp_path / "run", executor="local")
    cache = small.pipeline["cache"]
    assert cache["stages"] == ["ShrinkJpeg"] and cache["limit"] > 2**20 and not (tmp_path / "cache").exists()
    assert f"cache on disk: samples after ShrinkJpeg, {cache['expected_bytes'] / 2**10:.3g} KiB estimated" in str(
        small
    )
    little = ensemble.dry_run(declared(**kept, cache_bytes=30_000), tmp_path / "run", executor="local")
    assert "room for " in str(little) and little.pipeline["cache"]["limit"] == 30_000
    trained(tmp_path / "run", declared(**kept, epochs=2))
    found = of_kind(tmp_path / "run", "feeder")[-1]["cache"]["expected_bytes"]
    assert cache["expected_bytes"] == pytest.approx(found, rel=0.2)
