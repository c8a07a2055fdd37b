"""Data to predict for: what is missing, superfluous or of other types; and where predictions go."""

from __future__ import annotations

import io
import os
import re
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from artifact_runs import CROP, SCALE, declare, make_images, train
from torch import Tensor, nn

import ensemble
from ensemble import Recipe
from ensemble.artifact import ArtifactError, predict
from ensemble.artifact.preparation import As, make_plan
from pipelines import Pipeline, sources, stages
from pipelines.errors import PipelineError
from pipelines.stage import make_stage

X = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
Y = np.arange(40) % 2


def train_on(folder: Path, pipeline: Pipeline) -> Path:
    recipe = Recipe(model=lambda params: nn.Linear(4, 2), loss="cross_entropy", inputs=("x",))
    options = {"train": pipeline, "valid": pipeline, "test": None, "epochs": 1, "optimizer": "sgd"}
    return train(folder, declare(recipe=recipe, members=[{"lr": 0.1}] * 2, **options))


def save(path: Path, **columns: Any) -> Path:
    np.savez(path, **columns)
    return path


def negate(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "x": -sample["x"]}


LABELLED = stages.rename(y="label")
DROPS = [LABELLED, stages.drop("note"), stages.cast("label", "int64")]
PADS = [LABELLED, stages.select("x", "label"), stages.pad("x", 4)]
OF_USER = [LABELLED, stages.cast("label", "int64"), stages.select("x", "label"), negate]
LATER = [pytest.param(pipe, marks=pytest.mark.more) for pipe in (PADS, OF_USER)]


@pytest.mark.parametrize("of_pipe", [DROPS, *LATER], ids=["drops", "pads", "user's"])
def test_records_need_no_label_and_nothing_else_that_the_model_does_not_read(of_pipe: Any, tmp_path: Path) -> None:
    pipeline, is_of_user = Pipeline(sources.arrays(x=X, y=Y, note=np.arange(40))), of_pipe is OF_USER
    for stage in of_pipe:
        pipeline = pipeline.map(stage)
    run = train_on(tmp_path / "run", pipeline)
    data = save(tmp_path / "x.npz", x=X, **({"note": Y} if is_of_user else {}))
    models = [run] if is_of_user else [run, ensemble.export(run, tmp_path / "artifact", uncertainty=False)]
    batch = {"x": torch.from_numpy(-X if is_of_user else X)}
    wanted = ensemble.load(run)(batch).numpy()
    for number, model in enumerate(models):
        assert predict(model, data, tmp_path / f"{number}.parquet") == 40
        found = np.array(pq.read_table(tmp_path / f"{number}.parquet").column("probabilities").to_pylist())
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def plan(given: Sequence[Any], *fields: str) -> tuple[list[str], tuple[str, ...] | None, str | None]:
    made = make_plan([make_stage(stage, None, None, None) for stage in given], fields)
    return [stage.name for stage in made.stages], made.raw, made.image


def test_a_plan_has_the_stages_that_the_fields_need() -> None:
    assert plan([], "x") == ([], ("x",), "x")
    decode = [stages.rename(photo="image", y="label"), stages.decode_image("image"), stages.cast("label", "int64")]
    assert plan(decode, "image") == (["Rename", "DecodeImage"], ("photo",), "photo")
    text = [stages.drop("mask"), stages.tokenize("text", ["a"]), stages.pad("text", 4, lengths="n", mask="mask")]
    for field in ("text", "n", "mask"):
        assert plan(text, field) == (["Tokenize", "Pad"], ("text",), "text")
    assert plan([*decode, *text], "mask", "image")[1:] == (("photo", "text"), "photo")
    swap = [stages.rename(a="b", b="a")]
    assert plan(swap, "a") == (["Rename"], ("b",), "b")
    assert plan([negate, stages.select("x"), stages.pad("y", 2)], "x") == (["negate"], None, None)


