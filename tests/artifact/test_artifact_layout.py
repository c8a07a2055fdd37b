"""An artifact is written whole or not at all, replaces nothing, and is loaded without pickles."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from artifact_runs import NAMES

import ensemble
from ensemble.artifact import ArtifactError, is_artifact, layout, read_record
from ensemble.artifact import program as programs
from ensemble.store.files import WriteError

ROOT = Path(__file__).parents[2]


def test_only_a_new_folder_is_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ensemble.export(run, tmp_path / "empty", uncertainty=False)
    assert is_artifact(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("")
    (tmp_path / "new").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name in ("empty", "other", "file", "link"):
        with pytest.raises(ArtifactError, match="exists and is left as it is: choose a new folder"):
            ensemble.export(run, tmp_path / name)
    assert (tmp_path / "other" / "thesis.tex").read_text() == "years" and is_artifact(tmp_path / "empty")
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "link", "new", "other"]


def test_an_export_that_fails_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "save_weights", Mock(side_effect=OSError(28, "No space left on device", "x")))
    with pytest.raises(WriteError, match="the disk or quota is full"):
        ensemble.export(run, tmp_path / "out", uncertainty=False)
    assert os.listdir(tmp_path) == []


def test_what_has_come_while_an_artifact_was_written_stays(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / layout.PROGRAM).write_text("half")
        assert not is_artifact(folder), "what a killed export leaves"
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("years")

    with pytest.raises(WriteError):
        layout.write_folder(tmp_path / "out", write)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "years" and os.listdir(tmp_path) == ["out"]


def test_a_record_that_is_not_whole_is_refused(artifact: Path, tmp_path: Path) -> None:
    other = r"\(format 99, this one reads 1\); export the run again, or use that version$"
    for content, message in (({}, "is damaged: it has no task"), ({"v": "1"}, "is damaged"), ({"v": 99}, other)):
        (tmp_path / layout.RECORD).write_text(json.dumps({"kind": layout.KIND, "v": 1} | content))
        with pytest.raises(ArtifactError, match=message):
            read_record(tmp_path)
    whole = (artifact / layout.RECORD).read_bytes()
    (tmp_path / layout.RECORD).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError, match=r"artifact\.json is damaged, or no artifact's"):
        ensemble.predict(tmp_path, "x.npz", tmp_path / "p.parquet")


@pytest.mark.parametrize("name", [layout.PROGRAM, layout.RECORD])
def test_one_byte_that_has_changed_is_found(artifact: Path, tmp_path: Path, name: str) -> None:
    """A weight, or the name of a class: the artifact would predict something else."""
    shutil.copytree(artifact, tmp_path / "a")
    content = bytearray((artifact / name).read_bytes())
    at = content.index(NAMES[1].encode()) if name == layout.RECORD else len(content) // 2
    content[at] ^= 1
    (tmp_path / "a" / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=rf"{name} is damaged: .*export the run again"):
        ensemble.predict(tmp_path / "a", "x.npz", tmp_path / "p.parquet")


def test_a_damaged_program_is_named_in_a_line(artifact: Path, tmp_path: Path, capfd: Any) -> None:
    whole = (artifact / "model.pt2").read_bytes()
    for content in (whole[: len(whole) // 2], b"", whole.replace(b'"graph_module"', b'"graph_molecule"')):
        (tmp_path / "model.pt2").write_bytes(content)
        with pytest.raises(ArtifactError, match=r"model\.pt2 cannot be read: .*: export it again"):
            programs.load_program(tmp_path / "model.pt2")
    assert capfd.readouterr() == ("", "")


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["sample_inputs/model.pt", "weights/weight_0", "constants/opaque_obj_0", ""])
def test_a_program_with_a_pickle_is_not_loaded(artifact: Path, tmp_path: Path, place: str) -> None:
    with zipfile.ZipFile(artifact / "model.pt2") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    torch.save(Malicious(tmp_path / "pwned"), tmp_path / "pickle")
    pickled = (tmp_path / "pickle").read_bytes()
    [root] = {name.partition("/")[0] for name in files}
    if place.startswith("weights"):
        name = f"{root}/data/weights/model_weights_config.json"
        config = json.loads(files[name])
        next(iter(config["config"].values()))["use_pickle"] = True
        files[name] = json.dumps(config).encode()
    old_format = {"version": b"8.8", "serialized_state_dict.pt": pickled}
    files = files | {f"{root}/data/{place}": pickled} if place else old_format
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with pytest.raises(ArtifactError, match=r"model\.pt2 is not loaded: .* pickle, which runs code"):
        programs.load_program(tmp_path / "model.pt2")
    assert not (tmp_path / "pwned").exists()
