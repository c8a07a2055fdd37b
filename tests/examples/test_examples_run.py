"""The examples as a user runs them, on a part of their data."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
from kit.event_dicts import fold, ledger, read_events
from kit.scripts import run_python
from kit.tv import HOOK, import_torchvision

from ensemble import Recipe
from ensemble.spec.search_space import sample_space
from ensemble.spec.spec_file import load_spec
from ensemble.store import RunState
from ensemble.train.optimizers import make_optimizer

ROOT = Path(__file__).parents[2]
import_torchvision()  # load_spec() of examples that use it
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if "def spec(" in path.read_text())
DATA = os.environ.get("ENSEMBLE_DATA")
MORE, SLOW = pytest.mark.more, pytest.mark.slow
needs_data = pytest.mark.skipif(
    DATA is None, reason="ENSEMBLE_DATA does not name the folder that holds cifar10/ and imdb/"
)


def run(example: str, run_dir: Path, **settings: Any) -> tuple[RunState, list[dict[str, Any]]]:
    """Run an example by the local executor; its state at the end, and its rows."""
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = ["-m", "ensemble.cli", "run", f"examples/{example}.py", "--executor", "local", *sets]
    said = run_python(*command, "--run-dir", str(run_dir), "--json", "-", cwd=ROOT, also=(HOOK,))
    return fold(read_events(run_dir / "events.jsonl")), json.loads(said)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_run(example: Path) -> None:
    text = example.read_text()
    assert len(text.splitlines()) < 100
    assert f"ensemble run examples/{example.name}" in text.split('"""')[1]


#: What a user downloads: files, their rows, and what a row holds.
LAYOUT = {
    "cifar10": ({"train": 50_000, "test": 10_000}, "image", lambda i: {"bytes": photograph(i), "path": "x"}, 10),
    "imdb": ({"train": 25_000, "test": 25_000}, "text", lambda i: f"{i}: {'not ' * (i % 2)}great art " * 80, 2),
}


def photograph(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (32, 32, 3), np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels))


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cifar10/ and imdb/ as they are downloaded, with as many rows, ten of which are different."""
    folder = tmp_path_factory.mktemp("downloads")
    for name, (splits, field, value, classes) in LAYOUT.items():
        (folder / name).mkdir()
        for first, (split, rows) in zip((0, 10), splits.items(), strict=True):
            ten = [value(i) for i in range(first, first + 10)]
            table = pa.table({field: pa.array(ten).take(np.arange(rows) % 10), "label": np.arange(rows) % classes})
            pq.write_table(table, folder / name / f"{split}.parquet", row_group_size=1000)
    for split, number in (("train", 24), ("val", 16)):
        for n in range(number):
            place = folder / "imagenet" / split / f"n0{n % 2}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{n}.JPEG").write_bytes(photograph(n))
    return folder


@pytest.mark.parametrize(
    "example",
    [*(pytest.param(each, marks=MORE) for each in EXAMPLES if each.stem != "without_data"), ROOT / "README.md"],
    ids=lambda path: path.stem,
)
def test_the_defaults_suit_the_data_as_they_are_downloaded(
    example: Path, downloads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each default is used: all records are declared, each split is read, one step is trained."""
    monkeypatch.chdir(downloads)
    if example.suffix == ".md":
        text = re.split(r"```python.*\n", example.read_text())[1].split("```")[0]
        example = tmp_path / "readme_spec.py"
        example.write_text(text)
    declared = load_spec(example)
    if example.stem in LAYOUT:
        rows = LAYOUT[example.stem][0]
        assert len(declared.train) + len(declared.valid) == rows["train"] and len(declared.test) == rows["test"]
    assert isinstance(declared.recipe, Recipe)
    for split in (declared.valid, declared.test):
        assert split is None or len(next(iter(split.loader(4)))["index"]) == 4
    proposed = None if declared.search is None else next(sample_space(declared.search.space, 0))
    identity, recipe = declared.identify(0, proposed), declared.recipe
    batch = next(iter(declared.pipeline(identity.params).loader(4)))
    model = recipe.model(identity.params)
    made = recipe.optimizer(model, identity.params) if recipe.optimizer else None
    optimizer = made or make_optimizer(identity.optimizer or "sgd", model, identity.params)
    if recipe.schedule is not None:
        recipe.schedule(optimizer, identity.params, 3500)
    losses = recipe.loss(model, batch)
    assert losses.shape == (4,)
    losses.mean().backward()
    optimizer.step()