INF, NAN = np.inf, np.nan
CAST = [
    ([0, 255], "int64", "uint8", [0, 255]),
    ([0, 1], "int64", "bool", [False, True]),
    ([True], "bool", "int64", [1]),
]
CAST += [([INF, NAN, 0.1], "float64", "float32", [INF, NAN, np.float32(0.1)]), (3, "float64", "float32", 3)]
CAST += [([2**24 + 1], "int64", "float32", [2**24]), ([3.0, -0.0], "float64", "int32", [3, 0])]
NOT_CAST = [([0, 256], "uint16", "uint8", 256), ([-1], "int8", "uint8", -1), ([2**31], "int64", "int32", 2**31)]
NOT_CAST += [([2], "int64", "bool", 2), ([1e39], "float64", "float32", 1e39), ([2.5], "float64", "int64", 2.5)]
NOT_CAST += [([NAN], "float64", "int64", NAN), ([256.0], "float64", "uint8", 256.0)]


def test_numbers_are_cast_where_the_dtype_holds_them() -> None:
    for values, given, dtype, expected in CAST:
        made = As("x", dtype)({"x": np.array(values, given)})["x"]
        assert made.dtype == dtype and np.array_equal(made, expected, equal_nan=dtype == "float32"), values
    for values, given, dtype, held in NOT_CAST:
        with pytest.raises(PipelineError, match=re.escape(f"holds {held}, which {dtype} cannot hold")):
            As("x", dtype)({"x": np.array(values, given)})
    for array, dtype in ((X.astype(np.complex128), "complex64"), (X, "complex64"), (X + 0j, "float32")):
        with pytest.raises(PipelineError, match=f"field 'x' holds {array.dtype}, not {dtype}"):
            As("x", dtype)({"x": array})


