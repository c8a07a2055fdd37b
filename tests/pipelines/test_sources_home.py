"""A path that begins with `~` lies in the home of the user, for every source of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines import sources


def test_every_source_of_files_expands_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cv2
    import pyarrow
    from pyarrow import parquet

    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "t.csv").write_text("a\n1\n")
    (tmp_path / "t.jsonl").write_text('{"a": 1}\n')
    parquet.write_table(pyarrow.table({"a": [1]}), tmp_path / "t.parquet")
    np.save(tmp_path / "t.npy", np.ones(1))
    (tmp_path / "pictures").mkdir()
    cv2.imwrite(str(tmp_path / "pictures" / "a.png"), np.zeros((4, 4, 3), np.uint8))
    made: list[Any] = [sources.csv("~/t.csv"), sources.jsonl(["~/t.jsonl"]), sources.parquet("~/*.parquet")]
    made += [sources.parquet(Path("~/t.parquet")), sources.memmap(a="~/t.npy")]
    made += [sources.image_folder("~/pictures"), sources.image_folder(Path("~/pictures"))]
    assert [len(source) for source in made] == [1] * len(made)
    assert all(str(tmp_path) in source.where(0) for source in made)