@needs_data
@pytest.mark.parametrize(
    ("example", "settings"),
    [pytest.param("cifar10", {}, marks=MORE), pytest.param("imdb", {"length": 64, "words": 2000}, marks=SLOW)],
)
def test_two_members_train_on_the_real_data(example: str, settings: dict[str, Any], tmp_path: Path) -> None:
    small = {"samples": 400, "epochs": 1, "members": 2}
    state, rows = run(example, tmp_path, data=f"{DATA}/{example}", **small, **settings)
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert state.combined is not None and state.combined.split == "test"
    assert {"accuracy", "nll", "ece"} <= set(state.combined.metrics["ensemble"])
    reuse = ledger(read_events(tmp_path / "events.jsonl")).reuse
    assert (reuse.prepared, reuse.consumed, reuse.factor) == (360, 720, 2.0)  # nine tenths of 400, for two


@SLOW
def test_small_gpts_learn_from_packed_rows(downloads: Path, tmp_path: Path) -> None:
    small = {"samples": 40, "epochs": 3, "length": 64, "members": 2}
    state, rows = run("gpt", tmp_path, data=downloads / "imdb", **small)
    assert [row["state"] for row in rows] == ["finished"] * 2 and state.combined is not None
    assert state.combined.metrics["ensemble"]["accuracy"] > 0.6, "texts that repeat themselves"
    reuse = ledger(read_events(tmp_path / "events.jsonl")).reuse
    assert reuse.consumed >= 2 * reuse.prepared, "rows are packed and prepared once"


@SLOW
def test_members_share_what_torchvision_augments_and_add_noise_of_their_own(
    downloads: Path, tmp_path: Path
) -> None:
    state, rows = run("augment", tmp_path, data=downloads / "cifar10", samples=100, epochs=1)
    assert [row["state"] for row in rows] == ["finished"] * 3
    reuse = ledger(read_events(tmp_path / "events.jsonl")).reuse
    assert (reuse.prepared, reuse.consumed) == (90, 270), "each image is augmented once"
    assert state.combined is not None


@MORE
def test_heads_share_the_features_of_a_frozen_network_for_all_epochs(downloads: Path, tmp_path: Path) -> None:
    _, rows = run("probes", tmp_path, data=downloads / "cifar10", samples=100, epochs=2, members=3)
    assert [row["state"] for row in rows] == ["finished"] * 3
    reuse = ledger(read_events(tmp_path / "events.jsonl")).reuse
    assert (reuse.prepared, reuse.consumed) == (90, 540), "each image goes through the network once"


@MORE
def test_the_speed_of_augmentation_is_measured(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as archive:
        for number in range(2):
            image = np.random.default_rng(number).integers(0, 256, (70, 90, 3), np.uint8)
            file = tarfile.TarInfo(f"{number}.jpeg")
            content = simplejpeg.encode_jpeg(image)
            file.size = len(content)
            archive.addfile(file, io.BytesIO(content))
    script = [ROOT / "examples/augment_speed.py", tmp_path / "photos.tar", "--rounds=1", "--size=24"]
    table = run_python(*script, cwd=ROOT, also=(HOOK,))
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [row[0] for row in rows[1:]] == ["our stages", "torchvision, PIL images", "torchvision, tensors"]
    assert all(int(figure) > 0 for row in rows[1:] for figure in row[1:])


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("attach_only", marks=MORE),
        *(pytest.param(name, marks=SLOW) for name in ("plain", "train_function", "recipe")),
    ],
)
def test_a_ported_script_finds_what_it_searches_for(script: str, downloads: Path, tmp_path: Path) -> None:
    small = ["--trials=2", "--epochs=1", "--samples=120", "--together=2", f"--out={tmp_path}/found.json"]
    run_python(ROOT / f"examples/port/{script}.py", downloads / "cifar10", *small, cwd=tmp_path, also=(HOOK,))
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["trials"]) == 2 and {"params": found["params"], "value": found["best"]} in found["trials"]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@MORE
def test_resnet50_trains_on_folders_of_images(downloads: Path, tmp_path: Path) -> None:
    small = {"size": 32, "width": 8, "batch_size": 8, "epochs": 2, "warmup": 1, "workers": 1, "precision": "fp32"}
    state, rows = run("resnet50", tmp_path, data=downloads / "imagenet", **small)
    assert [row["state"] for row in rows] == ["finished", "finished"]
    assert {"loss", "accuracy", "top5_accuracy"} <= set(rows[0]["metrics"])
    assert state.combined is not None and state.combined.split == "test"