def test_images_of_16_bits_do_not_wrap_into_8(run: Path, artifact: Path, tmp_path: Path) -> None:
    images = make_images(3, 5)["image"]
    deep = save(tmp_path / "deep.npz", image=images.astype(np.uint16) * 257)
    for model in (run, artifact):
        with pytest.raises(PipelineError, match=r"sample 0 .*deep\.npz:row 0.* which uint8 cannot hold"):
            predict(model, deep, tmp_path / "p")
    assert predict(artifact, save(tmp_path / "wide.npz", image=images.astype(np.int64)), tmp_path / "p") == 5
    np.save(tmp_path / "images.npy", images)  # an array alone is the run's only field
    assert predict(run, tmp_path / "images.npy", tmp_path / "p") == 5


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("numbers")

    class Both(nn.Linear):
        def forward(self, a: Tensor, id: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(torch.stack([a, id], dim=1).float())

    table = pa.table({"a": X[:, 0], "id": np.arange(40), "label": Y})
    pq.write_table(table, folder / "data.parquet")
    pipe = Pipeline(sources.parquet(str(folder / "data.parquet")))
    recipe = Recipe(model=lambda params: Both(2, 2), loss="cross_entropy", inputs=("a", "id"))
    options = {"members": [{"lr": 0.1}], "train": pipe, "valid": pipe, "test": None, "optimizer": "sgd"}
    run = train(folder / "run", declare(recipe=recipe, **options))
    return {"run": run, "artifact": ensemble.export(run, folder / "artifact", uncertainty=False)}


@pytest.mark.parametrize("model", ["run", "artifact"])
def test_columns_beside_the_models_own_are_not_read(numbers: dict[str, Path], tmp_path: Path, model: str) -> None:
    lines = [f"{a},{number},,,n{number}" for number, a in enumerate(X[:, 0])]
    (tmp_path / "t.csv").write_text("\n".join(["a,id,empty,twice,twice", *lines]) + "\n")
    assert predict(numbers[model], tmp_path / "t.csv", tmp_path / "csv") == 40
    table = pa.table({"a": X[:, 0], "id": np.arange(40), "note": [None, "x"] * 20})
    pq.write_table(table, tmp_path / "t.parquet")
    assert predict(numbers[model], tmp_path / "t.parquet", tmp_path / "pq") == 40
    assert pq.read_table(tmp_path / "csv").equals(pq.read_table(tmp_path / "pq"))


NULL = r"sample 1 \(.*t\.csv:record 2\): column '%s' is null"
TABLES = {"a,id\n1.5,1\n,2\n": NULL % "a", "a,id\n1.5,1\n2.5,\n": NULL % "id", "a,id\n1.5,1\n#N/A,2\n": NULL % "a"}
TABLES |= {"a,id,id\n1.5,1,2\n": r"columns must name each column once, got .*'id', 'id'", "a,id\n1.5,x\n": "'id'"}
TABLES |= {"a,id\n": "holds no record", "": "is empty", "a,id\n1.5,2.5\n": "'id' holds 2.5, which int64 cannot"}
TABLES |= {"a\n1.5\n": "the model needs the fields a, id; the data have a: id is missing"}


def test_a_table_that_does_not_fit_is_refused(numbers: dict[str, Path], tmp_path: Path) -> None:
    for text, message in TABLES.items():
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises((ArtifactError, PipelineError), match=message):
            predict(numbers["artifact"], tmp_path / "t.csv", tmp_path / "p")
        assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("model", ["run", "artifact"])
def test_whole_numbers_may_be_floats_and_numbers_nan(numbers: dict[str, Path], tmp_path: Path, model: str) -> None:
    (tmp_path / "t.csv").write_text("a,id\n1.5,1.0\nnan,2.0\n-NaN,3\n2.5,4\n")
    save(tmp_path / "t.npz", a=np.array([1.5, np.nan, np.nan, 2.5]), id=np.arange(1, 5))
    for name in ("t.csv", "t.npz"):
        with pytest.warns(UserWarning, match="2 of 4 rows have predictions that are NaN"):
            assert predict(numbers[model], tmp_path / name, tmp_path / name.replace(".", "-")) == 4
    found = [str(pq.read_table(tmp_path / name).to_pylist()) for name in ("t-csv", "t-npz")]
    assert found[0] == found[1]


def test_what_a_stage_of_the_users_makes_is_cast(tmp_path: Path) -> None:
    """In training it had numbers of 32 bits to make them of, in a table they have 64."""

    def stack(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "x": np.stack([sample[name] for name in "abcd"])}

    columns = dict(zip("abcd", X.T, strict=True))
    pipe = Pipeline(sources.arrays(**columns, label=Y)).map(stack).map(stages.select("x", "label"))
    run = train_on(tmp_path / "run", pipe)
    lines = [",".join(map(str, row.tolist())) for row in X]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,c,d", *lines]) + "\n")
    assert predict(run, tmp_path / "t.csv", tmp_path / "p") == 40
    found = np.array(pq.read_table(tmp_path / "p").column("probabilities").to_pylist())
    wanted = ensemble.load(run)({"x": torch.from_numpy(X)}).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.more
def test_texts_in_a_tar_file_are_found(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "texts.tar", "w") as archive:
        for number in range(40):
            for suffix, text in (("txt", ("bad", "good")[number % 2]), ("cls", str(number % 2))):
                info = tarfile.TarInfo(f"{number:03}.{suffix}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
    pipe = Pipeline(sources.tar(str(tmp_path / "texts.tar"), rename={"cls": "label"}))
    pipe = pipe.map(stages.cast("label", "int64")).map(stages.tokenize("txt", ["good", "bad"]))
    pipe = pipe.map(stages.pad("txt", 4)).map(stages.rename(txt="x")).map(stages.drop("key"))
    run = train_on(tmp_path / "run", pipe.map(stages.cast("x", "float32")))
    for model in (run, ensemble.export(run, tmp_path / "artifact", uncertainty=False)):
        assert predict(model, tmp_path / "texts.tar", tmp_path / "p") == 40
        found = pq.read_table(tmp_path / "p").column("probabilities").to_pylist()
        assert found[0] == found[2] != found[1] == found[3]


def test_every_record_of_the_data_has_a_row_also_where_the_run_leaves_some_out(tmp_path: Path) -> None:
    def refuse(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["x"][0] == 99:
            raise ValueError("99 is not a number that I like")
        return sample

    bad = X.copy()
    bad[:7, 0] = 99
    pipe = Pipeline(sources.arrays(x=bad, label=Y), on_error="skip", max_skipped=1.0).map(refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = train_on(tmp_path / "run", pipe)
        made = ensemble.export(run, tmp_path / "artifact", uncertainty=False)  # its first samples are left out
        assert predict(run, split="valid", out=tmp_path / "split") == 33
        assert pq.read_table(tmp_path / "split").column("index").to_pylist() == list(range(7, 40))
    assert (made / "model.pt2").exists()
    with pytest.raises(PipelineError, match="99 is not a number that I like"):
        predict(run, save(tmp_path / "x.npz", x=bad), tmp_path / "p")
    assert predict(run, save(tmp_path / "ok.npz", x=X), tmp_path / "p") == 40


@pytest.mark.more
def test_a_run_without_validation_whose_training_is_augmented_is_exported(tmp_path: Path) -> None:
    pipe = Pipeline(sources.arrays(**make_images(0))).map(stages.random_flip("image")).map(CROP).map(SCALE)
    run = train(tmp_path / "run", declare(train=pipe, valid=None, test=None, members=[{"width": 2, "lr": 0.1}]))
    made = ensemble.export(run, tmp_path / "artifact", uncertainty=False)
    with pytest.raises(ArtifactError, match=r"the stage RandomFlip .* give --prepared"):
        predict(made, save(tmp_path / "x.npz", image=make_images(1)["image"]), tmp_path / "p")
    ready = np.stack([SCALE(CROP({"image": image}))["image"] for image in make_images(1)["image"]])
    assert predict(made, save(tmp_path / "ready.npz", image=ready), tmp_path / "p", prepared=True) == 60


@pytest.mark.timeout(60)  # opened, a pipe waits for a writer
def test_only_predictions_are_replaced(artifact: Path, tmp_path: Path) -> None:
    data = save(tmp_path / "x.npz", image=make_images(3, 5)["image"])
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ArtifactError, match="exists and holds no predictions: choose another file, or"):
        predict(artifact, data, tmp_path / "pipe.csv")
    for device in ("gpu", "cuda:99", "xla"):
        with pytest.raises(ArtifactError, match=f"the device '{device}' cannot be used here: "):
            predict(artifact, data, tmp_path / "p", device=device)
    pq.write_table(pa.table({"index": [0]}), tmp_path / "other.parquet")
    (tmp_path / "notes").write_text("mine")
    with (tmp_path / "array").open("wb") as file:
        np.save(file, X)
    for name in ("other.parquet", "notes", "array"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(ArtifactError, match="exists and holds no predictions: choose another file, or"):
            predict(artifact, data, tmp_path / name)
        assert (tmp_path / name).read_bytes() == before
    (tmp_path / "p").touch()
    assert predict(artifact, data, tmp_path / "p") == predict(artifact, data, tmp_path / "p") == 5


def test_predictions_do_not_go_among_the_data(numbers: dict[str, Path], tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": X[:, 0], "id": np.arange(40)}), tmp_path / "a.parquet")
    (tmp_path / "out").mkdir()
    (tmp_path / "other").symlink_to(tmp_path)
    refused = "would be read as one of the files with data: choose another folder"
    linked = tmp_path / "other" / "*.parquet"
    for data in (tmp_path, tmp_path / "*.parquet", tmp_path / "**" / "*.parquet", tmp_path / "[aop]*", linked):
        for out in (tmp_path / "p.parquet", tmp_path / "other" / "p.parquet"):
            with pytest.raises(ArtifactError, match=refused):
                predict(numbers["artifact"], data, out)
    for n, data in enumerate((tmp_path, tmp_path / "*.parquet", tmp_path / "a.parquet")):
        assert predict(numbers["artifact"], data, tmp_path / "out" / f"{n}.parquet") == 40
    for n, data in enumerate((tmp_path / "a*.parquet", tmp_path / "a.parquet")):
        assert predict(numbers["artifact"], data, tmp_path / f"p{n}.parquet") == 40


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(numbers: dict[str, Path], tmp_path: Path) -> None:
    data, link = tmp_path / "a[1].parquet", tmp_path / "link.parquet"
    pq.write_table(pa.table({"a": X[:, 0], "id": np.arange(40)}), data)
    link.symlink_to(data)
    for source, out in ((data, data), (link, data), (link, link)):
        with pytest.raises(ArtifactError, match="would be read as one of"):
            predict(numbers["artifact"], source, out)
    assert predict(numbers["artifact"], data, tmp_path / "a1.parquet") == 40
    (tmp_path / "b[1]").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "b[1]")
    data.rename(tmp_path / "b[1]" / "a.parquet")
    with pytest.raises(ArtifactError, match="would be read as one of"):
        predict(numbers["artifact"], tmp_path / "b" / "*.parquet", tmp_path / "b" / "p.parquet")
