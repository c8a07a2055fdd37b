"""image_folder(): image files in folders."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from pipelines import Pipeline, sources
from pipelines.errors import PipelineError, SampleError


def write(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return root


def test_sub_folders_name_the_classes(tmp_path: Path) -> None:
    write(tmp_path, "dog/b.jpg", "dog/deep/a.JPEG", "cat/c.png", "cat/notes.txt", ".hidden/x.jpg", "cat/.y.jpg")
    source = sources.image_folder(tmp_path)
    assert source.classes == ("cat", "dog")
    assert list(source) == [
        {"image": b"cat/c.png", "label": 0},
        {"image": b"dog/b.jpg", "label": 1},
        {"image": b"dog/deep/a.JPEG", "label": 1},
    ]
    assert source.where(1) == str(tmp_path / "dog" / "b.jpg")


def test_images_of_other_kinds_a_folder_one_level_too_high_and_labels_of_no_file_are_warned_of(
    tmp_path: Path,
) -> None:
    write(tmp_path / "a", "cat/a.jpg", "cat/b.HEIC", "dog/deep/c.heic", "dog/d.jfif", "dog/e.png", "dog/notes.txt")
    message = r"images of other kinds are left out \(2 \.heic, 1 \.jfif\): .*\.jfif and \.jpe are JPEG"
    with pytest.warns(UserWarning, match=message):
        assert len(sources.image_folder(tmp_path / "a")) == 2
    write(tmp_path / "b", "train/cat/a.jpg", "train/dog/b.jpg", "test/cat/c.jpg")
    message = r"class folders test, train have images only in their sub-folders.*'cat' is a class"
    with pytest.warns(UserWarning, match=message):
        sources.image_folder(tmp_path / "b")
    write(tmp_path / "c", "a.jpg", "a.png")  # two files of one stem need their extension
    with pytest.warns(UserWarning, match="labels of 1 files that are not there: 'b'"):
        source = sources.image_folder(tmp_path / "c", labels={"a.jpg": 1, "a.png": 2, "b": 3})
    assert [record["label"] for record in source] == [1, 2]
    with pytest.warns(UserWarning, match="'a'"), pytest.raises(PipelineError, match=r"no label for 'a\.jpg'"):
        sources.image_folder(tmp_path / "c", labels={"a": 1})


def test_a_flat_folder_has_no_labels_and_an_empty_folder_is_no_class(tmp_path: Path) -> None:
    write(tmp_path, "b.jpg", "a.jpg")
    (tmp_path / "empty").mkdir()
    source = sources.image_folder(tmp_path)
    assert list(source) == [{"image": b"a.jpg"}, {"image": b"b.jpg"}] and source.classes == ()


def test_a_flat_folder_is_given_labels(tmp_path: Path) -> None:
    write(tmp_path / "images", "a.jpg", "b.jpg")
    names = ({"a": "poodle", "b.jpg": "beagle"}, [1, 0], ("beagle", "poodle"))
    numbers: list[Any] = [
        ({"a": np.int64(5), "b": True}, [5, 1], ()),
        ({"a": 1, "b": np.float32(2.5)}, [1.0, 2.5], ()),
    ]
    identities = set()
    for labels, expected, classes in (names, *numbers):
        source = sources.image_folder(tmp_path / "images", labels=labels, names=True)
        values = [record["label"] for record in source]
        assert values == expected == source.column("label").tolist() and source.classes == classes
        assert list(map(type, values)) == list(map(type, expected))
        assert [record["key"] for record in source] == ["a.jpg", "b.jpg"]
        copy = pickle.loads(cloudpickle.dumps(source))
        assert (list(copy), copy.classes, copy.identity()) == (list(source), classes, source.identity())
        identities.add(str(source.identity()))
    assert len(identities) == 3


@pytest.mark.parametrize("quick_s", [0.0, 1.0], ids=["a file server", "memory"])
def test_a_file_that_was_changed_is_other_data_wherever_its_status_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_s: float
) -> None:
    monkeypatch.setattr("pipelines.sources._images._RUN", 2)
    monkeypatch.setattr("pipelines.sources._images._QUICK_S", quick_s)
    write(tmp_path, *(f"{number}.jpg" for number in range(7)))
    before = sources.image_folder(tmp_path)
    assert [record["image"] for record in before] == [f"{number}.jpg".encode() for number in range(7)]
    (tmp_path / "6.jpg").write_bytes(b"longer than it was")
    assert Pipeline(before).fingerprint != Pipeline(sources.image_folder(tmp_path)).fingerprint
    with pytest.raises(SampleError, match="changed"):
        before[6]


def test_folders_whose_names_are_no_utf8_are_classes_with_escapes(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"plain"):
        folder = os.path.join(os.fsencode(tmp_path), name)
        os.mkdir(folder)
        with open(os.path.join(folder, b"\xfc.png"), "wb"):
            pass
    source = sources.image_folder(tmp_path)
    assert source.classes == ("caf\\udce9", "plain") and source.find_class_names("label") is not None
    with pytest.raises(PipelineError, match=r"caf\\udce9/\\udcfc.png\): the file is empty") as caught:
        source[0]
    assert str(caught.value).encode() and pickle.loads(pickle.dumps(caught.value)).where.encode()
