"""Classes by name: each source that knows names can number its classes as another one does."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from core_pipes import count_shared_records
from torch.utils.data import ConcatDataset, Subset

from pipelines import Pipeline, sources
from pipelines.errors import PipelineError, SampleError
from pipelines.sources import Source
from pipelines.sources._classes import find_foreign_class, list_classes

Make = Callable[[Path, str], Source]  # of a record for each letter, named by it


def make_folder(folder: Path, letters: str) -> Source:
    for number, letter in enumerate(letters):
        (folder / letter).mkdir(parents=True, exist_ok=True)
        (folder / letter / f"{number}.png").write_bytes(letter.encode())
    return sources.image_folder(folder)


def make_labelled_files(folder: Path, letters: str) -> Source:
    for number, letter in enumerate(letters):
        (folder / f"{number}.png").write_bytes(letter.encode())
    return sources.image_folder(folder, labels={f"{number}.png": letter for number, letter in enumerate(letters)})


def make_csv(folder: Path, letters: str) -> Source:
    (folder / "rows.csv").write_text("x,label\n" + "".join(f"1,{letter}\n" for letter in letters))
    return sources.csv(folder / "rows.csv")


def make_jsonl(folder: Path, letters: str) -> Source:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"x": 1, "label": each}) + "\n" for each in letters))
    return sources.jsonl(folder / "rows.jsonl")


def make_dictionary(folder: Path, letters: str) -> Source:
    pq.write_table(pa.table({"label": pa.array(list(letters)).dictionary_encode()}), folder / "rows.parquet")
    return sources.parquet(folder / "rows.parquet")


def make_features(folder: Path, letters: str) -> Source:
    """Two files, each with a list of names of its own."""
    for part, of in enumerate((letters[:2], letters[2:])):
        names = sorted(set(of), reverse=True)
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = pa.table({"label": [names.index(letter) for letter in of]})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        pq.write_table(table, folder / f"{part}.parquet")
    return sources.parquet(folder / "*.parquet")


def make_huggingface(folder: Path, letters: str) -> Source:
    datasets = pytest.importorskip("datasets")
    names = sorted(set(letters))
    features = datasets.Features({"label": datasets.ClassLabel(names=names)})
    return sources.huggingface(datasets.Dataset.from_dict({"label": list(map(names.index, letters))}, features))


def make_texts(folder: Path, letters: str) -> Source:
    return sources.arrays(x=np.zeros(len(letters)), label=list(letters))


class Items(list[tuple[float, int]]):
    """A Dataset as torchvision's are."""

    def __init__(self, letters: str) -> None:
        self.classes = sorted(set(letters))
        super().__init__((0.0, self.classes.index(letter)) for letter in letters)


def make_concatenation(folder: Path, letters: str) -> Source:
    """Of two parts that number classes by themselves, chosen from in reverse order."""
    parts: Any = ConcatDataset([Items(letters[:2]), Items(letters[2:])])  # type: ignore[list-item]
    return sources.dataset(Subset(parts, list(range(len(letters)))[::-1]), id=letters)


MAKERS: tuple[Make, ...] = (make_folder, make_labelled_files, make_csv, make_jsonl, make_texts, make_dictionary)
MAKERS += (make_features, make_huggingface, make_concatenation)
KINDS: dict[str, Make] = {make.__name__.removeprefix("make_"): make for make in MAKERS}


def read_letters(kind: str, letters: str) -> str:
    return "".join(sorted(letters)) if kind == "folder" else letters[::-1] if kind == "concatenation" else letters


@pytest.mark.parametrize("kind", KINDS)
def test_classes_have_the_numbers_of_other_data_by_name(kind: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir(), (tmp_path / "other").mkdir()
    here, other = KINDS[kind](tmp_path / "here", "cdcbd"), KINDS[kind](tmp_path / "other", "abcda")
    names = list_classes(other, "label")
    assert set(names) == set("abcd")
    numbered = here.number_classes("label", names)
    wanted = [names.index(letter) for letter in read_letters(kind, "cdcbd")]
    for source in (numbered, pickle.loads(pickle.dumps(numbered))):
        assert [int(record["label"]) for record in source] == wanted == source.column("label").tolist()
    half = here.split(0.5)[0]
    assert [names[record["label"]] for record in half.number_classes("label", names)] == [
        names[wanted[index]] for index in half.indices
    ]
    # What has these numbers already stays as it is; another numbering is another source.
    assert numbered.number_classes("label", names) is numbered
    assert numbered.identity() not in (here.identity(), here.number_classes("label", names[::-1]).identity())
    foreign = find_foreign_class(here, "label", names[:2])
    assert foreign is not None and foreign[1] not in names[:2]
    with pytest.raises(SampleError, match=f"the class '{foreign[1]}' is not one of '{names[0]}', '{names[1]}'"):
        here.number_classes("label", names[:2])[foreign[0]]


def test_what_knows_no_names_cannot_be_numbered() -> None:
    source = sources.arrays(label=np.arange(3))
    assert list_classes(source, "label") == () and find_foreign_class(source, "label", "abc") is None
    with pytest.raises(PipelineError, match="does not know the classes of 'label'"):
        source.number_classes("label", "abc")


@pytest.mark.parametrize("given", [None, "mine"])  # also where the user has named the source
def test_a_numbering_is_part_of_a_pipelines_identity(tmp_path: Path, given: str | None) -> None:
    start = Pipeline(make_folder(tmp_path, "bc"), id=given)
    common = start.map(len, field="image", id="length")
    stages = [common.map(abs, field="label", id=str(number)) for number in range(2)]
    made = [pipe.number_classes("label", "abc") for pipe in (start, *stages)]
    assert len({pipe.fingerprint for pipe in (start, *stages, *made)}) == 6
    assert made[1].take_stages(1).token == made[2].take_stages(1).token != stages[1].take_stages(1).token
    assert [batch["label"].tolist() for batch in made[2].loader(2, epochs=1)] == [[1, 2]]
    assert start.number_classes("label", "bcd") is start


def test_shared_records_are_found_by_indices_of_one_source(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder, again = make_folder(tmp_path / "a", "bccbd"), sources.image_folder(tmp_path / "a")
    first, second = folder.split(0.4)
    table = datasets.Dataset.from_dict({"label": list(range(10))})
    train, test = map(sources.huggingface, table.train_test_split(0.3, seed=0).values())
    items = Items("abcab")
    equal = [sources.arrays(x=np.arange(6.0)) for _ in range(2)]
    pairs: list[tuple[Any, Any, int]] = [
        (folder, again, 5),
        (first, second, 0),
        (first, again, 5 - len(second)),
        (second.number_classes("label", "abcd"), folder.take(5), len(second)),
        (folder, make_folder(tmp_path / "b", "bccbd"), 0),
        (train, test, 0),
        (sources.huggingface(table), test, 3),
        (sources.dataset(Subset(items, [0, 1, 2])), sources.dataset(Subset(items, [2, 3])), 1),
        (sources.dataset(items), sources.dataset(Items("abcab")), 0),
        (*equal, 6),
        (equal[0], sources.arrays(x=np.arange(1.0, 7.0)), 0),
    ]
    assert [count_shared_records(*pair) for *pair, _ in pairs] == [wanted for *_, wanted in pairs]
