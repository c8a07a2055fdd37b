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


def test_images_of_other_kinds_are_counted_and_said(tmp_path: Path) -> None:
    write(
        tmp_path / "some", "cat/a.jpg", "cat/b.HEIC", "dog/deep/c.heic", "dog/d.jfif", "dog/e.png", "dog/notes.txt"
    )
    said = r"some'\): images of other kinds are left out \(2 \.heic, 1 \.jfif\): .*\.jfif and \.jpe are JPEG"
    with pytest.warns(UserWarning, match=said):
        assert len(sources.image_folder(tmp_path / "some")) == 2
    write(tmp_path / "none", "cat/a.avif")
    with pytest.raises(PipelineError, match=r"'cat' holds no image: images of other kinds .*1 \.avif"):
        sources.image_folder(tmp_path / "none")


def test_a_flat_folder_has_no_labels(tmp_path: Path) -> None:
    source = sources.image_folder(write(tmp_path, "b.jpg", "a.jpg"))
    assert [source[0], source[1]] == [{"image": b"a.jpg"}, {"image": b"b.jpg"}]
    assert source.classes == ()


def test_an_empty_folder_beside_flat_images_is_no_class(tmp_path: Path) -> None:
    write(tmp_path, "b.jpg")
    (tmp_path / "empty").mkdir()
    assert sources.image_folder(tmp_path)[0] == {"image": b"b.jpg"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((), "holds no image"),
        (("notes.txt",), "holds no image"),
        (("a.jpg", "dog/b.jpg"), "both beside and inside"),
        (("cat/a.jpg", "dog/notes.txt"), "class folder .dog. holds no image.*remove it"),
    ],
)
def test_folders_without_a_clear_meaning_are_refused(tmp_path: Path, names: tuple[str, ...], said: str) -> None:
    with pytest.raises(PipelineError, match=said) as caught:
        sources.image_folder(write(tmp_path, *names))
    assert str(tmp_path) in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"nowhere.*no such folder"):
        sources.image_folder(tmp_path / "nowhere")
    with pytest.raises(PipelineError, match="is not a folder"):
        sources.image_folder(write(tmp_path, "a.jpg") / "a.jpg")


