import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.kept_predictions import save_predictions
from safetensors.numpy import load_file, save

from ensemble.spec.task import Task, quantiles
from ensemble.store import DamagedError, PredictedRows, StoreError, UnlikeRows, load_predictions, save_checkpoint
from ensemble.store.predictions import VERSION, list_splits


@pytest.mark.parametrize("target", [None, np.int64, np.float64])
def test_rows_that_are_added_in_any_order_make_the_file_that_safetensors_writes(
    tmp_path: Path, target: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ensemble.store.predicted_rows._SPOOL_BYTES", 100)  # some are in memory, then in a file
    values = np.random.default_rng(0).random((40, 2, 3)).astype(np.float32)
    truth = None if target is None else np.arange(40 * 5).reshape(40, 5).astype(target)
    expected = {"valid.values": values, "valid.index": np.arange(40)}
    expected |= {} if truth is None else {"valid.target": truth}
    for number, order in enumerate((np.arange(40), np.arange(40)[::-1])):
        rows = PredictedRows(tmp_path / "new")
        for part in np.array_split(order, 7):
            rows.add(values[part], part, None if truth is None else truth[part])
        for known, array in zip((values, np.arange(40), truth), rows.arrays(), strict=True):
            assert known is array is None or np.array_equal(known, array)
        rows.save(tmp_path / f"{number}", "valid", Task("gaussian"))
        rows.close()
        about = json.dumps({"v": VERSION, "splits": {"valid": {"task": Task("gaussian").as_record()}}})
        content = save(expected, metadata={"ensemble.predictions": about})
        assert (tmp_path / f"{number}").read_bytes() == content
    assert not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("spool_bytes", [100, 2**20])
def test_rows_of_unlike_length_are_kept_and_filled_up_where_they_are_read(
    tmp_path: Path, spool_bytes: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ensemble.store.predicted_rows._SPOOL_BYTES", spool_bytes)
    monkeypatch.setattr("ensemble.store.predictions._LEAST_FILED", spool_bytes)
    values = np.random.default_rng(0).random((12, 5, 4, 3)).astype(np.float32)
    truth = np.arange(12 * 5 * 4).reshape(12, 5, 4)
    for dtype, nothing in ((np.int64, -100), (np.float64, np.nan)):
        rows = PredictedRows(tmp_path / "new")
        rows.tail = 1
        batches = [(range(8, 12), 2, 3), (range(4), 5, 2), (range(4, 8), 3, 4)]
        for at, height, width in batches:
            rows.add(values[at, :height, :width], list(at), truth[at, :height, :width].astype(dtype))
        found, _, targets = rows.arrays()
        rows.save(tmp_path / "saved", "valid", Task("classification"))
        rows.close()
        kept = {name.partition(".")[2]: part for name, part in load_file(tmp_path / "saved").items()}
        assert kept["lengths"].tolist() == [[5, 2]] * 4 + [[3, 4]] * 4 + [[2, 3]] * 4
        assert kept["values"].shape == (4 * (10 + 12 + 6), 3) and kept["target"].shape == (4 * (10 + 12 + 6),)
        for mapped in (False, True):
            saved = load_predictions(tmp_path / "saved", "valid", mapped=mapped)
            assert saved.values.shape == found.shape == values.shape
            assert saved.target is not None and targets is not None
            assert np.array_equal(saved.target, targets, equal_nan=True)
            for at, height, width in batches:
                assert np.array_equal(saved.values[at, :height, :width], values[at, :height, :width])
                expected = np.full((4, 5, 4), nothing, dtype)
                expected[:, :height, :width] = truth[at, :height, :width]
                assert np.array_equal(saved.target[at], expected, equal_nan=True)
    assert not list((tmp_path / "new").glob("*"))


def test_rows_that_differ_by_more_than_their_positions_are_refused(tmp_path: Path) -> None:
    longer, more_classes = (3, 6, 2), (3, 5, 3)
    cases = [(None, True, None, longer), (1, False, None, longer), (1, True, [0, 3], longer)]
    for tail, target, positions, shape in [*cases, (1, True, None, more_classes)]:
        rows = PredictedRows(tmp_path)
        rows.tail, rows.positions = tail, None if positions is None else np.array(positions)
        rows.add(np.zeros((3, 5, 2)), [0, 1, 2], np.zeros((3, 5), np.int64) if target else None)
        with pytest.raises(UnlikeRows, match="pad all batches to one length"):
            rows.add(np.zeros(shape), [3, 4, 5], np.zeros(shape[:2], np.int64) if target else None)


def test_a_target_of_samples_of_one_position_has_its_shape(tmp_path: Path) -> None:
    values, target = np.arange(6.0).reshape(3, 1, 2), np.array([[0], [1], [0]])
    for number, is_replaced in enumerate((False, True)):
        rows = PredictedRows(tmp_path)
        rows.tail = 1
        rows.add(values, [2, 0, 1], None if is_replaced else target)
        if is_replaced:
            rows.replace_target(target)
        found = rows.arrays()
        rows.save(tmp_path / f"{number}", "valid")
        kept = load_predictions(tmp_path / f"{number}", "valid")
        for known, read in ((found[0], kept.values), (found[2], kept.target)):
            assert known is not None and read is not None and np.array_equal(known, read)
        assert kept.target is not None and kept.target.tolist() == [[1], [0], [0]]


def test_fields_of_the_samples_are_kept_in_the_order_of_the_index(tmp_path: Path) -> None:
    rows = PredictedRows(tmp_path)
    rows.fields = {"user": [], "name": [], "at": []}
    for index in ([3, 1], [2]):
        rows.add(np.zeros((len(index), 2)), index, None)
        names = [f"é{each}" * each for each in index]
        rows.add_fields({"user": np.array(index) * 10, "name": np.array(names), "at": np.array(index) / 3})
    rows.save(tmp_path / "p", "valid")
    kept = load_predictions(tmp_path / "p", "valid").fields
    assert kept["user"].tolist() == [10, 20, 30] and kept["at"].tolist() == [1 / 3, 2 / 3, 1.0]
    assert kept["name"].tolist() == ["é1", "é2é2", "é3é3é3"]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    cases = [((2,), [0, 1], None, "have shape"), ((2, 3), [0], None, "have shapes")]
    cases += [((2, 3), [5, 5], None, "index 5 is there"), ((2, 3), [0, 1], [1], "target must have 2 rows")]
    for shape, index, target, words in cases:
        with pytest.raises(ValueError, match=words):
            save_predictions(tmp_path / "p", "valid", np.ones(shape), index, target)
    assert not (tmp_path / "p").exists()


def test_a_file_of_other_content_or_format_is_named(tmp_path: Path) -> None:
    file, whole = tmp_path / "p", ("valid.values", "valid.index")
    with pytest.raises(StoreError, match="does not exist"):
        load_predictions(file, "valid")
    save_checkpoint(file, {"w": torch.ones(1)})
    with pytest.raises(StoreError, match="holds no predictions"):
        load_predictions(file, "valid")
    of_task, unreadable = '{"v": 4, "splits": {"valid": {"task": {"kind": "%s"}}}}', f"cannot read {file}: "
    broken = [(header, whole, unreadable) for header in ('{"v": 4}', '{"v": 4', of_task % "guessing")]
    broken += [(of_task % "regression", ("valid.index",), unreadable)]
    for format in (VERSION - 1, VERSION + 1):
        words = rf"p was written by another version .*\(format {format}, this one reads {VERSION}\); train it"
        broken.append((json.dumps({"v": format}), whole, words))
    for header, names, words in broken:
        content = {name: np.arange(3) for name in names}
        file.write_bytes(save(content, metadata={"ensemble.predictions": header}))
        with pytest.raises(StoreError, match=words):
            load_predictions(file, "valid")


@pytest.mark.parametrize("rows", [3, 20_000], ids=["small", "mapped"])
def test_one_file_has_the_predictions_on_all_splits(tmp_path: Path, rows: int) -> None:
    """Those of a split that is saved again take the place of the former, and the others stay bit by bit."""
    file, draws = tmp_path / "p", np.random.default_rng(0)
    given: dict[str, tuple[Any, Any, Task]] = {
        "valid": (draws.random((rows, 2)), draws.integers(0, 2, rows), Task("classification")),
        "test": (draws.random(rows), draws.random(rows), Task("regression")),
        "later": (draws.random((rows, 2)), None, Task("classification")),
        "spread": (draws.random((rows, 4, 2)), np.full((rows, 4), np.nan), Task("gaussian")),
        "levels": (draws.random((rows, 4, 3)), draws.random((rows, 4)), quantiles(0.1, 0.5, 0.9)),
    }
    digests = [save_predictions(file, split, v, np.arange(rows), t, task) for split, (v, t, task) in given.items()]
    given["test"] = (draws.random(rows), None, Task("regression"))
    digests.append(save_predictions(file, "test", given["test"][0], np.arange(rows), None, Task("regression")))
    assert len(set(digests)) == 6 and sorted(list_splits(file)) == sorted(given)
    for split, (values, target, task) in given.items():
        for mapped in (False, True):
            found = load_predictions(file, split, mapped=mapped, digest=digests[-1])
            assert np.array_equal(found.values, values.astype(np.float32)) and found.task == task
            assert (found.target is None) == (target is None) and len(found.index) == rows
            assert target is None or np.array_equal(found.target, target, equal_nan=target.dtype == float)
            assert target is None or found.target.dtype == target.dtype
    with pytest.raises(DamagedError, match="has no predictions on 'train': the member saved those on"):
        load_predictions(file, "train")
    assert list_splits(tmp_path / "none") == []


def test_a_file_that_is_damaged_between_two_saves_is_not_taken_over(tmp_path: Path) -> None:
    file, values, index = tmp_path / "p", np.full((1000, 4), 0.25, np.float32), np.arange(1000)
    digest = save_predictions(file, "valid", values, index, index % 4)
    rows = PredictedRows(tmp_path)
    rows.add(values, index, index % 4)
    content = bytearray(file.read_bytes())
    content[content.find(values[:2].tobytes())] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedError, match="is damaged: its digest is"):
        rows.save(file, "test", beside=digest)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        rows.save(file, "test", beside=digest)
    rows.close()
