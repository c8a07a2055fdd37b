"""image_folder(): image files in folders."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import cloudpickle
import pytest

from pipelines import sources
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
        (("cat/a.jpg", "dog/notes.txt"), "class folder 'dog' holds no image"),
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


def test_identity_follows_the_files(tmp_path: Path) -> None:
    write(tmp_path, "a.jpg", "b.jpg")
    first = json.dumps(sources.image_folder(tmp_path).identity())
    assert json.dumps(sources.image_folder(os.path.relpath(tmp_path)).identity()) == first
    os.utime(tmp_path / "a.jpg", ns=(1, 1))
    assert json.dumps(sources.image_folder(tmp_path).identity()) != first


def test_it_pickles(tmp_path: Path) -> None:
    source = sources.image_folder(write(tmp_path, "x/a.jpg", "y/b.jpg"))
    copy = pickle.loads(cloudpickle.dumps(source))
    assert (copy[1], copy.classes, copy.identity()) == (source[1], source.classes, source.identity())