def test_a_file_that_cannot_be_read_is_named_with_its_index(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", "b.jpg", "c.jpg", "d.jpg")
    (tmp_path / "c.jpg").write_bytes(b"")
    source = sources.image_folder(tmp_path)
    (tmp_path / "b.jpg").unlink()
    (tmp_path / "d.jpg").write_bytes(b"other bytes")
    with pytest.raises(SampleError, match=r"sample 1 \(.*/b\.jpg\): cannot be opened: No such file"):
        source[1]
    with pytest.raises(SampleError, match=r"sample 3 \(.*/d\.jpg\): was changed after its records were indexed"):
        source[3]
    with pytest.raises(SampleError, match=r"sample 2 \(.*/c\.jpg\): the file is empty"):
        source[2]


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        ({"a": "poodle", "b.jpg": "beagle"}, [1, 0], ("beagle", "poodle")),
        ({"a": np.int64(5), "b": True}, [5, 1], ()),
        ({"a": 1, "b": np.float32(2.5)}, [1.0, 2.5], ()),
        (lambda name: name.upper(), [0, 1], ("A.JPG", "B.JPG")),
        ("id,breed\na,poodle\nb,beagle\n", [1, 0], ("beagle", "poodle")),
        ("\ufeffa.jpg, 3\nb.jpg, 4\n", [3, 4], ()),
        ("a,1.5\nb,2\n", [1.5, 2.0], ()),
        ("a,007\nb,010\n", [7, 10], ()),
        ('"a"," with, comma "\nb,x\n', [0, 1], ("with, comma", "x")),
    ],
)
def test_a_flat_folder_is_given_labels(tmp_path: Path, labels: Any, expected: list[float], classes: Any) -> None:
    write(tmp_path / "images", "a.jpg", "b.jpg")
    if isinstance(labels, str):
        (tmp_path / "labels.csv").write_text(labels)
        labels = tmp_path / "labels.csv"
    source = sources.image_folder(tmp_path / "images", labels=labels, names=True)
    found = [record["label"] for record in source]
    assert found == expected == source.column("label").tolist() and source.classes == classes
    assert list(map(type, found)) == list(map(type, expected))
    assert [record["key"] for record in source] == ["a.jpg", "b.jpg"]
    copy = pickle.loads(cloudpickle.dumps(source))
    assert (list(copy), copy.classes, copy.identity()) == (list(source), classes, source.identity())
    other = sources.image_folder(tmp_path / "images", labels={"a": 17, "b": 18}, names=True)
    assert other.identity() != source.identity()


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"a": 1}, r"labels: no label for 'b\.jpg'$"),
        ({}, r"no label for 'a\.jpg', nor for 1 more of the 2 files"),
        ({"a": None, "b": 1}, "no label for 'a.jpg'"),
        ({"a": float("nan"), "b": 1.0}, "no label for 'a.jpg'"),
        ({"a": float("inf"), "b": 1.0}, "the label of 'a.jpg' is inf"),
        ({"a": 2**70, "b": 1}, "the label of 'a.jpg' is 1180591620717411303424"),
        ({"a": "x", "b": 1}, r"must be all integers, all numbers, or all texts; 'a\.jpg' has 'x'"),
        ({"a": np.arange(2), "b": np.arange(2)}, "must be all integers"),
        ([0, 1], r"must be a mapping file name -> label .*got list"),
        ("a,\nb,2\n", "no label for 'a.jpg'"),
        ("a,nan\nb,2\n", "no label for 'a.jpg'"),
        ("a,1\na,2\nb,3\n", "'a' has the labels '1' and '2'"),
        ("a,1,x\nb,2,y\n", "a row of 3 values"),
    ],
)
def test_labels_that_are_missing_or_mixed_are_refused_by_name(tmp_path: Path, labels: Any, said: str) -> None:
    write(tmp_path / "images", "a.jpg", "b.jpg")
    if isinstance(labels, str):
        (tmp_path / "labels.csv").write_text(labels)
        labels = tmp_path / "labels.csv"
    with pytest.raises(PipelineError, match=said):
        sources.image_folder(tmp_path / "images", labels=labels)


def test_labels_of_files_that_are_not_there_are_warned_of_and_two_files_of_one_stem_need_their_extension(
    tmp_path: Path,
) -> None:
    write(tmp_path, "a.jpg", "a.png")
    with pytest.warns(UserWarning, match="labels of 1 files that are not there: 'b'"):
        source = sources.image_folder(tmp_path, labels={"a.jpg": 1, "a.png": 2, "b": 3})
    assert [record["label"] for record in source] == [1, 2]
    with (
        pytest.warns(UserWarning, match="not there: 'a'"),
        pytest.raises(PipelineError, match=r"no label for 'a\.jpg'"),
    ):
        sources.image_folder(tmp_path, labels={"a": 1})
    with pytest.raises(PipelineError, match="are labels already; labels= is for a flat folder"):
        sources.image_folder(write(tmp_path / "deep", "x/a.jpg"), labels={"a": 1})


def test_a_folder_one_level_too_high_is_warned_of(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/a.jpg", "train/dog/b.jpg", "test/cat/c.jpg")
    said = r"class folders test, train have images only in their sub-folders.*'cat' is a class"
    with pytest.warns(UserWarning, match=said):
        sources.image_folder(tmp_path)


def test_a_link_that_goes_round_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "x/a.jpg")
    (tmp_path / "x" / "again").symlink_to(tmp_path)
    with pytest.raises(PipelineError, match=r"image_folder\(.*symbolic links"):
        sources.image_folder(tmp_path)


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
