"""The splits beside each other: classes go by the names of the training data, and shared samples are said."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble import ClassWeights, Ensemble, Folds, Recipe, SpecError
from ensemble.spec.splits import describe_overlap
from ensemble.train.data_identity import describe_changed_splits, describe_difference, training_data
from pipelines import Pipeline, sources, stages

RECIPE = Recipe(model=lambda params: None, loss=lambda net, batch: None, task="classification")


def make_folder(folder: Path, letters: str) -> Any:
    for number, letter in enumerate(letters):
        (folder / letter).mkdir(parents=True, exist_ok=True)
        (folder / letter / f"{number}.png").write_bytes(b"png")
    return sources.image_folder(folder)


def declare(train: Any, **options: Any) -> Ensemble:
    return Ensemble(**{"name": "x", "recipe": RECIPE, "members": [{"n": 1}], "train": train, **options})


def measure(sample: dict[str, Any]) -> dict[str, Any]:
    return {"size": len(sample["image"]), "label": sample["label"]}


def count_from_one(label: int) -> int:
    return label + 1


def count_from_two(label: int) -> int:
    return label + 2


def read_labels(pipeline: Any) -> list[int]:
    return [int(record["label"]) for record in pipeline.source]


def test_classes_of_each_split_have_the_numbers_of_the_training_data(tmp_path: Path) -> None:
    train, valid, test = (
        Pipeline(make_folder(tmp_path / name, letters)).map(measure)
        for name, letters in (("train", "abc"), ("valid", "bbc"), ("test", "cab"))
    )
    declared = declare(train, valid=valid, test=test)
    assert declared.classes == ("a", "b", "c") and declared.train is train and declared.test is test
    assert read_labels(declared.valid) == [1, 1, 2] != read_labels(valid)
    assert declared.valid is not None and declared.valid.fingerprint not in (None, valid.fingerprint)
    (batch,) = declared.valid.without_randomness().loader(3, epochs=1)
    assert batch["label"].tolist() == [1, 1, 2]
    # A function of the hyperparameters, and a part of the data.
    for other in (lambda params: train, train.take(2)):
        made = declare(other, valid=valid)
        assert read_labels(made.valid) == [1, 1, 2] and made.classes == declared.classes
    # Members of a run that began with other numbers are evaluated again.
    before, now = {**training_data(declared), "numbering": {}}, training_data(declared)
    assert describe_difference(before, now) is None
    found = describe_changed_splits(before, now)
    assert found == {"valid": "valid has changed (its source, classes or stages)"}


def test_texts_are_numbered_in_all_splits(tmp_path: Path) -> None:
    made = {
        name: Pipeline(sources.arrays(x=np.arange(len(letters)), label=list(letters)))
        for name, letters in (("train", "cab"), ("valid", "bc"))
    }
    declared = declare(made["train"], valid=made["valid"], test=Pipeline(make_folder(tmp_path, "cb")))
    splits = (declared.train, declared.valid, declared.test)
    assert [read_labels(split) for split in splits] == [[2, 0, 1], [1, 2], [1, 2]]
    assert read_labels(declare(lambda params: made["train"], valid=made["valid"]).pipeline({"n": 1})) == [2, 0, 1]
    # What a stage makes numbers of, or declares to be a text, stays.
    for stage, more in ((ord, {"field": "label"}), (stages.text("label", 4), {})):
        given = [each.map(stage, **more) for each in made.values()]
        kept = declare(given[0], valid=given[1])
        assert kept.train is given[0] and kept.valid is given[1]


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_class_that_the_training_data_lack_is_named(split: str, tmp_path: Path) -> None:
    folders = {"train": "ab", "other": "bdd"}
    train, other = (Pipeline(make_folder(tmp_path / name, letters)) for name, letters in folders.items())
    says = (
        rf"Ensemble.{split}: the class 'd' \({tmp_path}/other/d/1.png\) is not in .* 'a', 'b' \({tmp_path}/train"
    )
    with pytest.raises(SpecError, match=says):
        declare(train, **{split: other})
    known = declare(train, **{split: other.take(1)})  # a part without it
    assert read_labels(getattr(known, split)) == [1]
    without = other.map(stages.drop("label"))
    assert getattr(declare(train, **{split: without}), split) is without
    numbers = declare(train, recipe=Recipe(model=RECIPE.model, loss="mse"), **{split: other})
    assert getattr(numbers, split) is other and numbers.classes == ()


def test_labels_that_stages_change_are_those_of_the_training_data_or_refused(tmp_path: Path) -> None:
    train, valid = (Pipeline(make_folder(tmp_path / name, name)).map(measure) for name in ("abc", "bc"))
    both = [each.map(count_from_two, field="label") for each in (train, valid)]
    assert read_labels(declare(both[0], valid=both[1]).valid) == [1, 2]
    by_hand = valid.map(count_from_one, field="label")
    for other in (by_hand, both[1]):
        says = r"numbers the classes of 'label' differently .*'b', 'c' instead of 'a', 'b'"
        with pytest.raises(SpecError, match=says):
            declare(train, valid=other)


def test_samples_that_splits_share_are_counted_and_refused_in_test() -> None:
    source = sources.arrays(x=np.arange(10.0))
    train, valid = (Pipeline(part) for part in source.split(0.6))
    (row,) = declare(train, valid=Pipeline(source), test=None).list_overlaps()
    assert describe_overlap(row) == (
        "valid shares 6 of its 10 samples with train: members are selected, and the combined model is calibrated, "
        "on samples that they were trained on"
    )
    assert declare(train, valid=valid).list_overlaps() == []
    for test, says in (
        (Pipeline(source), "shares 6 of its 10 samples with train"),
        (valid, "4 of its 4 .* valid"),
    ):
        with pytest.raises(SpecError, match=f"Ensemble.test .*{says}.*; .*allow_overlap=True"):
            declare(train, valid=valid, test=test)
        assert declare(train, valid=valid, test=test, allow_overlap=True).test is test
    assert declare(lambda params: train, valid=train).list_overlaps()[0]["shared"] == 6


def test_windows_of_valid_have_no_steps_of_the_training_windows() -> None:
    table = sources.arrays(load=np.arange(100.0), hour=np.arange(100))
    early, late = table.split(0.7, by="hour")
    middle, _ = table.split(0.8, by="hour")
    train, valid, overlapping = (
        Pipeline(sources.windows(part, 4, 2, inputs=["load"], target="load")) for part in (early, late, middle)
    )
    assert declare(train, valid=valid).list_overlaps() == []
    says = r"Ensemble.valid has windows .*split the table by time first.*allow_overlap"
    with pytest.raises(SpecError, match=says):
        declare(train, valid=overlapping)
    assert declare(train, valid=overlapping, allow_overlap=True).list_overlaps()[0]["shared"] == 70
    with pytest.raises(SpecError, match=r"Ensemble.test shares 10 of its 75 samples with train"):
        declare(valid, valid=train, test=overlapping)
    with pytest.raises(SpecError, match=r"Folds: overlapping windows would be in several parts.*stride="):
        declare(train, weights=Folds(5))
    assert declare(train, weights=Folds(5), allow_overlap=True)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({"by": "date"}, np.array(["01/06/2023"] * 20)),
        ({"group": "patient"}, np.where(np.arange(20) % 3, 1.0, np.nan)),
        ({"assigned": "fold"}, np.arange(20)),
    ],
)
def test_folds_that_the_records_cannot_be_divided_into_are_refused(options: Any, values: Any) -> None:
    [field] = options.values()
    with pytest.raises(SpecError, match=f"Folds.{next(iter(options))}='{field}'"):
        declare(Pipeline(sources.arrays(x=np.zeros(20), **{field: values})), weights=Folds(4, **options))


def test_weights_of_a_misspelt_class_are_refused() -> None:
    train = Pipeline(sources.arrays(x=np.zeros(20), label=np.array(["fraud", "usual"] * 10)))
    with pytest.raises(SpecError, match=r"ClassWeights: .*'fraud'"):
        declare(train, weights=ClassWeights({"froud": 20.0, "usual": 1.0}))
    assert declare(train, weights=ClassWeights({"fraud": 20.0, "usual": 1.0}))


def test_packed_rows_of_valid_have_no_document_of_the_training_rows() -> None:
    documents = sources.arrays(tokens=np.arange(60).reshape(10, 6), more=np.arange(10))
    early, late = documents.split(0.7, by="more")
    train, valid, whole = (Pipeline(sources.pack(part, "tokens", 4)) for part in (early, late, documents))
    assert declare(train, valid=valid).list_overlaps() == []
    mixture = Pipeline(sources.concat({"early": train.source, "late": valid.source}))
    for one, other in ((train, whole), (mixture, valid)):
        with pytest.raises(SpecError, match=r"Ensemble.valid has windows .*packed rows"):
            declare(one, valid=other)
    for one in (train, mixture):
        with pytest.raises(SpecError, match="Folds: pieces of one record would be in several parts"):
            declare(one, weights=Folds(5))


def test_a_stage_that_was_fitted_to_validation_records_is_refused() -> None:
    pytest.importorskip("sklearn")
    rows = sources.arrays(a=np.arange(10.0), label=np.arange(10) % 2)
    train, valid = rows.split(0.6)

    def make(fitted_to: Any, **options: Any) -> Ensemble:
        table = stages.fit(fitted_to, target="label")
        assert pickle.loads(pickle.dumps(table)) == table and pickle.loads(pickle.dumps(table)).fitted_to is None
        return declare(Pipeline(train).map(table), valid=Pipeline(valid).map(table), **options)

    make(train)
    assert make(rows, allow_overlap=True).allow_overlap
    for fitted_to, count in ((rows, 4), (rows.take(10), 4), (valid.take(1), 1)):
        says = rf"valid: the stage .* fitted to {count} of its 4 samples.*allow_overlap"
        with pytest.raises(SpecError, match=says):
            make(fitted_to)