@SLOW
def test_the_search_ends_in_a_combined_model(tmp_path: Path) -> None:
    state, rows = run("search", tmp_path, trials=4, epochs=2)
    assert {row["state"] for row in rows} <= {"finished", "pruned"} and len(rows) == 4
    assert state.combined is not None


@pytest.mark.parametrize(
    ("example", "settings", "figures"),
    [
        pytest.param("regression", {"members": 2}, {"rmse", "nll", "crps", "coverage_90"}, marks=MORE),
        pytest.param("committee", {"folds": 3}, {"accuracy", "nll", "ece", "roc_auc"}, marks=SLOW),
        pytest.param("multilabel", {}, {"f1_macro", "subset_accuracy", "average_precision"}, marks=SLOW),
        pytest.param(
            "plasma", {"shots": 60}, {"accuracy", "nll", "roc_auc", "shot_roc_auc", "warning_steps"}, marks=SLOW
        ),
    ],
)
def test_examples_of_other_tasks_end_in_a_combined_model_that_says_how_sure_it_is(
    example: str, settings: dict[str, Any], figures: set[str], tmp_path: Path
) -> None:
    state, rows = run(example, tmp_path, epochs=2, **settings)
    assert {row["state"] for row in rows} == {"finished"}
    combined = state.combined
    assert combined is not None and combined.split == "test"
    assert figures <= set(combined.metrics["ensemble"]) and figures <= set(combined.intervals["difference"])
    assert combined.uncertainty and combined.conformal
    if example == "committee":
        held_out = [member.identity["weights"]["held_out"] for member in state.members.values()]
        assert held_out == [0, 1, 2], "each leaves out a fold of its own"


@MORE
def test_a_forest_and_networks_without_a_pipeline_are_combined_and_a_pole_is_balanced(tmp_path: Path) -> None:
    _, rows = run("without_data", tmp_path / "pole", what="pole", trials=4)
    assert max(row["metric"] for row in rows if row["state"] == "finished") > 100
    state, rows = run("without_data", tmp_path / "digits", epochs=2)
    assert {row["state"] for row in rows} == {"finished"} and min(row["metric"] for row in rows) > 0.7
    assert state.combined is not None and state.combined.metrics["ensemble"]["accuracy"] > 0.8
    assert list(state.members["member-0"].files or ()) == ["forest.joblib"]


@MORE
def test_the_best_trials_of_a_search_become_an_artifact_that_answers_with_torch_alone(tmp_path: Path) -> None:
    script = ROOT / "examples/search_to_artifact.py"
    said = run_python(script, "digits", "--trials=5", "--epochs=4", cwd=tmp_path, also=(HOOK,))
    state = fold(read_events(tmp_path / "runs/digits/events.jsonl"))
    assert len(state.members) == 5 and state.combined is not None
    assert state.combined.method == "greedy" and state.combined.calibration["method"] == "temperature"
    for words in ("combined (", "best member (member-", "CPU-seconds", "runs/digits/report.html"):
        assert words in said
    asked = re.search(r"with torch alone: (\d+) of (\d+) test samples are right", said)
    assert asked is not None and int(asked[2]) == 256
    assert int(asked[1]) / 256 == pytest.approx(state.combined.metrics["ensemble"]["accuracy"], abs=0.1)
    assert {"model.pt2", "README.md", "ledger.json"} <= {file.name for file in (tmp_path / "digits").iterdir()}
